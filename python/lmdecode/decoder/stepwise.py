"""``StepwiseModel``: what a decoding loop needs of a model."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

__all__ = ["StepwiseModel"]


class StepwiseModel(Protocol):
    """A model that reads the tokens of some rows, step by step, and keeps what it has read."""

    def read_prompts(self, input_ids: Tensor) -> Tensor:
        """Read the prompts, [rows, S] int64; returns the logits after them, [rows, V]."""

    def read(self, input_ids: Tensor) -> Tensor:
        """Read the last tokens of [rows, S + n] int64; returns the logits after them, [rows, V].

        All other tokens have been read before.
        """

    def reorder(self, parents: Tensor) -> None:
        """Let each row go on from what row ``parents[row]`` has read; [rows] int64."""
