"""What every public function asks of its tensors first."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["check_dense_tensors", "check_no_gradient", "check_tensors"]


def check_tensors(op: str, **values: object) -> None:
    """Raise TypeError for what is no tensor."""
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{op}: {name} is of type {type(value).__name__}; expected a tensor")


def check_dense_tensors(op: str, **values: object) -> None:
    """Raise TypeError for what is no tensor, ValueError for one that is not dense."""
    for name, value in values.items():
        check_tensors(op, **{name: value})
        assert isinstance(value, Tensor)
        if value.layout != torch.strided:
            raise ValueError(f"{op}: {name} has layout {value.layout}; expected a dense tensor")


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
