"""Reads the fields of a request's JSON body, with errors that name the field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from lmdecode._checks import is_int
from lmdecode.serving.errors import BadRequest

__all__ = ["Fields", "body_of", "shown"]

_MOST_SHOWN = 80


def shown(value: Any) -> str:
    """Return a value as errors show it: its beginning, if it is long."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def body_of(data: bytes) -> Any:
    """Parse the JSON body of a request.

    Raises ``BadRequest`` if it is no JSON, or has a lone surrogate, which no tokenizer accepts.
    """
    try:
        # Strictly: of bytes json takes lone surrogates, and UTF-16.
        body = json.loads(data.decode("utf-8"), parse_constant=_no_number)
        if b"\\ud" in data or b"\\uD" in data:
            json.dumps(body, ensure_ascii=False).encode()
        return body
    except RecursionError as error:
        message = "the body is no JSON that can be read: it has too many levels"
        raise BadRequest("body", message) from error
    except ValueError as error:
        raise BadRequest("body", f"the body is no JSON: {error}") from error


class Fields:
    """The fields of one body; ``BadRequest`` if it is no object. A null field counts as absent.

    ``place``, such as "thinking.", is where the object is within its body: errors name it.
    """

    def __init__(self, body: Any, place: str = "") -> None:
        if not isinstance(body, Mapping):
            raise BadRequest("body", f"the body is a {type(body).__name__}; expected an object")
        self._body = {name: value for name, value in body.items() if value is not None}
        self._place = place

    def __contains__(self, name: str) -> bool:
        return name in self._body

    def get(self, name: str) -> Any:
        """Return a field as it came; None: it is absent."""
        return self._body.get(name)

    def names(self) -> list[str]:
        """Return the names of all fields."""
        return list(self._body)

    def error(self, name: str, expected: str) -> BadRequest:
        """Return the error of a field: what came and what was expected."""
        place = self._place + name
        return BadRequest(place, f"{place} is {shown(self.get(name))}; expected {expected}")

    def inner(self, name: str) -> Fields:
        """Return the fields of an object; none where it is absent."""
        return Fields(self.object(name) or {}, f"{self._place}{name}.")

    def number(self, name: str, low: float, high: float) -> float | None:
        """Return a number within limits."""
        value = self.get(name)
        if value is None:
            return None
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        try:
            is_number = is_number and low <= value <= high and math.isfinite(float(value))
        except OverflowError:
            is_number = False
        if not is_number:
            raise self.error(name, f"a number, {low:g} to {high:g}")
        return float(value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        """Return an int within limits."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():  # of clients that have one kind only
            value = int(value)
        if not is_int(value) or not low <= value <= high:
            raise self.error(name, f"an int, {low} to {high}")
        return int(value)

    def boolean(self, name: str, otherwise: bool = False) -> bool:
        """Return a truth value."""
        value = self.get(name)
        if value is None:
            return otherwise
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def text(self, name: str, longest: int | None = None) -> str | None:
        """Return a text."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.error(name, "a text")
        if longest is not None and len(value) > longest:
            raise BadRequest(
                name, f"{name} has {len(value)} characters; expected at most {longest}"
            )
        return value

    def texts(self, name: str, most: int, longest: int) -> list[str]:
        """Return texts that came as one or as a list, none of them empty."""
        value = self.get(name)
        if value is None:
            return []
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or len(texts) > most:
            raise self.error(name, f"a text, or a list of up to {most}")
        for text in texts:
            if not isinstance(text, str) or not text or len(text) > longest:
                raise self.error(name, f"texts of 1 to {longest} characters")
        return list(texts)

    def integers(self, name: str, most: int, low: int, high: int) -> list[int]:
        """Return a list of ints within limits."""
        value = self.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or len(value) > most:
            raise self.error(name, f"a list of up to {most} ints")
        for item in value:
            if not is_int(item) or not low <= item <= high:
                raise self.error(name, f"a list of ints, {low} to {high}")
        return list(value)

    def object(self, name: str) -> Mapping[str, Any] | None:
        """Return an object."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(name, "an object")
        return value

    def choice(self, name: str, *choices: str) -> str | None:
        """Return one of several words."""
        value = self.get(name)
        if value is not None and (not isinstance(value, str) or value not in choices):
            raise self.error(name, " or ".join(repr(choice) for choice in choices))
        return value
