"""The constraints against those of transformers 4.38.2: results, state and errors."""

import random
from typing import Any

import pytest
from transformers.generation import beam_constraints as oracle

from lmdecode.beam.scorers import constraints as ours
from tests.support.scorer_walks import random_constraints

VOCAB = 6
STATE = ("completed", "fulfilled_idx", "current_seq", "seqlen", "token_ids")


def make(module: Any, tokens: list[Any]) -> Any:
    is_phrase = isinstance(tokens[0], int)
    return (module.PhrasalConstraint if is_phrase else module.DisjunctiveConstraint)(tokens)


def outcome(function: Any, *args: Any) -> Any:
    """The result, or what was raised."""
    try:
        return function(*args)
    except Exception as error:
        return type(error)


def attributes(constraint: Any) -> list[Any]:
    return [getattr(constraint, name, None) for name in STATE]


def assert_same_constraint(actual: Any, expected: Any) -> None:
    assert attributes(actual) == attributes(expected)
    assert type(actual).__name__ == type(expected).__name__
    for name in ("advance", "remaining"):
        assert outcome(getattr(actual, name)) == outcome(getattr(expected, name)), name
    for token in range(VOCAB):
        assert outcome(actual.does_advance, token) == outcome(expected.does_advance, token)


@pytest.mark.parametrize("seed", range(200))
def test_one_constraint(seed: int) -> None:
    """Random calls, on a constraint and on copies that may share what the originals hold."""
    rng = random.Random(seed)
    tokens = random_constraints(seed, VOCAB)[0]
    pairs = [(make(ours, tokens), make(oracle, tokens))]
    for _ in range(40):
        actual, expected = rng.choice(pairs)
        call = rng.choice(("update", "update", "update", "right", "right", "reset", "copy"))
        if call == "copy":
            stateful = rng.random() < 0.6
            pairs.append((actual.copy(stateful=stateful), expected.copy(stateful=stateful)))
        elif call == "reset":
            assert actual.reset() is None and expected.reset() is None
        else:
            proposal = outcome(expected.advance)
            token = rng.randrange(VOCAB)
            if call == "right" and isinstance(proposal, (int, list)):
                token = rng.choice([proposal] if isinstance(proposal, int) else proposal)
            assert outcome(actual.update, token) == outcome(expected.update, token)
        for pair in pairs:
            assert_same_constraint(*pair)


def assert_same_list(actual: Any, expected: Any) -> None:
    assert actual.completed == expected.completed
    assert actual.get_bank() == expected.get_bank()
    assert actual.advance() == expected.advance()
    assert (actual.max_seqlen, actual.n_constraints) == (
        expected.max_seqlen,
        expected.n_constraints,
    )
    for name in ("complete_constraints", "pending_constraints"):
        assert [attributes(c) for c in getattr(actual, name)] == [
            attributes(c) for c in getattr(expected, name)
        ]
    assert (actual.inprogress_constraint is None) == (expected.inprogress_constraint is None)
    if expected.inprogress_constraint is not None:
        assert_same_constraint(actual.inprogress_constraint, expected.inprogress_constraint)


@pytest.mark.parametrize("seed", range(200))
def test_a_list_of_constraints(seed: int) -> None:
    rng = random.Random(seed)
    specification = random_constraints(seed, VOCAB)
    pairs = [
        tuple(
            module.ConstraintListState([make(module, tokens) for tokens in specification])
            for module in (ours, oracle)
        )
    ]
    for _ in range(40):
        actual, expected = rng.choice(pairs)
        call = rng.choice(("add", "add", "right", "right", "right", "reset", "copy"))
        if call == "copy":
            stateful = rng.random() < 0.7
            pairs.append((actual.copy(stateful=stateful), expected.copy(stateful=stateful)))
        elif call == "reset":
            sequence = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 5))]
            given = None if rng.random() < 0.2 else sequence
            assert actual.reset(given) is None and expected.reset(given) is None
        else:
            token = rng.randrange(VOCAB)
            if call == "right":
                token = rng.choice(expected.advance() or [token])
            assert actual.add(token) == expected.add(token)
        for pair in pairs:
            assert_same_list(*pair)


