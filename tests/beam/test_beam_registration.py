"""The ops of beam search in graphs of torch.compile."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import lmdecode
from tests.beam.contracts import candidates, searches
from tests.support.cases import assert_same_bits, bits

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def test_compile_log_softmax_top_k_with_dynamic_shapes() -> None:
    def step(x: torch.Tensor, scores: torch.Tensor) -> lmdecode.BeamCandidates:
        return lmdecode.log_softmax_top_k(x, scores, 5, num_beams=scores.shape[1])

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    for requests, beams, vocab in ((2, 3, 40), (3, 2, 33), (5, 4, 70)):
        generator = torch.Generator().manual_seed(vocab)
        x = torch.randn(requests * beams, vocab, generator=generator)
        scores = torch.randn(requests, beams, generator=generator)
        assert_same_bits(compiled(x, scores), step(x, scores))
    assert counter.frame_count == 1


@pytest.mark.parametrize("ragged", [False, True])
def test_compile_a_step_of_beam_search(ragged: bool) -> None:
    """From logits to next beams in one graph, the state changed in place."""
    widths = [2, 1, 3]

    def step(
        x: torch.Tensor, scores: torch.Tensor, offsets: torch.Tensor, *search: torch.Tensor
    ) -> tuple[lmdecode.BeamStep, lmdecode.BeamFinal]:
        state = lmdecode.BeamState(*search[:14])
        parameters = lmdecode.BeamParameters(*search[14:])
        beams = widths if ragged else 3
        best = lmdecode.log_softmax_top_k(x, scores, 6, num_beams=beams)
        out = lmdecode.beam_step(
            state, parameters, best.scores, best.tokens, best.beams, status=best.status,
            row_offsets=offsets if ragged else None, rows=sum(widths) if ragged else None,
        )  # fmt: skip
        return out, lmdecode.beam_finalize(state, parameters, 2, add_open=True)

    rows = sum(widths) if ragged else 9
    generator = torch.Generator().manual_seed(0)
    offsets = torch.tensor([0, 2, 3, 6])
    compiled = torch.compile(step, fullgraph=True)
    states = []
    for function in (compiled, step):
        state, parameters = searches(keep_log_probs=True)
        generator.manual_seed(1)
        outputs, scores = [], torch.zeros(rows)
        if not ragged:  # rows of no beam
            scores[[2, 4, 5]] = -float("inf")
        for _ in range(3):
            x = torch.randn(rows, 9, generator=generator)
            out, final = function(x, scores, offsets, *state, *parameters)
            scores = out.scores
            outputs += [*out, *final]
        states.append((outputs, state))
    for got, want in zip(states[0][0], states[1][0], strict=True):
        assert torch.equal(bits(got), bits(want))
    assert_same_bits(states[0][1], states[1][1])


def test_compile_with_rows_that_are_in_the_tensor() -> None:
    """How many rows come out is not known before the op has run."""

    def step(offsets: torch.Tensor, *tensors: torch.Tensor) -> lmdecode.BeamStep:
        state = lmdecode.BeamState(*tensors[:14])
        parameters = lmdecode.BeamParameters(*tensors[14:22])
        return lmdecode.beam_step(state, parameters, *tensors[22:], row_offsets=offsets)

    arguments = candidates()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    state, parameters = searches()
    got = compiled(torch.tensor([0, 2, 3]), *state, *parameters, *arguments)
    state, parameters = searches()
    assert_same_bits(got, step(torch.tensor([0, 2, 3]), *state, *parameters, *arguments))
