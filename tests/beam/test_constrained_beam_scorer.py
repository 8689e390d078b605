"""Constraints and ``ConstrainedBeamSearchScorer``; parity is in transformers_4_38."""

from typing import Any

import pytest
import torch

from lmdecode import (
    ConstrainedBeamSearchScorer,
    Constraint,
    ConstraintListState,
    DisjunctiveConstraint,
    PhrasalConstraint,
)
from lmdecode.beam.scorers.constrained_beam_scorer import _bank_order
from lmdecode.beam.scorers.constraint_progress import _Automaton, _Replay
from tests.beam.test_beam_scorer import step as plain_step
from tests.support.scorer_walks import random_constraints

END, PAD, VOCAB = 2, 0, 12


def scorer(**changes: Any) -> ConstrainedBeamSearchScorer:
    arguments: dict[str, Any] = {
        "batch_size": 1,
        "num_beams": 2,
        "constraints": [PhrasalConstraint([5, 6])],
        "device": "cpu",
        **changes,
    }
    return ConstrainedBeamSearchScorer(**arguments)


def step(search: ConstrainedBeamSearchScorer, ids: Any, tokens: Any, **options: Any) -> Any:
    """Likewise; every token costs 10 otherwise."""
    return plain_step(search, ids, tokens, torch.full((2, VOCAB), -10.0), **options)


def test_a_beam_is_kept_for_the_phrase() -> None:
    """The first token of the phrase joins the candidates, and takes the first place."""
    result = step(scorer(), [[1], [1]], [7, 8, 9, 3])
    assert result["next_beam_tokens"].tolist() == [5, 7]
    assert result["next_beam_scores"].tolist() == [-10.0, -1.0]
    assert result["next_beam_indices"].tolist() == [0, 0]


def test_only_what_fulfils_the_constraints_is_finished() -> None:
    search = scorer()
    step(search, [[1, 5], [1, 7]], [END, END, 8, 9])
    assert len(search._beam_hyps[0]) == 0
    step(search, [[1, 5, 6], [1, 7, 7]], [END, END, 8, 9])
    assert [beam[1].tolist() for beam in search._beam_hyps[0].beams] == [[1, 5, 6]]
    step(search, [[1, 5, 6], [3, 5, 6]], [END, END, 8, 9])
    assert search.is_done
    result = step(search, [[1, 5, 6], [3, 5, 6]], [8, 8, 8, 8])
    assert [part.tolist() for part in result.values()] == [[0.0, 0.0], [PAD, PAD], [0, 0]]
    with pytest.raises(ValueError, match="pad_token_id None"):
        step(search, [[1, 5, 6], [3, 5, 6]], [8, 8, 8, 8], pad_token_id=None)


def test_finalize_prefers_what_fulfils_the_constraints() -> None:
    ids = torch.tensor([[1, 7, 7], [5, 6, 7]])
    options = {"max_length": 5, "pad_token_id": PAD, "eos_token_id": END}
    indices = ((0, 0), (1, 1))
    search = scorer()
    result = search.finalize(
        ids, torch.tensor([-1.0, -2.0]), None, None, beam_indices=indices, **options
    )
    assert result["sequences"].tolist() == [[5, 6, 7, END]]
    assert result["beam_indices"].tolist() == [[1, 1, -1, -1]]
    # With fewer than asked for, the others come too.
    search = scorer(num_beam_hyps_to_keep=2)
    result = search.finalize(
        ids, torch.tensor([-2.0, -1.0]), None, None, beam_indices=indices, **options
    )
    assert result["sequences"].tolist() == [[5, 6, 7, END], [1, 7, 7, END]]
    assert result["beam_indices"].tolist() == [[1, 1, -1, -1], [-1] * 4]
    assert result["sequence_scores"].tolist() == pytest.approx([-1 / 3, -2 / 3])


def test_constraints_may_be_replaced() -> None:
    search = scorer()
    assert search.check_completes_constraints([5, 6])
    search.constraints = [DisjunctiveConstraint([[5, 7], [8]])]
    assert not search.check_completes_constraints([5, 6])
    assert search.check_completes_constraints([8])


def test_candidates_of_equal_scores_stay_in_their_order() -> None:
    assert _bank_order([1] * 40, torch.zeros(40)) == list(range(40))
    banks = [0, 1] * 20
    order = _bank_order(banks, torch.zeros(40))
    assert order == [place for first in range(0, 40, 2) for place in (first + 1, first)]


def test_bad_input_changes_nothing() -> None:
    search = scorer()
    ids = [[5, 6], [5, 6]]
    with pytest.raises(ValueError, match="next_tokens has 1 candidates that are not end tokens"):
        step(search, ids, [END, END, END, 7])
    assert len(search._beam_hyps[0]) == 0 and not search.is_done
    with pytest.raises(ValueError, match=r"input_ids has shape \[3, 1\]; expected 2 rows"):
        step(search, [[1]] * 3, [7, 8, 9, 3])
    with pytest.raises(ValueError, match=r"expected \[1, candidates\] for each"):
        search.process(
            torch.tensor(ids),
            torch.zeros(2, 4),
            torch.ones(2, 4, dtype=torch.int64),
            torch.zeros(2, 4, dtype=torch.int64),
            torch.zeros(2, VOCAB),
        )
    for changes in ({"num_beams": 1}, {"num_beam_groups": 3}, {"do_early_stopping": "never"}):
        with pytest.raises(ValueError, match=next(iter(changes)).removeprefix("do_")):
            scorer(**changes)
    with pytest.raises(ValueError, match=r"^ConstrainedBeamSearchScorer: constraints is empty"):
        scorer(constraints=[])
    search = scorer()
    search.constraints = []
    with pytest.raises(ValueError, match="constraints is empty"):
        search.check_completes_constraints([1])


