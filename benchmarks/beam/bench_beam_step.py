"""A step of beam search outside the forward pass, against transformers' own chain of calls.

Ours is ``log_softmax_top_k`` and ``beam_step``; transformers' what ``_beam_search`` does between
the logits and the parents that its cache is reordered by.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import lmdecode
from benchmarks.goals import Goal, GoalOutcome, evaluate
from benchmarks.harness import OURS, Case, Contestant, Result

GROUP = "beam_step"
SOURCES = ("beam/beam_step", "beam/log_softmax_top_k")
NUM_BEAMS = 4
CANDIDATES = 2 * NUM_BEAMS
CAPACITY, PROMPT = 128, 32
LENGTH = (PROMPT + CAPACITY) // 2  # at the step of transformers; ours takes all of them by turns
END_TOKEN = 2
TRANSFORMERS = "transformers"


def _inputs(requests: int, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits of a standard deviation of 3, the beams' scores and their sequences."""
    generator = torch.Generator().manual_seed(requests * 7919 + vocab)
    rows = requests * NUM_BEAMS
    logits = torch.randn(rows, vocab, generator=generator).mul_(3.0)
    logits[:, END_TOKEN] = -20.0  # most steps end no sequence
    scores = -torch.rand(requests, NUM_BEAMS, generator=generator)
    sequences = torch.randint(3, vocab, (requests, NUM_BEAMS, CAPACITY), generator=generator)
    return logits, scores, sequences


