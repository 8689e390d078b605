"""``Sampler`` against the samplers of others: a step, with edits, of one stage, with drafts."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

import lmdecode
from benchmarks.goals import Goal, GoalOutcome, evaluate
from benchmarks.harness import LIMIT, OURS, Case, Contestant, Result
from benchmarks.limits import streaming_read
from benchmarks.sampling import llama_cpp_peer, peers, sampler_peers
from benchmarks.sampling.sampler_peers import Edits

GROUP = "Sampler"
SOURCES = ("sampling/",)
TOP_K, TOP_P, MIN_P = 50, 0.9, 0.05
SEEN, BIASED, DRAFTS = 2000, 100, 8
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
TRANSFORMERS, VLLM, LLAMA = "transformers", "vLLM torch code", "llama.cpp"
PLAIN_STEP, ALL_ROWS, THE_OP = "k+p alone", "sampling the rows", "top_k_top_p_sample"
# A stage: its parameter, and who has it. Logits are normal, of a standard deviation of 3.
STAGES = {
    "typical": ("typical_p", 0.9, (TRANSFORMERS, LLAMA)),
    "epsilon": ("epsilon_cutoff", 3e-4, (TRANSFORMERS,)),
    "eta": ("eta_cutoff", 3e-4, (TRANSFORMERS,)),
    "n-sigma": ("top_n_sigma", 1.0, (LLAMA,)),
    "XTC": ("xtc_threshold", 0.01, (LLAMA,)),
    "mirostat": ("mirostat_tau", 5.0, (LLAMA,)),
}


@lru_cache(maxsize=4)
def _logits(batch: int, vocab: int, dtype: str) -> Tensor:
    generator = torch.Generator().manual_seed(batch * 7919 + vocab)
    return torch.randn(batch, vocab, generator=generator).mul_(3.0).to(DTYPES[dtype])


def _step(logits: Tensor, **parameters: Any) -> Callable[[], object]:
    sampler = lmdecode.Sampler(*logits.shape, seed=1, **parameters)
    return partial(sampler.sample, logits)


def _k_and_p(logits: Tensor) -> Callable[[], object]:
    return _step(logits, top_k=TOP_K, top_p=TOP_P)


def _contestants_of_k_and_p(
    with_peers: bool, *, batch: int, vocab: int, dtype: str, caches: str
) -> list[Contestant]:
    logits, small = _logits(batch, vocab, dtype), _logits(batch, min(vocab, 8192), dtype)
    filter_ = peers.Filter(top_k=TOP_K, top_p=TOP_P)

    def contestant(
        name: str, build: Callable[[Tensor], Callable[[], object]], complete: bool = True
    ) -> Contestant:
        return Contestant(name, build(logits), complete, rewarm=build(small))

    contestants = [contestant(OURS, _k_and_p)]
    if not with_peers:
        return contestants
    contestants.append(contestant(LIMIT, streaming_read))
    contestants.append(
        contestant(
            THE_OP,
            lambda x: partial(
                lmdecode.top_k_top_p_sample, x, TOP_K, TOP_P, seed=torch.arange(len(x)) + 1
            ),
            complete=False,
        )
    )
    if caches == "warm" and peers.has_transformers():
        chain = partial(peers.transformers_chain, filter_=filter_)
        contestants.append(contestant(TRANSFORMERS, chain))
    if llama_cpp_peer.can_sample(logits):
        llama = partial(llama_cpp_peer.llama_chain, filter_=filter_)
        contestants.append(contestant(LLAMA, llama))
    return contestants


def _edits(vocab: int) -> Edits:
    generator = torch.Generator().manual_seed(vocab)
    # The best tokens are among them, so that the edits matter to what is kept.
    tokens = torch.randperm(vocab, generator=generator)[: SEEN + BIASED].tolist()
    allowed = torch.rand(vocab, generator=generator) < 0.9
    biases = dict.fromkeys(tokens[SEEN:], 1.5)
    return Edits(tokens[: SEEN // 2], tokens[SEEN // 2 : SEEN], biases, allowed)


def bitmask_of(allowed: Tensor) -> Tensor:
    """Return [ceil(vocab / 32)] int32 of [vocab] bool."""
    padded = torch.nn.functional.pad(allowed, (0, -len(allowed) % 32)).view(-1, 32)
    words = (padded.long() << torch.arange(32)).sum(1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _step_with_edits(logits: Tensor, edits: Edits) -> Callable[[], object]:
    batch, vocab = logits.shape
    sampler = lmdecode.Sampler(
        batch, vocab, seed=1, top_k=TOP_K, top_p=TOP_P, min_p=MIN_P, logit_bias=edits.biases,
        repetition_penalty=edits.repetition, frequency_penalty=edits.frequency,
        presence_penalty=edits.presence,
    )  # fmt: skip
    for row in range(batch):
        sampler.insert(row, prompt=edits.prompt)
        sampler.accept(row, edits.output)
    bitmask = bitmask_of(edits.allowed).expand(batch, -1).contiguous()
    return partial(sampler.sample, logits, bitmask, accept=False)


def _contestants_with_edits(with_peers: bool, *, batch: int, vocab: int) -> list[Contestant]:
    logits, edits = _logits(batch, vocab, "f32"), _edits(vocab)
    contestants = [Contestant(OURS, _step_with_edits(logits, edits))]
    if not with_peers:
        return contestants
    contestants.append(Contestant(PLAIN_STEP, _k_and_p(logits), complete=False))
    filters = (edits, TOP_K, TOP_P, MIN_P)
    if peers.has_transformers():
        call = sampler_peers.transformers_with_edits(logits, *filters)
        contestants.append(Contestant(TRANSFORMERS, call))
    if llama_cpp_peer.can_sample(logits):
        contestants.append(Contestant(LLAMA, sampler_peers.llama_with_edits(logits, *filters)))
    if sampler_peers.has_vllm():
        contestants.append(Contestant(VLLM, sampler_peers.vllm_with_edits(logits, *filters)))
    return contestants


def _contestants_of_stage(
    with_peers: bool, *, stage: str, batch: int, vocab: int
) -> list[Contestant]:
    logits = _logits(batch, vocab, "f32")
    name, value, others = STAGES[stage]
    parameters = {name: value} | ({"xtc_probability": 1.0} if stage == "XTC" else {})
    call = partial(_step(logits, **parameters), accept=False)
    contestants = [Contestant(OURS, call)]
    if not with_peers:
        return contestants
    if TRANSFORMERS in others and peers.has_transformers():
        theirs = sampler_peers.transformers_stage(logits, name, value)
        contestants.append(Contestant(TRANSFORMERS, theirs))
    if LLAMA in others and llama_cpp_peer.can_sample(logits):
        contestants.append(Contestant(LLAMA, sampler_peers.llama_stage(logits, name, value)))
    return contestants


def _contestants_of_drafts(with_peers: bool, *, vocab: int) -> list[Contestant]:
    # A model that is sure, so that every call accepts all, whatever the noise.
    rows = _logits(DRAFTS + 1, vocab, "f32").clone()
    draft = torch.arange(DRAFTS)[None]
    rows[torch.arange(DRAFTS), draft[0]] = 60.0
    sampler = lmdecode.Sampler(1, vocab, seed=1, top_k=TOP_K, top_p=TOP_P)
    verify = partial(lmdecode.verify_draft, rows[None], draft, sampler)
    if verify().num_accepted.item() != DRAFTS:
        raise AssertionError("a drafted token was not accepted")
    contestants = [Contestant(OURS, verify)]
    if with_peers:
        contestants.append(Contestant(ALL_ROWS, _k_and_p(rows), complete=False))
    return contestants


def cases(quick: bool) -> list[Case]:
    """Return every case, or with ``quick`` one small shape of each kind."""
    large = 32000 if quick else 128256
    shapes = [(1, 32000, "f32", "warm")]
    if not quick:
        shapes += [
            (batch, large, dtype, caches)
            for caches in ("warm", "cold")
            for dtype in DTYPES
            for batch in (1, 8)
        ]
    found = [
        Case(
            GROUP,
            "a step, k+p",
            {"B": batch, "V": vocab, "dtype": dtype},
            partial(_contestants_of_k_and_p, batch=batch, vocab=vocab, dtype=dtype, caches=caches),
            caches=caches,
        )
        for batch, vocab, dtype, caches in shapes
    ]
    found += [
        Case(
            GROUP,
            "a step, penalties, biases, mask, k+p+min-p",
            {"B": batch, "V": large, "dtype": "f32"},
            partial(_contestants_with_edits, batch=batch, vocab=large),
        )
        for batch in ((1,) if quick else (1, 8))
    ]
    found += [
        Case(
            GROUP,
            f"{stage} alone",
            {"B": 1, "V": large, "dtype": "f32"},
            partial(_contestants_of_stage, stage=stage, batch=1, vocab=large),
        )
        for stage in STAGES
    ]
    found.append(
        Case(
            GROUP,
            f"verify {DRAFTS} drafted tokens, k+p",
            {"B": 1, "V": large, "dtype": "f32"},
            partial(_contestants_of_drafts, vocab=large),
        )
    )
    return found


def _vocab(vocab: int) -> Callable[[Result], bool]:
    return lambda result: result.case.shape["V"] == vocab


def _dtype(dtype: str) -> Callable[[Result], bool]:
    return lambda result: result.case.shape["dtype"] == dtype


def _times(name: str) -> Callable[[Result], float | None]:
    """How many times as long as another contestant ours takes."""

    def figure(result: Result) -> float | None:
        ratio = result.ratio(name)
        return None if ratio is None else 1 / ratio

    return figure


def _versus(name: str) -> Callable[[Result], float | None]:
    return lambda result: result.ratio(name)


_STEP, _EDITED = "a step, k+p", "a step, penalties, biases, mask, k+p+min-p"
_READ = "one read of the logits, cold"
GOALS = [
    Goal(
        _STEP, "warm", "the call and all", "at most", 5, lambda r: r.microseconds(OURS),
        [_vocab(32000)], unit=" us",
    ),
    Goal(_STEP, "warm", TRANSFORMERS, "at least", 180, _versus(TRANSFORMERS), [_vocab(32000)]),
    Goal(
        _STEP, "cold", _READ, "at most", 1.4, lambda r: r.times_limit,
        [_vocab(128256), _dtype("f32")],
    ),
    Goal(
        _STEP, "cold", _READ, "at most", 1.6, lambda r: r.times_limit,
        [_vocab(128256), _dtype("bf16")],
    ),
    Goal(_EDITED, "warm", PLAIN_STEP, "at most", 1.4, _times(PLAIN_STEP)),
    Goal(_EDITED, "warm", TRANSFORMERS, "at least", 100, _versus(TRANSFORMERS)),
    Goal(_EDITED, "warm", LLAMA, "at least", 10, _versus(LLAMA)),
    Goal(_EDITED, "warm", VLLM, "at least", 200, _versus(VLLM)),
    *(
        Goal(f"{stage} alone", "warm", others[0], "at least", 50, _versus(others[0]))
        for stage, (_, _, others) in STAGES.items()
    ),
    Goal(
        f"verify {DRAFTS} drafted tokens, k+p", "warm", ALL_ROWS, "at most", 1.1, _times(ALL_ROWS)
    ),
]  # fmt: skip


def goals(results: list[Result]) -> list[GoalOutcome]:
    """Judge the goals on the worst of the cases that each speaks of."""
    return evaluate(GOALS, results)


def notes() -> list[str]:
    """Tell what the table lacks on this machine."""
    missing = [] if llama_cpp_peer.llama_cpp is not None else [llama_cpp_peer.WHY_NOT]
    if not sampler_peers.has_vllm():
        missing.append("vLLM's torch code: not measured, vLLM is not installed")
    return missing
