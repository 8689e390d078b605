"""``Sampler`` against float64 computations of its stages, except rows within 1e-6 of a bound."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tests.support.random_rows import make_values
from tests.support.sampler_float64 import DIALECTS, PARAMETERS, STAGES, Array, Rows
from tests.support.sampler_parameters import make_parameters
from tests.support.samplers import SamplerUnderTest

INF = np.inf
STATUS_NAN, STATUS_EMPTY = 1, 2
PAIRS = tuple(itertools.combinations(STAGES, 2))


def compare(
    sampler: SamplerUnderTest, x: Array, parameters: dict[str, Array], dialect: str
) -> tuple[int, Array]:
    """Compare the rows that float64 decides; return how many, and which tokens are kept."""
    batch, vocab = x.shape
    rows = Rows(x, parameters, dialect)
    rows.run()
    tensors = {
        name: torch.from_numpy(value if name == "top_k" else value.astype(np.float32))
        for name, value in parameters.items()
    }
    tested = sampler.make(batch, vocab, dialect=dialect, seed=-1, return_logits=True, **tensors)
    out = tested.sample(torch.from_numpy(x))
    kept_logits = out.kept_logits.numpy()
    kept = kept_logits > -INF

    def check(good: Array, what: str) -> None:
        bad = np.flatnonzero(rows.decided & ~good)
        if len(bad):
            row = bad[0]
            raise AssertionError(
                f"{what} of {len(bad)} of {batch} rows, dialect {dialect}, first row {row}: "
                f"{ {name: value[row] for name, value in parameters.items()} }, V {vocab}, "
                f"kept {np.flatnonzero(kept[row])[:40]}, "
                f"expected {np.flatnonzero(rows.kept[row])[:40]}, {x[row][:40]}"
            )

    check((kept == rows.kept).all(axis=1), "kept set")
    check(out.kept_count.numpy() == kept.sum(axis=1), "kept_count")
    with np.errstate(all="ignore"):
        values = np.where(rows.infinite, INF, rows.values())
    close = np.isclose(kept_logits, values, rtol=rows.margin, atol=0)
    check((close | ~rows.kept).all(axis=1), "kept_logits")
    empty = ~rows.kept.any(axis=1)
    check(out.index.numpy() == np.where(empty, 0, rows.rank().argmin(axis=1)), "index")
    status = np.isnan(x).any(axis=1) * STATUS_NAN + empty * STATUS_EMPTY
    check(out.status.numpy() == status, "status")
    return int(rows.decided.sum()), rows.kept


def run(
    sampler: SamplerUnderTest, stages: Sequence[str], dialects: Sequence[str], rows: int
) -> tuple[int, int]:
    """Compare so many rows of a fast sampler; return how many there were and were decided."""
    random = np.random.default_rng([STAGES.index(stage) for stage in stages])
    total = decided = 0
    vocabularies = (2, 40, 250) if len(stages) == 2 else (1, 2, 7, 64, 250)
    for dialect in dialects:
        for vocab in vocabularies:
            batch = max(2, round(rows * sampler.share / len(vocabularies) / len(dialects)))
            x = make_values(random, batch, vocab)
            parameters = make_parameters(random, stages, batch, vocab)
            total += batch
            decided += compare(sampler, x, parameters, dialect)[0]
    return total, decided


@pytest.mark.parametrize("stage", STAGES)
def test_each_stage(stage: str, sampler: SamplerUnderTest) -> None:
    rows, decided = run(sampler, [stage], list(DIALECTS), 1000)
    assert decided > 0.75 * rows


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_each_pair(pair: tuple[str, str], sampler: SamplerUnderTest) -> None:
    """The order of two stages is that of the system, and the second sees what the first left."""
    rows, decided = run(sampler, pair, list(DIALECTS), 250)
    assert decided > 0.7 * rows


@pytest.mark.parametrize("dialect", DIALECTS)
def test_all_stages(dialect: str, sampler: SamplerUnderTest) -> None:
    rows, decided = run(sampler, STAGES, [dialect], 600)
    assert decided > 0.7 * rows


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_large_vocabulary(dialect: str, sampler: SamplerUnderTest) -> None:
    random = np.random.default_rng(0)
    x = make_values(random, max(2, round(20 * sampler.share)), 32000)
    decided, _ = compare(sampler, x, make_parameters(random, STAGES, *x.shape), dialect)
    assert decided > 0


@pytest.mark.parametrize("vocab", [1 << 17, 1 << 20])
@pytest.mark.parametrize("stage", [*STAGES, "all"])
def test_the_largest_vocabularies(stage: str, vocab: int, sampler: SamplerUnderTest) -> None:
    """Rows whose mass, entropy and variance come from a million terms."""
    if sampler.share < 1 and vocab > 1 << 17:
        pytest.skip("the reference takes seconds a row")
    stages = STAGES if stage == "all" else [stage]
    random = np.random.default_rng([vocab, len(stages), *map(ord, stage)])
    x = make_values(random, 3 if sampler.share == 1 else 1, vocab)
    dialect = list(DIALECTS)[random.integers(len(DIALECTS))]
    decided, _ = compare(sampler, x, make_parameters(random, stages, *x.shape), dialect)
    assert decided > 0 or sampler.share < 1


@pytest.mark.parametrize("others", [0.0, 1.3, 2.9, 7.3, 11.7])
def test_the_deviation_of_many_equal_logits(others: float, sampler: SamplerUnderTest) -> None:
    """Of a variance of 1 / V of the range's square: no rounding of squares moves the bound."""
    vocab, top, n = 20_000, 27.3, 2.0
    x = np.full((1, vocab), others, np.float32)
    x[0, 5], x[0, 4] = top, -3.1
    bound = n * float(x.astype(np.float64).std())
    x[0, 6:8] = top - bound * (1 - 1e-5), top - bound * (1 + 1e-5)
    # These two change it themselves.
    for _ in range(4):
        bound = n * float(x.astype(np.float64).std())
        x[0, 6:8] = top - bound * (1 - 1e-5), top - bound * (1 + 1e-5)
    tested = sampler.make(1, vocab, seed=-1, top_n_sigma=n, return_logits=True)
    kept = tested.sample(torch.from_numpy(x)).kept_logits[0] > -INF
    assert kept.nonzero().flatten().tolist() == [5, 6]


def test_dialects_differ() -> None:
    """A pair of stages that the dialects put differently: the brute force tells them apart."""
    x = np.log(np.array([[0.4, 0.3, 0.2, 0.1]], np.float32))
    parameters = {"top_p": np.array([0.75]), "min_p": np.array([0.3])}
    counts = {}
    for dialect in DIALECTS:
        rows = Rows(x, parameters, dialect)
        rows.run()
        counts[dialect] = int(rows.kept.sum())
    assert counts == {"lmdecode": 3, "transformers": 3, "vllm": 2, "llama.cpp": 3, "sglang": 3}


def test_parameters_name_every_stage() -> None:
    assert set(PARAMETERS) == set(STAGES) == set(DIALECTS["vllm"].split())
