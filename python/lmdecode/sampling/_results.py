"""The memory that a step of a ``Sampler`` writes its results to."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmdecode.sampling.sampler_rows import STAGES


class Results(NamedTuple):
    """The memory that the op writes, and what it means: one array after the other."""

    memory: Tensor
    index: Tensor  # type: ignore[assignment]  # instead of tuple.index
    rank: Tensor | None
    top_ids: Tensor | None
    logprob: Tensor | None
    top_logprobs: Tensor | None
    kept_count: Tensor
    stage_counts: Tensor | None
    status: Tensor


def new_memory(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Return zeros on the CPU that can be written in ``torch.inference_mode()`` and outside of it.

    Whatever the mode, the default device and the default dtype are.
    """
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=dtype, device="cpu")


def new_results(batch: int, num_logprobs: int, stages: bool) -> Results:
    wants, best = num_logprobs >= 0, max(num_logprobs, 0)
    parts: list[tuple[torch.dtype, tuple[int, ...] | None]] = [
        (torch.int64, (batch,)),
        (torch.int64, (batch,) if wants else None),
        (torch.int64, (batch, best) if wants else None),
        (torch.float32, (batch,) if wants else None),
        (torch.float32, (batch, best) if wants else None),
        (torch.int32, (batch,)),
        (torch.int32, (batch, len(STAGES)) if stages else None),
        (torch.uint8, (batch,)),
    ]
    sizes = [0 if s is None else torch.Size(s).numel() * d.itemsize for d, s in parts]
    memory = new_memory(sum(sizes))
    views: list[Any] = []
    begin = 0
    for (dtype, shape), size in zip(parts, sizes, strict=True):
        part = None if shape is None else memory[begin : begin + size].view(dtype).view(shape)
        views.append(part)
        begin += size
    return Results(memory, *views)
