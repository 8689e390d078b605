"""Memory of a ``Sampler``: its rows, and the outputs of a step."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmdecode._ops import has_cuda
from lmdecode.sampling.sampler_rows import STAGES
from lmdecode.sampling.types import KeptSet, SamplerOutput


class Results(NamedTuple):
    """The memory that the op writes, and views of its consecutive arrays."""

    memory: Tensor
    index: Tensor  # type: ignore[assignment]  # instead of tuple.index
    rank: Tensor | None
    top_ids: Tensor | None
    logprob: Tensor | None
    top_logprobs: Tensor | None
    kept_count: Tensor
    stage_counts: Tensor | None
    status: Tensor


def new_zeros(
    *shape: int, dtype: torch.dtype = torch.uint8, device: torch.device | str = "cpu"
) -> Tensor:
    """Return zeros that can be written both in ``torch.inference_mode()`` and outside of it.

    The mode, the default device and the default dtype have no effect.
    """
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=dtype, device=device)


def new_results(batch: int, num_logprobs: int, stages: bool, device: torch.device) -> Results:
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
    memory = new_zeros(sum(sizes), device=device)
    views: list[Any] = []
    begin = 0
    for (dtype, shape), size in zip(parts, sizes, strict=True):
        part = None if shape is None else memory[begin : begin + size].view(dtype).view(shape)
        views.append(part)
        begin += size
    return Results(memory, *views)


def kept_set(ids: Tensor, logprobs: Tensor, counts: Tensor) -> KeptSet:
    """Pack the first ``counts[b]`` elements of each row b of ids and logprobs."""
    indptr = new_zeros(len(counts) + 1, dtype=torch.int64, device=counts.device)
    torch.cumsum(counts, 0, out=indptr[1:])
    numbers = counts.tolist()
    rows = range(len(numbers))
    return KeptSet(
        indptr,
        torch.cat([ids[:0, 0], *(ids[b, : numbers[b]] for b in rows)]),
        torch.cat([logprobs[:0, 0], *(logprobs[b, : numbers[b]] for b in rows)]),
    )


def _same(part: Any) -> Any:
    return part


def _copied(part: Any) -> Any:
    return None if part is None else part.clone()


class Outputs:
    """The memory that the steps of a ``Sampler`` write, and the outputs of a step.

    ``returns`` tells whether to return logits, kept sets and stage counts, and whether all but a
    few results are this memory itself. ``num_logprobs`` is -1 for none.
    """

    def __init__(
        self,
        batch: int,
        vocab: int,
        num_logprobs: int,
        returns: tuple[bool, bool, bool, bool],
        device: torch.device,
    ) -> None:
        logits, returns_kept, stages, self._reuses = returns
        r = self._results = new_results(batch, num_logprobs, stages, device)
        self._index = r.index
        self._kept_logits = (
            new_zeros(batch, vocab, dtype=torch.float32, device=device) if logits else None
        )
        self._kept: tuple[Tensor, Tensor] | None = None
        if returns_kept:  # pages that are never written take no memory
            with torch.inference_mode(False):
                ids = torch.empty(batch, vocab, dtype=torch.int64, device=device)
                self._kept = ids, torch.empty(batch, vocab, dtype=torch.float32, device=device)
        # All outputs except the index, if only the index is new in each step.
        self._others: tuple[Any, ...] | None = None
        if self._reuses and r.rank is None and self._kept is None:
            self._others = (
                self._kept_logits, None, r.kept_count, r.status, None, None, None, None,
                r.stage_counts,
            )  # fmt: skip

    def to_write(self) -> tuple[Tensor | None, ...]:
        """Return the output tensors of the next step's op."""
        if self._kept_logits is not None and not self._reuses:  # the last step's are its caller's
            self._kept_logits = torch.empty_like(self._kept_logits)
        return (self._results.memory, self._kept_logits, *(self._kept or (None, None)))

    def of_step(self) -> SamplerOutput:
        """Return the step's results; where memory is reused, few of them are new tensors."""
        index = self._index.clone()
        if self._others is not None:
            return SamplerOutput(index, *self._others)
        r, given = self._results, _same if self._reuses else _copied
        return SamplerOutput(
            index,
            self._kept_logits,
            _copied(r.logprob),
            given(r.kept_count),
            given(r.status),
            given(r.top_ids),
            given(r.top_logprobs),
            _copied(r.rank),
            None if self._kept is None else kept_set(*self._kept, r.kept_count),
            given(r.stage_counts),
        )


def checked_device(op: str, device: Any) -> torch.device:
    """Return the device of this name; raise ValueError for one without kernels."""
    devices = "cpu or cuda" if has_cuda else "cpu: there are no CUDA kernels here"
    try:
        found = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in ("cpu", "cuda")[: 1 + has_cuda]:
        raise ValueError(f"{op}: device is {device!s}; expected {devices}")
    return found
