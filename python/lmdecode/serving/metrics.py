"""Counts and times of a server, in the text format of Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

__all__ = ["Counter", "Histogram", "Metrics"]

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class Counter:
    """A number that grows, by labels."""

    def __init__(self, *labels: str) -> None:
        self._labels, self._values = labels, dict[tuple[str, ...], float]()
        if not labels:
            self._values[()] = 0

    def add(self, amount: float = 1, *labels: str) -> None:
        """Add to the number of these labels."""
        self._values[labels] = self._values.get(labels, 0) + amount

    def lines(self, name: str) -> Iterable[str]:
        """Yield a line for each set of labels."""
        for labels, value in sorted(self._values.items()):
            given = ",".join(
                f'{label}="{_escaped(text)}"'
                for label, text in zip(self._labels, labels, strict=True)
            )
            yield f"{name}{{{given}}} {_number(value)}" if given else f"{name} {_number(value)}"


class Histogram:
    """Counts of seconds up to each of several limits."""

    def __init__(self) -> None:
        self._counts, self._sum = [0] * (len(_SECONDS) + 1), 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        """Add a duration, or several of the same length."""
        self._counts[bisect_left(_SECONDS, seconds)] += count
        self._sum += seconds * count

    def lines(self, name: str) -> Iterable[str]:
        """Yield the lines of all buckets, the sum and the count."""
        total = 0
        for limit, count in zip((*_SECONDS, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{limit}"}} {total}'
        yield f"{name}_sum {self._sum!r}"
        yield f"{name}_count {total}"


class Metrics:
    """All counts and times of a server."""

    def __init__(self) -> None:
        self.requests = Counter("endpoint", "status")
        self.answers = Counter("reason")
        self.first_token, self.between_tokens = Histogram(), Histogram()
        self.queued, self.total = Histogram(), Histogram()

    def text(self, gauges: Iterable[tuple[str, str, str, float]]) -> str:
        """Return everything as text.

        Parameters
        ----------
        gauges
            (name, kind, help, value) of numbers that others count.
        """
        lines = []
        for name, kind, text, value in gauges:
            lines += [f"# HELP lmdecode_{name} {text}", f"# TYPE lmdecode_{name} {kind}",
                      f"lmdecode_{name} {_number(value)}"]  # fmt: skip
        of_requests: tuple[tuple[str, str, Counter | Histogram], ...] = (
            ("requests_total", "Requests, by endpoint and status.", self.requests),
            ("answers_total", "Answers, by the reason of their end.", self.answers),
            ("queue_seconds", "From a request to its slot.", self.queued),
            ("time_to_first_token_seconds", "From a request to its first token.", self.first_token),
            ("inter_token_seconds", "Between tokens of an answer.", self.between_tokens),
            ("request_seconds", "From a request to its last token.", self.total),
        )
        for name, text, metric in of_requests:
            kind = "counter" if isinstance(metric, Counter) else "histogram"
            lines += [f"# HELP lmdecode_{name} {text}", f"# TYPE lmdecode_{name} {kind}"]
            lines += metric.lines(f"lmdecode_{name}")
        return "\n".join(lines) + "\n"
