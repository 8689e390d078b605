"""The ops of beam search as torch wants them: opcheck, torch.compile, fakes."""

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

import lmdecode
import lmdecode.reference
from tests.support.cases import assert_same_bits, bits
from tests.support.compiling import VOCAB, check_compiled, logits

pytestmark = pytest.mark.usefixtures("fresh_compiler")


BEAM_SCORES = torch.tensor([0.0, -1.5, -0.5, -float("inf")])


def beam_logits(layout: str) -> torch.Tensor:
    return torch.cat((logits(layout), logits(layout)[:1]))


@pytest.mark.parametrize("layout", ["dense", "half", "columns", "steps"])
def test_opcheck_log_softmax_top_k(layout: str) -> None:
    op = torch.ops.lmdecode.log_softmax_top_k.default
    x = beam_logits(layout)
    opcheck(op, (x, BEAM_SCORES, 5, 2, None))
    opcheck(op, (x, BEAM_SCORES, 5, 1, torch.tensor([0, 1, 4])))
    opcheck(op, (x, torch.stack((BEAM_SCORES, BEAM_SCORES), dim=1)[:, 0], 100, 4, None))


def beam_search(**options: Any) -> tuple[lmdecode.BeamState, lmdecode.BeamParameters]:
    """Two searches in three slots of two and three beams."""
    state = lmdecode.new_beam_state(3, 3, 6, **options)
    state.lengths.fill_(2)
    parameters = lmdecode.beam_parameters(3, [2, 1, 3], end_tokens=[5], max_lengths=6)
    return state, parameters


def beam_step_arguments(kind: str) -> tuple[Any, ...]:
    """Everything behind state and parameters."""
    scores = torch.tensor([[-1.0, -2.0, -3.0, -4.0], [-0.5, -1.0, -1.5, -2.0]])
    tokens = torch.tensor([[5, 3, 4, 3], [1, 2, 5, 3]])
    beams = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0]])
    if kind == "plain":
        return (scores, tokens, beams, *[None] * 8, 0, -1)
    slots, offsets = torch.tensor([0, 2]), torch.tensor([0, 2, 5])
    sequences = torch.zeros(2, 3, 4, dtype=torch.int64) if kind == "sequences" else None
    status = torch.tensor([0, 1], dtype=torch.uint8)
    return (
        scores, tokens, beams, scores / 2, status, slots, offsets, torch.tensor([0, 2]), sequences,
        scores < -3, torch.ones(2, 3), 1, 5,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["plain", "all", "sequences"])
@pytest.mark.parametrize("keeps", [False, True])
def test_opcheck_beam_step(kind: str, keeps: bool) -> None:
    state, parameters = beam_search(keep_log_probs=keeps, keep_beam_indices=keeps)
    op = torch.ops.lmdecode.beam_step.default
    opcheck(op, (list(state), list(parameters), *beam_step_arguments(kind)))


@pytest.mark.parametrize("add_open", [False, True])
def test_opcheck_beam_finalize(add_open: bool) -> None:
    op = torch.ops.lmdecode.beam_finalize.default
    state, parameters = beam_search(keep_log_probs=True)
    opcheck(op, (list(state), list(parameters), 2, 3, None, None, None, add_open, 0))
    state, parameters = beam_search(keep_beam_indices=True)
    arguments = (torch.tensor([2, 0]), torch.ones(2, 3, 3, dtype=torch.int64), torch.ones(2, 3))
    opcheck(op, (list(state), list(parameters), 4, 1, *arguments, add_open, 1))


def test_fakes_of_a_beam_search_know_shapes() -> None:
    def on_meta(value: Any) -> Any:
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    state, parameters = beam_search(keep_log_probs=True)
    fake_state, fake_parameters = map(on_meta, state), map(on_meta, parameters)
    fakes_of = [lmdecode.BeamState(*fake_state), lmdecode.BeamParameters(*fake_parameters)]
    for kind in ("plain", "all"):
        arguments = beam_step_arguments(kind)
        names = (
            "log_probs", "status", "slots", "row_offsets", "parent_offsets", "sequences", "stopped",
            "bonus",
        )  # fmt: skip
        given = dict(zip(names, arguments[3:11], strict=True))
        if kind == "all":
            given["rows"] = 5
        got = lmdecode.beam_step(
            *fakes_of, *map(on_meta, arguments[:3]), **{k: on_meta(v) for k, v in given.items()}
        )
        want = lmdecode.beam_step(state, parameters, *arguments[:3], **given)
        for fake, real in zip(got, want, strict=True):
            assert fake.device.type == "meta"
            assert (fake.shape, fake.dtype, fake.stride()) == (
                real.shape, real.dtype, real.stride(),
            )  # fmt: skip
    for fake, real in zip(
        lmdecode.beam_finalize(*fakes_of, 4), lmdecode.beam_finalize(state, parameters, 4),
        strict=True,
    ):  # fmt: skip
        assert fake.device.type == "meta"
        assert (fake.shape, fake.dtype) == (real.shape, real.dtype)


