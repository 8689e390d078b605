"""Each dialect against its system, or in float64, but where a mass within 1e-6 of p decides."""

import random

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import lmdecode
import lmdecode.reference
from lmdecode.sampling.types import DIALECTS
from tests.support.random_rows import row_with_ties

INF = float("inf")
MARGIN = 1e-6


def is_decided(y: torch.Tensor, top_p: float) -> bool:
    """Whether no prefix of the sorted row [V] has a mass within the margin of p."""
    cumulated = y.double().softmax(-1).sort(descending=True).values.cumsum(-1)
    return bool((cumulated - top_p).abs().min() > MARGIN)


def is_min_p_decided(y: torch.Tensor, min_p: float) -> bool:
    ratio = (y.double() - y.max().double()).exp()
    near = (ratio - min_p).abs() <= MARGIN * min_p
    if min_p == 1:
        near &= y != y.max()
    return not bool(near.any())


@pytest.fixture
def stable_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the order of equal scores in torch.sort, which the other system calls, a defined one."""
    sort = torch.sort

    def stable(scores: torch.Tensor, **arguments: object) -> torch.return_types.sort:
        return sort(scores, **{**arguments, "stable": True})

    monkeypatch.setattr(torch, "sort", stable)


@pytest.mark.usefixtures("stable_sort")
@pytest.mark.parametrize("vocab", [1, 2, 8, 50, 333, 2000])
def test_transformers(vocab: int, device: torch.device) -> None:
    choice = random.Random(vocab)
    ids = torch.zeros(1, 1, dtype=torch.int64)
    compared = 0
    for _ in range(250 if vocab < 1000 else 40):
        row = row_with_ties(choice, vocab)
        temperature = choice.choice((1.0, 0.5, 0.7, 1.3, 3.0))
        top_k = choice.choice((None, 1, 2, 5, 50, vocab, vocab + 3))
        top_p = choice.choice((None, 0.1, 0.5, 0.75, 0.9, 0.99, choice.random()))
        min_p = choice.choice((None, None, 0.05, 0.3, 1.0, choice.random()))

        scores = TemperatureLogitsWarper(temperature)(ids, row[None])
        decided = True
        if top_k is not None:
            scores = TopKLogitsWarper(top_k)(ids, scores)
        if top_p is not None:
            decided = is_decided(scores[0], top_p)
            scores = TopPLogitsWarper(top_p)(ids, scores)
        if min_p is not None:
            decided = decided and is_min_p_decided(scores[0], min_p)
            scores = MinPLogitsWarper(min_p)(ids, scores)
        if not decided:
            continue
        compared += 1
        out = lmdecode.top_k_top_p_sample(
            row[None].to(device),
            top_k,
            top_p,
            min_p=min_p,
            temperature=temperature,
            greedy=True,
            return_logits=True,
            dialect="transformers",
        )
        message = f"{temperature=} {top_k=} {top_p=} {min_p=}"
        np.testing.assert_array_equal(out.kept_logits.cpu(), scores, err_msg=message)
        # Among equal maxima argmax may return any; ours is the first.
        assert scores[0, out.index.item()] == scores.max()
    assert compared > 20


@pytest.mark.usefixtures("stable_sort")
def test_transformers_top_p_zero_and_ties(device: torch.device) -> None:
    """p = 0 keeps one token, and of equal ones the highest index."""
    scores = torch.tensor([[1.0, 2.0, 2.0, 0.0], [3.0, 3.0, 3.0, 3.0]])
    expected = TopPLogitsWarper(0.0)(torch.zeros(2, 1, dtype=torch.int64), scores)
    out = lmdecode.top_k_top_p_sample(
        scores.to(device), top_p=0.0, greedy=True, return_logits=True, dialect="transformers"
    )
    np.testing.assert_array_equal(out.kept_logits.cpu(), expected)
    assert out.index.tolist() == [2, 3]


def vllm_row(y: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Min-p, then top-k, then top-p on one ascending sort; y is [V] f64."""
    probability = y.softmax(-1)
    if min_p > 0:
        y = y.masked_fill(probability < min_p * probability.max(), -INF)
    values, ids = y.sort(stable=True)
    if 0 < top_k < len(y):
        values = values.masked_fill(values < values[len(y) - top_k], -INF)
    if top_p < 1:
        cumulated = values.softmax(-1).cumsum(-1)
        removed = cumulated <= 1 - top_p
        removed[-1] = False
        values = values.masked_fill(removed, -INF)
    return torch.empty_like(y).scatter_(0, ids, values)


