"""The op equals its reference in every bit of every output."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import lmdecode
from lmdecode.reference import top_k_top_p_sample as reference
from lmdecode.sampling.types import DIALECTS
from tests.support.cases import SamplingCase, assert_same_bits, bits
from tests.support.random_cases import (
    LARGE_VOCAB_SIZES,
    MEDIUM_VOCAB_SIZES,
    SMALL_VOCAB_SIZES,
    sampling_cases,
)
from tests.support.random_tensors import randn

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
INF = math.inf


def check(case: SamplingCase, device: torch.device) -> None:
    expected = case.call(reference)
    actual = case.to(device).call(lmdecode.top_k_top_p_sample)
    assert actual.index.device.type == device.type
    assert_same_bits(actual, expected, case)


@pytest.mark.parametrize("seed", range(8))
def test_small_rows(seed: int, device: torch.device) -> None:
    for case in sampling_cases(seed, 500, vocab_sizes=SMALL_VOCAB_SIZES):
        check(case, device)


@pytest.mark.parametrize("seed", range(10))
def test_medium_rows(seed: int, device: torch.device) -> None:
    for case in sampling_cases(1000 + seed, 80, vocab_sizes=MEDIUM_VOCAB_SIZES):
        check(case, device)


@pytest.mark.parametrize("seed", range(6))
def test_large_rows(seed: int, device: torch.device) -> None:
    for case in sampling_cases(2000 + seed, 5, vocab_sizes=LARGE_VOCAB_SIZES, max_batch=2):
        check(case, device)


def test_many_rows(device: torch.device) -> None:
    """Batches with more rows than threads."""
    for case in sampling_cases(3000, 20, vocab_sizes=(17, 64, 300), max_batch=200):
        check(case, device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_small_size(dtype: torch.dtype, device: torch.device) -> None:
    """Every remainder of a vector loop, for rows at every alignment."""
    for vocab in (*range(1, 71), 127, 128, 129, 191, 255, 257):
        logits = (randn(3, vocab, seed=vocab) * 3).to(dtype)
        for arguments in (
            {"top_k": 5, "top_p": 0.9},
            {"top_p": 0.8, "seed": vocab},
            {"top_k": 40, "min_p": 0.02, "temperature": 0.7, "seed": vocab},
            {"q": randn(3, vocab, seed=1).abs()},
            {},
        ):
            outputs = {"return_logits": True, "return_logprob": True}
            check(SamplingCase(f"V={vocab}", logits, {**arguments, **outputs}), device)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_stage_mixes_in_one_batch(dtype: torch.dtype, dialect: str, device: torch.device) -> None:
    """Each of k, p, min-p, noise and temperature on or off in each row of one batch."""
    mixes = list(itertools.product((0, 1), repeat=5))
    k, p, min_p, noise, greedy = (torch.tensor(column) for column in zip(*mixes, strict=True))
    for vocab in (1, 13, 64, 1000):
        logits = (randn(len(mixes), vocab, seed=vocab) * 2).to(dtype)
        arguments = {
            "top_k": (k * 7).to(torch.int32),
            "top_p": torch.where(p == 1, 0.85, 1.0),
            "min_p": min_p * 0.05,
            "temperature": torch.where(greedy == 1, 0.0, 0.9),
            "seed": torch.where(noise == 1, 99, -1),
            "return_logits": True,
            "return_logprob": True,
            "dialect": dialect,
        }
        check(SamplingCase("mixes", logits, arguments), device)
        q = torch.rand(len(mixes), vocab, generator=torch.Generator().manual_seed(3))
        check(SamplingCase("mixes, q", logits, {**arguments, "seed": None, "q": q}), device)


def row_kinds(vocab: int) -> dict[str, torch.Tensor]:
    noise = randn(vocab, seed=vocab)
    place = vocab // 3
    peaked, outlier = noise.clone(), noise.clone()
    peaked[place], outlier[place] = 12.0, 3e38
    holes, infinite, missing = noise.clone(), noise.clone(), noise.clone()
    holes[::2], infinite[1::5], missing[::3] = -INF, INF, math.nan
    zeros = torch.zeros(vocab)
    zeros[::2] = -0.0
    return {
        "flat": noise * 0.01,
        "normal": noise * 3,
        "ascending": noise.sort().values,
        "descending": noise.sort(descending=True).values,
        "peaked": peaked,
        "zipf": -torch.arange(1, vocab + 1).log(),
        "outlier": outlier,
        "subnormal": noise * 1e-40,
        "two values": (noise > 0).to(torch.float32),
        "five values": (noise * 2).round().clamp(-2, 2),
        "equal": torch.full((vocab,), -3.25),
        "zeros of both signs": zeros,
        "holes": holes,
        "+inf": infinite,
        "NaN": missing,
        "all -inf": torch.full((vocab,), -INF),
        "all NaN": torch.full((vocab,), math.nan),
        "one above -inf": torch.full((vocab,), -INF).index_fill(0, torch.tensor(place), -80.0),
    }


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("vocab", [38, pytest.param(1300, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_parameter_grid(vocab: int, dialect: str, device: torch.device) -> None:
    """All pairs of the interesting k and p, on every kind of row."""
    ks = [0, 1, 2, 50, 1000, vocab - 1, vocab, vocab + 5]
    ps = [0, 1e-30, 1e-6, 0.1, 0.5, 0.9, 0.99, 0.999999, 1 - 2**-24, 1]
    if vocab == 38:  # what lies outside is the same at every size
        ks, ps = [-1, *ks], [-1, *ps, 2]
    pairs = list(itertools.product(ks, ps))
    top_k, top_p = (torch.tensor(column) for column in zip(*pairs, strict=True))
    seeds = torch.arange(len(pairs))
    seeds[::3] = -1
    for name, row in row_kinds(vocab).items():
        if dialect == "ascend_v2_probabilities" and row.isfinite().all():
            row = row.softmax(0)
        arguments = {"top_k": top_k, "top_p": top_p, "seed": seeds, "dialect": dialect}
        arguments |= {"return_logits": True, "return_logprob": True}
        check(SamplingCase(name, row.expand(len(pairs), vocab), arguments), device)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.slow
def test_min_p_and_temperature_grid(dialect: str, device: torch.device) -> None:
    vocab = 61
    min_ps = [-1, 0, 1e-45, 1e-30, 0.01, 0.3, 0.999999, 1, 2, math.nan]
    temperatures = [0, 1e-45, 1e-30, 0.5, 1, 1.7, 1e30, INF, -1, math.nan]
    pairs = list(itertools.product(min_ps, temperatures))
    min_p, temperature = (
        torch.tensor(column, dtype=torch.float32) for column in zip(*pairs, strict=True)
    )
    for name, row in row_kinds(vocab).items():
        arguments = {"top_p": 0.95, "min_p": min_p, "temperature": temperature, "seed": 7}
        arguments |= {"return_logits": True, "return_logprob": True, "dialect": dialect}
        check(SamplingCase(name, row.expand(len(pairs), vocab), arguments), device)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_logits_that_the_temperature_makes_equal(dialect: str, device: torch.device) -> None:
    """Neighbouring logits with one quotient: equal in order, and yet of different weights."""
    low = torch.tensor(1.5 * 2.0**100) + torch.arange(40) * 2.0**77
    high = low + 2.0**77
    same = low / 3.0 == high / 3.0
    assert same.sum() > 5
    stages = [
        {},
        {"top_k": 1},
        {"top_p": 0.5},
        {"top_k": 1, "top_p": 0.5},
        {"top_k": 2, "top_p": 1 - 2**-24},
        {"min_p": 0.5},
        {"min_p": 1.0, "top_p": 0.5},
    ]
    for first, second in zip(low[same].tolist()[:4], high[same].tolist()[:4], strict=True):
        for vocab, others in itertools.product((2, 20, 700), (0.0, first, second)):
            row = torch.full((1, vocab), others)
            row[0, 0], row[0, 1] = first, second
            for stage, seed in itertools.product(stages, (-1, 3)):
                arguments = {"temperature": 3.0, "seed": seed, "dialect": dialect}
                arguments |= {"return_logits": True, "return_logprob": True}
                check(SamplingCase("equal quotients", row, {**arguments, **stage}), device)


@pytest.mark.parametrize("k_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("p_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_parameter_dtypes(
    dtype: torch.dtype, p_dtype: torch.dtype, k_dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(1)
    arguments = {
        "top_k": torch.randint(-2, 60, (24,), generator=generator).to(k_dtype),
        "top_p": torch.rand(24, generator=generator).to(p_dtype),
        "min_p": (torch.rand(24, generator=generator) * 0.1).to(p_dtype),
        "temperature": (torch.rand(24, generator=generator) * 2).to(p_dtype),
        "seed": torch.arange(-1, 23),
        "position": torch.arange(24) * 1000,
        "return_logits": True,
        "return_logprob": True,
    }
    check(SamplingCase("dtypes", (randn(24, 50) * 2).to(dtype), arguments), device)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda x: x.contiguous(),
    "transposed": lambda x: x.t().contiguous().t(),
    "offset": lambda x: torch.cat((x[:1], x)).flatten()[3:][: x.numel()].view(x.shape),
    "middle columns": lambda x: torch.cat((x, x, x), dim=1)[:, 5 : 5 + x.shape[1]],
    "every third column": lambda x: x.repeat_interleave(3, dim=1)[:, 2::3],
    "every second row": lambda x: x.repeat_interleave(2, dim=0)[1::2],
    "last of [B, T, V]": lambda x: torch.stack((x + 1, x), dim=1)[:, -1],
    "one row for all": lambda x: x[:1].expand(x.shape),
    "one value for all": lambda x: x[:, :1].expand(x.shape),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, dtype: torch.dtype, device: torch.device) -> None:
    """The op reads logits and q where they lie; the reference gets dense copies."""
    for vocab in (7, 65, 1001):
        logits = LAYOUTS[layout]((randn(4, vocab, seed=vocab) * 2).to(dtype).to(device))
        q = LAYOUTS[layout](randn(4, vocab, seed=1).exp().to(device))
        outputs = {"return_logits": True, "return_logprob": True}
        for top_k, top_p in ((None, None), (20, None), (None, 0.7), (20, 0.7)):
            actual = lmdecode.top_k_top_p_sample(logits, top_k, top_p, q, **outputs)
            expected = reference(logits.contiguous(), top_k, top_p, q.contiguous(), **outputs)
            assert_same_bits(actual, expected, f"{layout}, V={vocab}, k={top_k}, p={top_p}")
            assert actual.kept_logits is not None and actual.kept_logits.is_contiguous()


@pytest.mark.parametrize("kind", ["normal", "equal", "ascending", "two values", "+inf", "NaN"])
def test_vocabulary_of_a_million(kind: str, device: torch.device) -> None:
    row = row_kinds(2**20)[kind]
    logits = row.expand(3, -1)
    top_k, top_p = torch.tensor([0, 50_000, 50]), torch.tensor([0.9, 1.0, 0.5])
    arguments = {"top_k": top_k, "top_p": top_p, "seed": 5, "return_logprob": True}
    check(SamplingCase(kind, logits, arguments), device)


@pytest.mark.slow
def test_masses_with_fewer_fraction_bits(device: torch.device) -> None:
    """Above 2^20 tokens a mass has fewer fraction bits, so that the total still fits."""
    for vocab in (2**20 + 1, 2**21 + 3):
        for row in (randn(vocab), torch.zeros(vocab)):
            arguments = {"top_p": 0.5, "return_logprob": True}
            check(SamplingCase("fraction bits", row[None], arguments), device)


def test_outputs_on_request(device: torch.device) -> None:
    """The outputs do not depend on which others were asked for."""
    for case in sampling_cases(4000, 100, vocab_sizes=(5, 70, 1000)):
        case = case.to(device)
        full = case.call(lmdecode.top_k_top_p_sample, return_logits=True, return_logprob=True)
        for logits, logprob in itertools.product((False, True), repeat=2):
            actual = case.call(
                lmdecode.top_k_top_p_sample, return_logits=logits, return_logprob=logprob
            )
            expected = full._replace(
                kept_logits=full.kept_logits if logits else None,
                logprob=full.logprob if logprob else None,
            )
            assert_same_bits(actual, expected, case)


def test_shapes_and_dtypes(device: torch.device) -> None:
    out = lmdecode.top_k_top_p_sample(
        randn(3, 11).to(device), return_logits=True, return_logprob=True
    )
    assert isinstance(out, lmdecode.SampleOutput)
    assert out._fields == ("index", "kept_logits", "logprob", "kept_count", "status")
    assert out.kept_logits is not None and out.logprob is not None
    assert [tuple(t.shape) for t in out] == [(3,), (3, 11), (3,), (3,), (3,)]
    assert [t.dtype for t in out] == [
        torch.int64,
        torch.float32,
        torch.float32,
        torch.int32,
        torch.uint8,
    ]
    assert all(t.device.type == device.type for t in out)


def test_inputs_stay_as_they_are(device: torch.device) -> None:
    for case in sampling_cases(5000, 50):
        case = case.to(device)
        values = (case.logits, *case.arguments.values())
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        before = [tensor.clone() for tensor in tensors]
        case.call(lmdecode.top_k_top_p_sample)
        for tensor, copy in zip(tensors, before, strict=True):
            assert torch.equal(bits(tensor), bits(copy)), case


def test_logits_that_require_grad(device: torch.device) -> None:
    logits = randn(2, 30).to(device)
    expected = lmdecode.top_k_top_p_sample(logits, 5, 0.9, seed=1)
    with torch.no_grad():
        actual = lmdecode.top_k_top_p_sample(logits.clone().requires_grad_(), 5, 0.9, seed=1)
    assert_same_bits(actual, expected)


def every_number(seed: int, device: torch.device) -> Tensor:
    """[65536] bfloat16: each bit pattern once, but for +inf, beside which nothing else counts."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    patterns[patterns == 0x7F80] = 0
    order = torch.randperm(1 << 16, generator=torch.Generator().manual_seed(seed))
    return patterns[order].view(torch.bfloat16).to(device)


