"""A step of ``BeamSearch`` against that of transformers' loop; requests that come and go."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor

import lmdecode
from benchmarks.goals import Goal, GoalOutcome, evaluate
from benchmarks.harness import OURS, Case, Contestant, Result

GROUP = "BeamSearch"
SOURCES = ("beam/",)
NUM_BEAMS = 4
PROMPT, NEW_TOKENS = 64, 256
END_TOKEN = 2

TRANSFORMERS = "transformers' loop, without the model"
OP = "log_softmax_top_k alone"


@lru_cache(maxsize=2)
def _logits(rows: int, vocab: int) -> Tensor:
    """Return [rows, vocab] normal logits of a standard deviation of 3; nothing ends."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(rows, vocab, generator=generator).mul_(3.0)
    logits[:, END_TOKEN] = -100.0
    return logits


def _request(tokens: int = NEW_TOKENS) -> lmdecode.BeamRequest:
    return lmdecode.BeamRequest(
        [1] * PROMPT, max_new_tokens=tokens, num_beams=NUM_BEAMS, eos_token_id=END_TOKEN
    )


def _ours(logits: Tensor) -> Callable[[], object]:
    requests = len(logits) // NUM_BEAMS
    engine = lmdecode.BeamSearch(logits.shape[1], slots=requests, capacity=PROMPT + NEW_TOKENS)

    def step() -> object:
        if not engine.num_rows:  # all have come to their ends
            engine.pop_finished()
            for _ in range(requests):
                engine.insert(_request())
            engine.step(logits[:requests])
        return engine.step(logits)

    return step


def _op(logits: Tensor) -> Callable[[], object]:
    scores = torch.zeros(len(logits))
    return partial(lmdecode.log_softmax_top_k, logits, scores, 2 * NUM_BEAMS, num_beams=NUM_BEAMS)


