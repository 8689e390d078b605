"""``sliding_window_decode`` against torch's attention, and one read of the keys and values."""

from __future__ import annotations

from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

import lmdecode
from benchmarks.goals import Goal, GoalOutcome, evaluate
from benchmarks.harness import LIMIT, OURS, Case, Contestant, Result
from benchmarks.limits import streaming_read

GROUP = "sliding_window_decode"
SOURCES = ("attention/sliding_window_decode",)
GQA, REPEATED, FOLDED = "SDPA enable_gqa", "repeat_kv + SDPA", "SDPA, group as rows"
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
HEAD_SIZE = 128
SPREAD = 20.0  # of queries and scores: one weight in seven would be subnormal


@lru_cache(maxsize=1)
def _inputs(
    batch: int, length: int, heads: int, kv_heads: int, dtype: str
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int, length: int) -> Tensor:
        shape = (batch, count, length, HEAD_SIZE)
        return torch.randn(shape, generator=generator).to(DTYPES[dtype])

    return tokens(heads, 1), tokens(kv_heads, length), tokens(kv_heads, length)


def _contestants(
    with_peers: bool,
    *,
    batch: int,
    length: int,
    heads: int,
    kv_heads: int,
    dtype: str,
    factor: float = 1.0,
) -> list[Contestant]:
    q, k, v = _inputs(batch, length, heads, kv_heads, dtype)
    q = q * factor
    contestants = [Contestant(OURS, partial(lmdecode.sliding_window_decode, q, k, v))]
    if not with_peers:
        return contestants
    reads = [streaming_read(x) for x in (k, v)]

    def read() -> None:
        for one in reads:
            one()

    group = heads // kv_heads
    sdpa = F.scaled_dot_product_attention

    def repeated() -> Tensor:
        return sdpa(q, *(x.repeat_interleave(group, dim=1) for x in (k, v)))

    def folded() -> Tensor:
        rows = q.view(batch, kv_heads, group, HEAD_SIZE)
        return sdpa(rows, k, v).view(q.shape)

    return [
        *contestants,
        Contestant(LIMIT, read),
        Contestant(GQA, partial(sdpa, q, k, v, enable_gqa=True)),
        Contestant(REPEATED, repeated),
        Contestant(FOLDED, folded),
    ]


def _cases_of(
    name: str,
    sizes: list[tuple[int, int, int, int]],
    dtypes: list[str],
    threads: int | None = None,
    factor: float = 1.0,
) -> list[Case]:
    return [
        Case(
            GROUP,
            name,
            {"B": batch, "keys": length, "heads": f"{heads}/{kv_heads}", "dtype": dtype},
            partial(
                _contestants,
                batch=batch,
                length=length,
                heads=heads,
                kv_heads=kv_heads,
                dtype=dtype,
                factor=factor,
            ),
            threads=threads,
            has_tiles=True,
        )
        for batch, length, heads, kv_heads in sizes
        for dtype in dtypes
    ]


def cases(quick: bool) -> list[Case]:
    """Return every case, or with ``quick`` a small cache."""
    if quick:
        return _cases_of("one token", [(1, 256, 8, 2)], ["f32", "bf16"])
    return [
        *_cases_of("one token", [(8, 4096, 32, 8)], ["f32", "bf16", "f16"]),
        *_cases_of("one token, in the caches", [(1, 1024, 32, 8)], ["f32", "bf16"]),
        *_cases_of(
            "one token, subnormal weights", [(8, 4096, 32, 8)], ["f32", "bf16"], factor=SPREAD
        ),
        *_cases_of("one token, no groups", [(8, 4096, 8, 8)], ["f32", "bf16"]),
        *_cases_of("one token, two threads", [(8, 4096, 32, 8)], ["f32", "bf16"], 2),
    ]


def _versus(name: str):
    return lambda result: result.ratio(name)


GOALS = [
    Goal(
        "one token", "warm", "one read of keys and values", "at most", 1.3,
        lambda result: result.times_limit,
    ),
    Goal("one token", "warm", REPEATED, "at least", 20, _versus(REPEATED)),
    Goal("one token", "warm", GQA, "at least", 5, _versus(GQA)),
]  # fmt: skip


def goals(results: list[Result]) -> list[GoalOutcome]:
    """Judge the goals on the worst of the cases that each speaks of."""
    return evaluate(GOALS, results)
