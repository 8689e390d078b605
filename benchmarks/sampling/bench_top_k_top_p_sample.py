"""``top_k_top_p_sample`` against the sampling steps of others and one read of the logits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor

import lmdecode
from benchmarks.goals import Goal, GoalOutcome, evaluate
from benchmarks.harness import LIMIT, OURS, Case, Contestant, Result
from benchmarks.limits import streaming_read
from benchmarks.sampling import llama_cpp_peer, peers
from benchmarks.sampling.peers import Filter

GROUP = "top_k_top_p_sample"
SOURCES = ("sampling/top_k_top_p_sample",)
K_AND_P = Filter(top_k=50, top_p=0.9)
P_ALONE = Filter(top_p=0.9)
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
# The peers that sort take seconds and gigabytes beyond this many logits.
MOST_FOR_SORTING_PEERS = 12_000_000
# The row that brings the code back into the caches after they were evicted.
SMALL_VOCAB = 8192

TRANSFORMERS, VLLM, PLAIN, LLAMA = "transformers", "vLLM torch", "plain torch", "llama.cpp"
TOP_K_ALONE, SOFTMAX_ALONE = "torch.topk alone", "torch.softmax alone"
RANDOM_ORDER, ONE_THREAD = "lmdecode, random order", "lmdecode, 1 thread"


@lru_cache(maxsize=4)
def _logits(batch: int, vocab: int, dtype: str, scale: float, ascending: bool) -> Tensor:
    """Return [batch, vocab] normal logits of a standard deviation of ``scale``."""
    generator = torch.Generator().manual_seed(batch * 7919 + vocab)
    logits = torch.randn(batch, vocab, generator=generator).mul_(scale)
    if ascending:
        logits = logits.sort(dim=-1).values
    return logits.to(DTYPES[dtype])


def _ours(logits: Tensor, filter_: Filter, return_logits: bool) -> Callable[[], object]:
    return partial(
        lmdecode.top_k_top_p_sample,
        logits,
        filter_.top_k,
        filter_.top_p,
        temperature=filter_.temperature,
        seed=torch.arange(len(logits)) + 1,  # as generate() has them: a tensor, one seed a row
        return_logits=return_logits,
    )


def _contestants(
    with_peers: bool,
    *,
    filter_: Filter,
    batch: int,
    vocab: int,
    dtype: str,
    scale: float,
    ascending: bool,
    return_logits: bool,
    caches: str,
    compare_threads: bool,
    inputs: int,
) -> list[Contestant]:
    pool = _logits(batch * inputs, vocab, dtype, scale, ascending).split(batch)
    logits = pool[0]
    small = _logits(1, min(vocab, SMALL_VOCAB), dtype, scale, ascending)
    threads = torch.get_num_threads() if compare_threads else None

    def contestant(
        name: str,
        build: Callable[[Tensor], Callable[[], object]],
        complete: bool = True,
        threads: int | None = None,
    ) -> Contestant:
        calls = itertools.cycle([build(logits) for logits in pool])
        call = build(logits) if inputs == 1 else lambda: next(calls)()
        return Contestant(name, call, complete, threads, build(small))

    ours = partial(_ours, filter_=filter_, return_logits=return_logits)
    contestants = [contestant(OURS, ours, threads=threads)]
    if not with_peers:
        return contestants
    contestants.append(contestant(LIMIT, streaming_read))
    if compare_threads:
        contestants.append(contestant(ONE_THREAD, ours, complete=False, threads=1))
    if ascending:
        shuffled = ours(_logits(batch, vocab, dtype, scale, False))
        contestants.append(Contestant(RANDOM_ORDER, shuffled, complete=False))
    if caches != "cold" and not compare_threads and logits.numel() <= MOST_FOR_SORTING_PEERS:
        if peers.has_transformers():
            chain = partial(peers.transformers_chain, filter_=filter_)
            contestants.append(contestant(TRANSFORMERS, chain))
        contestants.append(contestant(VLLM, partial(peers.vllm_torch, filter_=filter_)))
    # Plain torch gives no kept logits and yet is compared: it does less.
    contestants.append(contestant(PLAIN, partial(peers.plain_torch, filter_=filter_)))
    if filter_.top_k is not None:

        def top_k_alone(logits: Tensor) -> Callable[[], object]:
            return partial(torch.topk, logits, min(filter_.top_k, vocab), dim=-1)

        contestants.append(contestant(TOP_K_ALONE, top_k_alone, complete=False))

    def softmax_alone(logits: Tensor) -> Callable[[], object]:
        return partial(torch.softmax, logits, dim=-1)

    contestants.append(contestant(SOFTMAX_ALONE, softmax_alone, complete=False))
    if not compare_threads and llama_cpp_peer.can_sample(logits):
        llama = partial(llama_cpp_peer.llama_chain, filter_=filter_)
        contestants.append(contestant(LLAMA, llama))
    return contestants


def _cases_of(
    name: str,
    filter_: Filter,
    shapes: list[tuple[int, int, str]],
    *,
    scale: float = 3.0,
    ascending: bool = False,
    return_logits: bool = False,
    caches: tuple[str, ...] = ("warm", "cold"),
    threads: int | None = None,
    inputs: int = 1,
) -> list[Case]:
    return [
        Case(
            GROUP,
            name,
            {"B": batch, "V": vocab, "dtype": dtype},
            partial(
                _contestants,
                filter_=filter_,
                batch=batch,
                vocab=vocab,
                dtype=dtype,
                scale=scale,
                ascending=ascending,
                return_logits=return_logits,
                caches=state,
                compare_threads=threads is not None,
                inputs=inputs,
            ),
            caches=state,
            threads=threads,
        )
        for batch, vocab, dtype in shapes
        for state in caches
    ]


def _shapes(batches: list[int], vocabs: list[int], dtypes: list[str]) -> list[tuple[int, int, str]]:
    return [(batch, vocab, dtype) for dtype in dtypes for vocab in vocabs for batch in batches]


def cases(quick: bool) -> list[Case]:
    """Return every case, or with ``quick`` one small shape of each kind."""
    both = ["f32", "bf16"]
    small = [(8, 32000, "f32")]
    large = [(1, 128256, "f32"), (8, 128256, "f32"), (1, 128256, "bf16"), (8, 128256, "bf16")]
    one_dtype = large[:2]
    warm = ("warm",)
    vocabs = [32000, 128256, 151936, 2**20]
    return [
        *_cases_of("k+p", K_AND_P, small if quick else _shapes([1, 8, 64], vocabs, both)),
        *_cases_of(
            "k+p, new logits each call",
            K_AND_P,
            [(1, 4096, "f32")] if quick else _shapes([1], [32000, 128256], both),
            caches=warm,
            inputs=8 if quick else 64,
        ),
        *_cases_of(
            "k+p, kept logits",
            K_AND_P,
            small if quick else [*large, (64, 128256, "f32")],
            return_logits=True,
        ),
        *_cases_of(
            "k+p, temperature",
            K_AND_P._replace(temperature=0.8),
            small if quick else one_dtype,
            caches=warm,
        ),
        *_cases_of(
            "p, peaked",
            P_ALONE,
            small if quick else [*_shapes([1, 8], [32000], ["f32"]), *large, (64, 128256, "f32")],
        ),
        *_cases_of("p, flat", P_ALONE, small if quick else large, scale=1.0),
        *_cases_of(
            "k+p, ascending", K_AND_P, small if quick else large, ascending=True, caches=warm
        ),
        *_cases_of(
            "p, ascending", P_ALONE, small if quick else one_dtype, ascending=True, caches=warm
        ),
        *_cases_of("no filter", Filter(), small if quick else large, caches=warm),
        *_cases_of(
            "k+p, two threads",
            K_AND_P,
            small if quick else [(b, 128256, dtype) for dtype in both for b in (2, 8, 64)],
            caches=warm,
            threads=2,
        ),
        *_cases_of(
            "p, two threads",
            P_ALONE,
            small if quick else [(8, 128256, "f32")],
            caches=warm,
            threads=2,
        ),
        *_cases_of("k+p, tiny row", K_AND_P, [(1, 64, "f32")], caches=("warm", "all cold")),
    ]


def _large(result: Result) -> bool:
    return result.case.shape["V"] >= 128000


def _few_rows(result: Result) -> bool:
    return result.case.shape["B"] <= 8


def _is(dtype: str) -> Callable[[Result], bool]:
    return lambda result: result.case.shape["dtype"] == dtype


def _fixed_cost(result: Result) -> float | None:
    """Microseconds a row above those of the read."""
    ours, read = result.microseconds(OURS), result.microseconds(LIMIT)
    return None if ours is None or read is None else (ours - read) / result.case.shape["B"]


def _softmax_share(result: Result) -> float | None:
    ratio = result.ratio(SOFTMAX_ALONE)
    return None if ratio is None else 1 / ratio


def _order_cost(result: Result) -> float | None:
    ratio = result.ratio(RANDOM_ORDER)
    return None if ratio is None else 1 / ratio


def _versus(name: str) -> Callable[[Result], float | None]:
    return lambda result: result.ratio(name)


_READ = "one read of the logits, cold"
GOALS = [
    Goal("k+p", "cold", _READ, "at most", 1.3, lambda r: r.times_limit, [_large, _is("f32")]),
    Goal("k+p", "cold", _READ, "at most", 1.6, lambda r: r.times_limit, [_large, _is("bf16")]),
    Goal("k+p", "warm", TRANSFORMERS, "at least", 250, _versus(TRANSFORMERS), [_large]),
    Goal("k+p", "warm", VLLM, "at least", 500, _versus(VLLM), [_large]),
    Goal("k+p", "warm", PLAIN, "at least", 8, _versus(PLAIN), [_large, _few_rows]),
    Goal("k+p", "warm", LLAMA, "at least", 7, _versus(LLAMA), [_large]),
    Goal("k+p, kept logits", "cold", _READ, "at most", 2, lambda r: r.times_limit, [_large]),
    Goal("p, peaked", "cold", _READ, "at most", 2.3, lambda r: r.times_limit, [_large]),
    Goal("p, peaked", "warm", SOFTMAX_ALONE, "at most", 0.9, _softmax_share, [_large]),
    Goal("p, peaked", "warm", TRANSFORMERS, "at least", 200, _versus(TRANSFORMERS), [_large]),
    Goal("p, flat", "warm", TRANSFORMERS, "at least", 80, _versus(TRANSFORMERS), [_large]),
    Goal(
        "k+p", "warm", TRANSFORMERS, "at least", 150, _versus(TRANSFORMERS),
        [lambda r: r.case.shape["V"] == 32000 and r.case.shape["B"] == 1],
    ),
    Goal(
        "k+p", "warm", "one read, warm", "at most", 2, _fixed_cost,
        [lambda r: r.case.shape["V"] == 32000 and r.case.shape["B"] > 1], unit=" us a row more",
    ),
    Goal("k+p, ascending", "warm", "random order", "at most", 2.5, _order_cost, []),
    Goal("p, ascending", "warm", "random order", "at most", 2.5, _order_cost, []),
    Goal(
        "k+p, two threads", "warm", "one thread", "at least", 1.8, _versus(ONE_THREAD), [_few_rows]
    ),
    Goal("p, two threads", "warm", "one thread", "at least", 1.8, _versus(ONE_THREAD), []),
]  # fmt: skip


def goals(results: list[Result]) -> list[GoalOutcome]:
    """Judge the goals on the worst of the cases that each speaks of."""
    return evaluate(GOALS, results)


def notes() -> list[str]:
    """Tell what the table lacks on this machine."""
    return [] if llama_cpp_peer.llama_cpp is not None else [llama_cpp_peer.WHY_NOT]