@pytest.mark.parametrize(
    "tokens",
    [
        [], (1, 2), None, 5, [1, -1], [1, "2"], [1.0], [[]], [[1], [1, 2]], [[1, 2], [1, 2]],
        [[1], 2], [[1, -3]], [[1], (2,)], [[], [1]], [[1, 2, 4], [1, 2, 3, 4]], [True, 2],
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("name", ["PhrasalConstraint", "DisjunctiveConstraint"])
def test_what_a_constructor_refuses(name: str, tokens: Any) -> None:
    actual, expected = (outcome(getattr(module, name), tokens) for module in (ours, oracle))
    assert isinstance(actual, type) == isinstance(expected, type)
    if isinstance(expected, type):
        assert actual is expected is ValueError


@pytest.mark.parametrize("module", [ours, oracle], ids=["ours", "oracle"])
@pytest.mark.parametrize("token", ["1", 1.0, None])
def test_a_token_that_is_no_int(module: Any, token: Any) -> None:
    phrase, either = module.PhrasalConstraint([1]), module.DisjunctiveConstraint([[1]])
    for call in (
        phrase.update,
        phrase.does_advance,
        either.update,
        either.does_advance,
        module.ConstraintListState([phrase]).add,
    ):
        with pytest.raises(ValueError, match="token_id"):
            call(token)


@pytest.mark.parametrize("module", [ours, oracle], ids=["ours", "oracle"])
def test_a_constraint_of_ones_own(module: Any) -> None:
    """The constructor of the base class tries the constraint out."""

    class Count(module.Constraint):
        def __init__(self, token: int, times: int, left_at_end: int = 0) -> None:
            self.token, self.times, self.seen = token, times, 0
            self.seqlen, self.left_at_end = times, left_at_end
            super().__init__()

        def advance(self) -> int:
            return self.token

        def does_advance(self, token_id: int) -> bool:
            return token_id == self.token

        def update(self, token_id: int) -> tuple[bool, bool, bool]:
            stepped = self.does_advance(token_id)
            self.seen += stepped
            return stepped, self.seen == self.times, False

        def reset(self) -> None:
            self.seen = 0

        def remaining(self) -> int:
            return self.times - self.seen + self.left_at_end

        def copy(self, stateful: bool = False) -> Any:
            new = Count(self.token, self.times)
            new.seen = self.seen if stateful else 0
            return new

    class Refuses(Count):
        def does_advance(self, token_id: int) -> bool:
            return False

    class Breaks(Count):
        def update(self, token_id: int) -> tuple[bool, bool, bool]:
            return False, False, False

    assert Count(3, 2).seen == 2
    for build in (
        lambda: Refuses(3, 2),
        lambda: Count(3, 10_001),
        lambda: Count(3, 2, left_at_end=1),
    ):
        with pytest.raises(Exception, match=r"."):
            build()
    breaks = Count(3, 2)
    breaks.__class__ = Breaks
    state = module.ConstraintListState([breaks])
    state.pending_constraints = [breaks]
    with pytest.raises(Exception, match="does_advance"):
        state.add(3)
    with pytest.raises(TypeError):
        module.Constraint()


def test_a_trie() -> None:
    for nested in ([[1, 2, 3], [1, 4]], [[1], [2, 3, 4], [2, 5]]):
        actual, expected = ours.DisjunctiveTrie(nested), oracle.DisjunctiveTrie(nested)
        assert actual.trie == expected.trie and actual.max_height == expected.max_height
        for sequence in ([], nested[0], nested[1][:1]):
            assert actual.next_tokens(sequence) == expected.next_tokens(sequence)
            assert actual.reached_leaf(sequence) == expected.reached_leaf(sequence)
        assert actual.count_leaves(actual.trie) == expected.count_leaves(expected.trie)
    nested = [[1], [1, 2]]
    actual = ours.DisjunctiveTrie(nested, no_subsets=False)
    expected = oracle.DisjunctiveTrie(nested, no_subsets=False)
    assert actual.trie == expected.trie
    assert actual.has_subsets(actual.trie, nested) and expected.has_subsets(expected.trie, nested)
    with pytest.raises(KeyError):
        actual.next_tokens([9])