def make(specification: list[list[Any]]) -> list[Constraint]:
    return [
        PhrasalConstraint(tokens) if isinstance(tokens[0], int) else DisjunctiveConstraint(tokens)
        for tokens in specification
    ]


def test_a_phrase_is_fulfilled_token_by_token() -> None:
    phrase = PhrasalConstraint([4, 5, 6])
    assert (phrase.seqlen, phrase.remaining(), phrase.advance()) == (3, 3, 4)
    assert phrase.update(4) == (True, False, False)
    assert phrase.update(5) == (True, False, False)
    assert phrase.remaining() == 1 and not phrase.completed
    assert phrase.update(6) == (True, True, False)
    assert phrase.completed and phrase.remaining() == 0 and phrase.advance() is None
    assert not phrase.does_advance(4)


def test_a_wrong_token_breaks_a_phrase() -> None:
    phrase = PhrasalConstraint([4, 5, 6])
    phrase.update(4)
    assert phrase.update(9) == (False, False, True)
    assert not phrase.completed


def test_one_of_several_phrases_is_enough() -> None:
    either = DisjunctiveConstraint([[1, 2, 3], [1, 4], [5]])
    assert either.advance() == [1, 5]
    assert either.update(1) == (True, False, False)
    assert either.advance() == [2, 4] and either.remaining() == 2
    assert either.update(4) == (True, True, False)
    assert either.completed and either.remaining() == 0 and either.advance() is None
    either.reset()
    assert either.update(5) == (True, True, False)


def test_a_copy_has_the_progress_if_asked() -> None:
    phrase = PhrasalConstraint([4, 5])
    phrase.update(4)
    assert phrase.copy(stateful=True).advance() == 5
    assert phrase.copy().advance() == 4
    either = DisjunctiveConstraint([[1, 2], [3]])
    either.update(1)
    assert either.copy(stateful=True).advance() == [2]
    assert either.copy().advance() == [1, 3]


@pytest.mark.parametrize("tokens", [[], (1,), [-1], [1.0], None])
def test_a_phrase_that_is_none(tokens: Any) -> None:
    with pytest.raises(ValueError, match="token_ids is"):
        PhrasalConstraint(tokens)


@pytest.mark.parametrize("tokens", [[], [1], [[1], (2,)], [[1], [-1]], [[1], [1, 2]], [[1], [1]]])
def test_phrases_that_are_none(tokens: Any) -> None:
    with pytest.raises(ValueError, match="nested_token_ids is"):
        DisjunctiveConstraint(tokens)


def test_a_list_of_constraints_is_fulfilled_one_at_a_time_in_any_order() -> None:
    state = ConstraintListState(
        [PhrasalConstraint([1, 2]), DisjunctiveConstraint([[3], [4, 5, 6]])]
    )
    assert state.max_seqlen == 3 and state.advance() == [1, 3, 4] and state.get_bank() == 0
    assert state.add(4) == (False, True)
    assert state.advance() == [5] and state.get_bank() == 1
    assert state.add(1) == (False, False)  # breaks it, and does not begin the other
    assert state.get_bank() == 0 and state.advance() == [1, 3, 4]
    assert state.add(3) == (True, True)
    assert state.get_bank() == 3 and not state.completed
    assert state.add(1) == (False, True) and state.add(2) == (True, True)
    assert state.completed and state.get_bank() == 6 and state.advance() is None
    assert state.add(1) == (True, False)


def test_a_list_of_constraints_takes_a_sequence() -> None:
    state = ConstraintListState([PhrasalConstraint([1, 2])])
    state.reset([7, 1])
    assert state.inprogress_constraint is not None and state.advance() == [2]
    state.reset(None)
    assert state.inprogress_constraint is None
    state.reset([7, 1, 2, 9])
    assert state.completed
    with pytest.raises(ValueError, match="token_id is '1'"):
        ConstraintListState([PhrasalConstraint([1])]).add("1")  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(60))
def test_the_automaton_is_the_list_run_over_each_sequence(seed: int) -> None:
    vocab = 5
    constraints = make(random_constraints(seed, vocab))
    automaton, replay = _Automaton(constraints), _Replay(constraints)
    sequences: list[tuple[int, ...]] = [()]
    for _ in range(4):
        for sequence in sequences:
            actual, expected = automaton.position(sequence), replay.position(sequence)
            assert actual.completed == expected.completed
            for token in range(vocab):
                assert actual.bank_after(token) == expected.bank_after(token)
            if not expected.completed:
                assert actual.proposals() == expected.proposals()
        longer = [(*sequence, token) for sequence in sequences for token in range(vocab)]
        sequences = longer[seed % 3 :: max(1, len(longer) // 60)]


def test_the_automaton_looks_at_a_sequence_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the last step knew of a sequence is where this one begins."""
    from lmdecode.beam.scorers.constraint_progress import _Node

    taken: list[int] = []
    after = _Node.after
    monkeypatch.setattr(_Node, "after", lambda self, t: taken.append(t) or after(self, t))
    automaton = _Automaton([PhrasalConstraint([1, 2]), PhrasalConstraint([3])])
    sequence = tuple(range(10, 60))
    automaton.position(sequence)
    assert taken == list(sequence)
    assert not automaton.position((*sequence, 1)).completed
    assert automaton.position((*sequence, 1, 2)).bank_after(3) == 4
    assert taken == [*sequence, 1, 2, 3]
