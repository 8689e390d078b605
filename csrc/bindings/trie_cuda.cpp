// trie_step on CUDA tensors.
#include "bindings/cuda_stream.h"
#include "bindings/trie_checks.h"

namespace lmdecode::beam {
namespace {

void run_step(const TrieStepParams& params, const Tensor& nodes) {
  trie_step_cuda(params, current_cuda_stream(nodes));
}

}  // namespace
}  // namespace lmdecode::beam

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CUDA, m) {
  using namespace lmdecode;
  using namespace lmdecode::beam;
  m.impl("trie_step", TORCH_BOX((&trie_step<run_step, CudaGuard>)));
}
