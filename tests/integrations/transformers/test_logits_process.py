"""``TopKTopPLogitsProcessor`` against the warpers of transformers themselves."""

import functools
import itertools
import math

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lmdecode.integrations.transformers import TopKTopPLogitsProcessor

WARPERS = {
    "temperature": TemperatureLogitsWarper, "top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
}  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Closer than this, the floating-point sums of transformers decide.
TOLERANCE = 1e-6


@pytest.fixture(autouse=True)
def stable_sort(monkeypatch):
    """Fix the one thing that transformers leaves open: the order of equal values in top-p."""
    monkeypatch.setattr(torch, "sort", functools.partial(torch.sort, stable=True))


def chain(scores: torch.Tensor, stages: dict[str, float]) -> torch.Tensor:
    """Apply the warpers in the order of ``generate()`` to float32 scores."""
    warpers = [warper(stages[name]) for name, warper in WARPERS.items() if name in stages]
    return LogitsProcessorList(warpers)(None, scores.float())


def undecided(scores: torch.Tensor, stages: dict[str, float]) -> torch.Tensor:
    """Return [B, V] bool: tokens so close to the bound of top-p or min-p that rounding decides."""
    before_top_p = {name: stages[name] for name in ("temperature", "top_k") if name in stages}
    y = chain(scores, before_top_p)
    close = torch.zeros(y.shape, dtype=torch.bool)
    if "top_p" in stages:
        ascending, order = torch.sort(y, stable=True)
        prob = ascending.double().softmax(-1)
        mass_before = prob.flip(-1).cumsum(-1).flip(-1) - prob
        near = (mass_before - stages["top_p"]).abs() <= TOLERANCE
        close = close.scatter(-1, order, near)
    if "min_p" in stages:
        ratio = (y - y.amax(-1, keepdim=True)).double().exp()
        close |= (ratio - stages["min_p"]).abs() <= TOLERANCE * stages["min_p"]
    return close


def assert_equals_chain(scores: torch.Tensor, stages: dict[str, float]) -> None:
    before = scores.clone()
    got = TopKTopPLogitsProcessor(**stages)(None, scores)
    expected = chain(scores, stages).to(scores.dtype)
    assert got.dtype == scores.dtype and got.shape == scores.shape
    torch.testing.assert_close(scores, before, rtol=0, atol=0, equal_nan=True)
    differs = got != expected
    if differs.any():
        # A token that one of them dropped, never another value of a kept one.
        assert ((got == -math.inf) | (expected == -math.inf))[differs].all()
        assert not (differs & ~undecided(scores, stages)).any()


def random_scores(
    shape: tuple[int, int], dtype: torch.dtype, *, ties: bool, seed: int, scale: float = 4.0
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(shape, generator=generator) * scale
    if ties:
        scores = (scores * 2).round() / 2
    return scores.to(dtype)


def all_stage_combinations(**values: float):
    for count in range(len(values) + 1):
        for names in itertools.combinations(values, count):
            yield {name: values[name] for name in names}


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 7, 64, 1000])
def test_equals_the_warpers_in_every_combination(vocab, dtype, ties):
    scores = random_scores((5, vocab), dtype, ties=ties, seed=vocab)
    for stages in all_stage_combinations(temperature=0.7, top_k=9, top_p=0.83, min_p=0.04):
        assert_equals_chain(scores, stages)
    for stages in all_stage_combinations(temperature=1.9, top_k=1, top_p=0.15, min_p=0.6):
        assert_equals_chain(scores, stages)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [32000, 128256])
def test_equals_the_warpers_at_real_vocabulary_sizes(vocab, dtype):
    for scale in (1.0, 5.0):
        scores = random_scores((2, vocab), dtype, ties=False, seed=vocab, scale=scale)
        for stages in (
            {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.05},
            {"top_p": 0.9},
            {"top_k": 2000, "top_p": 0.99},
            {"temperature": 1.3, "min_p": 0.1},
        ):
            assert_equals_chain(scores, stages)


@pytest.mark.parametrize(
    "stages",
    [
        {"top_k": 10**9},
        {"top_k": 64},
        {"top_p": 0.0},
        {"top_p": 1.0},
        {"min_p": 0.0},
        {"min_p": 1.0},
        {"top_p": 0.0, "min_p": 1.0},
        {"temperature": 1e-3, "top_p": 0.5},
        {"temperature": 1e3, "top_p": 0.5},
    ],
    ids=str,
)
def test_equals_the_warpers_at_the_ends_of_the_ranges(stages):
    for ties in (False, True):
        assert_equals_chain(random_scores((4, 64), torch.float32, ties=ties, seed=1), stages)


def test_equals_the_warpers_on_masked_and_equal_scores():
    scores = random_scores((4, 40), torch.float32, ties=True, seed=2)
    scores[0, 5:] = -math.inf
    scores[1] = 3.0
    scores[2, ::2] = scores[2].max()
    scores[3, :39] = -math.inf
    for stages in all_stage_combinations(temperature=0.5, top_k=7, top_p=0.6, min_p=0.3):
        assert_equals_chain(scores, stages)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_strides(dtype):
    stages = {"temperature": 0.9, "top_k": 12, "top_p": 0.8}
    last_of_sequence = random_scores((3, 4 * 50), dtype, ties=False, seed=3).view(3, 4, 50)[:, -1]
    transposed = random_scores((50, 3), dtype, ties=False, seed=4).t()
    for scores in (last_of_sequence, transposed, last_of_sequence[:0]):
        assert_equals_chain(scores, stages)