def processors(requests: int) -> dict[str, Any]:
    """Of a call of log_softmax_top_k with 4 rows: numbers for all, tensors of one a request."""
    return {
        "sequences": torch.arange(24).view(4, 6) % 5,
        "lengths": torch.arange(requests) + 4,
        "repetition_penalty": torch.linspace(1.1, 2.0, requests),
        "no_repeat_ngram_size": 2,
        "end_tokens": torch.tensor([7, -1]),
        "min_lengths": torch.full((requests,), 5),
        "suppressed_tokens": torch.arange(requests * 3).view(requests, 3),
        "forced_tokens": torch.arange(4) - 3,
        "diversity_tokens": torch.full((requests, 2), 9),
        "diversity_penalty": 0.5,
        "bias": torch.linspace(-1, 1, 4 * VOCAB).view(4, VOCAB),
        "token_bitmask": torch.full((requests, 2), -3, dtype=torch.int32),
    }


@pytest.mark.parametrize("layout", ["dense", "half", "columns"])
def test_opcheck_log_softmax_top_k_processed(layout: str) -> None:
    op = torch.ops.lmdecode.log_softmax_top_k.processed
    x = beam_logits(layout)
    p = processors(2)
    numbers = (
        p["sequences"], None, 1.2, None, 3, None, p["end_tokens"], 5, None,
        *(None, None, None, 0.0, None, None, None),
    )  # fmt: skip
    tensors = (
        p["sequences"], p["lengths"], 1.0, p["repetition_penalty"], 0, torch.tensor([2, 0]),
        p["end_tokens"], 0, p["min_lengths"], p["suppressed_tokens"], p["forced_tokens"],
        p["diversity_tokens"], 0.0, torch.tensor([0.5, 1.0]), p["bias"], p["token_bitmask"],
    )  # fmt: skip
    opcheck(op, (x, BEAM_SCORES, 5, 2, None, *numbers))
    opcheck(op, (x, BEAM_SCORES, 100, 1, torch.tensor([0, 1, 4]), *tensors))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile_log_softmax_top_k(backend: str) -> None:
    """A step of beam search around the op; widths as a number, a list and a tensor."""
    for widths in (2, [1, 3], torch.tensor([3, 1])):
        torch._dynamo.reset()

        def step(
            x: torch.Tensor, scores: torch.Tensor, widths: Any = widths
        ) -> lmdecode.BeamCandidates:
            out = lmdecode.log_softmax_top_k(x * 2.0, scores, 5, num_beams=widths)
            return out._replace(tokens=out.tokens + 1)

        calls = [(beam_logits("dense"), BEAM_SCORES), (beam_logits("columns"), BEAM_SCORES - 1)]
        check_compiled(step, *calls, backend=backend)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile_log_softmax_top_k_with_processors(backend: str) -> None:
    options = processors(2)
    names = list(options)

    def step(x: torch.Tensor, *values: Any) -> lmdecode.BeamCandidates:
        chosen = dict(zip(names, values, strict=True))
        return lmdecode.log_softmax_top_k(x, BEAM_SCORES, 5, num_beams=2, **chosen)

    longer = {**options, "lengths": options["lengths"] + 1, "bias": options["bias"] * 2}
    calls = [(beam_logits("dense"), *chosen.values()) for chosen in (options, longer)]
    check_compiled(step, *calls, backend=backend)


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


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("ragged", [False, True])
def test_compile_a_step_of_beam_search(backend: str, ragged: bool) -> None:
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
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    states = []
    for function in (compiled, step):
        state, parameters = beam_search(keep_log_probs=True)
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


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_with_rows_that_are_in_the_tensor(backend: str) -> None:
    """How many rows come out is not known before the op has run."""

    def step(offsets: torch.Tensor, *tensors: torch.Tensor) -> lmdecode.BeamStep:
        state = lmdecode.BeamState(*tensors[:14])
        parameters = lmdecode.BeamParameters(*tensors[14:22])
        return lmdecode.beam_step(state, parameters, *tensors[22:], row_offsets=offsets)

    arguments = beam_step_arguments("plain")[:3]
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    state, parameters = beam_search()
    got = compiled(torch.tensor([0, 2, 3]), *state, *parameters, *arguments)
    state, parameters = beam_search()
    assert_same_bits(got, step(torch.tensor([0, 2, 3]), *state, *parameters, *arguments))


def test_fakes_know_shapes_dtypes_and_devices() -> None:
    """The meta device stands for any other."""
    for widths in (2, [1, 3], torch.tensor([3, 1])):
        x, scores = beam_logits("half"), BEAM_SCORES
        beams = widths.to("meta") if isinstance(widths, torch.Tensor) else widths
        fakes = lmdecode.log_softmax_top_k(x.to("meta"), scores.to("meta"), 7, num_beams=beams)
        reals = lmdecode.log_softmax_top_k(x, scores, 7, num_beams=widths)
        for fake, want in zip(fakes, reals, strict=True):
            assert fake.device.type == "meta"
            shape = (want.shape, want.dtype, want.stride())
            assert (fake.shape, fake.dtype, fake.stride()) == shape
    options = processors(2)
    on_meta = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    x, scores = beam_logits("half"), BEAM_SCORES
    fakes = lmdecode.log_softmax_top_k(x.to("meta"), scores.to("meta"), 7, num_beams=2, **on_meta)
    reals = lmdecode.log_softmax_top_k(x, scores, 7, num_beams=2, **options)
    for fake, want in zip(fakes, reals, strict=True):
        assert fake.device.type == "meta"
        assert (fake.shape, fake.dtype, fake.stride()) == (want.shape, want.dtype, want.stride())
