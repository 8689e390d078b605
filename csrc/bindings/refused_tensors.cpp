// Tensors that no kernel takes: sparse and quantised tensors in any argument, and CUDA tensors of
// CPU-only ops. The dispatcher sends such calls to keys of their own, before any binding sees them;
// here each op has a kernel for these keys, which throws a std::invalid_argument that names the
// argument.
//
// One function serves all ops: it reads names and types of the arguments from the op's schema.
#include <array>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/op_schemas.h"
#include "bindings/tensor_checks.h"

namespace lmdecode {
namespace {

struct NamedTensor {
  std::string name;
  Tensor tensor;
};

// "Tensor(a!)[] state" is an argument of type "Tensor[]" by the name of "state".
struct Argument {
  std::string type;
  std::string name;
};

std::string op_name(const OpSchema& op) {
  const std::string_view text = op.text;
  return std::string(text.substr(0, text.find('(')));
}

Argument parse_argument(std::string_view text) {
  Argument argument;
  text = text.substr(0, text.find('='));  // no default
  const size_t space = text.rfind(' ');
  argument.name = text.substr(space + 1);
  const std::string_view type = text.substr(0, space);
  const size_t alias = type.find('(');
  argument.type = type.substr(0, alias);
  if (alias != type.npos) argument.type += type.substr(type.find(')') + 1);
  return argument;
}

std::vector<Argument> arguments_of(const OpSchema& op) {
  constexpr std::string_view kSeparator = ", ";
  std::vector<Argument> arguments;
  std::string_view text = op.text;
  text = text.substr(0, text.find(") -> "));
  text = text.substr(text.find('(') + 1);
  while (!text.empty()) {
    const size_t end = text.find(kSeparator);
    const std::string_view part = text.substr(0, end);
    if (part != "*") arguments.push_back(parse_argument(part));
    text = end == text.npos ? std::string_view() : text.substr(end + kSeparator.size());
  }
  return arguments;
}

// Takes the arguments off the stack, all of them, as a kernel has to; returns the tensors.
std::vector<NamedTensor> take_arguments(const OpSchema& op, StableIValue* stack) {
  using torch::stable::detail::to;
  std::vector<NamedTensor> tensors;
  for (const auto& [type, name] : arguments_of(op)) {
    const StableIValue value = *stack++;
    if (type == "Tensor") {
      tensors.push_back({name, to<Tensor>(value)});
    } else if (type == "Tensor?") {
      if (const auto tensor = to<OptionalTensor>(value)) tensors.push_back({name, *tensor});
    } else if (type == "Tensor[]") {
      const auto list = to<std::vector<Tensor>>(value);
      for (size_t i = 0; i < list.size(); ++i) {
        tensors.push_back({name + "[" + std::to_string(i) + "]", list[i]});
      }
    } else if (type == "int[]") {
      to<std::vector<int64_t>>(value);
    } else if (type == "float[]") {
      to<std::vector<double>>(value);
    } else if (type == "int?" || type == "SymInt?") {
      to<std::optional<int64_t>>(value);
    }  // the others are numbers, which own nothing
  }
  return tensors;
}

// Callers do not write the overload.
std::string name_in_errors(const OpSchema& op) {
  const std::string name = op_name(op);
  return name.substr(0, name.find('.'));
}

const char* layout_name(int32_t layout) {
  const std::pair<int32_t, const char*> names[] = {
      {aoti_torch_layout_sparse_coo(), "sparse_coo"},
      {aoti_torch_layout_sparse_csr(), "sparse_csr"},
      {aoti_torch_layout_sparse_csc(), "sparse_csc"},
      {aoti_torch_layout_sparse_bsr(), "sparse_bsr"},
      {aoti_torch_layout_sparse_bsc(), "sparse_bsc"},
      {aoti_torch_layout__mkldnn(), "_mkldnn"},
  };
  for (const auto& [number, name] : names) {
    if (number == layout) return name;
  }
  return "another layout";
}

bool is_quantised(ScalarType type) {
  return type == ScalarType::QInt8 || type == ScalarType::QUInt8 || type == ScalarType::QInt32 ||
         type == ScalarType::QUInt4x2 || type == ScalarType::QUInt2x4;
}

template <size_t kOp>
void refuse_kind(StableIValue* stack, uint64_t, uint64_t) {
  const std::string op = name_in_errors(kOpSchemas[kOp]);
  for (const auto& [name, tensor] : take_arguments(kOpSchemas[kOp], stack)) {
    int32_t layout = 0;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(tensor.get(), &layout));
    if (layout != aoti_torch_layout_strided()) {
      fail(op.c_str(), name, " has layout torch.", layout_name(layout),
           "; expected a dense tensor");
    }
    if (is_quantised(dtype_of(tensor))) {
      fail(op.c_str(), name, " has dtype ", dtype_name(dtype_of(tensor)),
           "; expected no quantised tensor");
    }
  }
  fail(op.c_str(), "an argument is a tensor of another kind; expected dense tensors");
}

template <size_t kOp>
void refuse_cuda(StableIValue* stack, uint64_t, uint64_t) {
  const std::string op = name_in_errors(kOpSchemas[kOp]);
  for (const auto& [name, tensor] : take_arguments(kOpSchemas[kOp], stack)) {
    if (tensor.is_cuda()) {
      fail(op.c_str(), name, " is on cuda; expected cpu: ", op, " runs on the CPU only");
    }
  }
  fail(op.c_str(), "an argument is on cuda; expected cpu: ", op, " runs on the CPU only");
}

bool takes_tensors(const OpSchema& op) {
  for (const Argument& argument : arguments_of(op)) {
    if (argument.type.starts_with("Tensor")) return true;
  }
  return false;
}

using Library = torch::stable::detail::StableLibrary;

template <size_t... kOps>
void register_refusals(Library& m, std::index_sequence<kOps...>) {
  const auto impl = [&](const OpSchema& op, auto* kernel) {
    if (takes_tensors(op)) m.impl(op_name(op).c_str(), kernel);
  };
  (impl(kOpSchemas[kOps], &refuse_kind<kOps>), ...);
}

template <size_t... kOps>
void register_cuda_refusals(Library& m, std::index_sequence<kOps...>) {
  const auto impl = [&](const OpSchema& op, auto* kernel) {
    if (op.devices == Devices::kCpuOnly) m.impl(op_name(op).c_str(), kernel);
  };
  (impl(kOpSchemas[kOps], &refuse_cuda<kOps>), ...);
}

using AllOps = std::make_index_sequence<kOpCount>;

}  // namespace
}  // namespace lmdecode

#define LMD_REFUSE_KIND(key)                            \
  STABLE_TORCH_LIBRARY_IMPL(lmdecode, key, m) {         \
    lmdecode::register_refusals(m, lmdecode::AllOps()); \
  }

LMD_REFUSE_KIND(SparseCPU)
LMD_REFUSE_KIND(SparseCUDA)
LMD_REFUSE_KIND(SparseCsrCPU)
LMD_REFUSE_KIND(SparseCsrCUDA)
LMD_REFUSE_KIND(MkldnnCPU)
LMD_REFUSE_KIND(QuantizedCPU)
LMD_REFUSE_KIND(QuantizedCUDA)

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CUDA, m) {
  lmdecode::register_cuda_refusals(m, lmdecode::AllOps());
}