def test_float64_scores_are_taken_as_float32():
    scores = random_scores((2, 30), torch.float64, ties=False, seed=6)
    assert_equals_chain(scores, {"top_k": 5, "temperature": 0.6})


@pytest.mark.parametrize("dtype", (*DTYPES, torch.float64), ids=str)
def test_the_dtype_is_that_of_the_warpers(dtype):
    scores = random_scores((3, 40), dtype, ties=False, seed=9)
    stages = {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.02}
    warpers = LogitsProcessorList([WARPERS[name](value) for name, value in stages.items()])
    got = TopKTopPLogitsProcessor(**stages)(None, scores)
    assert got.dtype == warpers(None, scores).dtype == dtype
    as_float32 = TopKTopPLogitsProcessor(**stages)(None, scores.float())
    assert torch.equal(got, as_float32.to(dtype))


def test_nothing_left_stays_nothing_left():
    scores = torch.full((2, 8), -math.inf)
    filtered = TopKTopPLogitsProcessor(top_k=3, top_p=0.5)(None, scores)
    assert (filtered == -math.inf).all()


def test_nan_is_not_hidden():
    scores = random_scores((3, 20), torch.float32, ties=False, seed=7)
    scores[1, 13] = math.nan
    filtered = TopKTopPLogitsProcessor(top_k=3)(None, scores)
    assert filtered.softmax(-1)[1].isnan().all()
    assert not filtered.softmax(-1)[[0, 2]].isnan().any()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("top_k", 0, "an int >= 1"),
        ("top_k", -3, "an int >= 1"),
        ("top_k", 2.0, "an int >= 1"),
        ("top_k", True, "an int >= 1"),
        ("top_k", "5", "an int >= 1"),
        ("top_p", -0.1, "a number from 0 to 1"),
        ("top_p", 1.1, "a number from 0 to 1"),
        ("top_p", math.nan, "a number from 0 to 1"),
        ("top_p", "0.9", "a number from 0 to 1"),
        ("min_p", -0.1, "a number from 0 to 1"),
        ("min_p", 2, "a number from 0 to 1"),
        ("temperature", 0.0, "> 0"),
        ("temperature", -1.0, "> 0"),
        ("temperature", math.inf, "finite"),
        ("temperature", math.nan, "> 0"),
        ("temperature", 1e-60, "float32"),
        ("temperature", "1", "> 0"),
    ],
)
def test_bad_arguments(name, value, expected):
    with pytest.raises(ValueError, match=f"^{name}: .*{expected}.*got {value!r}$"):
        TopKTopPLogitsProcessor(**{name: value})


def test_bad_scores():
    with pytest.raises(ValueError):
        TopKTopPLogitsProcessor(top_k=3)(None, torch.randn(10))


def test_arguments_may_be_ints_and_are_shown():
    processor = TopKTopPLogitsProcessor(top_k=4, top_p=1, temperature=2)
    assert repr(processor) == "TopKTopPLogitsProcessor(temperature=2.0, top_k=4, top_p=1.0)"


def test_in_generate(llama, prompts):
    """As a user's processor it gives the scores and the tokens that the warpers give."""

    def generate(**kwargs):
        torch.manual_seed(11)
        return llama.generate(
            prompts,
            do_sample=True,
            max_new_tokens=12,
            output_scores=True,
            return_dict_in_generate=True,
            **kwargs,
        )

    expected = generate(temperature=0.7, top_k=15, top_p=0.9, min_p=0.02)
    processor = TopKTopPLogitsProcessor(temperature=0.7, top_k=15, top_p=0.9, min_p=0.02)
    got = generate(top_k=0, logits_processor=LogitsProcessorList([processor]))
    assert torch.equal(got.sequences, expected.sequences)
    for ours, theirs in zip(got.scores, expected.scores, strict=True):
        assert torch.equal(ours, theirs)


def test_kept_by_continuous_batching():
    cb = pytest.importorskip("transformers.generation.continuous_batching.cb_logits_processors")

    processor = TopKTopPLogitsProcessor(top_k=3, top_p=0.9)
    processors = cb.ContinuousBatchingLogitsProcessorList(
        LogitsProcessorList([processor]), per_request_processors=True
    )
    assert list(processors.logits_processor) == [processor]
    scores = random_scores((4, 30), torch.float32, ties=False, seed=8)
    batched = processors(torch.zeros(4, dtype=torch.int64), scores, torch.empty(0))
    alone = [processor(None, scores[row : row + 1]) for row in range(4)]
    assert torch.equal(batched, torch.cat(alone))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float8_e4m3fn], ids=str)
def test_scores_that_cannot_be_minus_infinity_come_back_as_float32(dtype):
    scores = torch.tensor([[1, 5, 3, 4]]).to(dtype)
    got = TopKTopPLogitsProcessor(top_k=2)(None, scores)
    assert got.dtype == torch.float32
    assert got.tolist() == [[-math.inf, 5.0, -math.inf, 4.0]]