@pytest.mark.parametrize("vocab", [1, 2, 8, 50, 333, 2000])
def test_vllm(vocab: int, device: torch.device) -> None:
    choice = random.Random(vocab)
    compared = 0
    for _ in range(250 if vocab < 1000 else 40):
        row = row_with_ties(choice, vocab)
        temperature = choice.choice((1.0, 0.5, 0.7, 1.3, 3.0))
        top_k = choice.choice((-1, 0, 1, 2, 5, 50, vocab, vocab + 3))
        top_p = choice.choice((1.0, 0.1, 0.5, 0.75, 0.9, 0.99, choice.random()))
        min_p = choice.choice((0.0, 0.0, 0.05, 0.3, choice.random()))
        y = row / torch.full((vocab,), temperature)
        before_top_p = vllm_row(y.double(), top_k, 1.0, min_p)
        if not is_min_p_decided(y, min_p) or not is_decided(before_top_p, top_p):
            continue
        compared += 1
        expected = vllm_row(y.double(), top_k, top_p, min_p)
        out = lmdecode.top_k_top_p_sample(
            row[None].to(device),
            top_k,
            top_p,
            min_p=min_p,
            temperature=temperature,
            return_logits=True,
            dialect="vllm",
        )
        message = f"{temperature=} {top_k=} {top_p=} {min_p=}"
        np.testing.assert_array_equal(out.kept_logits[0].cpu(), expected, err_msg=message)
    assert compared > 20


def test_vllm_min_p_comes_first(device: torch.device) -> None:
    """Min-p leaves .4 .3 .2: two reach .75 of their mass, and three .75 of the mass of all."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]], device=device).log()
    arguments = {"top_p": 0.75, "min_p": 0.3}
    assert lmdecode.top_k_top_p_sample(logits, **arguments, dialect="vllm").kept_count.item() == 2
    assert lmdecode.top_k_top_p_sample(logits, **arguments).kept_count.item() == 3


def ascend_row(
    x: np.ndarray, top_k: int, top_p: float, q: np.ndarray | None, version: int, min_p: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Return the kept ids, and the score of each; x is [V] f64, sorted only where k or p is on."""
    vocab = len(x)
    ids = np.arange(vocab)
    top_k_on = 1 <= top_k <= min(vocab, 1024)
    top_p_on = 0 < top_p < 1 if version == 1 else top_p < 1
    if top_k_on or top_p_on or min_p > 0:
        ids = np.lexsort((ids, -x))
    if top_k_on:
        ids = ids[:top_k]
    ids = ids[x[ids] > -np.inf]
    if top_p_on:
        probability = np.exp(x[ids] - x[ids[0]])
        cumulated = np.cumsum(probability / probability.sum())
        stop = cumulated > top_p if version == 1 else cumulated >= top_p
        ids = ids[: int(stop.argmax()) + 1] if stop.any() else ids
    if min_p > 0:
        ids = ids[np.exp(x[ids] - x[ids[0]]) >= min_p]
    if min_p >= 1:
        ids = ids[:1]
    probability = np.exp(x[ids] - x[ids].max())
    if q is None:
        return ids, probability
    noise = q[: len(ids)] if top_k_on or top_p_on else q[ids]
    return ids, probability / probability.sum() / (np.abs(noise) + 1e-8)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("vocab", [1, 2, 8, 50, 333, 2000])
def test_ascend(vocab: int, version: int, device: torch.device) -> None:
    choice = random.Random(vocab)
    compared = 0
    for _ in range(250 if vocab < 1000 else 60):
        row = row_with_ties(choice, vocab)
        top_k = choice.choice((-1, 0, 1, 2, 5, 50, 1000, 1024, 1025, vocab, vocab + 3))
        top_p = choice.choice((-1.0, 1.0, 1.0, 0.1, 0.5, 0.9, 0.99, choice.random()))
        min_p = choice.choice((0.0, 0.05, 0.3, 1.0)) if version == 2 else 0.0
        generator = torch.Generator().manual_seed(choice.getrandbits(60))
        q = None
        if choice.random() < 0.8:
            q = torch.empty(1, vocab).exponential_(generator=generator)
        x = row.double().numpy()
        before_top_p, _ = ascend_row(x, top_k, 1.0, None, version)
        survivors = torch.full((vocab,), -INF).index_put(
            (torch.from_numpy(before_top_p),), row[before_top_p]
        )
        if 0 < top_p < 1 and not is_decided(survivors, top_p):
            continue
        if not is_min_p_decided(row, min_p):
            continue
        compared += 1
        ids, score = ascend_row(
            x, top_k, top_p, None if q is None else q[0].numpy(), version, min_p
        )
        out = lmdecode.top_k_top_p_sample(
            row[None].to(device),
            top_k,
            top_p,
            None if q is None else q.to(device),
            greedy=q is None,
            min_p=min_p,
            return_logits=True,
            dialect=f"ascend_v{version}",
        )
        message = f"{top_k=} {top_p=} {min_p=} {q is None=}"
        kept = (out.kept_logits[0] > -INF).nonzero().flatten().tolist()
        assert kept == sorted(ids.tolist()), message
        chosen = ids.tolist().index(out.index.item())
        assert score[chosen] >= score.max() * (1 - MARGIN), message
        if (score >= score.max() * (1 - MARGIN)).sum() == 1 or q is None:
            assert chosen == score.argmax(), message
    assert compared > 20


