"""The fakes by the names of their ops, and what they check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["FAKES", "check_devices", "entries", "fake"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: The fake of each op, or overload, of ``torch.ops.lmdecode``.
FAKES: dict[str, Callable[..., Any]] = {}


def fake(op: str) -> Callable[[_Function], _Function]:
    """Enter a function as the fake of an op."""

    def enter(function: _Function) -> _Function:
        FAKES[op] = function
        return function

    return enter


def check_devices(
    op: str, name: str, tensor: torch.Tensor, others: dict[str, torch.Tensor | None]
) -> None:
    """CPU tensors with a meta tensor beside them end up in a fake, and not in the CPU op."""
    for other_name, other in others.items():
        if other is not None and other.device != tensor.device:
            raise ValueError(
                f"{op}: {other_name} is on {other.device}; "
                f"expected the device of {name}, {tensor.device}"
            )


def entries(**lists):
    """Name the tensors of lists for an error."""
    return {
        f"{name}[{number}]": tensor
        for name, tensors in lists.items()
        for number, tensor in enumerate(tensors)
    }
