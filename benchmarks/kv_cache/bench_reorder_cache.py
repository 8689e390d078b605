"""``reorder_cache_`` against the ways torch has, and one streaming copy of the bytes that move."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor

import lmdecode
from benchmarks.goals import Goal, GoalOutcome, evaluate
from benchmarks.harness import LIMIT, OURS, Case, Contestant, Result
from benchmarks.limits import library_copy, streaming_copy

GROUP = "reorder_cache_"
SOURCES = ("kv_cache/reorder_cache",)
FRESH, OUT, MASKED = "index_select", "index_select out=", "t[m] = t[p[m]]"
LIBRARY_COPY = "copy_ of the moved bytes"
BEAMS = 4  # of a request


@lru_cache(maxsize=1)
def _caches(shape: tuple[int, ...], tensors: int) -> list[Tensor]:
    """Return the keys and values of some layers, bfloat16."""
    return [torch.ones(shape, dtype=torch.bfloat16) for _ in range(tensors)]


@lru_cache(maxsize=1)
def _second_caches(shape: tuple[int, ...], tensors: int) -> list[Tensor]:
    """Return the memory that ``index_select(out=...)`` needs."""
    return [torch.ones(shape, dtype=torch.bfloat16) for _ in range(tensors)]


def parent_map(rows: int, moved: int) -> Tensor:
    """Map ``moved`` rows to another beam of their request, the others to themselves.

    With all rows moved the beams of each request change places in a cycle.
    """
    parents = torch.arange(rows)
    if moved == rows:
        return parents.view(-1, BEAMS).roll(1, 1).flatten()
    generator = torch.Generator().manual_seed(moved)
    chosen = torch.randperm(rows, generator=generator)[:moved]
    step = torch.randint(1, BEAMS, (moved,), generator=generator)
    parents[chosen] = chosen // BEAMS * BEAMS + (chosen + step) % BEAMS
    return parents


def _contestants(
    with_peers: bool,
    *,
    shape: tuple[int, ...],
    tensors: int,
    moved: int,
    batch_dim: int,
    length_dim: int | None,
    length: int | None,
) -> list[Contestant]:
    caches = _caches(shape, tensors)
    rows = shape[batch_dim]
    parents = parent_map(rows, moved)
    options = dict(batch_dim=batch_dim, length_dim=length_dim, length=length)
    ours = partial(lmdecode.reorder_cache_, caches, parents, **options)
    contestants = [Contestant(OURS, ours)]
    if not with_peers:
        return contestants
    # What the others have of a cache that grows: exactly the valid positions.
    valid = list(shape)
    if length_dim is not None and length is not None:
        valid[length_dim] = length
    used = caches if valid == list(shape) else _second_caches(tuple(valid), tensors)
    moved_bytes = sum(cache.nbytes for cache in used) // rows * moved
    if moved:
        contestants.append(Contestant(LIMIT, streaming_copy(moved_bytes)))
        contestants.append(Contestant(LIBRARY_COPY, library_copy(moved_bytes), complete=False))

    def fresh() -> object:
        return [cache.index_select(batch_dim, parents) for cache in used]

    out = [torch.ones_like(cache) for cache in used]

    def preallocated() -> None:
        for cache, target in zip(used, out, strict=True):
            torch.index_select(cache, batch_dim, parents, out=target)

    def masked() -> None:
        moves = (parents != torch.arange(rows)).nonzero().flatten()
        sources = parents[moves]
        for cache in used:
            cache.index_copy_(batch_dim, moves, cache.index_select(batch_dim, sources))

    peers: list[tuple[str, Callable[[], object]]] = [
        (FRESH, fresh), (OUT, preallocated), (MASKED, masked),
    ]  # fmt: skip
    return contestants + [Contestant(name, call) for name, call in peers]


def _cases_of(
    name: str,
    shape: tuple[int, ...],
    tensors: int,
    moved: list[int],
    *,
    batch_dim: int = 0,
    length_dim: int | None = None,
    length: int | None = None,
    threads: int | None = None,
) -> list[Case]:
    return [
        Case(
            GROUP,
            name,
            {"cache": "x".join(map(str, shape)), "tensors": tensors, "moved": count},
            partial(
                _contestants,
                shape=shape,
                tensors=tensors,
                moved=count,
                batch_dim=batch_dim,
                length_dim=length_dim,
                length=length,
            ),
            threads=threads,
        )
        for count in moved
    ]


def cases(quick: bool) -> list[Case]:
    """Return every case, or with ``quick`` small caches."""
    positions, tensors = (64, 2) if quick else (1024, 8)
    rows, heads, dim = 32, 8, 128
    shape = (rows, heads, positions, dim)
    few = [8] if quick else [8, 15, 32]
    return [
        *_cases_of("[B, H, S, D]", shape, tensors, [0, 8] if quick else [0, 8, 15, 32]),
        *_cases_of(
            "[B, H, S, D], a length", shape, tensors, few,
            length_dim=2, length=positions * 300 // 1024,
        ),
        *_cases_of("[S, B, D]", (positions * heads, rows, dim), tensors, few, batch_dim=1),
        *_cases_of("[B, H, S, D], two threads", shape, tensors, few, threads=2),
    ]  # fmt: skip


def _share_of_limit(result: Result) -> float | None:
    return None if result.times_limit is None else 1 / result.times_limit


def _moved(count: int) -> Callable[[Result], bool]:
    return lambda result: result.case.shape["moved"] == count


def _versus(name: str) -> Callable[[Result], float | None]:
    return lambda result: result.ratio(name)


_COPY = "one streaming copy of the moved bytes"
_PLAIN = "[B, H, S, D]"
GOALS = [
    Goal(_PLAIN, "warm", _COPY, "at least", 0.75, _share_of_limit),
    Goal(
        _PLAIN, "warm", "nothing moved", "at most", 100, lambda r: r.microseconds(OURS),
        [_moved(0)], unit=" us",
    ),
    Goal(
        _PLAIN, "warm", "8 of 32 rows moved", "at most", 8000, lambda r: r.microseconds(OURS),
        [_moved(8)], unit=" us",
    ),
    Goal(_PLAIN, "warm", OUT, "at least", 4, _versus(OUT), [_moved(8)]),
    Goal(_PLAIN, "warm", FRESH, "at least", 10, _versus(FRESH), [_moved(8)]),
    Goal("[B, H, S, D], a length", "warm", _COPY, "at least", 0.75, _share_of_limit),
]  # fmt: skip


def goals(results: list[Result]) -> list[GoalOutcome]:
    """Judge the goals on the worst of the cases that each speaks of."""
    return evaluate(GOALS, results)
