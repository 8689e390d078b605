"""``ConstrainedBeamSearchScorer`` against that of transformers 4.38.2, bit for bit."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers.generation import beam_constraints as oracle_constraints
from transformers.generation import beam_search as oracle

import lmdecode
from lmdecode.beam.scorers import constraints as beam_constraints
from tests.support.scorer_walks import random_constraints, scorer_cases, walk


class OwnPhrase(beam_constraints.PhrasalConstraint):
    """A subclass: run over whole sequences, not by the automaton."""


def make(module: Any, specification: list[list[Any]]) -> list[Any]:
    return [
        module.PhrasalConstraint(tokens)
        if isinstance(tokens[0], int)
        else module.DisjunctiveConstraint(tokens)
        for tokens in specification
    ]


@pytest.fixture(autouse=True)
def stable_sort(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """transformers leaves the order of equal scores to a sort that need not be stable."""
    sort = torch.Tensor.sort
    monkeypatch.setattr(
        torch.Tensor, "sort", lambda self, *a, **kw: sort(self, *a, **{**kw, "stable": True})
    )
    yield


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("follow", ["automaton", "replay"])
def test_random_searches(follow: str, seed: int) -> None:
    steps = 0
    for case in scorer_cases(16, seed, groups=False):
        specification = random_constraints(case.seed, case.vocab)
        constraints = make(beam_constraints, specification)
        if follow == "replay":
            constraints = [
                OwnPhrase(c.token_ids) if hasattr(c, "fulfilled_idx") else c for c in constraints
            ] + [OwnPhrase([1])]
            specification = [*specification, [1]]
        steps += walk(
            case,
            lmdecode.ConstrainedBeamSearchScorer(
                constraints=constraints, device="cpu", **case.arguments
            ),
            oracle.ConstrainedBeamSearchScorer(
                constraints=make(oracle_constraints, specification), device="cpu", **case.arguments
            ),
            vocab_scores=True,
        )
    assert steps >= 60


@pytest.mark.parametrize("push_progress", [False, True])
@pytest.mark.parametrize("seed", range(150))
def test_one_choice_of_beams(seed: int, push_progress: bool) -> None:
    """The public method, with sequences that have come to all kinds of points."""
    rng = random.Random(seed)
    vocab, beams, batch = 7, rng.randint(2, 5), rng.randint(1, 2)
    specification = random_constraints(seed, vocab)
    ours = lmdecode.ConstrainedBeamSearchScorer(
        batch, beams, make(beam_constraints, specification), "cpu"
    )
    theirs = oracle.ConstrainedBeamSearchScorer(
        batch, beams, make(oracle_constraints, specification), "cpu"
    )
    length = rng.randint(1, 8)
    sequences = []
    for _ in range(batch * beams):
        state = theirs.make_constraint_states(1)[0]
        row: list[int] = []
        while len(row) < length:
            proposals = state.advance() if rng.random() < 0.8 else None
            row.append(rng.choice(proposals or range(vocab)))
            state.add(row[-1])
        sequences.append(row)
        assert ours.check_completes_constraints(row) == theirs.check_completes_constraints(row)
    sequences[-1] = rng.choice(sequences)  # two candidates may be the same
    input_ids = torch.tensor(sequences)
    generator = torch.Generator().manual_seed(seed)
    vocab_scores = -torch.randint(0, 12, (batch * beams, vocab), generator=generator) / 2.0
    for request in range(batch):
        scores = (-torch.randint(0, 12, (beams,), generator=generator) / 2.0).sort(descending=True)
        tokens = torch.randint(0, vocab, (beams,), generator=generator)
        rows = torch.randint(0, beams, (beams,), generator=generator) + request * beams
        inputs = (request, input_ids, vocab_scores, scores.values, tokens, rows, push_progress)
        actual, expected = (s.step_sentence_constraint(*inputs) for s in (ours, theirs))
        for part, other in zip(actual, expected, strict=True):
            assert part.dtype == other.dtype
            assert part.tolist() == other.tolist()


def test_without_constraints() -> None:
    """What transformers refuses in its first step is refused before there is one."""
    theirs = oracle.ConstrainedBeamSearchScorer(1, 2, [], "cpu")
    with pytest.raises(ValueError):
        theirs.check_completes_constraints([1])
    with pytest.raises(ValueError, match="constraints is empty; expected at least one"):
        lmdecode.ConstrainedBeamSearchScorer(1, 2, [], "cpu")
