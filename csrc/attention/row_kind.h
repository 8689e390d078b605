// How the rows of q, k and v lie that kernels on tensor cores read.
#pragma once

#include <cstddef>
#include <type_traits>

#include "attention/sliding_window_attention.h"
#include "common/host_device.h"

namespace lmdecode::attention::cuda_kernels {

// What a kernel is compiled for: rows of any size and stride, or of kSize elements each, which lie
// side by side and begin at multiples of 16 bytes. Results are the same; the second has neither
// branches nor a way to read elements one by one.
enum class RowKind { kAny, kExact };

LMD_HOST_DEVICE bool has_aligned_rows(const void* data, const AttentionStrides& s,
                                      size_t element_bytes) {
  const int64_t elements = 16 / static_cast<int64_t>(element_bytes);
  return s.element == 1 && reinterpret_cast<uintptr_t>(data) % 16 == 0 &&
         (s.sequence | s.head | s.token) % elements == 0;
}

// run(std::integral_constant) with the kind of a call's rows, of elements of 16 bits, for a kernel
// of this size.
template <class Run>
void with_row_kind(const SlidingWindowAttentionParams& p, int size, const Run& run) {
  const auto is_aligned = [](const void* data, const AttentionStrides& strides) {
    return has_aligned_rows(data, strides, 2);
  };
  const bool is_exact = p.head_size == size && p.value_size == size &&
                        is_aligned(p.q, p.q_strides) && is_aligned(p.k, p.k_strides) &&
                        is_aligned(p.v, p.v_strides);
  if (is_exact) {
    run(std::integral_constant<RowKind, RowKind::kExact>());
  } else {
    run(std::integral_constant<RowKind, RowKind::kAny>());
  }
}

}  // namespace lmdecode::attention::cuda_kernels
