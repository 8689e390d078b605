"""Times of the ops of beam search, and of torch's calls for the first of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import lmdecode
from benchmarks.gpu.machine import Machine, header, name_of, row

_BEAMS = 4
_CAPACITY, _PROMPT = 256, 32


def _best_in_torch(x: torch.Tensor, scores: torch.Tensor) -> object:
    total = x.float().log_softmax(-1) + scores[:, None]
    return total.view(-1, _BEAMS * x.shape[1]).topk(2 * _BEAMS)


def _choose(machine: Machine) -> Iterator[str]:
    shapes = machine.size(((4, 32000), (32, 32000), (128, 128256), (512, 131072)), ((8, 500),))
    for dtype in (torch.float32, torch.bfloat16):
        for rows, vocab in shapes:
            x, scores = machine.randn(rows, vocab, dtype=dtype) * 3, machine.randn(rows)
            sequences = torch.randint(3, vocab, (rows, _CAPACITY), device=machine.device)
            rules = dict(sequences=sequences, repetition_penalty=1.2, no_repeat_ngram_size=3)

            def best(x=x, scores=scores, **rules: object) -> object:
                return lmdecode.log_softmax_top_k(x, scores, 2 * _BEAMS, num_beams=_BEAMS, **rules)

            yield row(
                [
                    f"log_softmax_top_k, {rows} x {vocab} {name_of(dtype)}",
                    machine.times(best),
                    machine.times(lambda x=x, s=scores: _best_in_torch(x, s)),
                ]
            )
            yield row(
                ["with penalty and n-grams", machine.times(lambda b=best, r=rules: b(**r)), ""]
            )


def _decide(machine: Machine) -> Iterator[str]:
    for requests in machine.size((1, 8, 64), (2,)):
        device = machine.device
        state = lmdecode.new_beam_state(
            requests, _BEAMS, _CAPACITY, keep_beam_indices=True, device=device
        )
        parameters = lmdecode.beam_parameters(
            requests, _BEAMS, prompt_lengths=_PROMPT, max_lengths=_CAPACITY, end_tokens=[2],
            device=device,
        )  # fmt: skip
        x, scores = machine.randn(requests * _BEAMS, 1000), machine.randn(requests * _BEAMS)
        x[:, 2] = -20.0  # no sequence ends
        best = lmdecode.log_softmax_top_k(x, scores, 2 * _BEAMS, num_beams=_BEAMS)

        def step(state=state, parameters=parameters, best=best) -> object:
            state.lengths.fill_(_PROMPT + 100)
            return lmdecode.beam_step(
                state, parameters, best.scores, best.tokens, best.beams, status=best.status
            )

        def finalize(state=state, parameters=parameters) -> object:
            return lmdecode.beam_finalize(state, parameters, num_return_sequences=_BEAMS)

        name = f"{requests} x {_BEAMS} beams"
        yield row([f"beam_step and a fill_, {name}", machine.times(step), ""])
        yield row([f"beam_finalize, {name}", machine.times(finalize), ""])


def run(machine: Machine) -> Iterator[str]:
    """Time the choice of candidates, a step and the end."""
    yield f"{_BEAMS} beams. Microseconds, median: in a CUDA graph (and called from Python)."
    yield from header(["what", "ours", "torch"])
    yield from _choose(machine)
    yield from _decide(machine)
