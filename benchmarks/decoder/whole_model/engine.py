"""What a whole model is asked to do by the benchmark, and how that is timed.

The peers' environments have no torch: nothing here needs more than numpy.
"""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

CLOCKS = {"process": time.process_time, "wall": time.perf_counter}
MAX_NEW_TOKENS = 256  # that a prepared row may get


def seconds(call: Callable[[], object], clock: str) -> float:
    """Return how long a call takes, by the CPU time of this process or by the wall."""
    now = CLOCKS[clock]
    start = now()
    call()
    return now() - start


class Engine(ABC):
    """A model in memory.

    Parameters
    ----------
    folder
        Of a transformers model, where files in other formats are kept beside it, too.
    number_format
        Of the weights, one of the engine's own words.
    threads
        That compute.
    longest
        Tokens of the longest prompt.
    """

    def __init__(self, folder: Path, number_format: str, threads: int, longest: int) -> None:
        self.folder, self.number_format, self.threads = folder, number_format, threads
        self.capacity = longest + MAX_NEW_TOKENS
        self._prepared: object = None

    @abstractmethod
    def version(self) -> str:
        """Return the version of what computes."""

    @abstractmethod
    def logits(self, tokens: Sequence[int], steps: int) -> Any:
        """Return the logits behind the last token, a numpy array [V] float32.

        All but the last ``steps`` tokens are read at once, the others one after another.
        """

    @abstractmethod
    def prefill(self, tokens: Sequence[int]) -> None:
        """Read a prompt, up to the logits behind it."""

    def prepare(self, tokens: Sequence[int], rows: int) -> None:
        """Read a prompt into each of some rows; each keeps keys and values of its own."""
        raise NotImplementedError

    def rewind(self) -> None:
        """Forget what was read behind the prompt, or leave it where the engine cannot."""
        raise NotImplementedError

    def step(self, tokens: Sequence[int]) -> None:
        """Read one token in each row, up to the logits."""
        raise NotImplementedError

    def generate(self, tokens: Sequence[int], new_tokens: int, beams: int) -> None:
        """Decode so many tokens behind a prompt, greedily or with beams."""
        raise NotImplementedError

    def time_prefill(self, tokens: Sequence[int], clock: str) -> float:
        """Return the seconds of reading a prompt."""
        self._prepared = None
        return seconds(lambda: self.prefill(tokens), clock)

    def time_generate(
        self, tokens: Sequence[int], new_tokens: int, beams: int, clock: str
    ) -> float:
        """Return the seconds of a whole call."""
        self._prepared = None
        return seconds(lambda: self.generate(tokens, new_tokens, beams), clock)

    def time_step(self, tokens: Sequence[int], rows: int, count: int, clock: str) -> float:
        """Return the seconds of a step behind a prompt, the middle one of ``count``."""
        if self._prepared != (list(tokens), rows):
            self.prepare(tokens, rows)
            self._prepared = (list(tokens), rows)
            self.step(list(tokens[:1]) * rows)
        self.rewind()
        read = (list(tokens[i : i + 1]) * rows for i in range(count))
        return statistics.median(seconds(lambda x=x: self.step(x), clock) for x in read)
