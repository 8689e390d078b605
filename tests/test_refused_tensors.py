"""Tensors that no op takes, and errors of C++ in Python, also as torch 2.15 raises them."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import lmdecode  # noqa: F401  registers the ops
from lmdecode._checks import as_thrown
from tests.support.op_schemas import op_names, op_schemas

KINDS = {
    "sparse_coo": lambda x: x.to_sparse(),
    "sparse_csr": lambda x: x.to_sparse_csr(),
    "sparse_csc": lambda x: x.to_sparse_csc(),
    "sparse_bsr": lambda x: x.to_sparse_bsr((1, 1)),
    "sparse_bsc": lambda x: x.to_sparse_bsc((1, 1)),
    "_mkldnn": lambda x: x.to_mkldnn(),
    "qint8": lambda x: torch.quantize_per_tensor(x, 1.0, 0, torch.qint8),
}


def overload(name: str) -> torch._ops.OpOverload:
    base, _, overload_name = name.removeprefix("lmdecode::").partition(".")
    return getattr(getattr(torch.ops.lmdecode, base), overload_name or "default")


def plain_value(kind: str) -> Any:
    """A value of a schema's type; what an op would say of it comes after the dispatcher."""
    if kind.startswith("Optional"):
        return None
    return {
        "Tensor": torch.zeros(2, 2), "List[Tensor]": [torch.zeros(2, 2)], "List[int]": [1],
        "List[float]": [1.0], "bool": False, "float": 1.0,
    }.get(kind, 1)  # fmt: skip


TENSOR_ARGUMENTS = [
    (name, index)
    for name in op_names()
    for index, argument in enumerate(overload(name)._schema.arguments)
    if "Tensor" in str(argument.type)
]


def call(op: torch._ops.OpOverload, index: int, tensor: torch.Tensor, key: Any = None) -> None:
    """Call the op with this tensor as its index-th argument, or in a list that is it."""
    positional, keywords = [], {}
    for i, argument in enumerate(op._schema.arguments):
        value = plain_value(str(argument.type))
        if i == index:
            value = [torch.zeros(2, 2), tensor] if isinstance(value, list) else tensor
        if argument.kwarg_only:
            keywords[argument.name] = value
        else:
            positional.append(value)
    if key is None:
        op(*positional, **keywords)
    else:
        op._op_dk(key, *positional, **keywords)


def argument_name(op: torch._ops.OpOverload, index: int) -> str:
    argument = op._schema.arguments[index]
    return argument.name + ("[1]" if str(argument.type) == "List[Tensor]" else "")


@pytest.mark.parametrize(("name", "index"), TENSOR_ARGUMENTS)
def test_what_is_not_dense_gets_an_error_that_names_it(name: str, index: int) -> None:
    op = overload(name)
    what = re.escape(f"{name.removeprefix('lmdecode::').partition('.')[0]}: ")
    what += re.escape(argument_name(op, index))
    for kind, make in KINDS.items():
        came = f"dtype {kind}" if kind.startswith("q") else re.escape(f"layout torch.{kind}")
        with pytest.raises(ValueError, match=rf"^{what} has {came}; expected"):
            call(op, index, make(torch.zeros(2, 2)))


CPU_ONLY = {schema.name for schema in op_schemas() if schema.is_cpu_only}


@pytest.mark.parametrize(("name", "index"), [(n, i) for n, i in TENSOR_ARGUMENTS if n in CPU_ONLY])
def test_cuda_tensors_where_there_is_no_cuda_kernel(name: str, index: int) -> None:
    """A fake tensor says that it is on cuda, and needs no GPU; the kernel is the one for CUDA."""
    with FakeTensorMode():
        tensor = torch.zeros(2, 2, device="cuda")
    op = overload(name)
    what = f"{op._schema.name.removeprefix('lmdecode::')}: {argument_name(op, index)} is on cuda"
    with pytest.raises(ValueError, match=rf"^{re.escape(what)}; expected cpu: .* on the CPU only"):
        call(op, index, tensor, torch._C.DispatchKey.CUDA)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the dispatcher itself is asked below")
def test_the_dispatcher_leads_cuda_tensors_there() -> None:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert {name for name in op_names() if has(name, "CUDA")} >= CPU_ONLY


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("op", [torch.ops.lmdecode.layer_norm, torch.ops.lmdecode.pack_linear])
def test_cuda_tensors_of_a_gpu(op: Any) -> None:
    x = torch.zeros(2, 2, device="cuda")
    arguments = (x, None, None, 1e-5) if "norm" in str(op) else (x, 0)
    with pytest.raises(ValueError, match="is on cuda; expected cpu"):
        op(*arguments)


