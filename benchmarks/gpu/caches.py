"""Times of the ops on KV caches, and of torch's calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

import lmdecode
from benchmarks.gpu.machine import Machine, header, row
from benchmarks.kv_cache.bench_reorder_cache import parent_map

_ROWS = 32


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _reorder(machine: Machine) -> Iterator[str]:
    """Keys and values of a layer: at 4096 positions they are larger than the caches."""
    for length in machine.size((256, 4096), (16,)):
        caches = [machine.randn(_ROWS, 8, length, 128, dtype=torch.bfloat16) for _ in range(2)]
        for moved in (0, 8, _ROWS):
            parents = parent_map(_ROWS, moved).to(machine.device)
            sources = [cache[:moved] for cache in caches]
            targets = [torch.empty_like(source) for source in sources]

            yield row(
                [
                    f"reorder_cache_, 2 x {_ROWS} x 8 x {length} x 128, {moved} rows move",
                    machine.times(lambda c=caches, p=parents: lmdecode.reorder_cache_(c, p)),
                    machine.times(lambda c=caches, p=parents: [x.index_select(0, p) for x in c]),
                    machine.times(lambda t=targets, s=sources: _copy(t, s)) if moved else "",
                ]
            )


def _indirection(machine: Machine) -> Iterator[str]:
    for rows, capacity in machine.size(((32, 1024), (32, 8192), (256, 8192)), ((32, 64),)):
        table = lmdecode.BeamIndirection(rows, capacity, device=machine.device).table
        lengths = torch.full((rows,), capacity - 10, dtype=torch.int32, device=machine.device)
        parents = parent_map(rows, rows).to(machine.device)
        other = torch.empty_like(table)
        yield row(
            [
                f"update_beam_indirection_, {rows} x {capacity}, all rows move",
                machine.times(
                    lambda a=(table, parents, lengths): lmdecode.update_beam_indirection_(*a)
                ),
                machine.times(lambda t=table, p=parents: t.index_select(0, p)),
                machine.times(lambda t=table, o=other: o.copy_(t)),
            ]
        )


def run(machine: Machine) -> Iterator[str]:
    """Time each op."""
    yield "Microseconds, median: in a CUDA graph (and called from Python)."
    yield from header(["what", "ours", "index_select", "a copy of what moves"])
    yield from _reorder(machine)
    yield from _indirection(machine)
