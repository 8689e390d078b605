"""Constraints on what beam search generates: phrases that a sequence must contain.

``ConstrainedBeamSearchScorer`` takes a list of them. Classes, attributes and results are those of
transformers 4.38.2, its oddities included, which the docstrings name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

__all__ = [
    "Constraint",
    "ConstraintListState",
    "DisjunctiveConstraint",
    "DisjunctiveTrie",
    "PhrasalConstraint",
]

_MAX_STEPS = 10_000

Tokens = int | list[int] | None


def _check_token(token_id: object) -> None:
    if not isinstance(token_id, int):
        raise ValueError(f"token_id is {token_id!r}, a {type(token_id).__name__}; expected an int")


def _is_token_list(token_ids: list[Any]) -> bool:
    return all(isinstance(token_id, int) and token_id >= 0 for token_id in token_ids)


class Constraint(ABC):
    """Interface of a constraint; subclasses hold its state, which advances token by token.

    The tokens that ``advance`` proposes must complete a constraint in at most 10000 steps. The
    constructor of this class tests that, for subclasses that call it.

    Attributes
    ----------
    seqlen : int
        Largest number of tokens from the beginning to completion.
    """

    seqlen: int

    def __init__(self) -> None:
        self.test()

    def test(self) -> None:
        """Follow ``advance`` to completion.

        Raises
        ------
        ValueError
            If a proposed token does not advance the constraint, or it never completes.
        """
        completed, steps = False, 0
        while not completed:
            if steps == 1:
                self.reset()
            token_id: Any = self.advance()
            if not self.does_advance(token_id):
                raise ValueError(
                    f"{type(self).__name__}: does_advance() refuses {token_id!r}, which advance() "
                    "proposes; expected it to accept what advance() returns"
                )
            _, completed, _ = self.update(token_id)
            steps += 1
            if steps > _MAX_STEPS:
                raise ValueError(
                    f"{type(self).__name__}: update() has not completed the constraint after "
                    f"{_MAX_STEPS} tokens of advance()"
                )
        if self.remaining() != 0:
            raise ValueError(
                f"{type(self).__name__}: remaining() is {self.remaining()} when the constraint is "
                "complete; expected 0"
            )

    @abstractmethod
    def advance(self) -> Tokens:
        """Return the token, or the list of tokens, that would make progress; None if none would."""

    @abstractmethod
    def does_advance(self, token_id: int) -> bool:
        """Tell whether this token would make progress."""

    @abstractmethod
    def update(self, token_id: int) -> tuple[bool, bool, bool]:
        """Take a generated token.

        Returns
        -------
        stepped, completed, reset : bool
            Whether it made progress, fulfilled the constraint, or undid the progress so far.
        """

    @abstractmethod
    def reset(self) -> None:
        """Forget the progress."""

    @abstractmethod
    def remaining(self) -> int:
        """Return how many tokens are missing, at most."""

    @abstractmethod
    def copy(self, stateful: bool = False) -> Constraint:
        """Return the same constraint, at its beginning or (``stateful``) with its progress."""


class PhrasalConstraint(Constraint):
    """The tokens of a phrase, one right after the other.

    ``reset`` leaves the first token fulfilled, as in transformers. ``ConstraintListState`` is not
    affected: it begins again with a fresh copy.

    Parameters
    ----------
    token_ids : list of int
        At least one token, all >= 0.

    Raises
    ------
    ValueError
        If ``token_ids`` is anything else.
    """

    def __init__(self, token_ids: list[int]) -> None:
        if not isinstance(token_ids, list) or not token_ids:
            raise ValueError(f"token_ids is {token_ids!r}; expected a list of at least one token")
        if not _is_token_list(token_ids):
            raise ValueError(f"token_ids is {token_ids!r}; expected ints, all at least 0")
        self.token_ids = token_ids
        self.seqlen = len(token_ids)
        self.fulfilled_idx = -1  # the last token of the phrase that has been generated
        self.completed = False

    def advance(self) -> int | None:
        """Return the next token of the phrase, or None when it is complete."""
        return None if self.completed else self.token_ids[self.fulfilled_idx + 1]

    def does_advance(self, token_id: int) -> bool:
        """Tell whether this is the next token of the phrase."""
        _check_token(token_id)
        return not self.completed and token_id == self.token_ids[self.fulfilled_idx + 1]

    def update(self, token_id: int) -> tuple[bool, bool, bool]:
        """Take a generated token; any but the next of the phrase undoes the progress."""
        if not self.does_advance(token_id):
            self.reset()
            return False, False, True
        self.fulfilled_idx += 1
        self.completed = self.fulfilled_idx == self.seqlen - 1
        return True, self.completed, False

    def reset(self) -> None:
        """Go back to where the first token has been generated."""
        self.completed = False
        self.fulfilled_idx = 0

    def remaining(self) -> int:
        """Return how many tokens of the phrase are missing."""
        return self.seqlen - (self.fulfilled_idx + 1)

    def copy(self, stateful: bool = False) -> PhrasalConstraint:
        """Return the same phrase, at its beginning or (``stateful``) with its progress."""
        new = PhrasalConstraint.__new__(PhrasalConstraint)  # token_ids has been checked
        new.token_ids, new.seqlen = self.token_ids, self.seqlen
        new.fulfilled_idx = self.fulfilled_idx if stateful else -1
        new.completed = self.completed if stateful else False
        return new


class DisjunctiveTrie:
    """The alternatives of a ``DisjunctiveConstraint`` as a tree of tokens.

    With ``no_subsets``, raises ValueError for alternatives that are equal, or begin with another.
    """

    def __init__(self, nested_token_ids: list[list[int]], no_subsets: bool = True) -> None:
        self.max_height = max(map(len, nested_token_ids))
        self.trie: dict[int, Any] = {}
        for token_ids in nested_token_ids:
            node = self.trie
            for token_id in token_ids:
                node = node.setdefault(token_id, {})
        if no_subsets and self.has_subsets(self.trie, nested_token_ids):
            raise ValueError(
                f"nested_token_ids is {nested_token_ids!r}; expected alternatives of which none is "
                "the beginning of another"
            )

    def node(self, current_seq: Sequence[int]) -> dict[int, Any]:
        """Return the node at ``current_seq``, a path from the root: children by token."""
        node = self.trie
        for token_id in current_seq:
            node = node[token_id]
        return node

    def next_tokens(self, current_seq: Sequence[int]) -> list[int]:
        """Return the tokens that may follow ``current_seq``."""
        return list(self.node(current_seq))

    def reached_leaf(self, current_seq: Sequence[int]) -> bool:
        """Tell whether ``current_seq`` is a whole alternative."""
        return not self.node(current_seq)

    def count_leaves(self, root: dict[int, Any]) -> int:
        """Return the number of leaves below a node, itself included."""
        leaves, open_nodes = 0, [root]
        while open_nodes:
            node = open_nodes.pop()
            leaves += not node
            open_nodes.extend(node.values())
        return leaves

    def has_subsets(self, trie: dict[int, Any], nested_token_ids: list[list[int]]) -> bool:
        """Tell whether some alternative has no leaf of its own."""
        return len(nested_token_ids) != self.count_leaves(trie)


class DisjunctiveConstraint(Constraint):
    """One of several phrases.

    A stateful ``copy`` shares ``current_seq``, as in transformers: what one of them takes
    afterwards, the other has in its ``current_seq`` too.

    Parameters
    ----------
    nested_token_ids : list of list of int
        The phrases, of which none may be the beginning of another; tokens are >= 0.

    Raises
    ------
    ValueError
        If ``nested_token_ids`` is anything else.
    """

    def __init__(self, nested_token_ids: list[list[int]]) -> None:
        if not isinstance(nested_token_ids, list) or not nested_token_ids:
            raise ValueError(
                f"nested_token_ids is {nested_token_ids!r}; expected a list of at least one phrase"
            )
        if any(not isinstance(token_ids, list) for token_ids in nested_token_ids):
            raise ValueError(f"nested_token_ids is {nested_token_ids!r}; expected a list of lists")
        if not all(map(_is_token_list, nested_token_ids)):
            raise ValueError(
                f"nested_token_ids is {nested_token_ids!r}; expected lists of ints, all at least 0"
            )
        self.trie = DisjunctiveTrie(nested_token_ids)
        self.token_ids = nested_token_ids
        self.seqlen = self.trie.max_height
        self.current_seq: list[int] = []
        self.completed = False

    def advance(self) -> list[int] | None:
        """Return the tokens that may come next, or None when a phrase is complete."""
        return self.trie.next_tokens(self.current_seq) or None

    def does_advance(self, token_id: int) -> bool:
        """Tell whether a phrase goes on with this token."""
        _check_token(token_id)
        return token_id in self.trie.node(self.current_seq)

    def update(self, token_id: int) -> tuple[bool, bool, bool]:
        """Take a generated token; one that no phrase goes on with undoes the progress."""
        stepped = self.does_advance(token_id)
        if stepped:
            self.current_seq.append(token_id)
        else:
            self.reset()
        self.completed = self.trie.reached_leaf(self.current_seq)
        return stepped, self.completed, not stepped

    def reset(self) -> None:
        """Forget the progress."""
        self.completed = False
        self.current_seq = []

    def remaining(self) -> int:
        """Return how many tokens the longest phrase still lacks; 0 when a phrase is complete."""
        return 0 if self.completed else self.seqlen - len(self.current_seq)

    def copy(self, stateful: bool = False) -> DisjunctiveConstraint:
        """Return the same phrases, at their beginning or (``stateful``) with the progress."""
        new = DisjunctiveConstraint.__new__(DisjunctiveConstraint)  # the trie never changes
        new.trie, new.token_ids, new.seqlen = self.trie, self.token_ids, self.seqlen
        new.current_seq = self.current_seq if stateful else []
        new.completed = self.completed if stateful else False
        return new


class ConstraintListState:
    """How far a sequence has come with a list of constraints, one at a time, in any order.

    Parameters
    ----------
    constraints : list of Constraint
        At least one. They are copied, never changed.

    Attributes
    ----------
    complete_constraints, pending_constraints : list of Constraint
        Those that are fulfilled, in that order, and those that have not begun.
    inprogress_constraint : Constraint or None
        The one that is being fulfilled.
    completed : bool
        Whether all are fulfilled. ``reset`` leaves it as it is, as in transformers.
    """

    def __init__(self, constraints: Sequence[Constraint]) -> None:
        self.constraints = constraints
        self.max_seqlen = max(constraint.seqlen for constraint in constraints)
        self.n_constraints = len(constraints)
        self.completed = False
        self.init_state()

    def init_state(self) -> None:
        """Begin with all constraints pending."""
        self.complete_constraints: list[Constraint] = []
        self.inprogress_constraint: Constraint | None = None
        self.pending_constraints = [constraint.copy() for constraint in self.constraints]

    def get_bank(self) -> int:
        """Return the progress: ``max_seqlen`` for a fulfilled constraint, less for a begun one."""
        bank = len(self.complete_constraints) * self.max_seqlen
        if self.inprogress_constraint:
            bank += self.max_seqlen - self.inprogress_constraint.remaining()
        return bank

    def advance(self) -> list[int] | None:
        """Return the tokens that make progress: with the constraint that has begun, else with any.

        None where there are no such tokens.
        """
        if self.inprogress_constraint is None:
            proposals = [constraint.advance() for constraint in self.pending_constraints]
        else:
            proposals = [self.inprogress_constraint.advance()]
        tokens: list[int] = []
        for proposal in proposals:
            if isinstance(proposal, int):
                tokens.append(proposal)
            elif isinstance(proposal, list):
                tokens.extend(proposal)
        return tokens or None

    def reset(self, token_ids: Sequence[int] | None) -> None:
        """Begin anew with the sequence ``token_ids``."""
        self.init_state()
        for token_id in () if token_ids is None else token_ids:
            self.add(token_id)
            if self.completed:
                break

    def add(self, token_id: int) -> tuple[bool, bool]:
        """Take a generated token.

        Returns
        -------
        complete, stepped : bool
            Whether it fulfilled a constraint (or all have been), and whether it made progress.
        """
        _check_token(token_id)
        if self.completed:
            return True, False
        if self.inprogress_constraint is not None:
            complete, stepped = self._continue(self.inprogress_constraint, token_id)
        else:
            complete, stepped = self._begin(token_id)
        if complete and not self.pending_constraints:
            self.completed = True
        return complete, stepped

    def _continue(self, constraint: Constraint, token_id: int) -> tuple[bool, bool]:
        stepped, complete, reset = constraint.update(token_id)
        if reset:
            # It moves to the end. The token that broke it is not read again.
            self.pending_constraints.append(constraint.copy())
            self.inprogress_constraint = None
        if complete:
            self.complete_constraints.append(constraint)
            self.inprogress_constraint = None
        return complete, stepped

    def _begin(self, token_id: int) -> tuple[bool, bool]:
        for place, constraint in enumerate(self.pending_constraints):
            if not constraint.does_advance(token_id):
                continue
            stepped, complete, _ = constraint.update(token_id)
            if not stepped:
                raise ValueError(
                    f"{type(constraint).__name__}: update({token_id}) makes no progress, though "
                    "does_advance() promises it"
                )
            if complete:
                self.complete_constraints.append(constraint)
            else:
                self.inprogress_constraint = constraint
            self.pending_constraints = (
                self.pending_constraints[:place] + self.pending_constraints[place + 1 :]
            )
            return complete, stepped
        return False, False

    def copy(self, stateful: bool = True) -> ConstraintListState:
        """Return the same list, with its progress (but for ``completed``) or at its beginning."""
        new = ConstraintListState(self.constraints)
        if stateful:
            new.complete_constraints = [c.copy(stateful=True) for c in self.complete_constraints]
            if self.inprogress_constraint is not None:
                new.inprogress_constraint = self.inprogress_constraint.copy(stateful=True)
            new.pending_constraints = [c.copy() for c in self.pending_constraints]
        return new
