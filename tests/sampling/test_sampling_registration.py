"""The op of sampling as torch wants it: opcheck, torch.compile, export, fakes."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

import lmdecode
import lmdecode.reference
from lmdecode.sampling.types import DIALECTS
from tests.support.cases import SamplingCase, assert_same_bits, bits
from tests.support.compiling import BATCH, VOCAB, check_compiled, logits
from tests.support.random_cases import sampling_cases

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def row_parameters(kind: str) -> tuple[Any, ...]:
    """top_k ... temperature_rows: numbers for all rows, or tensors of one a row."""
    if kind == "numbers":
        return (5, None, 0.9, None, 0.01, None, 0.7, None)
    rows = (
        torch.tensor([0, 5, 40]),
        torch.tensor([1.0, 0.5, 0.9]),
        torch.tensor([0.0, 0.01, 0.5]),
        torch.tensor([1.0, 0.0, 1.3]),
    )
    if kind == "strided":
        rows = tuple(torch.stack((row, row), dim=1)[:, 0] for row in rows)
    return tuple(itertools.chain.from_iterable(zip((0, 1.0, 0.0, 1.0), rows, strict=True)))


def noise(kind: str) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """q, seed, position."""
    if kind == "q":
        generator = torch.Generator().manual_seed(1)
        return torch.empty(BATCH, VOCAB).exponential_(generator=generator), None, None
    if kind == "seed":
        return None, torch.tensor([1, -1, 3]), torch.tensor([0, 7, 2**40])
    return None, None, None


SAMPLES = [
    ("dense", "numbers", "none"),
    ("half", "tensors", "q"),
    ("columns", "strided", "seed"),
    ("steps", "tensors", "seed"),
    ("dense", "numbers", "q"),
]


@pytest.mark.parametrize("return_logprob", [False, True])
@pytest.mark.parametrize("return_logits", [False, True])
@pytest.mark.parametrize(("layout", "parameters", "source"), SAMPLES)
def test_opcheck_functional(
    layout: str, parameters: str, source: str, return_logits: bool, return_logprob: bool
) -> None:
    arguments = (logits(layout), *row_parameters(parameters), *noise(source), 1e-8)
    op = torch.ops.lmdecode.top_k_top_p_sample.default
    opcheck(op, (*arguments, return_logits, return_logprob, 0))
    out = op(*arguments, return_logits, return_logprob, 0)
    assert (out[1] is None) == (not return_logits)
    assert (out[2] is None) == (not return_logprob)


def outputs(with_logits: bool, with_logprob: bool) -> dict[str, torch.Tensor | None]:
    return {
        "index": torch.full((BATCH,), -7),
        "kept_logits": torch.full((BATCH, VOCAB), 99.0) if with_logits else None,
        "logprob": torch.full((BATCH,), 99.0) if with_logprob else None,
        "kept_count": torch.full((BATCH,), -7, dtype=torch.int32),
        "status": torch.full((BATCH,), 77, dtype=torch.uint8),
    }


@pytest.mark.parametrize("with_logprob", [False, True])
@pytest.mark.parametrize("with_logits", [False, True])
@pytest.mark.parametrize(("layout", "parameters", "source"), SAMPLES)
def test_opcheck_out(
    layout: str, parameters: str, source: str, with_logits: bool, with_logprob: bool
) -> None:
    arguments = (logits(layout), *row_parameters(parameters), *noise(source), 1e-8)
    op = torch.ops.lmdecode.top_k_top_p_sample.out
    opcheck(op, (*arguments, 0), outputs(with_logits, with_logprob))
    out = outputs(with_logits, with_logprob)
    assert op(*arguments, 0, **out) is None
    functional = torch.ops.lmdecode.top_k_top_p_sample.default
    expected = functional(*arguments, with_logits, with_logprob, 0)
    for got, want in zip(out.values(), expected, strict=True):
        assert got is want is None or torch.equal(bits(got), bits(want))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_opcheck_dialects(dialect: str) -> None:
    x = logits("dense").softmax(-1)
    arguments = (x, *row_parameters("tensors"), *noise("q"), 1e-8, True, True)
    opcheck(torch.ops.lmdecode.top_k_top_p_sample.default, (*arguments, DIALECTS.index(dialect)))


def test_fakes_know_shapes_dtypes_and_devices() -> None:
    """The meta device stands for any other."""
    x = torch.empty(5, 70, device="meta", dtype=torch.bfloat16)
    out = lmdecode.top_k_top_p_sample(x, 3, 0.9, seed=1, return_logits=True, return_logprob=True)
    real = lmdecode.top_k_top_p_sample(
        torch.zeros(5, 70, dtype=torch.bfloat16), 3, return_logits=True, return_logprob=True
    )
    for fake, want in zip(out, real, strict=True):
        assert fake is not None and want is not None
        assert fake.device.type == "meta"
        assert (fake.shape, fake.dtype, fake.stride()) == (want.shape, want.dtype, want.stride())


@pytest.mark.parametrize("return_logprob", [False, True])
@pytest.mark.parametrize("return_logits", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_with_numbers(backend: str, return_logits: bool, return_logprob: bool) -> None:
    def sample(x: torch.Tensor) -> lmdecode.SampleOutput:
        return lmdecode.top_k_top_p_sample(
            x,
            5,
            0.9,
            min_p=0.01,
            temperature=0.7,
            seed=11,
            position=3,
            return_logits=return_logits,
            return_logprob=return_logprob,
        )

    check_compiled(sample, (logits("dense"),), (logits("columns"),), backend=backend)


def sample_with_tensors(
    x: torch.Tensor,
    k: torch.Tensor,
    p: torch.Tensor,
    min_p: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
) -> lmdecode.SampleOutput:
    return lmdecode.top_k_top_p_sample(
        x,
        k,
        p,
        min_p=min_p,
        temperature=temperature,
        seed=seed,
        position=position,
        return_logits=True,
        return_logprob=True,
    )


def tensors(batch: int, vocab: int = VOCAB) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(batch)
    return (
        torch.randn(batch, vocab, generator=generator),
        torch.randint(0, vocab, (batch,), generator=generator, dtype=torch.int32),
        torch.rand(batch, generator=generator).bfloat16(),
        torch.rand(batch, generator=generator) * 0.1,
        torch.rand(batch, generator=generator).half(),
        torch.randint(-5, 100, (batch,), generator=generator),
        torch.randint(0, 2**50, (batch,), generator=generator),
    )


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_with_tensors(backend: str) -> None:
    check_compiled(sample_with_tensors, tensors(3), backend=backend)


def test_compile_with_a_dynamic_batch() -> None:
    """One graph serves every batch of two rows and more, and every vocabulary."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(sample_with_tensors, fullgraph=True, dynamic=True, backend=counter)
    compiled(*tensors(3))
    graphs = counter.frame_count
    for arguments in (tensors(4), tensors(7, 50), tensors(64, 33)):
        assert_same_bits(compiled(*arguments), sample_with_tensors(*arguments))
    assert counter.frame_count == graphs
    for batch in (1, 0):
        assert_same_bits(compiled(*tensors(batch)), sample_with_tensors(*tensors(batch)))


