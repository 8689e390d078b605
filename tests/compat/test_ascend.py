"""The Ascend ops against their documentation in float64, save where a mass is within 1e-6 of p."""

import itertools
import math
import random

import numpy as np
import pytest
import torch

from lmdecode.compat import ascend
from tests.support.random_rows import row_with_ties

INF = math.inf
MARGIN = 1e-6
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


class Kept:
    """What the stages leave of a row: ids, in order where they sorted, and their probabilities."""

    def __init__(self, x: np.ndarray, k: int, k_max: int) -> None:
        vocab = len(x)
        self.undecided = False
        self.ranked = 1 <= k <= min(vocab, k_max)
        self.ids = np.lexsort((np.arange(vocab), -x))  # descending, the lower id first
        if self.ranked:
            self.ids = self.ids[:k]

    def top_p(self, p: float, strict: bool) -> None:
        self.ranked = True
        cumulated = np.cumsum(self.probability)
        near = np.abs(cumulated - p)
        self.undecided |= bool(((near <= MARGIN) & (near > 0)).any())
        full = cumulated > p if strict else cumulated >= p
        self.cut(int(full.argmax()) + 1 if full.any() else len(self.ids))

    def cut(self, count: int) -> None:
        self.ids = self.ids[:count]
        self.probability = self.probability[:count]

    def choose(self, q: np.ndarray | None, eps: float) -> int | None:
        """Return the chosen id; None where rounding decides."""
        if q is None:
            return int(self.ids[0])
        if self.ranked:
            noise = q[: len(self.ids)]
        else:
            noise = q[self.ids]
        score = self.probability / (np.abs(noise) + eps)
        if (score >= score.max() * (1 - MARGIN)).sum() > 1:
            return None
        return int(self.ids[score.argmax()])


def reference_v1(x: np.ndarray, k: int, p: float) -> Kept:
    """Keep by top-k, 1 <= k <= min(V, 1024), and top-p, 0 < p < 1; x is [V] f64."""
    kept = Kept(x, k, 1024)
    kept.ids = kept.ids[x[kept.ids] > -INF]
    kept.probability = softmax(x[kept.ids])
    if 0 < p < 1:
        kept.top_p(p, strict=True)
        kept.probability = softmax(x[kept.ids])
    return kept


def reference_v2(
    x: np.ndarray, k: int, p: float, min_p: float, k_max: int, is_logits: bool
) -> Kept:
    """Keep by top-k, top-p and min-p without normalising again; x is [V] f64."""
    kept = Kept(x, k, k_max)
    kept.ids = kept.ids[x[kept.ids] > -INF]
    kept.probability = softmax(x[kept.ids]) if is_logits else x[kept.ids]
    if p <= 0:
        kept.ranked = True
        kept.cut(1)
        if is_logits:
            kept.probability = np.ones(1)
    elif p < 1:
        kept.top_p(p, strict=False)
    if min_p >= 1:
        kept.cut(1)
    elif min_p > 0:
        bound = min_p * kept.probability.max()
        near = np.abs(kept.probability - bound) <= MARGIN * bound
        kept.undecided |= bool(near.any())
        kept.cut(int((kept.probability >= bound).sum()))
    return kept


