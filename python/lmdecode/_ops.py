"""Loads the compiled libraries, which register ``torch.ops.lmdecode.*``, and adds the fakes."""

from __future__ import annotations

import importlib.util

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