DTYPES = sorted(
    {v for v in vars(torch).values() if isinstance(v, torch.dtype)} - {torch.float32}, key=str
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_unsupported_dtype_is_in_the_message(dtype: torch.dtype) -> None:
    """By its name, whatever torch has: the ops take float32, float16 and bfloat16 at most."""
    name = str(dtype).removeprefix("torch.")
    weight = torch.empty(2, dtype=dtype)
    with pytest.raises(ValueError, match=rf"^layer_norm: weight has dtype {name}; expected"):
        torch.ops.lmdecode.layer_norm(torch.zeros(2, 2), weight, None, 1e-5)
    if dtype not in (torch.float16, torch.bfloat16):
        x = torch.empty(2, 2, dtype=dtype)
        with pytest.raises(ValueError, match=rf"^log_softmax_top_k: logits has dtype {name}; exp"):
            torch.ops.lmdecode.log_softmax_top_k(x, torch.zeros(2), 1, 1, None)


CSRC = Path(__file__).resolve().parent.parent / "csrc"
OPS = torch.ops.lmdecode
X, WEIGHT = torch.zeros(2, 3), torch.zeros(5)
REFUSED = r"^layer_norm: weight has shape \[5\]; expected \[3\]$"


def raised(error: Exception) -> Exception:
    """Return what an op's call raises where torch raises ``error``."""

    def call() -> None:
        raise error

    with pytest.raises(Exception) as info:
        as_thrown(call)()
    return info.value


@pytest.mark.parametrize("op", [OPS.layer_norm, OPS.layer_norm.default], ids=str)
def test_an_op_refuses_with_a_value_error(op) -> None:
    for kwargs in ({"weight": WEIGHT, "bias": None, "eps": 1e-5}, {}):
        with pytest.raises(ValueError, match=REFUSED):
            op(X, **kwargs) if kwargs else op(X, WEIGHT, None, 1e-5)


def test_a_compiled_function_refuses_with_a_value_error(fresh_compiler: None) -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return OPS.layer_norm(x, weight, None, 1e-5)

    with pytest.raises(ValueError, match=REFUSED):
        compiled(X, WEIGHT)


def test_memory_that_is_not_there_is_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        OPS.pack_linear(torch.zeros(1, 1).expand(1 << 22, 1 << 22), 0)


@pytest.mark.parametrize(
    "text",
    [
        "layer_norm: weight has shape [5]; expected [3]",
        "Sampler.insert: rules is not what it should be: of another kind",
        "causal_forward_: caches.states has shape [2]; expected [2, 5]",
        "LMDECODE_CPU_CAPABILITY is 'sse'; expected default, avx2, avx512 or amx",
    ],
)
def test_what_was_refused_becomes_a_value_error(text: str) -> None:
    error = raised(RuntimeError(text))
    assert type(error) is ValueError and str(error) == text


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("lmdecode::layer_norm() Expected a value of type 'Tensor' for argument 'x'"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("aoti_torch_empty_strided(...) API call failed at tensor.h, line 1"),
        torch.OutOfMemoryError("layer_norm: no more"),
        IndexError("layer_norm: 5"),
    ],
    ids=str,
)
def test_another_error_stays_as_it_is(error: Exception) -> None:
    assert raised(error) is error


@pytest.mark.skipif(not CSRC.is_dir(), reason="in source checkouts only")
def test_every_runtime_error_of_csrc_stays_one() -> None:
    """What each of its throws says begins with an op's name, and is yet no refusal."""
    found = 0
    for path in [*CSRC.rglob("*.h"), *CSRC.rglob("*.cpp"), *CSRC.rglob("*.cu")]:
        if path.is_relative_to(CSRC / "store"):  # pybind11's, not torch's
            continue
        for thrown in re.findall(r"throw std::runtime_error\((.*?)\);", path.read_text(), re.S):
            parts = [part.strip() for part in thrown.split(" +")]
            error = RuntimeError("".join(map(said, parts)))
            assert raised(error) is error, thrown
            found += 1
    assert found >= 6


def said(part: str) -> str:
    """Return what a part of a message may be."""
    literals = re.findall(r'"((?:[^"\\]|\\.)*)"', part)
    if literals:
        return "".join(literals)
    if part.startswith("std::to_string"):
        return "7"
    return "launch" if part == "what" else "some_op"