def test_compile_with_changing_numbers() -> None:
    """Each new top_k is compiled anew, which is right but slow: a tensor is not."""

    def sample(x: torch.Tensor, k: int, p: float, seed: int) -> lmdecode.SampleOutput:
        return lmdecode.top_k_top_p_sample(x, k, p, seed=seed, return_logprob=True)

    x = logits("dense")
    calls = [(x, 5, 0.9, 1), (x, 6, 0.8, 2), (x, 7, 0.7, 2**62), (x, 8, 0.6, 4)]
    check_compiled(sample, *calls, backend="aot_eager")


def test_compile_with_noise_of_the_caller() -> None:
    def sample(x: torch.Tensor, q: torch.Tensor) -> lmdecode.SampleOutput:
        return lmdecode.top_k_top_p_sample(x, 5, q=q, dialect="ascend_v2")

    check_compiled(sample, (logits("dense"), noise("q")[0]), backend="aot_eager")


def test_compile_random_cases() -> None:
    """The whole of the arguments, without a backend: what dynamo has to trace."""
    for case in sampling_cases(5, 12, vocab_sizes=(1, 17, 40), extremes=False):
        torch._dynamo.reset()

        def sample(x: torch.Tensor, case: SamplingCase = case) -> lmdecode.SampleOutput:
            return lmdecode.top_k_top_p_sample(x, **case.arguments)

        check_compiled(sample, (case.logits,), backend="eager")


@pytest.mark.slow
def test_compile_with_inductor() -> None:
    """The default backend, a step of a decoding loop around the op."""

    def step(x: torch.Tensor, seed: torch.Tensor, position: torch.Tensor) -> lmdecode.SampleOutput:
        out = lmdecode.top_k_top_p_sample(
            x * 2.0 + 1.0, 5, 0.9, seed=seed, position=position, return_logits=True
        )
        return out._replace(index=out.index + 0)

    x, seeds = logits("dense"), torch.tensor([1, 2, 3])
    check_compiled(step, (x, seeds, torch.tensor([0, 0, 0])), (x, seeds, torch.tensor([1, 2, 3])))


def test_compile_with_a_generator_is_not_possible() -> None:
    """torch.compile takes no Generator; a tensor of seeds, drawn outside, does the same."""

    def sample(x: torch.Tensor, generator: torch.Generator) -> lmdecode.SampleOutput:
        return lmdecode.top_k_top_p_sample(x, 5, generator=generator)

    compiled = torch.compile(sample, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(logits("dense"), torch.Generator())


class Sampler(torch.nn.Module):
    def forward(
        self, x: torch.Tensor, k: torch.Tensor, seed: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        out = lmdecode.top_k_top_p_sample(x, k, 0.9, seed=seed, return_logprob=True)
        assert out.logprob is not None
        return out.index, out.logprob, out.kept_count


def test_export() -> None:
    batch = torch.export.Dim("batch", min=2, max=1000)
    arguments = (logits("dense"), torch.tensor([3, 4, 5]), torch.tensor([1, 2, 3]))
    program = torch.export.export(
        Sampler(), arguments, dynamic_shapes=({0: batch}, {0: batch}, {0: batch})
    )
    assert "lmdecode.top_k_top_p_sample.default" in str(program.graph)
    for size in (3, 8):
        x = torch.randn(size, VOCAB, generator=torch.Generator().manual_seed(size))
        call = (x, torch.arange(1, size + 1), torch.arange(size))
        for got, want in zip(program.module()(*call), Sampler()(*call), strict=True):
            np.testing.assert_array_equal(got, want)
