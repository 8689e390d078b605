"""The op against a plain float64 computation: softmax, sort, cumulated sum.

Where the mass of a prefix lies so close to p that float64 cannot tell, either side would do; there
the integer masses of the reference decide, and the op must agree with them.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
import torch

import lmdecode
from lmdecode.reference import top_k_top_p_sample as reference
from lmdecode.testing import assert_same_bits, sampling_cases

MARGIN = 1e-6
FLOATS = np.ndarray  # of float64 where nothing else is said


class Expected(NamedTuple):
    kept: np.ndarray  # [V] bool
    probability: FLOATS  # [V], of the filtered distribution
    decided: bool  # no comparison was closer than the margin


def filter_row(
    x: np.ndarray, top_k: int, top_p: float, min_p: float, temperature: float
) -> Expected:
    """Filter one row of f32 logits by the textbook."""
    vocab = len(x)
    y = (x / np.float32(temperature)).astype(np.float64)
    order = np.lexsort((np.arange(vocab), -y))
    order = order[: np.isfinite(y).sum()]
    if 0 < top_k < vocab:
        order = order[:top_k]
    decided = True
    if top_p < 1:
        weight = np.exp(y[order] - y[order[0]])
        cumulated = np.cumsum(weight / weight.sum())
        if top_p > 0:
            decided = bool(np.abs(cumulated - top_p).min() > MARGIN)
        order = order[: np.searchsorted(cumulated, max(top_p, 0.0), side="left") + 1]
    if min_p > 0:
        probability = np.exp(y[order] - y[order[0]])
        decided = decided and bool(np.abs(probability - min_p).min() > MARGIN * min_p)
        order = order[probability >= min_p]
    kept = np.zeros(vocab, dtype=bool)
    kept[order] = True
    weight = np.where(kept, np.exp(y - y[order[0]]), 0.0)
    return Expected(kept, weight / weight.sum(), decided)


def rows(
    seed: int, count: int, vocab: int
) -> Iterator[tuple[np.ndarray, tuple[int, float, float, float]]]:
    """Yield logits and (top_k, top_p, min_p, temperature), f32 values."""
    random = np.random.default_rng([seed, vocab])
    for _ in range(count):
        x = random.standard_normal(vocab) * random.choice([0.1, 1, 3, 8])
        if random.random() < 0.3:
            x = np.round(x * 2) / 2  # ties
        if random.random() < 0.2:
            x[random.random(vocab) < 0.5] = -np.inf
        if not np.isfinite(x).any():
            x[0] = 1.0
        top_k = int(random.choice([0, 1, 2, 5, 50, 1000, vocab // 2]))
        top_p = random.choice([0, 1e-3, 0.1, 0.5, 0.9, 0.99, 0.999999, 1, random.random()])
        min_p = random.choice([0, 0, 0.01, 0.1, 0.7, random.random()])
        temperature = random.choice([0.3, 0.7, 1, 1, 1.5, 4])
        floats = (float(np.float32(value)) for value in (top_p, min_p, temperature))
        yield x.astype(np.float32), (top_k, *floats)


@pytest.mark.parametrize("vocab", [1, 2, 7, 33, 64, 200, 1000, 4096, 32000])
def test_kept_set_logprob_and_choice(vocab: int, device: torch.device) -> None:
    count = 300 if vocab <= 200 else 60 if vocab <= 4096 else 15
    cases = list(rows(0, count, vocab))
    logits = np.stack([x for x, _ in cases])
    parameters = [torch.tensor(column) for column in zip(*(p for _, p in cases), strict=True)]
    top_k, top_p, min_p, temperature = parameters
    q = np.random.default_rng(vocab).exponential(size=logits.shape).astype(np.float32)
    arguments = {
        "top_k": top_k,
        "top_p": top_p,
        "q": torch.from_numpy(q),
        "min_p": min_p,
        "temperature": temperature,
    }
    outputs = {"return_logits": True, "return_logprob": True}
    out = lmdecode.top_k_top_p_sample(
        torch.from_numpy(logits).to(device),
        **{name: value.to(device) for name, value in arguments.items()},
        **outputs,
    )
    assert_same_bits(out, reference(torch.from_numpy(logits), **arguments, **outputs))

    assert out.kept_logits is not None and out.logprob is not None
    kept = out.kept_logits.cpu().numpy() > -np.inf
    index, logprob = out.index.cpu().numpy(), out.logprob.cpu().numpy()
    undecided = 0
    for row, (x, (k, p, m, t)) in enumerate(cases):
        expected = filter_row(x, k, p, m, t)
        if not expected.decided:
            undecided += 1
            continue
        np.testing.assert_array_equal(kept[row], expected.kept, err_msg=f"row {row}: {k, p, m, t}")
        log_of_chosen = np.log(expected.probability[index[row]])
        assert logprob[row] == pytest.approx(log_of_chosen, rel=2e-6, abs=2e-6)
        score = expected.probability / (np.abs(q[row].astype(np.float64)) + 1e-8)
        if index[row] != score.argmax():
            assert score[index[row]] >= score.max() * (1 - MARGIN), f"row {row}: {k, p, m, t}"
    assert undecided <= count / 3


@pytest.mark.parametrize("seed", range(4))
def test_random_calls(seed: int, device: torch.device) -> None:
    """The same for the cases that the other tests use, as far as they are well conditioned."""
    compared = 0
    for case in sampling_cases(seed, 400, dialects=("lmdecode",), extremes=False):
        out = case.to(device).call(lmdecode.top_k_top_p_sample, return_logits=True)
        assert out.kept_logits is not None
        batch = len(case.logits)

        def column(name: str, default: float, batch: int = batch, case=case) -> list[float]:
            value = case.arguments[name]
            value = default if value is None else value
            return (
                torch.as_tensor(value, dtype=torch.float64).to(torch.float32).expand(batch).tolist()
            )

        parameters = zip(
            (int(k) for k in column("top_k", 0)),
            column("top_p", 1),
            column("min_p", 0),
            column("temperature", 1),
            strict=True,
        )
        for row, (k, p, m, t) in enumerate(parameters):
            x = case.logits[row].float().numpy()
            if t == 0:
                assert out.index[row].item() == x.argmax()
                continue
            if m >= 1:  # one token, of equal ones too: test_semantics.py
                continue
            expected = filter_row(x, k, p, m, t)
            if expected.decided:
                compared += 1
                kept = out.kept_logits[row].cpu().numpy() > -np.inf
                np.testing.assert_array_equal(kept, expected.kept, err_msg=f"row {row} of {case}")
    assert compared > 400
