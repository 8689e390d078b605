"""Interface of a model to an ``Engine``: slots for sequences, and steps over all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from torch import Tensor

from lmdecode.decoder.engine.rows import (
    DrawnRows,
    Ended,
    FollowingCaches,
    SearchedRows,
    WrittenSequence,
)

__all__ = ["ModelSteps", "StepLogits"]


class StepLogits(NamedTuple):
    """Logits of a step.

    Attributes
    ----------
    logits : Tensor
        [rows, V] float32: the sampled sequences, then the beams of the searches. Sequences that
        have just begun come last in each of the two.
    begun : iterator of WrittenSequence
        Sequences whose prompts were read in this step. Each leaves ``reading`` when the iterator
        yields it, for its rows.
    """

    logits: Tensor
    begun: Iterator[WrittenSequence]


class ModelSteps(Protocol):
    """Places of a model's caches, and its steps."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of prompts that were computed."""

    @property
    def cached_tokens(self) -> int:
        """Tokens of prompts that were shared or loaded."""

    @property
    def caches(self) -> FollowingCaches:
        """The caches, whose rows are the places of sequences."""

    @property
    def reading(self) -> list[WrittenSequence]:
        """The sequences that have places and whose prompts have not been read, in their order."""

    @property
    def num_free(self) -> int:
        """Places that can be taken."""

    def has_room(self, sequence: WrittenSequence) -> bool:
        """Whether there are places for a sequence."""

    def begin(self, sequence: WrittenSequence) -> None:
        """Give places to a sequence; there are enough."""

    def encode(self) -> list[Ended]:
        """Do what is to be done before a sequence can read; return those that failed by it."""

    def read(self, drawn: DrawnRows, searched: SearchedRows) -> StepLogits | None:
        """Read the last token of every row, and of prompts what there is room for.

        None: there was nothing to read.
        """

    def leave(self, sequence: WrittenSequence, *, is_sound: bool) -> None:
        """Take the places of a sequence back; sound ones may be of use to others."""

    def clear(self) -> None:
        """Forget what is being read, after a step that failed; places are taken back one by one."""

    def flush(self) -> None:
        """Wait until what is kept of prompts is written."""
