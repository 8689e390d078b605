"""Times of the ops of beam search, and of torch's calls for the first of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

import lmdecode
from benchmarks.gpu.machine import Machine, name_of
from benchmarks.harness import Case, Contestant

_BEAMS = 4
_CAPACITY, _PROMPT = 256, 32


def _best_in_torch(x: torch.Tensor, scores: torch.Tensor) -> object:
    total = x.float().log_softmax(-1) + scores[:, None]
    return total.view(-1, _BEAMS * x.shape[1]).topk(2 * _BEAMS)


def _choose(
    machine: Machine, rows: int, vocab: int, dtype: torch.dtype, has_rules: bool
) -> list[Contestant]:
    x, scores = machine.randn(rows, vocab, dtype=dtype) * 3, machine.randn(rows)
    sequences = torch.randint(3, vocab, (rows, _CAPACITY), device=machine.device)
    rules = dict(sequences=sequences, repetition_penalty=1.2, no_repeat_ngram_size=3)

    def best() -> object:
        options = rules if has_rules else {}
        return lmdecode.log_softmax_top_k(x, scores, 2 * _BEAMS, num_beams=_BEAMS, **options)

    beside = {} if has_rules else {"torch": partial(_best_in_torch, x, scores)}
    return machine.contestants(ours=best, **beside)


def _decide(machine: Machine, requests: int, ends: bool) -> list[Contestant]:
    device = machine.device
    state = lmdecode.new_beam_state(
        requests, _BEAMS, _CAPACITY, keep_beam_indices=True, device=device
    )
    parameters = lmdecode.beam_parameters(
        requests, _BEAMS, prompt_lengths=_PROMPT, max_lengths=_CAPACITY, end_tokens=[2],
        device=device,
    )  # fmt: skip
    state.lengths.fill_(_PROMPT + 100)
    x, scores = machine.randn(requests * _BEAMS, 1000), machine.randn(requests * _BEAMS)
    x[:, 2] = -20.0  # no sequence ends
    best = lmdecode.log_softmax_top_k(x, scores, 2 * _BEAMS, num_beams=_BEAMS)

    def step() -> object:
        state.lengths.fill_(_PROMPT + 100)
        return lmdecode.beam_step(
            state, parameters, best.scores, best.tokens, best.beams, status=best.status
        )

    def finalize() -> object:
        return lmdecode.beam_finalize(state, parameters, num_return_sequences=_BEAMS)

    return machine.contestants(ours=finalize if ends else step)


def cases(machine: Machine) -> Iterator[Case]:
    """Yield the choice of candidates, a step and the end."""
    shapes = machine.size(((4, 32000), (32, 32000), (128, 128256), (512, 131072)), ((8, 500),))
    for dtype in (torch.float32, torch.bfloat16):
        for rows, vocab in shapes:
            for has_rules in (False, True):
                name = "with penalty and n-grams" if has_rules else "no rule"
                make = partial(_choose, machine, rows, vocab, dtype, has_rules)
                logits = f"{rows} x {vocab} {name_of(dtype)}"
                yield machine.case("log_softmax_top_k", name, make, logits=logits)
    for requests in machine.size((1, 8, 64), (2,)):
        for name, ends in (("beam_step and a fill_", False), ("beam_finalize", True)):
            make = partial(_decide, machine, requests, ends)
            yield machine.case("States", name, make, beams=f"{requests} x {_BEAMS}")
