"""The op of sampling in graphs of torch.compile and torch.export."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import lmdecode
from tests.support.cases import SamplingCase, assert_same_bits
from tests.support.compiling import VOCAB, check_compiled, logits
from tests.support.random_cases import sampling_cases

pytestmark = pytest.mark.usefixtures("fresh_compiler")


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


class Draw(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return lmdecode.top_k_top_p_sample(x, 900).index


def assert_draws_from_torchs_generator(draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.zeros(16, 1000)
    torch.manual_seed(3)
    drawn = [draw(x), draw(x)]
    assert not torch.equal(*drawn)
    torch.manual_seed(3)
    assert torch.equal(draw(x), drawn[0])


def test_graphs_without_a_seed_draw_as_calls_do() -> None:
    x = torch.zeros(16, 1000)
    exported = torch.export.export(Draw(), (x,)).module()
    graphs = [torch.compile(Draw(), fullgraph=True, backend=b) for b in ("eager", "aot_eager")]
    for draw in (*graphs, exported):
        assert_draws_from_torchs_generator(draw)
        torch.manual_seed(3)
        first = draw(x)
        torch.manual_seed(3)
        assert torch.equal(Draw()(x), first)


@pytest.mark.slow
def test_inductor_draws_without_a_seed() -> None:
    """By its own generator, which torch.manual_seed seeds."""
    assert_draws_from_torchs_generator(torch.compile(Draw(), fullgraph=True))


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
