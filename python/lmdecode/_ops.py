"""Loads the compiled libraries, which register ``torch.ops.lmdecode.*``, and adds the fakes."""

from __future__ import annotations

import importlib.util

import torch

from lmdecode._checks import as_thrown
from lmdecode._fakes import register_fakes

__all__ = ["has_cuda", "ops"]


def _load(name: str) -> bool:
    # find_spec goes through the import hook of an editable install, which rebuilds what changed.
    spec = importlib.util.find_spec(f"lmdecode.{name}")
    if spec is None or spec.origin is None:
        return False
    torch.ops.load_library(spec.origin)
    return True


if not _load("_C"):
    raise ImportError(
        "lmdecode was installed without its compiled library lmdecode._C: "
        "install it with 'pip install .' from its source tree"
    )

#: Whether the CUDA kernels are loaded: they were built, and this torch has CUDA.
has_cuda: bool = torch.version.cuda is not None and _load("_C_cuda")

register_fakes()

ops = torch.ops.lmdecode


def _raise_as_thrown() -> None:
    """Give every op that call, of its overloads and of its name alone."""
    for name in {n.partition(".")[0] for n in torch._C._dispatch_get_all_op_names()}:
        if name.startswith("lmdecode::"):
            packet = getattr(ops, name.removeprefix("lmdecode::"))
            packet._op = as_thrown(packet._op)
            for overload in packet.overloads():
                op = getattr(packet, overload)
                op._op, op._op_dk = as_thrown(op._op), as_thrown(op._op_dk)


if torch.__version__ >= "2.15.0.dev":  # which is below 2.15.0
    _raise_as_thrown()
