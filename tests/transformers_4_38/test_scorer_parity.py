"""``BeamSearchScorer`` and ``BeamHypotheses`` against those of transformers 4.38.2, bit for bit."""

import random
from typing import Any

import pytest
import torch
from transformers.generation import beam_search as oracle

import lmdecode
from lmdecode.reference.beam_scorer import BeamSearchScorer as ReferenceScorer
from tests.support.scorer_walks import scorer_cases, walk

SCORERS = [lmdecode.BeamSearchScorer, ReferenceScorer]


@pytest.mark.parametrize(
    ("scorer", "seed"),
    [(SCORERS[0], seed) for seed in range(12)] + [(SCORERS[1], seed) for seed in range(12, 15)],
)
def test_random_searches(scorer: Any, seed: int) -> None:
    """More than 10,000 steps on the ops, a group of beams at a time; fewer of the reference."""
    steps = sum(
        walk(
            case,
            scorer(device="cpu", **case.arguments),
            oracle.BeamSearchScorer(device="cpu", **case.arguments),
        )
        for case in scorer_cases(100, seed)
    )
    assert steps >= 850


def test_the_searches_meet_what_matters() -> None:
    """All that the walks are meant to compare does come up."""
    met = dict.fromkeys(("done", "padded", "evicted", "tie", "short of candidates", "-inf"), 0)
    for case in scorer_cases(150, 0):
        scorer = oracle.BeamSearchScorer(device="cpu", **case.arguments)
        process = scorer.process

        def watched(*args: Any, scorer: Any = scorer, process: Any = process, **kwargs: Any) -> Any:
            met["padded"] += bool(scorer._done.any())
            before = [[hypothesis[0] for hypothesis in h.beams] for h in scorer._beam_hyps]
            try:
                result = process(*args, **kwargs)
            except ValueError as error:
                met["short of candidates"] += "eos_token_id" in str(error)
                raise
            for old, hypotheses in zip(before, scorer._beam_hyps, strict=True):
                new = [hypothesis[0] for hypothesis in hypotheses.beams]
                met["evicted"] += len(old) == len(new) and old != new
                met["tie"] += len(set(new)) < len(new)
                met["-inf"] += -float("inf") in new
            met["done"] += bool(scorer.is_done)
            return result

        scorer.process = watched
        walk(case, ReferenceScorer(device="cpu", **case.arguments), scorer)
    assert all(count >= 5 for count in met.values()), met


@pytest.mark.parametrize("seed", range(100))
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_hypotheses(early_stopping: Any, seed: int) -> None:
    """The list alone, and the one that a scorer keeps in its state."""
    rng = random.Random(seed)
    num_beams, penalty = rng.randint(2, 5), rng.choice((-1, 0, 0.5, 1.0, 2))
    expected = oracle.BeamHypotheses(num_beams, penalty, early_stopping, max_length=9)
    scorer = lmdecode.BeamSearchScorer(
        1, num_beams, "cpu", length_penalty=penalty, do_early_stopping=early_stopping, max_length=9
    )
    compared = [
        lmdecode.BeamHypotheses(num_beams, penalty, early_stopping, max_length=9),
        scorer._beam_hyps[0],
    ]
    for _ in range(25):
        tokens = torch.tensor([rng.randrange(9) for _ in range(rng.randint(1, 8))])
        score = -rng.randint(0, 6) / 2
        options: dict[str, Any] = {}
        if rng.random() < 0.5:
            options["generated_len"] = rng.randint(1, 8)
        if rng.random() < 0.5:
            options["beam_indices"] = tuple(range(rng.randint(1, 4)))
        expected.add(tokens, score, **options)
        length, prompt = rng.randint(4, 8), rng.randint(0, 3)
        for ours in compared:
            ours.add(tokens, score, **options)
            assert isinstance(ours, lmdecode.BeamHypotheses)
            assert len(ours) == len(expected)
            assert ours.worst_score == expected.worst_score
            assert [(s, t.tolist(), i) for s, t, i in ours.beams] == [
                (s, t.tolist(), i) for s, t, i in expected.beams
            ]
            for best in (-0.1, -1.0, -5.0):
                done = expected.is_done(best, length, prompt)
                assert ours.is_done(best, length, decoder_prompt_len=prompt) == done


def scorers(**arguments: Any) -> list[Any]:
    return [
        outcome(scorer, **{"batch_size": 1, "num_beams": 4, "device": "cpu", **arguments})
        for scorer in (*SCORERS, oracle.BeamSearchScorer)
    ]


def outcome(function: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except ValueError as error:
        return type(error)


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_beams": 1},
        {"num_beams": 0},
        {"num_beams": 4.0},
        {"num_beam_groups": 3},
        {"num_beam_groups": 8},
        {"do_early_stopping": "never"},
        {"do_early_stopping": None},
    ],
    ids=str,
)
def test_what_the_constructor_refuses(arguments: dict[str, Any]) -> None:
    assert scorers(**arguments) == [ValueError] * 3


@pytest.mark.parametrize(("groups", "rows"), [(1, 1), (1, 3), (1, 8), (2, 1), (2, 4)])
def test_rows_of_another_number_of_beams(groups: int, rows: int) -> None:
    inputs = (
        torch.zeros(rows, 3, dtype=torch.int64), torch.zeros(1, 8),
        torch.ones(1, 8, dtype=torch.int64), torch.zeros(1, 8, dtype=torch.int64),
    )  # fmt: skip
    for scorer in scorers(num_beam_groups=groups):
        assert outcome(scorer.process, *inputs, eos_token_id=2, pad_token_id=0) is ValueError


def test_never_needs_a_length_beyond_the_prompt() -> None:
    """It is looked at when the places are taken."""
    ids = torch.zeros(4, 6, dtype=torch.int64)
    scores = -torch.arange(8.0).unsqueeze(0)
    beams = torch.zeros(1, 8, dtype=torch.int64)
    some, all_end = torch.tensor([[2, 2, 1, 1, 1, 1, 1, 1]]), torch.tensor([[2] * 4 + [1] * 4])
    for scorer in scorers(do_early_stopping="never", max_length=3):
        options = {"eos_token_id": 2, "pad_token_id": 0, "decoder_prompt_len": 3}
        assert outcome(scorer.process, ids, scores, some, beams, **options) is not ValueError
        assert outcome(scorer.process, ids, scores, all_end, beams, **options) is ValueError


def test_finalize_needs_tokens_where_it_writes_them() -> None:
    ids = torch.zeros(4, 6, dtype=torch.int64)
    scores = -torch.arange(4.0)
    for max_length, expected in ((6, False), (7, True), (None, True)):
        for scorer in scorers():
            result = outcome_of_any(scorer.finalize, ids, scores, None, None, max_length=max_length)
            assert isinstance(result, type) == expected


def outcome_of_any(function: Any, *args: Any, **kwargs: Any) -> Any:
    """As outcome(); transformers fails with a TypeError where no token was given."""
    try:
        return function(*args, **kwargs)
    except (ValueError, TypeError) as error:
        return type(error)
