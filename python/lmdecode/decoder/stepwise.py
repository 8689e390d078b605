"""What a decoding loop needs: ``StepwiseModel``, and ``StepParts`` of a loop in C++."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

__all__ = ["StepParts", "StepwiseModel"]

_SECONDS_OF_A_PART = 0.1
_BYTES_OF_FIRST_PART = 1 << 28


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


class StepParts:
    """How many steps run in C++ before Python handles signals, such as Ctrl-C: 0.1 s of them.

    ``steps`` begins with a guess from ``weights``, the bytes that a step reads.
    """

    def __init__(self, weights: int) -> None:
        self.steps = max(1, _BYTES_OF_FIRST_PART // max(1, weights))

    def took(self, steps: int, seconds: float) -> None:
        """Set the size of the next part, which at most doubles."""
        of_time = int(steps * _SECONDS_OF_A_PART / max(seconds, 1e-9))
        self.steps = max(1, min(2 * self.steps, of_time))
