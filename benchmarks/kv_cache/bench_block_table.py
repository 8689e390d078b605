"""A beam step on a cache in blocks, against moving the rows of a dense one."""

from __future__ import annotations

from functools import partial

import torch

import lmdecode
from benchmarks.goals import Goal, GoalOutcome, evaluate
from benchmarks.harness import OURS, Case, Contestant, Result
from benchmarks.kv_cache.bench_reorder_cache import BEAMS, parent_map

GROUP = "BlockTable"
SOURCES = ("kv_cache/block_table", "kv_cache/copy_blocks")
DENSE, FRESH = "reorder_cache_", "index_select"
ROWS, HEADS, DIM, LAYERS = 32, 8, 128, 4


def _step(
    table: lmdecode.BlockTable, pools: list[torch.Tensor], parents: torch.Tensor, length: int
) -> None:
    if int(table.lengths[0]) > length + 60:  # so that all calls are of about one length
        table.free(range(table.num_rows))
        for _ in range(ROWS // BEAMS):
            table.insert(length, BEAMS)
    lmdecode.copy_blocks_(pools, table.append().copies)
    table.reorder_(parents)


def _contestants(with_peers: bool, *, length: int, moved: int) -> list[Contestant]:
    blocks = 2 * ROWS + ROWS // BEAMS * (length // 64 + 2)
    table = lmdecode.BlockTable(blocks, ROWS, length // 64 + 2)
    for _ in range(ROWS // BEAMS):
        table.insert(length, BEAMS)
    pools = [
        torch.ones(blocks, HEADS, table.block_size, DIM, dtype=torch.bfloat16)
        for _ in range(2 * LAYERS)
    ]
    parents = parent_map(ROWS, moved)
    contestants = [Contestant(OURS, partial(_step, table, pools, parents, length))]
    if not with_peers:
        return contestants
    cache = [torch.ones(ROWS, HEADS, length, DIM, dtype=torch.bfloat16) for _ in pools]
    return [
        *contestants,
        Contestant(DENSE, partial(lmdecode.reorder_cache_, cache, parents)),
        Contestant(FRESH, lambda: [tensor.index_select(0, parents) for tensor in cache]),
    ]


def cases(quick: bool) -> list[Case]:
    """Return every case, or with ``quick`` a small one."""
    length = 100 if quick else 1000
    return [
        Case(
            GROUP,
            "a step",
            {"rows": ROWS, "length": length, "layers": LAYERS, "moved": moved},
            partial(_contestants, length=length, moved=moved),
        )
        for moved in ((8,) if quick else (0, 8, 32))
    ]


def _versus_dense(result: Result) -> float | None:
    return result.ratio(DENSE)


def _some_move(result: Result) -> bool:
    return result.case.shape["moved"] != 0


GOALS = [Goal("a step", "warm", DENSE, "at least", 4, _versus_dense, [_some_move])]


def goals(results: list[Result]) -> list[GoalOutcome]:
    """Judge the goals on the worst of the cases that each speaks of."""
    return evaluate(GOALS, results)
