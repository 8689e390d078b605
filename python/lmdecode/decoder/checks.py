"""Checks of a decoder's calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lmdecode._checks import check_dense_tensor, dtype_name
from lmdecode.models.checks import check_floats

__all__ = ["check_memory", "indices"]


def check_memory(op: str, memory: Any, size: int | None, source: int) -> None:
    """Raise ValueError for anything but a memory, [source or fewer, size] floats."""
    if not isinstance(memory, Tensor) or memory.dim() != 2 or memory.shape[1] != size:
        shape = list(memory.shape) if isinstance(memory, Tensor) else type(memory).__name__
        raise ValueError(f"{op}: memory is {shape}; expected a tensor [source, {size}]")
    check_floats(op, "memory", memory)
    if memory.shape[0] > source:
        raise ValueError(f"{op}: memory has {memory.shape[0]} positions; expected at most {source}")


def indices(op: str, name: str, value: object, rows: int) -> Tensor:
    """Return [rows] integers as contiguous int32."""
    check_dense_tensor(op, name, value)
    assert isinstance(value, Tensor)
    if value.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise ValueError(f"{op}: {name} has dtype {dtype_name(value)}; expected integers")
    if tuple(value.shape) != (rows,):
        raise ValueError(f"{op}: {name} has shape {list(value.shape)}; expected [{rows}]")
    if value.device.type != "cpu":
        raise ValueError(f"{op}: {name} is on {value.device}; expected cpu")
    if rows and not 0 <= int(value.min()) <= int(value.max()) < 1 << 31:
        raise ValueError(f"{op}: {name} is {value.tolist()}; expected 0 to 2^31 - 1")
    return value.to(torch.int32).contiguous()