def make_batch(
    choice: random.Random, batch: int, vocab: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, of any strides, and noise, [B, V] each."""
    generator = torch.Generator().manual_seed(choice.getrandbits(60))
    logits = torch.stack([row_with_ties(choice, vocab, generator) for _ in range(batch)]).to(dtype)
    q = torch.empty(batch, vocab).exponential_(generator=generator)
    if choice.random() < 0.3:
        q *= torch.where(torch.rand(batch, vocab, generator=generator) < 0.5, -1.0, 1.0)
    layout = choice.choice(("dense", "columns", "steps"))
    if layout == "columns":
        logits, q = logits.t().contiguous().t(), q.t().contiguous().t()
    elif layout == "steps":
        wide = torch.full((batch, 2 * vocab), 99.0, dtype=dtype)
        wide[:, ::2] = logits
        logits = wide[:, ::2]
    return logits, q


def top_k_choices(vocab: int) -> tuple[int, ...]:
    return (-1, 0, 1, 2, 5, 50, 1000, 1024, 1025, vocab, vocab + 3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 8, 50, 333, 2000])
def test_v1(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    """Rows of all eight scenarios in one batch; those without q in a second one."""
    choice = random.Random(f"{vocab}/{dtype}")
    compared = 0
    for _ in range(40 if vocab < 1000 else 10):
        batch = choice.randint(1, 5)
        logits, q = make_batch(choice, batch, vocab, dtype)
        k = torch.tensor([choice.choice(top_k_choices(vocab)) for _ in range(batch)]).int()
        p_choices = (-1.0, 0.0, 1.0, 1.5, 0.1, 0.5, 0.9, 0.99, choice.random())
        p = torch.tensor([choice.choice(p_choices) for _ in range(batch)]).to(dtype)
        with_q = choice.random() < 0.7
        index, kept_logits = ascend.top_k_top_p_sample(
            logits.to(device),
            k.to(device),
            p.to(device),
            q.to(device) if with_q else None,
            isNeedLogits=True,
            topKGuess=choice.choice((1, 32, 4096)),
        )
        assert index.dtype == torch.int64 and index.shape == (batch,)
        assert kept_logits.dtype == torch.float32 and kept_logits.shape == (batch, vocab)
        for b in range(batch):
            x = logits[b].double().numpy()
            kept = reference_v1(x, int(k[b]), p[b].item())
            if kept.undecided:
                continue
            compared += 1
            expected = np.full(vocab, -INF)
            expected[kept.ids] = x[kept.ids]
            message = f"k={k[b].item()} p={p[b].item()}"
            np.testing.assert_array_equal(kept_logits[b].cpu(), expected, err_msg=message)
            chosen = kept.choose(q[b].double().numpy() if with_q else None, 1e-8)
            assert chosen in (None, index[b].item()), message
    assert compared > 10


SCENARIOS = [
    # k, p, with q -> index, kept. Probabilities .1 .4 .3 .2; q picks token 3, or rank 1: token 2.
    (0, 1.0, False, 1, [0, 1, 2, 3]),
    (2, 1.0, False, 1, [1, 2]),
    (0, 0.75, False, 1, [1, 2, 3]),
    (0, 1.0, True, 3, [0, 1, 2, 3]),
    (3, 0.5, False, 1, [1, 2]),
    (2, 1.0, True, 2, [1, 2]),
    (0, 0.75, True, 2, [1, 2, 3]),
    (3, 0.5, True, 2, [1, 2]),
]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("k", "p", "with_q", "index", "kept"), SCENARIOS)
def test_eight_scenarios(
    k: int, p: float, with_q: bool, index: int, kept: list[int], version: int, device: torch.device
) -> None:
    logits = torch.tensor([[0.1, 0.4, 0.3, 0.2]], device=device).log()
    q = torch.tensor([[0.9, 0.3, 0.9, 0.1]], device=device) if with_q else None
    if version == 1:
        selected, kept_logits = ascend.top_k_top_p_sample(logits, k, p, q, isNeedLogits=True)
    else:
        selected, kept_logits, *_ = ascend.top_k_top_p_sample_v2(logits, k, p, q, isNeedLogits=True)
    assert (kept_logits[0] > -INF).nonzero().flatten().tolist() == kept
    assert selected.tolist() == [index]


def kept_count_of(output: tuple) -> int:
    return int((output[1] > -INF).sum())


def test_sum_equal_to_p() -> None:
    """V1 stops above p, V2 at p; the masses .5 .25 .125 .125 are exact."""
    logits = torch.tensor([[8.0, 4.0, 2.0, 2.0]]).log()
    equal = torch.zeros(1, 8)
    for p, expected_v1, expected_v2 in ((0.5, 5, 4), (0.25, 3, 2), (0.125, 2, 1), (0.875, 8, 7)):
        v1 = ascend.top_k_top_p_sample(equal, 0, p, isNeedLogits=True)
        v2 = ascend.top_k_top_p_sample_v2(equal, 0, p, isNeedLogits=True)
        assert (kept_count_of(v1), kept_count_of(v2)) == (expected_v1, expected_v2), p
        v1 = ascend.top_k_top_p_sample(equal, 8, p, isNeedLogits=True)
        v2 = ascend.top_k_top_p_sample_v2(equal, 8, p, isNeedLogits=True)
        assert (kept_count_of(v1), kept_count_of(v2)) == (expected_v1, expected_v2), p
    # Of four equal ones, k keeps two, p half of these.
    v1 = ascend.top_k_top_p_sample(torch.zeros(1, 4), 2, 0.5, isNeedLogits=True)
    v2 = ascend.top_k_top_p_sample_v2(torch.zeros(1, 4), 2, 0.5, isNeedLogits=True)
    assert (kept_count_of(v1), kept_count_of(v2)) == (2, 1)
    probabilities = logits.softmax(-1)
    exact = torch.tensor([[0.5, 0.25, 0.125, 0.125]])
    assert torch.allclose(probabilities, exact)
    for p, expected in ((0.5, 1), (0.75, 2), (0.875, 3), (0.76, 3)):
        out = ascend.top_k_top_p_sample_v2(exact, 0, p, isNeedLogits=True, inputIsLogits=False)
        assert out.logitsTopKPSelect is not None
        assert int((out.logitsTopKPSelect > 0).sum()) == expected, p


def test_p_of_zero_or_less(device: torch.device) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]], device=device)
    for p in (0.0, -0.5, -INF):
        assert kept_count_of(ascend.top_k_top_p_sample(logits, 0, p, isNeedLogits=True)) == 4
        assert kept_count_of(ascend.top_k_top_p_sample(logits, 3, p, isNeedLogits=True)) == 3
        out = ascend.top_k_top_p_sample_v2(logits, 0, p, isNeedLogits=True)
        assert kept_count_of(out) == 1
        assert out.logitsSelectIdx is not None and out.logitsSelectIdx.item() == 1
        out = ascend.top_k_top_p_sample_v2(logits, 0, p, isNeedSampleResult=True)
        assert out.logitsIdx.tolist() == [[1, 0, 0, 0]]
        assert out.logitsSortMasked.tolist() == [[1.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("vocab", [10, 1024, 1025, 3000])
def test_range_of_k(vocab: int, device: torch.device) -> None:
    """1 to min(V, 1024) are on, k = V included, which q shows: it is then indexed by rank."""
    logits = torch.linspace(0.0, 0.5, vocab, device=device).expand(2, vocab)
    q = torch.ones(2, vocab, device=device)
    q[:, 0] = 1e-3  # rank 0 is the last id
    for k in (-1, 0, 1, 7, 1024, 1025, vocab - 1, vocab, vocab + 1):
        on = 1 <= k <= min(vocab, 1024)
        for k_argument in (k, torch.tensor([k, k], dtype=torch.int32, device=device)):
            outputs = (
                ascend.top_k_top_p_sample(logits, k_argument, 1.0, q, isNeedLogits=True),
                ascend.top_k_top_p_sample_v2(logits, k_argument, 1.0, q, isNeedLogits=True),
            )
            for index, kept_logits, *_ in outputs:
                assert index is not None and kept_logits is not None
                assert ((kept_logits > -INF).sum(1) == (k if on else vocab)).all()
                assert index.tolist() == [vocab - 1 if on else 0] * 2, k


@pytest.mark.parametrize("is_logits", [True, False], ids=["logits", "probabilities"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 8, 50, 333, 2000])
def test_v2(vocab: int, dtype: torch.dtype, is_logits: bool, device: torch.device) -> None:
    choice = random.Random(f"{vocab}/{dtype}/{is_logits}")
    compared = 0
    for _ in range(40 if vocab < 1000 else 10):
        batch = choice.randint(1, 5)
        logits, q = make_batch(choice, batch, vocab, dtype)
        if not is_logits:
            logits = logits.float().softmax(-1).to(dtype)
        ks_max = choice.choice((1024, 1024, 1, 8, 10, 40, 1000))
        k = torch.tensor([choice.choice(top_k_choices(vocab)) for _ in range(batch)]).int()
        p_choices = (-1.0, 0.0, 1.0, 1.5, 0.1, 0.5, 0.9, 0.99, choice.random())
        p = torch.tensor([choice.choice(p_choices) for _ in range(batch)]).to(dtype)
        min_p_choices = (-1.0, 0.0, 0.05, 0.3, 1.0, 2.0, choice.random())
        min_p = torch.tensor([choice.choice(min_p_choices) for _ in range(batch)]).to(dtype)
        with_min_p = choice.random() < 0.5
        sample_result = choice.random() < 0.5
        with_q = not sample_result and choice.random() < 0.7
        index, kept_logits, ids, values = ascend.top_k_top_p_sample_v2(
            logits.to(device),
            k.to(device),
            p.to(device),
            q.to(device) if with_q else None,
            min_p.to(device) if with_min_p else None,
            isNeedLogits=True,
            ksMax=ks_max,
            inputIsLogits=is_logits,
            isNeedSampleResult=sample_result,
        )
        assert (index is None) == sample_result
        assert (ids is None) == (values is None) == (not sample_result)
        for b in range(batch):
            x = logits[b].double().numpy()
            kept = reference_v2(
                x,
                int(k[b]),
                p[b].item(),
                min_p[b].item() if with_min_p else 0.0,
                -(-ks_max // 8) * 8,
                is_logits,
            )
            if kept.undecided:
                continue
            compared += 1
            message = f"k={k[b].item()} p={p[b].item()} {ks_max=} min_p={min_p[b].item()}"
            expected = np.full(vocab, -INF if is_logits else 0.0)
            expected[kept.ids] = x[kept.ids]
            np.testing.assert_array_equal(kept_logits[b].cpu(), expected, err_msg=message)
            if index is not None:
                chosen = kept.choose(q[b].double().numpy() if with_q else None, 1e-8)
                assert chosen in (None, index[b].item()), message
            if ids is not None and values is not None:
                count = len(kept.ids)
                assert ids.dtype == torch.int64 and values.dtype == torch.float32
                assert ids[b, :count].tolist() == kept.ids.tolist(), message
                np.testing.assert_allclose(
                    values[b, :count].cpu(), kept.probability, rtol=1e-5, atol=1e-30
                )
                assert not ids[b, count:].any() and not values[b, count:].any(), message
    assert compared > 10


@pytest.mark.parametrize("ks_max", [1, 7, 8, 9, 10, 16, 1017, 1023, 1024])
def test_ks_max_is_rounded_up_to_a_multiple_of_8(ks_max: int, device: torch.device) -> None:
    vocab = 1500
    logits = torch.linspace(0.0, 0.5, vocab, device=device)[None]
    limit = (ks_max + 7) // 8 * 8
    for k in (1, ks_max, limit, limit + 1, vocab):
        for k_argument in (k, torch.tensor([k], device=device)):
            out = ascend.top_k_top_p_sample_v2(
                logits, k_argument, 1.0, isNeedLogits=True, ksMax=ks_max
            )
            assert kept_count_of(out) == (k if k <= limit else vocab)


def test_min_p(device: torch.device) -> None:
    logits = torch.tensor([[0.1, 0.4, 0.3, 0.2]] * 4, device=device).log()
    min_p = torch.tensor([0.0, 0.5001, 0.7, 1.0], device=device)
    out = ascend.top_k_top_p_sample_v2(logits, 3, 1.0, minPs=min_p, isNeedLogits=True)
    assert out.logitsTopKPSelect is not None
    assert (out.logitsTopKPSelect > -INF).sum(1).tolist() == [3, 2, 2, 1]
    for value, count in ((0.5001, 2), (1.0, 1), (-1.0, 3)):
        out = ascend.top_k_top_p_sample_v2(logits[:1], 3, 1.0, minPs=value, isNeedLogits=True)
        assert kept_count_of(out) == count
    # Min-p alone leaves the noise indexed by token.
    q = torch.tensor([[1.0, 1.0, 1e-3, 1.0]], device=device)
    out = ascend.top_k_top_p_sample_v2(logits[:1], 0, 1.0, q, minPs=0.6)
    assert out.logitsSelectIdx is not None and out.logitsSelectIdx.item() == 2


def test_probabilities_are_not_normalised(device: torch.device) -> None:
    """The sum of .2 .1 .05 never reaches .5: all are kept; they reach .3 with the second."""
    probabilities = torch.tensor([[0.05, 0.2, 0.0, 0.1]], device=device)
    for k, p, expected in ((0, 0.5, [1, 3, 0, 2]), (3, 0.5, [1, 3, 0]), (3, 0.25, [1, 3])):
        out = ascend.top_k_top_p_sample_v2(
            probabilities, k, p, isNeedLogits=True, inputIsLogits=False, isNeedSampleResult=True
        )
        assert out.logitsSelectIdx is None
        count = len(expected)
        assert out.logitsIdx[0, :count].tolist() == expected
        torch.testing.assert_close(
            out.logitsSortMasked[0, :count], probabilities[0, expected], rtol=0, atol=0
        )
        assert not out.logitsSortMasked[0, count:].any()
        filtered = sorted(set(range(4)) - set(expected))
        assert out.logitsTopKPSelect[0, filtered].tolist() == [0.0] * len(filtered)


def test_sorted_output_with_special_values(device: torch.device) -> None:
    nan = math.nan
    logits = torch.tensor(
        [
            [-INF, -INF, -INF, -INF],
            [nan, 1.0, -INF, 2.0],
            [INF, 5.0, INF, INF],
            [-0.0, 0.0, -0.0, -1.0],
        ],
        device=device,
    )
    out = ascend.top_k_top_p_sample_v2(logits, 2, 1.0, isNeedLogits=True, isNeedSampleResult=True)
    assert out.logitsIdx.tolist() == [[0, 0, 0, 0], [3, 1, 0, 0], [0, 2, 0, 0], [0, 1, 0, 0]]
    e = math.exp(1.0) / (1.0 + math.exp(1.0))
    expected = [[0.0] * 4, [e, 1 - e, 0, 0], [0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0]]
    torch.testing.assert_close(out.logitsSortMasked.cpu(), torch.tensor(expected))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", [0.9, 0.999, 0.3, 1.0 - 2.0**-12])
def test_a_number_p_is_rounded_to_the_dtype_of_the_logits(p: float, dtype: torch.dtype) -> None:
    """0.999 is 1 in bfloat16, which switches the stage off."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 500, generator=generator).to(dtype)
    q = torch.empty(3, 500).exponential_(generator=generator)
    rows = torch.full((3,), p).to(dtype)
    v1 = ascend.top_k_top_p_sample
    v2 = ascend.top_k_top_p_sample_v2
    for number, tensor in (
        (v1(logits, 0, p, q, isNeedLogits=True), v1(logits, 0, rows, q, isNeedLogits=True)),
        (v2(logits, 0, p, q, isNeedLogits=True), v2(logits, 0, rows, q, isNeedLogits=True)),
        (
            v2(logits, 0, 1.0, q, p, isNeedLogits=True),
            v2(logits, 0, 1.0, q, rows, isNeedLogits=True),
        ),
    ):
        assert torch.equal(number[0], tensor[0]) and torch.equal(number[1], tensor[1])
    if rows[0] >= 1:
        assert kept_count_of(v1(logits, 0, p, isNeedLogits=True)) == logits.numel()


def test_the_hint_and_the_outputs_not_asked_for() -> None:
    logits = torch.randn(2, 100, generator=torch.Generator().manual_seed(0))
    first = ascend.top_k_top_p_sample(logits, 0, 0.8)
    assert first.logitsTopKPSelect is None and len(first) == 2
    for guess in (1, 32, 10**6):
        out = ascend.top_k_top_p_sample(logits, 0, 0.8, topKGuess=guess)
        assert torch.equal(out.logitsSelectIdx, first.logitsSelectIdx)
    second = ascend.top_k_top_p_sample_v2(logits, 0, 0.8)
    assert second.logitsSelectIdx is not None and second[1:] == (None, None, None)
    assert torch.equal(second.logitsSelectIdx, first.logitsSelectIdx)


def test_integers_and_numbers_of_numpy(device: torch.device) -> None:
    """As everywhere else in lmdecode."""
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(4)).to(device)
    expected = ascend.top_k_top_p_sample_v2(logits, 5, 0.5, minPs=0.25, ksMax=16, topKGuess=8)
    got = ascend.top_k_top_p_sample_v2(
        logits,
        np.int64(5),
        np.float32(0.5),
        minPs=np.float64(0.25),
        eps=np.float64(1e-8),
        ksMax=np.int32(16),
        topKGuess=np.int64(8),
    )
    assert torch.equal(got.logitsSelectIdx, expected.logitsSelectIdx)


