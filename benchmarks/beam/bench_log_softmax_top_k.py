"""``log_softmax_top_k`` against the same step in torch calls and one read of the logits."""

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
from benchmarks.sampling.peers import has_transformers

GROUP = "log_softmax_top_k"
SOURCES = ("beam/log_softmax_top_k",)
NUM_BEAMS = 4
CANDIDATES = 2 * NUM_BEAMS
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
# The row that brings the code back into the caches after they were evicted.
SMALL_VOCAB = 8192

CHAIN, LOG_SOFTMAX_ALONE = "log_softmax, add, topk", "log_softmax alone"
TRANSFORMERS_STEP = "the same on a float32 copy, div, mod"
PROCESSOR_CHAIN, WITHOUT = "transformers' processors in between", "lmdecode without processors"

# A usual set of processors, and the tokens that a beam has so far.
HISTORY = 128
REPETITION_PENALTY, NGRAM, END_TOKEN = 1.2, 3, 2


@lru_cache(maxsize=2)
def _logits(rows: int, vocab: int, dtype: str) -> Tensor:
    """Return [rows, vocab] normal logits of a standard deviation of 3."""
    generator = torch.Generator().manual_seed(rows * 7919 + vocab)
    return torch.randn(rows, vocab, generator=generator).mul_(3.0).to(DTYPES[dtype])


def _beam_scores(logits: Tensor) -> Tensor:
    return -torch.rand(len(logits), generator=torch.Generator().manual_seed(0))


def _ours(logits: Tensor) -> Callable[[], object]:
    scores = _beam_scores(logits)
    return partial(lmdecode.log_softmax_top_k, logits, scores, CANDIDATES, num_beams=NUM_BEAMS)


def _chain(logits: Tensor) -> Callable[[], object]:
    """Build the least that does the work, in the dtype of the logits: bf16 rounds its scores."""
    scores = _beam_scores(logits)[:, None].to(logits.dtype)

    def step() -> object:
        total = logits.log_softmax(dim=-1) + scores
        return total.view(-1, NUM_BEAMS * logits.shape[1]).topk(CANDIDATES, dim=-1)

    return step


def _transformers_step(logits: Tensor) -> Callable[[], object]:
    """Build what transformers 4.x does around its processors: float32, then tokens and beams."""
    scores = _beam_scores(logits)[:, None]
    vocab = logits.shape[1]

    def step() -> object:
        total = logits.to(torch.float32, copy=True).log_softmax(dim=-1) + scores
        best, flat = total.view(-1, NUM_BEAMS * vocab).topk(CANDIDATES, dim=-1)
        return best, flat % vocab, torch.div(flat, vocab, rounding_mode="floor")

    return step


def _history(logits: Tensor) -> Tensor:
    """Return tokens that the model found likely, which repeat themselves now and then."""
    generator = torch.Generator().manual_seed(1)
    likely = logits.float().topk(4 * HISTORY).indices
    places = torch.randint(0, likely.shape[1], (len(logits), HISTORY), generator=generator)
    return likely.gather(1, places)


def _ours_processed(logits: Tensor) -> Callable[[], object]:
    requests = len(logits) // NUM_BEAMS
    return partial(
        lmdecode.log_softmax_top_k,
        logits,
        _beam_scores(logits),
        CANDIDATES,
        num_beams=NUM_BEAMS,
        sequences=_history(logits),
        lengths=torch.full((requests,), HISTORY),
        repetition_penalty=REPETITION_PENALTY,
        no_repeat_ngram_size=NGRAM,
        end_tokens=torch.tensor([END_TOKEN]),
        min_lengths=HISTORY + 1,
    )


def _processor_chain(logits: Tensor) -> Callable[[], object]:
    """Build what generate() does from logits to candidates, with the processors in their order."""
    from transformers.generation import logits_process

    scores, history = _beam_scores(logits)[:, None], _history(logits)
    processors = logits_process.LogitsProcessorList(
        [
            logits_process.RepetitionPenaltyLogitsProcessor(REPETITION_PENALTY),
            logits_process.NoRepeatNGramLogitsProcessor(NGRAM),
            logits_process.MinLengthLogitsProcessor(HISTORY + 1, [END_TOKEN]),
        ]
    )
    vocab = logits.shape[1]

    def step() -> object:
        log_probs = logits.to(torch.float32, copy=True).log_softmax(dim=-1)
        total = processors(history, log_probs) + scores
        best, flat = total.view(-1, NUM_BEAMS * vocab).topk(CANDIDATES, dim=-1)
        return best, flat % vocab, torch.div(flat, vocab, rounding_mode="floor")

    return step


