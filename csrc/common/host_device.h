// One spelling for functions that the CPU kernels, the CUDA kernels and the host tests share.
#pragma once

#if defined(__CUDACC__)
#define LMD_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define LMD_HOST_DEVICE inline __attribute__((always_inline))
#endif
