"""``sliding_window_attention`` against torch's attention, and the multiplications in registers."""

from __future__ import annotations

from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

import lmdecode
from benchmarks.attention.peak import multiply_add
from benchmarks.goals import Goal, GoalOutcome, evaluate
from benchmarks.harness import LIMIT, OURS, Case, Contestant, Result

GROUP = "sliding_window_attention"
SOURCES = ("attention/sliding_window_attention",)
CAUSAL, MASKED, CHUNKED, REPEATED = (
    "SDPA is_causal", "SDPA, boolean mask", "chunked SDPA", "repeat_kv + SDPA",
)  # fmt: skip
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
HEADS, KV_HEADS, HEAD_SIZE = 8, 2, 128
SPREAD = 20.0  # of queries and scores: one weight in seven would be subnormal
CHUNK = 256  # queries of a chunk: the fastest of 64 to 1024
LARGEST_MASK = 8192  # tokens; the mask of more takes a gigabyte and its peers minutes


@lru_cache(maxsize=1)
def _inputs(tokens: int, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def heads(count: int) -> Tensor:
        return torch.randn(1, count, tokens, HEAD_SIZE, generator=generator).to(DTYPES[dtype])

    return heads(HEADS), heads(KV_HEADS), heads(KV_HEADS)


def useful_operations(tokens: int, window: int) -> float:
    """Count the multiplications and additions for the visible pairs."""
    window = min(window, tokens)
    pairs = window * (window + 1) / 2 + (tokens - window) * window
    return 4.0 * HEAD_SIZE * HEADS * pairs


def chunked(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Attend chunk by chunk, each to the keys that it can see: torch's best way."""
    out = torch.empty_like(q)
    tokens = q.shape[2]
    for begin in range(0, tokens, CHUNK):
        end = min(begin + CHUNK, tokens)
        first = max(0, begin - window + 1)
        distance = torch.arange(begin, end)[:, None] - torch.arange(first, end)
        out[:, :, begin:end] = F.scaled_dot_product_attention(
            q[:, :, begin:end],
            k[:, :, first:end],
            v[:, :, first:end],
            attn_mask=(distance >= 0) & (distance < window),
            enable_gqa=True,
        )
    return out


def _contestants(
    with_peers: bool,
    *,
    tokens: int,
    window: int,
    dtype: str,
    threads: int | None,
    factor: float = 1.0,
) -> list[Contestant]:
    q, k, v = _inputs(tokens, dtype)
    q = q * factor
    ours = partial(lmdecode.sliding_window_attention, q, k, v, window=window)
    contestants = [Contestant(OURS, ours)]
    if not with_peers:
        return contestants
    peak = multiply_add(useful_operations(tokens, window), dtype)
    if peak is not None and threads is None:
        contestants.append(Contestant(LIMIT, peak))
    sdpa = F.scaled_dot_product_attention
    contestants += [
        Contestant(CHUNKED, partial(chunked, q, k, v, window)),
        Contestant(
            CAUSAL, partial(sdpa, q, k, v, is_causal=True, enable_gqa=True),
            complete=window >= tokens,
        ),
    ]  # fmt: skip
    if tokens <= LARGEST_MASK:
        mask = ~lmdecode.swa_mask(tokens, window, form="bool")

        def repeated() -> Tensor:
            more = [x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v)]
            return sdpa(q, *more, attn_mask=mask)

        masked = partial(sdpa, q, k, v, attn_mask=mask, enable_gqa=True)
        contestants += [Contestant(MASKED, masked), Contestant(REPEATED, repeated)]
    return contestants


def _cases_of(
    name: str,
    sizes: list[tuple[int, int]],
    dtypes: list[str],
    threads: int | None = None,
    factor: float = 1.0,
) -> list[Case]:
    return [
        Case(
            GROUP,
            name,
            {
                "S": tokens, "window": window, "heads": f"{HEADS}/{KV_HEADS}", "D": HEAD_SIZE,
                "dtype": dtype,
            },
            partial(
                _contestants, tokens=tokens, window=window, dtype=dtype, threads=threads,
                factor=factor,
            ),
            threads=threads,
            has_tiles=True,
        )
        for tokens, window in sizes
        for dtype in dtypes
    ]  # fmt: skip


def cases(quick: bool) -> list[Case]:
    """Return every case, or with ``quick`` a short one."""
    if quick:
        return _cases_of("prefill", [(512, 128)], ["f32", "bf16"])
    sizes = [(4096, 256), (4096, 1024), (4096, 4096), (8192, 1024), (8192, 4096), (16384, 1024)]
    return [
        *_cases_of("prefill", sizes, ["f32", "bf16"]),
        *_cases_of("prefill", [(4096, 1024)], ["f16"]),
        *_cases_of("prefill, subnormal weights", [(4096, 1024)], ["f32", "bf16"], factor=SPREAD),
        *_cases_of("prefill, two threads", [(8192, 1024), (8192, 4096)], ["f32", "bf16"], 2),
    ]


def _share_of_limit(result: Result) -> float | None:
    return None if result.times_limit is None else 1 / result.times_limit


def _is(**shape: object) -> list:
    return [lambda result: all(result.case.shape[name] == x for name, x in shape.items())]


_PEAK = "multiplications in registers"
GOALS = [
    Goal(
        "prefill", "warm", _PEAK, "at least", 0.75, _share_of_limit,
        [*_is(dtype="f32"), lambda result: result.case.shape["window"] != 256],
    ),
    *(
        Goal(
            "prefill", "warm", _PEAK, "at least", share, _share_of_limit,
            _is(dtype="bf16", window=window), with_tiles=False,
        )
        for window, share in ((256, 0.55), (1024, 0.65), (4096, 0.72))
    ),
    Goal(
        "prefill", "warm", "products of tiles in registers", "at least", 0.25, _share_of_limit,
        _is(dtype="bf16", S=4096, window=1024), with_tiles=True,
    ),
]  # fmt: skip


def goals(results: list[Result]) -> list[GoalOutcome]:
    """Judge the goals on the worst of the cases that each speaks of."""
    return evaluate(GOALS, results)
