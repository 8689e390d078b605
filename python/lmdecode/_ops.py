"""Loads the compiled libraries, which register ``torch.ops.lmdecode.*``, and adds the fakes."""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Callable
from typing import Any

import torch

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

# How an op begins what it says of an argument that it refuses, and of what it cannot do.
_REFUSED = re.compile(r"LMDECODE_CPU_CAPABILITY is |[\w.]+: ")
_FAILED = re.compile(
    r"lmdecode: |[\w.]+: (no memory for |launch: |cuda[A-Z]|"
    r"caches\.(pool of cache |slots has room for |states has \d+ free ))"
)


def _as_thrown(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the call of an op with the errors that C++ throws.

    Up to 2.14 torch raises ValueError for std::invalid_argument and MemoryError for std::bad_alloc;
    from 2.15 on it raises RuntimeError for both.
    """

    @functools.wraps(call)
    def op(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except RuntimeError as error:
            text = str(error)
            if type(error) is RuntimeError:
                if text == "std::bad_alloc":
                    raise MemoryError(text) from None
                if _REFUSED.match(text) and not _FAILED.match(text):
                    raise ValueError(text) from None
            raise

    return op


def _raise_as_thrown() -> None:
    """Give every op that call, of its overloads and of its name alone."""
    for name in {n.partition(".")[0] for n in torch._C._dispatch_get_all_op_names()}:
        if name.startswith("lmdecode::"):
            packet = getattr(ops, name.removeprefix("lmdecode::"))
            packet._op = _as_thrown(packet._op)
            for overload in packet.overloads():
                op = getattr(packet, overload)
                op._op, op._op_dk = _as_thrown(op._op), _as_thrown(op._op_dk)


if torch.__version__ >= "2.15.0.dev":  # which is below 2.15.0
    _raise_as_thrown()
