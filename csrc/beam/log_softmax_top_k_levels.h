// The CPU kernels of log_softmax_top_k at every level: rows, plain or with processors, then
// requests.
#pragma once

#include <cstdint>

#include "beam/log_softmax_top_k.h"
#include "simd/kernel_levels.h"

LMD_DECLARE_KERNELS(beam, void log_softmax_top_k_rows(const LogSoftmaxTopKParams& params,
                                                      int64_t begin, int64_t end, void* workspace);
                    void log_softmax_top_k_requests(const LogSoftmaxTopKParams& params,
                                                    int64_t begin, int64_t end, int64_t size,
                                                    void* workspace);
                    void log_softmax_top_k_processed_rows(const LogSoftmaxTopKParams& params,
                                                          const LogitsProcessors& processors,
                                                          int64_t max_edits, int64_t begin,
                                                          int64_t end, void* workspace);)
