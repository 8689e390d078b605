// STABLE_TORCH_ERROR_CODE_CHECK, for every call into torch's C shim.
#pragma once

#include <torch/csrc/stable/macros.h>
#include <torch/headeronly/util/shim_utils.h>

// The headers of torch 2.11 do not have it. Newer ones define it like this for a library that is
// to run on 2.11 (TORCH_TARGET_VERSION).
#ifndef STABLE_TORCH_ERROR_CODE_CHECK
#define STABLE_TORCH_ERROR_CODE_CHECK(call) TORCH_ERROR_CODE_CHECK(call)
#endif
