"""Times of the ops on KV caches, and of torch's calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

import lmdecode
from benchmarks.gpu.machine import Machine
from benchmarks.harness import Case, Contestant
from benchmarks.kv_cache.bench_reorder_cache import parent_map

_ROWS = 32


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _reorder(machine: Machine, length: int, moved: int) -> list[Contestant]:
    """Keys and values of a layer: at 4096 positions they are larger than the caches."""
    caches = [machine.randn(_ROWS, 8, length, 128, dtype=torch.bfloat16) for _ in range(2)]
    parents = parent_map(_ROWS, moved).to(machine.device)
    sources = [cache[:moved] for cache in caches]
    targets = [torch.empty_like(source) for source in sources]
    return machine.contestants(
        ours=lambda: lmdecode.reorder_cache_(caches, parents),
        torch_index_select=lambda: [x.index_select(0, parents) for x in caches],
        **({"limit": lambda: _copy(targets, sources)} if moved else {}),
    )


def _redirect(machine: Machine, rows: int, capacity: int) -> list[Contestant]:
    table = lmdecode.BeamIndirection(rows, capacity, device=machine.device).table
    lengths = torch.full((rows,), capacity - 10, dtype=torch.int32, device=machine.device)
    parents = parent_map(rows, rows).to(machine.device)
    other = torch.empty_like(table)
    return machine.contestants(
        ours=lambda: lmdecode.update_beam_indirection_(table, parents, lengths),
        torch_index_select=lambda: table.index_select(0, parents),
        limit=lambda: other.copy_(table),
    )


def cases(machine: Machine) -> Iterator[Case]:
    """Yield each op and size; the limit is a copy of what moves."""
    for length in machine.size((256, 4096), (16,)):
        for moved in (0, 8, _ROWS):
            make = partial(_reorder, machine, length, moved)
            sizes = {"caches": f"2 x {_ROWS} x 8 x {length} x 128", "rows that move": moved}
            yield machine.case("reorder_cache_", "bfloat16", make, **sizes)
    for rows, capacity in machine.size(((32, 1024), (32, 8192), (256, 8192)), ((32, 64),)):
        make = partial(_redirect, machine, rows, capacity)
        group = "update_beam_indirection_"
        yield machine.case(group, "all rows move", make, table=f"{rows} x {capacity}")
