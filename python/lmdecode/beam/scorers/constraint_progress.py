"""How far sequences have come with their constraints, as constrained beam search asks for it.

The answers are those of ``ConstraintListState`` run over the sequence. For phrasal and disjunctive
constraints they come from an automaton: its states are met again in every step and by every beam,
so a token costs one look-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from lmdecode.beam.scorers.constraints import (
    Constraint,
    ConstraintListState,
    DisjunctiveConstraint,
    PhrasalConstraint,
)

__all__ = ["ConstraintProgress", "Position", "constraint_progress"]


class Position(Protocol):
    """How far one sequence has come."""

    @property
    def completed(self) -> bool:
        """Whether the sequence fulfils all constraints."""

    def bank_after(self, token: int) -> int:
        """Return the progress, ``ConstraintListState.get_bank``, with one more token."""

    def proposals(self) -> list[tuple[int, int]]:
        """Return the tokens that make progress, each with the bank it leads to.

        Where a disjunctive constraint has begun and has several tokens, the banks are what
        transformers makes of them: its copies of the constraint share their path, so each token is
        added after the ones before it.
        """


class ConstraintProgress(Protocol):
    """Follows sequences through a list of constraints."""

    def position(self, sequence: tuple[int, ...]) -> Position:
        """Return how far this sequence has come."""


def constraint_progress(constraints: Sequence[Constraint]) -> ConstraintProgress:
    """Return the fastest way to follow these constraints."""
    if constraints and all(
        type(constraint) in (PhrasalConstraint, DisjunctiveConstraint) for constraint in constraints
    ):
        return _Automaton(constraints)
    return _Replay(constraints)


class _Replay:
    """Any constraints: each sequence is run through them from its beginning."""

    def __init__(self, constraints: Sequence[Constraint]) -> None:
        self._constraints = constraints

    def position(self, sequence: tuple[int, ...]) -> _ReplayPosition:
        return _ReplayPosition(self._constraints, sequence)


class _ReplayPosition:
    def __init__(self, constraints: Sequence[Constraint], sequence: tuple[int, ...]) -> None:
        self._constraints = constraints
        self._sequence = sequence

    def _state(self, *tokens: int) -> ConstraintListState:
        state = ConstraintListState([constraint.copy() for constraint in self._constraints])
        state.reset([*self._sequence, *tokens])
        return state

    @property
    def completed(self) -> bool:
        return self._state().completed

    def bank_after(self, token: int) -> int:
        return self._state(token).get_bank()

    def proposals(self) -> list[tuple[int, int]]:
        state = self._state()
        result = []
        for token in state.advance() or ():
            new = state.copy(stateful=True)
            new.add(token)
            result.append((token, new))
        # Not before all have their token: the copies of a constraint may share their progress.
        return [(token, new.get_bank()) for token, new in result]


class _Progress(NamedTuple):
    """A state of the automaton; constraints by their number."""

    fulfilled: int  # how many
    begun: tuple[int, tuple[int, ...]] | None  # a constraint and its path in the trie
    pending: tuple[int, ...]


class _Node:
    """A state and its cached consequences; the position of a sequence."""

    __slots__ = ("_automaton", "_proposals", "bank", "completed", "following", "otherwise", "state")

    def __init__(self, automaton: _Automaton, state: _Progress, bank: int) -> None:
        self._automaton = automaton
        self._proposals: list[tuple[int, int]] | None = None
        self.state = state
        self.bank = bank
        self.completed = state.begun is None and not state.pending
        # Tokens that make progress, in order; their nodes once they are known.
        self.following: dict[int, _Node | None] = {}
        self.otherwise: _Node | None = None  # after any other token

    def after(self, token: int) -> _Node:
        return self.following.get(token, self.otherwise) or self._automaton.link(self, token)

    def bank_after(self, token: int) -> int:
        return self.after(token).bank

    def proposals(self) -> list[tuple[int, int]]:
        if self._proposals is None:
            self._proposals = self._automaton.proposals(self)
        return self._proposals


class _Automaton:
    """Phrasal and disjunctive constraints; a phrase is a trie of one path."""

    def __init__(self, constraints: Sequence[Constraint]) -> None:
        self._tries = [_trie(constraint) for constraint in constraints]
        self._seqlens = [constraint.seqlen for constraint in constraints]
        self._max_seqlen = max(self._seqlens)
        self._nodes: dict[_Progress, _Node] = {}
        self._start = self._node(_Progress(0, None, tuple(range(len(constraints)))))
        # Positions of the sequences of the latest length asked for, and of the one before.
        self._length = 0
        self._latest: dict[tuple[int, ...], _Node] = {}
        self._before: dict[tuple[int, ...], _Node] = {}

    def position(self, sequence: tuple[int, ...]) -> _Node:
        if len(sequence) != self._length:
            self._before, self._latest, self._length = self._latest, {}, len(sequence)
        node = self._latest.get(sequence)
        if node is None:
            node = self._before.get(sequence[:-1]) if sequence else None
            tokens = sequence if node is None else sequence[-1:]
            node = node or self._start
            for token in tokens:
                node = node.after(token)
            self._latest[sequence] = node
        return node

    def _node(self, progress: _Progress) -> _Node:
        """Return the node of this state; make it if there is none."""
        node = self._nodes.get(progress)
        if node is not None:
            return node
        node = self._nodes[progress] = _Node(self, progress, self._bank(progress))
        if progress.begun is None:
            tokens = [token for number in progress.pending for token in self._tries[number]]
            node.otherwise = node
        else:
            number, path = progress.begun
            tokens = list(_below(self._tries[number], path))
        node.following = dict.fromkeys(tokens)
        return node

    def _bank(self, progress: _Progress) -> int:
        bank = progress.fulfilled * self._max_seqlen
        if progress.begun is not None:
            number, path = progress.begun
            bank += self._max_seqlen - (self._seqlens[number] - len(path))
        return bank

    def link(self, node: _Node, token: int) -> _Node:
        """Work out the node after this token."""
        fulfilled, begun, pending = node.state
        if token not in node.following:
            if node.otherwise is None:
                # The constraint that had begun moves to the end.
                assert begun is not None
                node.otherwise = self._node(_Progress(fulfilled, None, (*pending, begun[0])))
            return node.otherwise
        if begun is None:
            number = next(n for n in pending if token in self._tries[n])
            pending = tuple(n for n in pending if n != number)
            path: tuple[int, ...] = (token,)
        else:
            number, path = begun[0], (*begun[1], token)
        found = self._node(self._stepped(fulfilled, number, path, pending))
        node.following[token] = found
        return found

    def _stepped(
        self, fulfilled: int, number: int, path: tuple[int, ...], pending: tuple[int, ...]
    ) -> _Progress:
        """Return the state where a constraint has just come to the end of `path`."""
        if _below(self._tries[number], path):
            return _Progress(fulfilled, (number, path), pending)
        return _Progress(fulfilled + 1, None, pending)

    def proposals(self, node: _Node) -> list[tuple[int, int]]:
        fulfilled, begun, pending = node.state
        if begun is None:
            return [
                (token, node.after(token).bank)
                for number in pending
                for token in self._tries[number]
            ]
        number, path = begun
        banks: list[int | None] = []
        for token in node.following:
            below = _below(self._tries[number], path).get(token)
            if below is None:
                banks.append(fulfilled * self._max_seqlen)
            else:
                path = (*path, token)
                banks.append(None if below else (fulfilled + 1) * self._max_seqlen)
        still_begun = self._bank(_Progress(fulfilled, (number, path), pending))
        return [
            (token, still_begun if bank is None else bank)
            for token, bank in zip(node.following, banks, strict=True)
        ]


def _trie(constraint: Constraint) -> dict[int, Any]:
    if isinstance(constraint, DisjunctiveConstraint):
        return constraint.trie.trie
    assert isinstance(constraint, PhrasalConstraint)
    node: dict[int, Any] = {}
    for token in reversed(constraint.token_ids):
        node = {token: node}
    return node


def _below(trie: dict[int, Any], path: Sequence[int]) -> dict[int, Any]:
    """Return the node at the end of a path."""
    for token in path:
        trie = trie[token]
    return trie