def transformers_step(
    logits: Tensor,
    num_beams: int = NUM_BEAMS,
    prompt: Tensor | None = None,
    process: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Callable[[], object]:
    """Build the body of ``_beam_search`` between the forward pass and the cache, at one length.

    prompt: what the beams [rows, length] begin with; process: the logits processors.
    """
    from transformers.generation.stopping_criteria import (
        EosTokenCriteria,
        MaxLengthCriteria,
        StoppingCriteriaList,
    )
    from transformers.generation.utils import GenerationMixin

    loop, batch = GenerationMixin(), len(logits) // num_beams
    length, capacity = PROMPT + NEW_TOKENS // 2, PROMPT + NEW_TOKENS
    criteria = StoppingCriteriaList(
        [MaxLengthCriteria(max_length=capacity), EosTokenCriteria(eos_token_id=END_TOKEN)]
    )
    sequences = torch.ones(batch, num_beams, capacity, dtype=torch.int64)
    if prompt is not None:
        sequences[:, :, : prompt.shape[1]] = prompt.view(batch, num_beams, -1)
    indices = torch.zeros(batch, num_beams, NEW_TOKENS, dtype=torch.int32)
    running_scores = -torch.rand(batch, num_beams).sort(dim=1).values
    scores = torch.full((batch, num_beams), -1e9)
    finished = torch.zeros(batch, num_beams, dtype=torch.bool)
    improvable = torch.ones(batch, 1, dtype=torch.bool)
    mask = torch.arange(2 * num_beams) < num_beams
    common = {"num_beams": num_beams, "cur_len": length, "decoder_prompt_len": PROMPT}
    rules = {"early_stopping": False, "length_penalty": 1.0}

    def step() -> object:
        copied = logits.to(copy=True, dtype=torch.float32)
        log_probs = torch.nn.functional.log_softmax(copied, dim=-1)
        if process is not None:
            log_probs = process(loop._flatten_beam_dim(sequences[:, :, :length]), log_probs)
        log_probs = loop._unflatten_beam_dim(log_probs, batch, num_beams)
        log_probs = (log_probs + running_scores[:, :, None]).reshape(batch, -1)
        top_scores, top_sequences, top_indices = loop._get_top_k_continuations(
            accumulated_log_probs=log_probs, running_sequences=sequences,
            running_beam_indices=indices, do_sample=False, beams_to_keep=2 * num_beams,
            batch_size=batch, **common,
        )  # fmt: skip
        stops = criteria(loop._flatten_beam_dim(top_sequences[:, :, : length + 1]), None)
        stops = loop._unflatten_beam_dim(stops, batch, 2 * num_beams)
        _, next_scores, _ = loop._get_running_beams_for_next_iteration(
            topk_log_probs=top_scores, topk_running_sequences=top_sequences,
            topk_running_beam_indices=top_indices, next_token_hits_stopping_criteria=stops,
            num_beams=num_beams,
        )  # fmt: skip
        _, best, _, ended = loop._update_finished_beams(
            sequences=sequences, topk_running_sequences=top_sequences, beam_scores=scores,
            topk_log_probs=top_scores, beam_indices=indices, topk_running_beam_indices=top_indices,
            is_early_stop_heuristic_unsatisfied=improvable, is_sent_finished=finished,
            next_token_hits_stopping_criteria=stops, top_num_beam_mask=mask, **common, **rules,
        )  # fmt: skip
        going = loop._check_early_stop_heuristic(
            is_early_stop_heuristic_unsatisfied=improvable, running_beam_scores=next_scores,
            beam_scores=best, is_sent_finished=ended, cur_len=length + 1, max_length=capacity,
            decoder_prompt_len=PROMPT, **rules,
        )  # fmt: skip
        return bool(loop._beam_search_has_unfinished_sequences(going, ended, stops, False))

    return step


def _step_contestants(with_peers: bool, *, requests: int, vocab: int) -> list[Contestant]:
    logits = _logits(requests * NUM_BEAMS, vocab)
    contestants = [Contestant(OURS, _ours(logits))]
    if with_peers:
        contestants.append(Contestant(OP, _op(logits), complete=False))
        if importlib.util.find_spec("transformers") is not None:
            contestants.append(Contestant(TRANSFORMERS, transformers_step(logits)))
    return contestants


def _insert_contestants(_: bool, *, others: int) -> list[Contestant]:
    """A request comes and goes, beside others that run; their KV and state are not touched."""
    engine = lmdecode.BeamSearch(slots=others + 1, capacity=PROMPT + NEW_TOKENS)
    for _ in range(others):
        engine.insert(_request())
    if others:
        engine.step(_logits(others, 1024))
    request = _request()
    return [Contestant(OURS, lambda: engine.cancel(engine.insert(request)))]


def cases(quick: bool) -> list[Case]:
    """Return every case, or with ``quick`` small ones."""
    shapes = [(1, 1024)] if quick else [(1, 32000), (8, 32000), (8, 128256)]
    steps = [
        Case(
            GROUP,
            "step",
            {"requests": requests, "beams": NUM_BEAMS, "V": vocab},
            partial(_step_contestants, requests=requests, vocab=vocab),
        )
        for requests, vocab in shapes
    ]
    inserts = [
        Case(
            GROUP,
            "insert and cancel beside others",
            {"requests": others, "beams": NUM_BEAMS, "V": 1024},
            partial(_insert_contestants, others=others),
        )
        for others in ((0,) if quick else (0, 64, 1024))
    ]
    return [*steps, *inserts]


def _of_eight(result: Result) -> bool:
    return result.case.shape["requests"] == 8 and result.case.shape["V"] == 32000


def _versus_transformers(result: Result) -> float | None:
    return result.ratio(TRANSFORMERS)


GOALS = [
    Goal("step", "warm", TRANSFORMERS, "at least", 8, _versus_transformers, [_of_eight]),
]


def goals(results: list[Result]) -> list[GoalOutcome]:
    """Judge the goal on the case that it speaks of."""
    return evaluate(GOALS, results)