@pytest.mark.parametrize("function", ["top_k_top_p_sample", "top_k_top_p_sample_v2"])
def test_empty_batch(function: str) -> None:
    out = getattr(ascend, function)(torch.empty(0, 7), 3, 0.9, isNeedLogits=True)
    assert out[0].shape == (0,) and out[1].shape == (0, 7)


def test_compiled_equals_eager() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 60, generator=generator).bfloat16()
    q = torch.empty(3, 60).exponential_(generator=generator)
    rows = torch.full((3,), 0.9).bfloat16()

    def both(logits: torch.Tensor, k: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> list:
        first = ascend.top_k_top_p_sample(logits, k, 0.9, q, isNeedLogits=True)
        second = ascend.top_k_top_p_sample_v2(logits, k, p, None, 0.1, isNeedSampleResult=True)
        return [*first, *second]

    k = torch.tensor([5, 0, 60])
    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    for got, want in zip(compiled(logits, k, rows, q), both(logits, k, rows, q), strict=True):
        assert got is want is None or torch.equal(got, want)


LOGITS = torch.zeros(2, 8)
HALF = torch.zeros(2, 8, dtype=torch.float16)
ONES = torch.ones(2)

ERRORS = [
    ({"logits": [1.0]}, TypeError, r"logits is of type list; expected a tensor"),
    ({"logits": torch.zeros(8)}, ValueError, r"logits has shape \[8\]; expected \[batch, vocab\]"),
    ({"logits": torch.zeros(2, 0)}, ValueError, r"logits has shape \[2, 0\]; expected"),
    ({"logits": LOGITS.double()}, ValueError, r"logits has dtype float64; expected float32, "),
    ({"topK": None}, TypeError, r"topK is of type NoneType; expected an int or a tensor"),
    ({"topK": 2.0}, TypeError, r"topK is of type float; expected an int"),
    ({"topK": ONES}, ValueError, r"topK has dtype float32; expected int32 or int64"),
    ({"topK": torch.ones(3).int()}, ValueError, r"topK has shape \[3\]; expected \[2\]"),
    ({"topP": None}, TypeError, r"topP is of type NoneType; expected a number or a tensor"),
    ({"topP": True}, TypeError, r"topP is of type bool; expected a number"),
    ({"topP": math.nan}, ValueError, r"topP is nan; expected a number"),
    ({"topP": ONES.half()}, ValueError, r"topP has dtype float16; expected float32, the dtype of"),
    ({"logits": HALF, "topP": ONES}, ValueError,
     r"topP has dtype float32; expected float16, the dtype of logits"),
    ({"topP": ONES[:, None]}, ValueError, r"topP has shape \[2, 1\]; expected \[2\]"),
    ({"q": 1.0}, TypeError, r"q is of type float; expected a tensor or None"),
    ({"q": HALF}, ValueError, r"q has dtype float16; expected float32$"),
    ({"q": torch.ones(2, 9)}, ValueError, r"q has shape \[2, 9\]; expected \[2, 8\]"),
    ({"eps": -1.0}, ValueError, r"eps is -1.0; expected a finite number >= 0"),
    ({"eps": math.nan}, ValueError, r"eps is nan; expected"),
    ({"eps": INF}, ValueError, r"eps is inf; expected"),
    ({"eps": None}, TypeError, r"eps is of type NoneType; expected a number"),
    ({"isNeedLogits": 2}, TypeError, r"isNeedLogits is 2; expected True or False"),
    ({"topKGuess": 0}, ValueError, r"topKGuess is 0; expected an int >= 1"),
    ({"topKGuess": 1.5}, TypeError, r"topKGuess is of type float; expected an int"),
]  # fmt: skip
V2_ERRORS = [
    ({"minPs": "a"}, TypeError, r"minPs is of type str; expected a number or a tensor"),
    ({"minPs": ONES.bfloat16()}, ValueError, r"minPs has dtype bfloat16; expected float32"),
    ({"minPs": torch.ones(1)}, ValueError, r"minPs has shape \[1\]; expected \[2\]"),
    ({"ksMax": 0}, ValueError, r"ksMax is 0; expected an int from 1 to 1024"),
    ({"ksMax": 1025}, ValueError, r"ksMax is 1025; expected an int from 1 to 1024"),
    ({"ksMax": 8.0}, TypeError, r"ksMax is of type float; expected an int"),
    ({"inputIsLogits": None}, TypeError, r"inputIsLogits is None; expected True or False"),
    ({"isNeedSampleResult": "yes"}, TypeError, r"isNeedSampleResult is 'yes'; expected True"),
    ({"isNeedSampleResult": True, "q": torch.ones(2, 8)}, ValueError,
     r"q and isNeedSampleResult=True were both given; expected q to be None then"),
]  # fmt: skip
CASES = [
    *itertools.product(["top_k_top_p_sample", "top_k_top_p_sample_v2"], ERRORS),
    *itertools.product(["top_k_top_p_sample_v2"], V2_ERRORS),
]


@pytest.mark.parametrize(("function", "case"), CASES)
def test_errors(function: str, case: tuple) -> None:
    changes, error, message = case
    arguments = {"logits": LOGITS, "topK": 3, "topP": 0.9, **changes}
    with pytest.raises(error, match=rf"^{function}: {message}"):
        getattr(ascend, function)(**arguments)