def probabilities_row(p: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Kept ids of [V] f64 probabilities that are never renormalised."""
    ids = np.lexsort((np.arange(len(p)), -p))
    if 1 <= top_k <= min(len(p), 1024):
        ids = ids[:top_k]
    if top_p < 1:
        full = np.cumsum(p[ids]) >= top_p
        ids = ids[: int(full.argmax()) + 1] if full.any() else ids
    return ids[p[ids] >= min_p * p[ids[0]]]


@pytest.mark.parametrize("vocab", [1, 2, 8, 50, 333])
def test_ascend_v2_probabilities(vocab: int, device: torch.device) -> None:
    choice = random.Random(vocab)
    compared = 0
    for _ in range(200):
        row = row_with_ties(choice, vocab).softmax(0)
        top_k = choice.choice((0, 1, 2, 5, 50, vocab))
        top_p = choice.choice((0.0, 1.0, 0.1, 0.5, 0.9, choice.random()))
        min_p = choice.choice((0.0, 0.05, 0.3))
        p = row.double().numpy()
        cumulated = np.cumsum(np.sort(p)[::-1])
        if 0 < top_p < 1 and np.abs(cumulated - top_p).min() < MARGIN:
            continue
        if np.abs(p - min_p * p.max()).min() < MARGIN * p.max() and min_p > 0:
            continue
        compared += 1
        out = lmdecode.top_k_top_p_sample(
            row[None].to(device),
            top_k,
            top_p,
            min_p=min_p,
            greedy=True,
            return_logits=True,
            dialect="ascend_v2_probabilities",
        )
        ids = probabilities_row(p, top_k, top_p, min_p)
        expected = np.zeros(vocab, dtype=np.float32)
        expected[ids] = row.numpy()[ids]
        message = f"{top_k=} {top_p=} {min_p=}"
        np.testing.assert_array_equal(out.kept_logits[0].cpu(), expected, err_msg=message)
        assert out.kept_count.item() == len(ids), message
        assert out.index.item() == ids[0], message
    assert compared > 20


# --- The points in which the dialects differ, by hand ---------------------------------------------


def kept_by(dialect: str, row: list[float], device: torch.device, **arguments: object) -> list[int]:
    logits = torch.tensor([row], device=device)
    out = lmdecode.top_k_top_p_sample(logits, return_logits=True, dialect=dialect, **arguments)
    return (out.kept_logits[0] > -INF).nonzero().flatten().tolist()


BY_HAND: list[tuple[str, dict[str, object], list[float], dict[str, list[int]]]] = [
    (
        "ties at the k-th value",
        {"top_k": 2},
        [1.0, 3.0, 1.0, 1.0],
        {
            "lmdecode": [0, 1],
            "transformers": [0, 1, 2, 3],
            "vllm": [0, 1, 2, 3],
            "ascend_v1": [0, 1],
            "ascend_v2": [0, 1],
        },
    ),
    (
        "a prefix of mass p exactly",
        {"top_p": 0.5},
        [1.0, 1.0, 1.0, 1.0],
        {
            "lmdecode": [0, 1],
            "transformers": [2, 3],
            "vllm": [2, 3],
            "ascend_v1": [0, 1, 2],
            "ascend_v2": [0, 1],
        },
    ),
    ("p <= 0", {"top_p": 0.0}, [1.0, 3.0, 3.0],
     {"lmdecode": [1], "transformers": [2], "vllm": [2], "ascend_v1": [0, 1, 2], "ascend_v2": [1]}),
    ("min_p >= 1", {"min_p": 1.0}, [1.0, 3.0, 3.0],
     {"lmdecode": [1], "transformers": [1, 2], "vllm": [1, 2], "ascend_v1": [1], "ascend_v2": [1]}),
]  # fmt: skip


@pytest.mark.parametrize("point", BY_HAND, ids=lambda point: point[0])
def test_points_of_difference(point: tuple, device: torch.device) -> None:
    _, arguments, row, expected = point
    for dialect, tokens in expected.items():
        assert kept_by(dialect, row, device, **arguments) == tokens, dialect


def test_k_above_1024_is_off_in_ascend(device: torch.device) -> None:
    row = (torch.arange(3000.0) * 1e-3).tolist()
    for dialect in DIALECTS[:3]:
        assert len(kept_by(dialect, row, device, top_k=1025)) == 1025
    for dialect in ("ascend_v1", "ascend_v2"):
        assert len(kept_by(dialect, row, device, top_k=1024)) == 1024
        assert len(kept_by(dialect, row, device, top_k=1025)) == 3000


NOISE_BY_RANK: list[tuple[dict[str, object], bool]] = [
    ({}, False),
    ({"top_k": 2}, True),
    ({"top_k": 4}, True),  # k == V counts as on
    ({"top_k": 5}, False),
    ({"top_k": 0}, False),
    ({"top_p": 0.99}, True),
    ({"top_p": 1.0}, False),
    ({"min_p": 0.001}, False),
]


@pytest.mark.parametrize("dialect", ["ascend_v1", "ascend_v2", "lmdecode", "transformers", "vllm"])
@pytest.mark.parametrize(("arguments", "by_rank"), NOISE_BY_RANK)
def test_noise_by_rank(
    arguments: dict[str, object], by_rank: bool, dialect: str, device: torch.device
) -> None:
    """q favours id 0, and rank 0, which is id 3."""
    logits = torch.tensor([[1.0, 0.0, -1.0, 1.1]], device=device)
    q = torch.tensor([[1e-3, 1.0, 1.0, 1.0]], device=device)
    out = lmdecode.top_k_top_p_sample(logits, q=q, dialect=dialect, **arguments)
    assert out.index.item() == (3 if by_rank and dialect.startswith("ascend") else 0)


def test_dialects_agree_where_nothing_ties(device: torch.device) -> None:
    logits = torch.randn(50, 100, generator=torch.Generator().manual_seed(0)).to(device)
    outputs = [
        lmdecode.top_k_top_p_sample(logits, 30, 0.8, seed=1, dialect=dialect).index.tolist()
        for dialect in DIALECTS[:5]
    ]
    assert outputs.count(outputs[0]) == len(outputs)


VOCAB = 400
HALVES = [torch.float16, torch.bfloat16]
ASCEND = ["ascend_v1", "ascend_v2", "ascend_v2_probabilities"]


def logits_of(dtype: torch.dtype, dialect: str) -> torch.Tensor:
    x = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    return (x.softmax(-1) if dialect == "ascend_v2_probabilities" else x).to(dtype)


@pytest.mark.parametrize("as_rows", [False, True])
@pytest.mark.parametrize("p", [0.9, 0.999, 0.9996, 1e-9, -1e9, 1e9])
@pytest.mark.parametrize("name", ["top_p", "min_p"])
@pytest.mark.parametrize("dialect", ASCEND)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_fraction_is_that_of_the_dtype(
    dtype: torch.dtype, dialect: str, name: str, p: float, as_rows: bool
) -> None:
    x = logits_of(dtype, dialect)
    options = {"return_logits": True, "return_logprob": True, "seed": 3, "dialect": dialect}
    rounded = torch.full((3,), p, dtype=torch.float32).to(dtype)
    given = torch.full((3,), p) if as_rows else p
    got = lmdecode.top_k_top_p_sample(x, **{name: given}, **options)
    for want in (
        lmdecode.top_k_top_p_sample(x, **{name: rounded}, **options),
        lmdecode.reference.top_k_top_p_sample(x, **{name: given}, **options),
    ):
        for one, other in zip(got, want, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("dialect", ["ascend_v1", "ascend_v2"])
def test_what_rounds_to_one_is_off_and_what_rounds_to_zero_is_zero(dialect: str) -> None:
    x = logits_of(torch.bfloat16, dialect)
    assert lmdecode.top_k_top_p_sample(x, top_p=0.999, dialect=dialect).kept_count.eq(VOCAB).all()
    tiny = lmdecode.top_k_top_p_sample(x.half(), top_p=1e-9, dialect=dialect)
    assert tiny.kept_count.eq(VOCAB if dialect == "ascend_v1" else 1).all()


@pytest.mark.parametrize("dialect", ["lmdecode", "transformers", "vllm"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_other_dialects_take_float32(dtype: torch.dtype, dialect: str) -> None:
    x = logits_of(dtype, dialect)
    got = lmdecode.top_k_top_p_sample(x, top_p=0.9996, dialect=dialect)
    assert got.kept_count.lt(VOCAB).all()
