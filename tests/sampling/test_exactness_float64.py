"""The op against a plain float64 computation: softmax, sort, cumulated sum, a batch at a time.

Float64 decides a row unless a mass lies within 1e-6 of p, or a probability within 1e-6, relatively,
of the min-p bound. There either side would do: the integer masses of the reference decide, and the
op must equal it in every bit.

Three limits of the specification are part of it: a weight is at least 2^-125, a logit further below
the maximum than the largest float32 has that weight at any temperature, and where the temperature
makes such logits equal to the maximum in order, those kept may have no mass. Left out are the rows
that it calls extreme: temperatures below 1e-38, for which log2(e) / temperature is no float32.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch

import lmdecode
from lmdecode.reference import top_k_top_p_sample as reference
from lmdecode.sampling.types import SampleOutput
from tests.support.cases import SamplingCase, assert_same_bits
from tests.support.random_cases import sampling_cases
from tests.support.random_rows import make_values, pick

MARGIN = 1e-6
COMPARED = 20_000  # rows that float64 decides, over the three dtypes
INF, NAN = np.inf, np.nan
STATUS_NAN, STATUS_EMPTY, STATUS_PARAMETER = 1, 2, 4
OUTPUTS = {"return_logits": True, "return_logprob": True}
LOWEST_LOG_WEIGHT = -125 * np.log(2)
LEAST_MASS = 2.0**-43  # for V <= 2^20
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
Array = np.ndarray


class Call(NamedTuple):
    """The arguments of a call: x [B, V] and the parameters [B] as f32, k as int64."""

    x: Array
    top_k: Array
    top_p: Array
    min_p: Array
    temperature: Array
    q: Array | None
    eps: float


class Expected(NamedTuple):
    kept_logits: Array  # [B, V] f32
    first: Array  # [B] the first token in order, 0 where nothing is kept
    log_weight: Array  # [B, V] f64 by token id, -inf where not kept
    greedy: Array  # [B] bool
    status: Array  # [B] without what the noise adds
    decided: Array  # [B] bool: no comparison was closer than the margin


@np.errstate(all="ignore")
def filter_rows(call: Call) -> Expected:
    """Sort each row; each stage shortens the front of it that is kept."""
    batch, vocab = call.x.shape
    rank = np.arange(vocab)
    top_k, top_p, min_p, t = (
        column[:, None] for column in (call.top_k, call.top_p, call.min_p, call.temperature)
    )
    x = np.where(np.isnan(call.x), -np.float32(INF), call.x)
    greedy = ~(t > 0)
    y = np.where(np.isinf(x) | greedy, x, x / t)
    assert y.dtype == np.float32
    infinite = (y == INF).any(axis=1, keepdims=True)
    y = np.where(infinite & (y < INF), -np.float32(INF), y)

    order = np.argsort(-y, axis=1, kind="stable")
    y_sorted = np.take_along_axis(y, order, axis=1).astype(np.float64)
    x_sorted = np.take_along_axis(x, order, axis=1).astype(np.float64)
    count = (y_sorted > -INF).sum(axis=1, keepdims=True)
    count = np.where(greedy, np.minimum(count, 1), count)
    count = np.where(~greedy & (top_k > 0) & (top_k < vocab), np.minimum(count, top_k), count)

    # The exact softmax is of x / t: rounded to y, large logits would lose digits.
    largest = np.where(rank < count, x_sorted, -INF).max(axis=1, keepdims=True)
    log_weight = np.where(infinite | greedy, 0.0, (x_sorted - largest) / t)
    too_far = np.isinf((x_sorted - largest).astype(np.float32)) & ~infinite & ~greedy
    log_weight = np.where(too_far, LOWEST_LOG_WEIGHT, log_weight)
    log_weight = np.where(rank < count, np.maximum(log_weight, LOWEST_LOG_WEIGHT), -INF)
    weight = np.exp(log_weight)
    cumulated = np.cumsum(weight, axis=1) / weight.sum(axis=1, keepdims=True)
    on = ~greedy & (top_p < 1)
    close = on & (top_p > 0) & (rank < count) & (np.abs(cumulated - top_p) <= MARGIN)
    decided = ~close.any(axis=1)
    reached = (cumulated < top_p).sum(axis=1, keepdims=True) + 1
    count = np.where(on, np.minimum(count, reached), count)

    on = ~greedy & (min_p > 0)
    below_first = np.where(infinite, 0.0, y_sorted - y_sorted[:, :1])
    bound = np.log(min_p.astype(np.float64))
    close = on & (min_p < 1) & (rank < count) & (np.abs(below_first - bound) <= MARGIN)
    decided &= ~close.any(axis=1)
    reached = np.where(min_p >= 1, 1, (below_first >= bound).sum(axis=1, keepdims=True))
    count = np.where(on, np.minimum(count, reached), count)

    kept = rank < count
    kept_logits = np.full((batch, vocab), -INF, dtype=np.float32)
    np.put_along_axis(kept_logits, order, np.where(kept, y_sorted, -INF).astype(np.float32), 1)
    by_id = np.full((batch, vocab), -INF)
    np.put_along_axis(by_id, order, np.where(kept, log_weight, -INF), 1)
    wrong = ~(t >= 0) | np.isnan(top_p) | np.isnan(min_p)
    status = np.isnan(call.x).any(axis=1) * STATUS_NAN + (count[:, 0] == 0) * STATUS_EMPTY
    return Expected(
        kept_logits,
        np.where(count[:, 0] > 0, order[:, 0], 0),
        by_id,
        greedy[:, 0],
        status + wrong[:, 0] * STATUS_PARAMETER,
        decided,
    )


@np.errstate(all="ignore")
def choices(call: Call, expected: Expected, index: Array) -> tuple[Array, Array]:
    """Return [B] bool, whether these tokens can have been chosen by q, and what the noise adds to
    the status. Of two scores so close that rounding in f32 decides, either can be the largest."""
    kept = np.isfinite(expected.log_weight)
    noise = np.abs(call.q.astype(np.float64))
    score = np.exp(expected.log_weight) / (noise + np.float32(call.eps))
    score = np.where(kept, np.where(np.isnan(score), -1.0, score), -2.0)
    best = score.max(axis=1)
    # Roundings: of the weight, of |q| + eps and the quotient, and of the exponent, relatively.
    error = np.where(kept & (score > 0), 4e-7 - 2e-7 * expected.log_weight, 0.0)
    lowest = np.where(score == INF, INF, score * (1 - error)).max(axis=1)
    here = np.arange(len(index)), index
    possible = score[here] * (1 + error[here]) >= lowest
    # Equal scores, be it of equal weights and equal noise, go to the lowest id.
    exact = (best <= 0) | (best == INF)
    possible &= ~exact | (index == score.argmax(axis=1))
    same = kept & (call.x == call.x[here][:, None]) & (noise == noise[here][:, None])
    possible &= ~same.any(axis=1) | (index == same.argmax(axis=1))
    noise_status = (kept & np.isnan(call.q)).any(axis=1) * STATUS_NAN

    fixed = expected.greedy | ~kept.any(axis=1)
    possible = np.where(fixed, index == expected.first, possible)
    return possible, np.where(fixed, 0, noise_status)


def assert_rows(good: Array, decided: Array, what: str, call: Call) -> None:
    bad = np.flatnonzero(decided & ~good)
    if len(bad):
        row = bad[0]
        parameters = (call.top_k, call.top_p, call.min_p, call.temperature)
        k, p, m, t = (column[row] for column in parameters)
        raise AssertionError(
            f"{what} of {len(bad)} rows, first row {row}: k {k}, p {p}, min-p {m}, "
            f"temperature {t}, V {call.x.shape[1]}, {np.array2string(call.x[row], threshold=40)}"
        )


def compare(call: Call, out: SampleOutput, internal_noise: bool = False) -> Array:
    """Compare the rows that float64 decides, without tokens of internal noise; return them."""
    expected = filter_rows(call)
    decided = expected.decided
    index = out.index.cpu().numpy()
    kept_logits, logprob = out.kept_logits.cpu().numpy(), out.logprob.cpu().numpy()

    same = (kept_logits == expected.kept_logits).all(axis=1)
    assert_rows(same, decided, "kept_logits", call)
    kept = np.isfinite(expected.log_weight)
    assert_rows(out.kept_count.cpu().numpy() == kept.sum(axis=1), decided, "kept_count", call)

    status = expected.status
    chosen = index == expected.first
    if internal_noise:
        chosen |= kept[np.arange(len(index)), index] & ~expected.greedy
    elif call.q is not None:
        chosen, noise_status = choices(call, expected, index)
        status = status | noise_status
    assert_rows(chosen, decided, "index", call)
    assert_rows(out.status.cpu().numpy() == status, decided, "status", call)

    with np.errstate(divide="ignore", invalid="ignore"):
        chosen_weight = expected.log_weight[np.arange(len(index)), index]
        total = np.exp(expected.log_weight).sum(axis=1)
        want = np.where(total >= LEAST_MASS, chosen_weight - np.log(total), -INF)
    # Beside 1e-5 the roundings of the exponent of a weight, and of the result to f32.
    close = np.isclose(logprob, want, rtol=2.5e-7, atol=1e-5)
    assert_rows(close, decided, "logprob", call)
    return decided


def call_of(case: SamplingCase) -> Call:
    """Return the arguments as what the op takes them for."""
    arguments = case.arguments
    batch = len(case.logits)

    def column(name: str, off: float, dtype: torch.dtype) -> Array:
        value = arguments.get(name)
        value = torch.as_tensor(off if value is None else value).to(dtype)
        return value.expand(batch).numpy()

    q = arguments.get("q")
    return Call(
        case.logits.float().numpy(),
        column("top_k", 0, torch.int64),
        column("top_p", 1.0, torch.float32),
        column("min_p", 0.0, torch.float32),
        column("temperature", 1.0, torch.float32),
        None if q is None else q.numpy(),
        arguments.get("eps", 1e-8),
    )


def check(case: SamplingCase, device: torch.device) -> int:
    """Compare all rows of a case, and return how many of them float64 decided."""
    out = case.to(device).call(lmdecode.top_k_top_p_sample, **OUTPUTS)
    internal_noise = case.arguments.get("seed") is not None
    decided = compare(call_of(case), out, internal_noise)
    rest = np.flatnonzero(~decided).tolist()
    if internal_noise and rest:  # a seed that is an int depends on the place of the row
        assert_same_bits(out, case.call(reference, **OUTPUTS), case)
    elif rest:
        part = case.rows(rest)
        actual = SampleOutput(*(None if field is None else field.cpu()[rest] for field in out))
        assert_same_bits(actual, part.call(reference, **OUTPUTS), part)
    return int(decided.sum())


def lay_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    vocab = x.shape[1]
    if layout == "transposed":
        return x.t().contiguous().t()
    if layout == "every second":
        return x.repeat_interleave(2, dim=1)[:, 1::2]
    if layout == "slice":
        return torch.cat((x[:, -1:], x, x[:, :2]), dim=1)[:, 1 : 1 + vocab]
    if layout == "last of a sequence":
        return torch.stack((x, x), dim=1)[:, -1]
    assert layout == "contiguous"
    return x.contiguous()


LAYOUTS = ("contiguous", "contiguous", "transposed", "every second", "slice", "last of a sequence")


def make_case(
    random: np.random.Generator, batch: int, vocab: int, dtype: torch.dtype, layout: str
) -> SamplingCase:
    """One call whose rows have parameters of their own, tensors of any dtype that is taken."""

    def row_tensor(values: Array, dtypes: Sequence[torch.dtype]) -> torch.Tensor:
        tensor = torch.from_numpy(values).to(dtypes[random.integers(len(dtypes))])
        return tensor if random.random() < 0.7 else torch.stack((tensor, tensor), dim=1)[:, 0]

    off_k = random.random(batch) < 0.4
    top_k = pick(random, {-1: 1, 1: 1, 2: 2, 5: 2, 50: 4, vocab - 1: 1, vocab: 1, 10**12: 1}, batch)
    top_k = np.where(random.random(batch) < 0.4, random.integers(1, vocab + 1, batch), top_k)
    top_p = pick(
        random, {-1: 1, 0: 1, 1e-3: 1, 0.5: 1, 0.9: 1, 0.999: 1, 1: 8, 2: 1, NAN: 0.3}, batch
    )
    top_p = np.where(random.random(batch) < 0.55, random.random(batch), top_p)
    min_p = pick(random, {-1: 1, 0: 16, 1e-6: 1, 0.01: 2, 0.1: 2, 1: 1, 3: 0.5, NAN: 0.3}, batch)
    min_p = np.where(random.random(batch) < 0.2, random.random(batch), min_p)
    temperature = pick(
        random,
        {
            **{0: 2, 0.3: 3, 0.7: 4, 1: 12, 1.5: 4, 4: 2, NAN: 0.2, -1: 0.2, -INF: 0.1},
            **{INF: 1, 3e38: 0.5, 1e37: 1, 1e30: 1, 1e-30: 1, 1e-38: 1},
        },
        batch,
    )
    arguments: dict[str, object] = {
        "top_k": row_tensor(np.where(off_k, 0, top_k).astype(np.int64), (torch.int64,)),
        "top_p": row_tensor(top_p, DTYPES),
        "min_p": row_tensor(min_p, DTYPES),
        "temperature": row_tensor(temperature, (torch.float32, torch.float32, torch.float16)),
    }
    if random.random() < 0.3:
        top_k = np.minimum(top_k, 2**31 - 1)
        arguments["top_k"] = row_tensor(top_k.astype(np.int32), (torch.int32,))
    if random.random() < 0.6:
        q = random.standard_exponential((batch, vocab), dtype=np.float32)
        if random.random() < 0.5:
            rows = random.random((batch, 1)) < 0.3
            for special in (0.0, -0.5, 1.0, NAN):
                places = random.random((batch, vocab), dtype=np.float32) < 0.1
                q = np.where(rows & places, np.float32(special), q)
        arguments["q"] = lay_out(torch.from_numpy(q), LAYOUTS[random.integers(len(LAYOUTS))])
        arguments["eps"] = float(random.choice([1e-8, 1e-8, 0.0, 1e-3]))
    values = torch.from_numpy(make_values(random, batch, vocab)).to(dtype)
    return SamplingCase(f"{batch} rows", lay_out(values, layout), arguments)


def make_cases(dtype: torch.dtype) -> Iterator[SamplingCase]:
    random = np.random.default_rng([7, DTYPES.index(dtype)])
    small = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 50, 64, 65, 100, 127, 129, 200, 255, 300)
    plan = [(600, vocab) for vocab in small]
    plan += [(250, vocab) for vocab in (1000, 1023, 1025, 1500, 2048, 3001, 4096, 4999, 5000)]
    plan += [(5, vocab) for vocab in (32000, 50257, 128256, 151936) * 5]
    plan += [(2, 2**20)]
    for number, (batch, vocab) in enumerate(plan):
        yield make_case(random, batch, vocab, dtype, LAYOUTS[number % len(LAYOUTS)])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_every_kind(dtype: torch.dtype, device: torch.device) -> None:
    """V from 1 to 2^20, rows and parameters mixed in each batch."""
    rows = compared = 0
    for case in make_cases(dtype):
        rows += len(case.logits)
        compared += check(case, device)
    assert compared >= COMPARED / len(DTYPES)
    assert rows - compared < 0.02 * rows


@pytest.mark.parametrize("seed", range(4))
def test_random_calls(seed: int, device: torch.device) -> None:
    """The calls that the other tests use: parameters that are numbers, seeds, other rows."""
    rows = compared = 0
    for case in sampling_cases(seed, 400, dialects=("lmdecode",), extremes=False):
        rows += len(case.logits)
        compared += check(case, device)
    assert compared > 800
    assert rows - compared < 0.1 * rows


def tampered(out: SampleOutput, name: str, row: int, value: float) -> SampleOutput:
    tensor = getattr(out, name).clone()
    tensor[row] = value
    return out._replace(**{name: tensor})


def test_wrong_results_are_noticed() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [3.0, -INF, NAN, 1.0]])
    q = torch.ones(2, 4)
    case = SamplingCase("", logits, {"top_k": 3, "q": q})
    out = case.call(lmdecode.top_k_top_p_sample, **OUTPUTS)
    assert compare(call_of(case), out).all()
    assert out.index.tolist() == [1, 0]
    more = out.kept_logits.clone()
    more[0, 0] = 0.0
    for wrong, what in (
        (out._replace(kept_logits=more), "kept_logits"),
        (tampered(out, "kept_count", 0, 4), "kept_count"),
        (tampered(out, "index", 0, 3), "index"),  # as good a score, but not the lowest id
        (tampered(out, "index", 0, 2), "index"),
        (tampered(out, "status", 1, 0), "status"),
        (tampered(out, "logprob", 1, out.logprob[1].item() + 3e-5), "logprob"),
    ):
        with pytest.raises(AssertionError, match=f"^{what} of 1 rows"):
            compare(call_of(case), wrong)