def _contestants(
    with_peers: bool, *, requests: int, vocab: int, dtype: str, inputs: int, processors: bool
) -> list[Contestant]:
    rows = requests * NUM_BEAMS
    pool = _logits(rows * inputs, vocab, dtype).split(rows)
    small = _logits(NUM_BEAMS, SMALL_VOCAB, dtype)

    def contestant(
        name: str, build: Callable[[Tensor], Callable[[], object]], complete: bool = True
    ) -> Contestant:
        calls = itertools.cycle([build(logits) for logits in pool])
        call = build(pool[0]) if inputs == 1 else lambda: next(calls)()
        return Contestant(name, call, complete, rewarm=build(small))

    def log_softmax_alone(logits: Tensor) -> Callable[[], object]:
        return partial(torch.log_softmax, logits, dim=-1)

    if processors:
        contestants = [contestant(OURS, _ours_processed)]
        if with_peers:
            contestants += [
                contestant(LIMIT, streaming_read),
                contestant(WITHOUT, _ours, complete=False),
            ]
            if has_transformers():
                contestants.append(contestant(PROCESSOR_CHAIN, _processor_chain))
        return contestants
    contestants = [contestant(OURS, _ours)]
    if with_peers:
        contestants += [
            contestant(LIMIT, streaming_read),
            contestant(CHAIN, _chain),
            contestant(TRANSFORMERS_STEP, _transformers_step),
            contestant(LOG_SOFTMAX_ALONE, log_softmax_alone, complete=False),
        ]
    return contestants


def _cases_of(
    name: str,
    shapes: list[tuple[int, int, str]],
    caches: tuple[str, ...],
    inputs: int = 1,
    processors: bool = False,
) -> list[Case]:
    return [
        Case(
            GROUP,
            name,
            {"requests": requests, "beams": NUM_BEAMS, "V": vocab, "dtype": dtype},
            partial(
                _contestants,
                requests=requests,
                vocab=vocab,
                dtype=dtype,
                inputs=inputs,
                processors=processors,
            ),
            caches=state,
        )
        for requests, vocab, dtype in shapes
        for state in caches
    ]


def cases(quick: bool) -> list[Case]:
    """Return every case, or with ``quick`` one small shape of each kind."""
    shapes = [(r, v, d) for d in DTYPES for v in (32000, 128256) for r in (1, 8)]
    fresh = [(1, v, d) for d in DTYPES for v in (32000, 128256)]
    small = [(1, SMALL_VOCAB, "f32")]
    return [
        *_cases_of("beam step", small if quick else shapes, ("warm", "cold")),
        *_cases_of(
            "beam step, new logits each call",
            small if quick else fresh,
            ("warm",),
            inputs=4 if quick else 16,
        ),
        *_cases_of("processed step", small if quick else shapes, ("warm",), processors=True),
    ]


def _large(result: Result) -> bool:
    return result.case.shape["V"] >= 128000


def _eight(result: Result) -> bool:
    return result.case.shape["requests"] == 8


def _is_f32(result: Result) -> bool:
    return result.case.shape["dtype"] == "f32"


def _per_logit(result: Result) -> float | None:
    ours, shape = result.microseconds(OURS), result.case.shape
    logits = int(shape["requests"]) * int(shape["beams"]) * int(shape["V"])
    return None if ours is None else ours * 1e3 / logits


def _versus_chain(result: Result) -> float | None:
    return result.ratio(CHAIN)


GOALS = [
    Goal("beam step", "warm", CHAIN, "at least", 10, _versus_chain, [_eight, _is_f32]),
    Goal(
        "beam step", "warm", "the clock", "at most", 0.18, _per_logit, [_large], unit=" ns a logit"
    ),
    Goal(
        "beam step", "cold", "one read of the logits, cold", "at most", 1.3,
        lambda r: r.times_limit, [_large, _is_f32],
    ),
]  # fmt: skip


def goals(results: list[Result]) -> list[GoalOutcome]:
    """Judge the goals on the worst of the cases that each speaks of."""
    return evaluate(GOALS, results)
