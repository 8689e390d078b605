"""Interface of a model to an ``Engine``: slots for sequences, and steps over all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from lmdecode.decoder.engine.rows import Ended, FollowingCaches, ReadRows, SearchedRows
from lmdecode.decoder.engine.sequences import WrittenSequence

__all__ = ["ModelSteps", "StepLogits"]


class StepLogits(NamedTuple):
    """Logits of a step, [rows, V] float32: the sampled sequences, then the beams of the searches.

    ``begun`` yields the sequences that finished their prompts in this step; they come last among
    the sampled sequences, or among the beams. Each leaves ``reading`` when it is yielded.
    ``drafts`` are drafts of the first sampled sequences, see ``DrawnRows.step``; such a sequence
    has logits after each token of its draft, too.
    """

    logits: Tensor
    begun: Iterator[WrittenSequence]
    drafts: Sequence[list[int]] = ()


class ModelSteps(Protocol):
    """Places of a model's caches, and its steps."""

    @property
    def prompt_tokens(self) -> int:
        """Number of computed prompt tokens."""

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens that were shared or loaded."""

    @property
    def nbytes(self) -> int:
        """Bytes of caches and scratch, used or not."""

    @property
    def caches(self) -> FollowingCaches:
        """The caches; their rows are the places of sequences."""

    @property
    def reading(self) -> list[WrittenSequence]:
        """Sequences with places and unread prompt tokens, in order."""

    @property
    def num_free(self) -> int:
        """Number of free places."""

    def has_room(self, sequence: WrittenSequence) -> bool:
        """Whether enough places are free for a sequence."""

    def begin(self, sequence: WrittenSequence) -> None:
        """Assign places to a sequence; enough are free."""

    def encode(self) -> list[Ended]:
        """Encode inputs before their sequences can read; return the sequences that failed."""

    def read(self, drawn: ReadRows, searched: SearchedRows) -> StepLogits | None:
        """Read the last token of every row, and as much of prompts as fits.

        None if there was nothing to read.
        """

    def leave(self, sequence: WrittenSequence, *, is_sound: bool) -> None:
        """Free the places of a sequence; others may reuse sound ones."""

    def clear(self) -> None:
        """Forget the prompts being read, after a failed step; places are freed one by one."""

    def flush(self) -> None:
        """Wait until kept prompts are written."""
