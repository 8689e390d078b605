// Not run: what is compiled for the loop that brings tiles of keys and values, and nothing else.
#include "attention/matrix_tile.cuh"

namespace lmdecode::attention::cuda_kernels {

template <class T, int kSize>
__global__ void __launch_bounds__(128)
    tile_loader_probe(const SlidingWindowAttentionParams p, const AttentionRows* tile, T* out) {
  constexpr int kKeys = 64, kThreads = 128;
  struct Storage {
    alignas(128) T keys[kKeys * kSize];
    alignas(128) T values[kKeys * kSize];
    AttentionRows rows;
    KeyRange seen;
  };
  Storage& storage = cuda::shared_storage<Storage>();
  if (threadIdx.x == 0) {
    storage.rows = *tile;
    storage.seen = {0, p.kv_len};
  }
  __syncthreads();
  using Loader = TileLoader<T, kSize, kThreads, RowKind::kExact>;
  const Loader keys(p.k, p.k_strides, p.head_size), values(p.v, p.v_strides, p.value_size);
  for (int64_t first = 0; first < storage.seen.end; first += kKeys) {
    const auto row_of = [&](const void* tensor, const AttentionStrides& strides) {
      return [&, tensor](int row) -> const T* {
        const int64_t key = first + row;
        if (key < storage.seen.begin || key >= storage.seen.end) return nullptr;
        return CacheRows<T>(p, tensor, strides, storage.rows).row(key);
      };
    };
    keys.template load<kKeys>(storage.keys, row_of(p.k, p.k_strides));
    values.template load<kKeys>(storage.values, row_of(p.v, p.v_strides));
    cuda::copy_async_commit();
    cuda::copy_async_wait<0>();
    __syncthreads();
  }
  out[threadIdx.x] = storage.keys[threadIdx.x];
}

template __global__ void tile_loader_probe<BFloat16, 64>(SlidingWindowAttentionParams,
                                                         const AttentionRows*, BFloat16*);
template __global__ void tile_loader_probe<BFloat16, 128>(SlidingWindowAttentionParams,
                                                          const AttentionRows*, BFloat16*);
template __global__ void tile_loader_probe<BFloat16, 256>(SlidingWindowAttentionParams,
                                                          const AttentionRows*, BFloat16*);

}  // namespace lmdecode::attention::cuda_kernels
