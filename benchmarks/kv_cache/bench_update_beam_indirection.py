"""``update_beam_indirection_`` against torch's steps on the index, and against moving the cache."""

from __future__ import annotations

from functools import partial

import torch

import lmdecode
from benchmarks.goals import Goal, GoalOutcome, evaluate
from benchmarks.harness import OURS, Case, Contestant, Result
from benchmarks.kv_cache.bench_reorder_cache import parent_map

GROUP = "update_beam_indirection_"
SOURCES = ("kv_cache/update_beam_indirection",)
TORCH, REORDER = "index_select", "reorder_cache_ of the cache"
ROWS, HEADS, DIM = 32, 8, 128


def _contestants(with_peers: bool, *, capacity: int, moved: int) -> list[Contestant]:
    table = lmdecode.BeamIndirection(ROWS, capacity).table
    length = capacity - 100
    lengths = torch.full((ROWS,), length, dtype=torch.int32)
    parents = parent_map(ROWS, moved)
    contestants = [
        Contestant(OURS, partial(lmdecode.update_beam_indirection_, table, parents, lengths))
    ]
    if not with_peers:
        return contestants
    own = torch.arange(ROWS, dtype=torch.int32)
    other = table.clone()

    def plain_torch() -> None:
        other[:, :length] = other[:, :length].index_select(0, parents)
        other[:, length] = own

    # What the step saves, of one layer.
    cache = [torch.ones(ROWS, HEADS, capacity, DIM, dtype=torch.bfloat16) for _ in range(2)]
    reorder = partial(lmdecode.reorder_cache_, cache, parents, length_dim=2, length=length)
    return [
        *contestants,
        Contestant(TORCH, plain_torch),
        Contestant(REORDER, reorder, complete=False),
    ]


def cases(quick: bool) -> list[Case]:
    """Return every case, or with ``quick`` a small one."""
    return [
        Case(
            GROUP,
            "a step",
            {"rows": ROWS, "capacity": capacity, "moved": moved},
            partial(_contestants, capacity=capacity, moved=moved),
        )
        for capacity in ((256,) if quick else (1024, 8192))
        for moved in ((8,) if quick else (0, 8, 32))
    ]


def _versus_torch(result: Result) -> float | None:
    return result.ratio(TORCH)


GOALS = [Goal("a step", "warm", TORCH, "at least", 2, _versus_torch)]


def goals(results: list[Result]) -> list[GoalOutcome]:
    """Judge the goals on the worst of the cases that each speaks of."""
    return evaluate(GOALS, results)
