"""Constraints: what a sequence must contain. Parity with transformers is in transformers_4_38."""

from typing import Any

import pytest

from lmdecode import Constraint, ConstraintListState, DisjunctiveConstraint, PhrasalConstraint
from lmdecode.beam.scorers.constraint_progress import _Automaton, _Replay
from tests.support.scorer_walks import random_constraints


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
