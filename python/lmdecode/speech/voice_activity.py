"""Detection of speech by silero-vad."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lmdecode._checks import install_hint, type_error
from lmdecode.speech.features import HOP, RATE

__all__ = ["speech_of"]

_OP = "Transcriber.transcribe"
# faster-whisper's values: pauses within a talk are part of it.
_DEFAULTS: dict[str, Any] = {
    "threshold": 0.5,
    "min_speech_duration_ms": 0,
    "min_silence_duration_ms": 2000,
    "speech_pad_ms": 400,
}

_lock = threading.Lock()  # the model has a state


@functools.cache
def _silero() -> tuple[Any, Any]:
    """Return the model and the function that calls it."""
    try:
        from silero_vad import get_speech_timestamps, load_silero_vad
    except ImportError as error:
        raise ImportError(
            f"{_OP}: vad is True and needs the package silero-vad ({error}): {install_hint('vad')}"
        ) from error
    return load_silero_vad(), get_speech_timestamps


def speech_of(
    samples: Tensor, longest: int | None, parameters: Mapping[str, Any] | None
) -> list[tuple[int, int]]:
    """Return the first and last frame of each piece of speech, in order; samples are at 16 kHz.

    Speech above ``longest`` frames is cut at its last pause of a tenth of a second, unless
    ``parameters``, arguments of silero-vad's ``get_speech_timestamps``, say otherwise. Raises
    ImportError without the package, and TypeError for a parameter that it does not have.
    """
    if parameters is not None and not isinstance(parameters, Mapping):
        raise type_error(_OP, "vad_parameters", parameters, "a mapping or None")
    given = {**_DEFAULTS, **(parameters or {})}
    threads = torch.get_num_threads()
    try:
        with _lock:
            model, get_speech_timestamps = _silero()
            if longest is not None:
                given.setdefault("max_speech_duration_s", longest * HOP / RATE)
                # Its longest pause may be far back, and later pauses are forgotten then.
                pause = "use_max_poss_sil_at_max_speech"
                if pause in inspect.signature(get_speech_timestamps).parameters:
                    given.setdefault(pause, False)
            found = get_speech_timestamps(samples, model, sampling_rate=RATE, **given)
    except TypeError as error:
        raise TypeError(f"{_OP}: vad_parameters is {parameters!r} ({error})") from error
    finally:
        torch.set_num_threads(threads)  # the package sets them
    frames = len(samples) // HOP
    pieces = [(piece["start"] // HOP, min(-(-piece["end"] // HOP), frames)) for piece in found]
    return [(begin, end) for begin, end in pieces if end > begin]
