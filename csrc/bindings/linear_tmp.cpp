// pack_linear, until csrc/bindings/linear.cpp is here.
#include <cstdlib>
#include <new>

#include "bindings/tensor_checks.h"
#include "common/huge_pages.h"
#include "linear/packed_linear.h"

namespace lmdecode {
namespace {

Tensor pack(const Tensor& weight, int64_t format) {
  const PackedLinearShape shape{weight.size(1), weight.size(0), static_cast<LinearFormat>(format)};
  const size_t bytes = packed_linear_bytes(shape);
  const size_t alignment = bytes >= kHugePage ? kHugePage : 64;
  const size_t size = (bytes + alignment - 1) / alignment * alignment;
  void* memory = std::aligned_alloc(alignment, size);
  if (memory == nullptr) throw std::bad_alloc();
  if (alignment == kHugePage) advise_huge_pages(memory, size);
  const int64_t sizes[] = {static_cast<int64_t>(bytes)}, strides[] = {1};
  Tensor packed = torch::stable::from_blob(
      memory, {sizes, 1}, {strides, 1}, torch::stable::Device(torch::headeronly::DeviceType::CPU),
      ScalarType::Byte, &std::free);
  pack_linear(shape, static_cast<const float*>(weight.const_data_ptr()), weight.stride(0),
              weight.stride(1), memory);
  return packed;
}

}  // namespace
}  // namespace lmdecode

STABLE_TORCH_LIBRARY_FRAGMENT(lmdecode, m) {
  m.def("pack_linear(Tensor weight, int format) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(lmdecode, CPU, m) { m.impl("pack_linear", TORCH_BOX(&lmdecode::pack)); }