def _ours(
    logits: Tensor, scores: Tensor, sequences: Tensor
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Build the whole step, and the step from its candidates on."""
    requests = len(scores)
    state = lmdecode.new_beam_state(requests, NUM_BEAMS, CAPACITY, keep_beam_indices=True)
    state.sequences.copy_(sequences)
    parameters = lmdecode.beam_parameters(
        requests, NUM_BEAMS, prompt_lengths=PROMPT, max_lengths=CAPACITY, end_tokens=[END_TOKEN]
    )
    flat = scores.reshape(-1)
    # From the prompt to the capacity, and again.
    lengths = itertools.cycle(range(PROMPT, CAPACITY - 1))

    def best() -> lmdecode.BeamCandidates:
        return lmdecode.log_softmax_top_k(logits, flat, CANDIDATES, num_beams=NUM_BEAMS)

    def decide(candidates: lmdecode.BeamCandidates) -> object:
        if next(lengths) == PROMPT:
            state.lengths.fill_(PROMPT)
        return lmdecode.beam_step(
            state, parameters, candidates.scores, candidates.tokens, candidates.beams,
            status=candidates.status,
        ).parents  # fmt: skip

    return lambda: decide(best()), partial(decide, best())


def _transformers(
    logits: Tensor, scores: Tensor, sequences: Tensor
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Build both from ``GenerationMixin``'s own methods, in the order of ``_beam_search``."""
    from transformers.generation import (
        EosTokenCriteria,
        GenerationMixin,
        MaxLengthCriteria,
        StoppingCriteriaList,
    )

    mixin = GenerationMixin()
    requests = len(scores)
    criteria = StoppingCriteriaList(
        [MaxLengthCriteria(CAPACITY), EosTokenCriteria(torch.tensor([END_TOKEN]))]
    )
    indices = torch.full((requests, NUM_BEAMS, CAPACITY - PROMPT), -1, dtype=torch.int32)
    finished = torch.full((requests, NUM_BEAMS), -1e9)
    is_finished = torch.zeros(requests, NUM_BEAMS, dtype=torch.bool)
    unsatisfied = torch.ones(requests, 1, dtype=torch.bool)
    top = torch.arange(CANDIDATES) < NUM_BEAMS
    lengths = dict(cur_len=LENGTH, decoder_prompt_len=PROMPT)
    rules = dict(early_stopping=False, length_penalty=1.0)

    def accumulated() -> Tensor:
        log_probs = logits.to(torch.float32, copy=True).log_softmax(dim=-1)
        log_probs = mixin._unflatten_beam_dim(log_probs, requests, NUM_BEAMS)
        return (log_probs + scores[:, :, None]).reshape(requests, -1)

    def candidates(flat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return mixin._get_top_k_continuations(
            accumulated_log_probs=flat, running_sequences=sequences, running_beam_indices=indices,
            do_sample=False, beams_to_keep=CANDIDATES, num_beams=NUM_BEAMS, batch_size=requests,
            **lengths,
        )  # fmt: skip

    def decide(best: tuple[Tensor, Tensor, Tensor]) -> object:
        log_probs, longer, longer_indices = best
        hits = criteria(mixin._flatten_beam_dim(longer[:, :, : LENGTH + 1]), None)
        hits = mixin._unflatten_beam_dim(hits, requests, CANDIDATES)
        _, running_scores, running_indices = mixin._get_running_beams_for_next_iteration(
            topk_log_probs=log_probs, topk_running_sequences=longer,
            topk_running_beam_indices=longer_indices, next_token_hits_stopping_criteria=hits,
            num_beams=NUM_BEAMS,
        )  # fmt: skip
        _, best_scores, _, sent = mixin._update_finished_beams(
            sequences=sequences, topk_running_sequences=longer, beam_scores=finished,
            topk_log_probs=log_probs, beam_indices=indices,
            topk_running_beam_indices=longer_indices,
            is_early_stop_heuristic_unsatisfied=unsatisfied, is_sent_finished=is_finished,
            next_token_hits_stopping_criteria=hits, top_num_beam_mask=top, num_beams=NUM_BEAMS,
            **lengths, **rules,
        )  # fmt: skip
        parents = mixin._flatten_beam_dim(running_indices[..., LENGTH - PROMPT])
        may_improve = mixin._check_early_stop_heuristic(
            is_early_stop_heuristic_unsatisfied=unsatisfied, running_beam_scores=running_scores,
            beam_scores=best_scores, is_sent_finished=sent, cur_len=LENGTH + 1,
            decoder_prompt_len=PROMPT, max_length=CAPACITY, **rules,
        )  # fmt: skip
        mixin._beam_search_has_unfinished_sequences(may_improve, sent, hits, False)
        return parents

    def whole() -> object:
        return decide(candidates(accumulated()))

    return whole, partial(decide, candidates(accumulated()))


def _contestants(with_peers: bool, *, requests: int, vocab: int, whole: bool) -> list[Contestant]:
    inputs = _inputs(requests, vocab)
    which = 0 if whole else 1
    ours = _ours(*inputs)[which]
    contestants = [Contestant(OURS, ours)]
    if with_peers:
        theirs = _transformers(*inputs)[which]
        if not torch.equal(ours(), theirs()):  # type: ignore[arg-type]
            raise RuntimeError("beam_step and transformers found other beams")
        # Behind the top-k transformers has gathered the sequences already.
        contestants.append(Contestant(TRANSFORMERS, theirs, complete=whole))
    return contestants


def cases(quick: bool) -> list[Case]:
    """Return every case, or with ``quick`` one small shape of each kind."""
    shapes = [(1, 500)] if quick else [(1, 32000), (8, 32000), (8, 128256)]
    small = [(1, 500)] if quick else [(1, 32000), (8, 32000), (64, 1000)]
    return [
        Case(
            GROUP,
            name,
            {"requests": requests, "beams": NUM_BEAMS, "V": vocab},
            partial(_contestants, requests=requests, vocab=vocab, whole=name == "whole step"),
        )
        for name, sizes in (("whole step", shapes), ("from the candidates on", small))
        for requests, vocab in sizes
    ]


def _eight(result: Result) -> bool:
    return result.case.shape["requests"] == 8


def _versus_transformers(result: Result) -> float | None:
    return result.ratio(TRANSFORMERS)


GOALS = [
    Goal("whole step", "warm", TRANSFORMERS, "at least", 8, _versus_transformers, [_eight]),
    Goal(
        "from the candidates on", "warm", "the clock", "at most", 10,
        lambda r: r.microseconds(OURS), [_eight], unit=" us",
    ),
]  # fmt: skip


def goals(results: list[Result]) -> list[GoalOutcome]:
    """Judge the goals on the worst of the cases that each speaks of."""
    return evaluate(GOALS, results)
