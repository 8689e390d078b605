"""The ids of requests: those given, and numbers for the others."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence

from lmdecode.beam.engine.request import BeamRequest

__all__ = ["RequestIds", "position_of_request"]


class RequestIds:
    """The ids of requests that run or wait for ``pop_finished``."""

    def __init__(self) -> None:
        self._taken: set[Hashable] = set()
        self._numbers = itertools.count()

    def check(self, op: str, request: object) -> None:
        """Raise TypeError for what is no ``BeamRequest``, ValueError for an id that is in use."""
        if not isinstance(request, BeamRequest):
            kind = type(request).__name__
            raise TypeError(f"{op}: request is of type {kind}; expected a BeamRequest")
        request_id = request.request_id
        if request_id is not None and request_id in self._taken:
            raise ValueError(
                f"{op}: request_id {request_id!r} is in use, as request_id {request_id!r} is that "
                "of a request which is running, or waits for pop_finished; expected another"
            )

    def new(self, request: BeamRequest) -> Hashable:
        """Return the id that a checked request is to have."""
        if request.request_id is not None:
            return request.request_id
        return next(number for number in self._numbers if number not in self._taken)

    def add(self, request_id: Hashable) -> None:
        """Take an id."""
        self._taken.add(request_id)

    def discard(self, request_id: Hashable) -> None:
        """Give an id back."""
        self._taken.discard(request_id)


def position_of_request(op: str, request_id: object, running: Sequence[Hashable]) -> int:
    """Return where a request is among those that run; raise ValueError where it is not."""
    if request_id not in running:
        raise ValueError(
            f"{op}: request_id is {request_id!r}; expected one that is running: {list(running)}"
        )
    return list(running).index(request_id)
