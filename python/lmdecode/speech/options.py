"""Options of transcription, named as in faster-whisper where it has them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from lmdecode._checks import (
    check_bool,
    check_count,
    check_int,
    check_number,
    is_int,
    is_real,
    type_error,
)

__all__ = ["APPENDED", "PREPENDED", "TASKS", "TEMPERATURES", "TranscriptionOptions"]

_OP = "Transcriber.transcribe"
TASKS = ("transcribe", "translate")
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
PREPENDED = "\"'“¿([{-"
APPENDED = "\"'.。,，!！?？:：”)]}、"  # noqa: RUF001  both widths are in texts


def _fail(name: str, value: object, expected: str) -> ValueError:
    return ValueError(f"{_OP}: {name} is {value!r}; expected {expected}")


@dataclass(frozen=True)
class TranscriptionOptions:
    """Options of ``Transcriber.transcribe``, which has their meanings and errors."""

    _: KW_ONLY
    task: str = "transcribe"
    beam_size: int = 5
    best_of: int = 5
    patience: float = 1.0
    length_penalty: float = 1.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    temperature: Any = TEMPERATURES
    compression_ratio_threshold: float | None = 2.4
    log_prob_threshold: float | None = -1.0
    no_speech_threshold: float | None = 0.6
    condition_on_previous_text: bool = True
    prompt_reset_on_temperature: float = 0.5
    initial_prompt: Any = None
    prefix: str | None = None
    hotwords: str | None = None
    suppress_blank: bool = True
    suppress_tokens: Any = (-1,)
    without_timestamps: bool = False
    max_initial_timestamp: float | None = 1.0
    max_new_tokens: int | None = None
    word_timestamps: bool = False
    prepend_punctuations: str = PREPENDED
    append_punctuations: str = APPENDED
    seed: int = 0

    def __post_init__(self) -> None:
        """Check every option."""

        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        if not isinstance(self.task, str):
            raise type_error(_OP, "task", self.task, "a str")
        if self.task not in TASKS:
            raise _fail("task", self.task, f"one of {', '.join(TASKS)}")
        for name in ("beam_size", "best_of"):
            limits = "1 to 128"
            put(name, check_int(_OP, name, getattr(self, name), 1, 128, limits=limits))
        put("no_repeat_ngram_size", check_count(_OP, "no_repeat_ngram_size",
                                                self.no_repeat_ngram_size, 0))  # fmt: skip
        put("seed", check_count(_OP, "seed", self.seed, 0))
        if self.max_new_tokens is not None:
            put("max_new_tokens", check_count(_OP, "max_new_tokens", self.max_new_tokens))
        for name in ("patience", "repetition_penalty"):
            value = check_number(_OP, name, getattr(self, name), is_finite=True)
            if value <= 0:
                raise _fail(name, value, "a number above 0")
            put(name, value)
        for name in ("length_penalty", "prompt_reset_on_temperature"):
            put(name, check_number(_OP, name, getattr(self, name), is_finite=True))
        for name in (
            "compression_ratio_threshold",
            "log_prob_threshold",
            "no_speech_threshold",
            "max_initial_timestamp",
        ):
            value = getattr(self, name)
            if value is not None:
                put(name, check_number(_OP, name, value, kind="a number or None"))
        if self.max_initial_timestamp is not None and not self.max_initial_timestamp >= 0:
            raise _fail("max_initial_timestamp", self.max_initial_timestamp, "at least 0, or None")
        for name in (
            "condition_on_previous_text",
            "suppress_blank",
            "without_timestamps",
            "word_timestamps",
        ):
            check_bool(_OP, name, getattr(self, name))
        for name in ("prefix", "hotwords"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise type_error(_OP, name, value, "a str or None")
        for name in ("prepend_punctuations", "append_punctuations"):
            if not isinstance(getattr(self, name), str):
                raise type_error(_OP, name, getattr(self, name), "a str")
        put("temperature", _temperatures(self.temperature))
        put("suppress_tokens", _tokens("suppress_tokens", self.suppress_tokens, least=-1))
        if self.initial_prompt is not None and not isinstance(self.initial_prompt, str):
            put("initial_prompt", _tokens("initial_prompt", self.initial_prompt, least=0))


def _temperatures(value: Any) -> tuple[float, ...]:
    """Return temperatures, which are tried one after the other."""
    values = (value,) if is_real(value) else value
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise type_error(_OP, "temperature", value, "a number or a sequence of them")
    found = tuple(check_number(_OP, "temperature", one, is_finite=True) for one in values)
    if not found or not all(math.isfinite(one) and one >= 0 for one in found):
        raise _fail("temperature", value, "one number or more, each at least 0")
    if not all(found[1:]):
        raise _fail("temperature", value, "numbers above 0 behind the first")
    return found


def _tokens(name: str, value: Any, *, least: int) -> tuple[int, ...]:
    values = () if value is None else (value,) if is_int(value) else value
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise type_error(_OP, name, value, "token ids")
    return tuple(check_int(_OP, name, token, least, limits=f"at least {least}") for token in values)