@pytest.mark.parametrize("k", [1, 2, 100, 16000, 32500, 32639, 32640, 32643, 40000, 65000])
def test_top_k_around_every_bound(k: int, device: torch.device) -> None:
    row = every_number(k, device)[None]
    narrow = lmdecode.top_k_top_p_sample(row, top_k=k, seed=1, return_logits=True)
    wide = lmdecode.top_k_top_p_sample(row.float(), top_k=k, seed=1, return_logits=True)
    assert narrow.kept_logits is not None and wide.kept_logits is not None
    assert narrow.kept_count.item() == min(k, (row > -math.inf).sum().item())
    torch.testing.assert_close(narrow.kept_logits, wide.kept_logits, rtol=0, atol=0)
    assert torch.equal(narrow.index, wide.index) and torch.equal(narrow.status, wide.status)


@pytest.mark.parametrize(
    "bound",
    [3.0, 3.0 + 2**-20, 1e-39, 1e-45, 0.0, -0.0, -1e-45, -1e-39, -3.0 + 2**-20, -3.0, -2e38],
)
def test_min_p_at_a_bound(bound: float, device: torch.device) -> None:
    """The bound of min-p is any float32; tokens are kept from it on."""
    row = every_number(7, device)
    top = torch.tensor(bound, dtype=torch.float64).abs().item() + 1.0
    row = torch.where(row > top, torch.nan, row).contiguous()
    largest = row[~row.isnan()].max().item()
    # exp(bound - largest), so that the bound comes to about this number; far below it, to nothing.
    min_p = math.exp(max(bound - largest, -80.0))
    narrow = lmdecode.top_k_top_p_sample(row[None], min_p=min_p, seed=1, return_logits=True)
    wide = lmdecode.top_k_top_p_sample(row[None].float(), min_p=min_p, seed=1, return_logits=True)
    assert narrow.kept_logits is not None and wide.kept_logits is not None
    assert 0 < narrow.kept_count.item() <= (row > -math.inf).sum().item()
    torch.testing.assert_close(narrow.kept_logits, wide.kept_logits, rtol=0, atol=0)
    assert torch.equal(narrow.index, wide.index)


def test_both_zeros_reach_zero(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    row = -1.0 - torch.rand(20000, generator=generator)
    zeros = torch.randperm(20000, generator=generator)[:8000]
    row[zeros] = torch.where(zeros % 2 == 0, 0.0, -0.0)
    row = row.to(torch.bfloat16).to(device)
    out = lmdecode.top_k_top_p_sample(row[None], top_k=1000, seed=1, return_logits=True)
    kept = (out.kept_logits[0] > -math.inf).nonzero().flatten()
    assert torch.equal(kept, zeros.sort().values[:1000].to(device))
