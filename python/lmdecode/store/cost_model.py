"""When loading is faster than computing: a slow disk loses to a fast processor."""

from __future__ import annotations

import threading

_WEIGHT = 0.3  # of a new measurement in the running mean


class CostModel:
    """Running means of what loading and prefilling cost, from measurements.

    A load of b bytes is taken to last b / bandwidth, the prefill of n tokens n / rate. Where one of
    the two was never measured, loading is assumed to be faster: it is by orders of magnitude where
    a CPU computes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds_per_byte: float | None = None
        self._seconds_per_token: float | None = None

    @staticmethod
    def _mean(before: float | None, value: float) -> float:
        return value if before is None else before + _WEIGHT * (value - before)

    def observe_load(self, num_bytes: int, seconds: float) -> None:
        """Take note of a load."""
        if num_bytes > 0 and seconds > 0:
            with self._lock:
                self._seconds_per_byte = self._mean(self._seconds_per_byte, seconds / num_bytes)

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Take note of a prefill."""
        if num_tokens > 0 and seconds > 0:
            with self._lock:
                self._seconds_per_token = self._mean(self._seconds_per_token, seconds / num_tokens)

    @property
    def load_bandwidth(self) -> float | None:
        """Bytes a second; None: not measured."""
        return None if self._seconds_per_byte is None else 1 / self._seconds_per_byte

    @property
    def prefill_rate(self) -> float | None:
        """Tokens a second; None: not measured."""
        return None if self._seconds_per_token is None else 1 / self._seconds_per_token

    def should_load(self, num_tokens: int, num_bytes: int) -> bool:
        """Whether loading some tokens is faster than computing them."""
        if num_tokens == 0:
            return False
        per_byte, per_token = self._seconds_per_byte, self._seconds_per_token
        if per_byte is None or per_token is None:
            return True
        return num_bytes * per_byte < num_tokens * per_token
