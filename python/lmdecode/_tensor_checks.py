"""What every public function asks of its tensors first."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["check_dense_tensors", "check_layout", "check_no_gradient"]


def check_layout(op: str, name: str, tensor: Tensor) -> None:
    """Raise ValueError for a tensor that is not dense.

    The ops themselves do (csrc/bindings/refused_tensors.cpp); this is for what is computed with
    before an op is called, or has another name there.
    """
    if tensor.layout is not torch.strided:
        raise ValueError(f"{op}: {name} has layout {tensor.layout}; expected a dense tensor")


def check_dense_tensors(op: str, **values: object) -> None:
    """Raise TypeError for what is no tensor, ValueError for one that is not dense."""
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{op}: {name} is of type {type(value).__name__}; expected a tensor")
        check_layout(op, name, value)


def check_no_gradient(op: str, **tensors: object) -> None:
    """Raise ValueError for what would get no gradient: autograd passes over these ops."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            raise ValueError(
                f"{op}: {name} requires a gradient, and there is none; call it under "
                "torch.no_grad()"
            )
