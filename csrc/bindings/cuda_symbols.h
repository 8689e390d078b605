// Included before every CUDA binding by the compiler's command line (CMakeLists.txt).
//
// This symbol is in libtorch_cuda alone. As a weak one it leaves the library loadable where torch
// has no CUDA, and no CUDA tensor ever leads to the call.
#pragma once

#pragma weak aoti_torch_get_current_cuda_stream
