"""Transcribers of small random Whisper models."""

import functools
import wave
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lmdecode
from lmdecode.speech import Segment
from tests.decoder.whisper_models import audio, whisper_pair
from tests.decoder.whisper_tokenizer import whisper_tokenizer

__all__ = [
    "EASY", "check_times", "sound", "tokenizer", "transcriber", "transcriber_pair", "write_wave",
]  # fmt: skip

# What a random model's text needs: it is improbable, and repeats itself.
EASY: dict[str, Any] = {
    "temperature": 0.0, "compression_ratio_threshold": None, "log_prob_threshold": None,
    "no_speech_threshold": None, "max_initial_timestamp": 0.4, "max_new_tokens": 24,
}  # fmt: skip


def tokenizer() -> Any:
    """Return the ``tokenizers.Tokenizer`` of the models."""
    return whisper_tokenizer().backend_tokenizer


@functools.cache
def transcriber_pair(seed: int = 0, **options: Any) -> tuple[Any, lmdecode.Transcriber]:
    """Return a model of transformers and its transcriber; tests share them."""
    model, decoding = whisper_pair(seed, **options)
    return model, lmdecode.Transcriber(decoding, tokenizer=tokenizer())


def transcriber(seed: int = 0, **options: Any) -> lmdecode.Transcriber:
    """Return the transcriber of a pair."""
    return transcriber_pair(seed, **options)[1]


def sound(seconds: float, seed: int = 0) -> Tensor:
    """Return a sound, [samples] float32."""
    return torch.from_numpy(audio(seconds, seed))


def write_wave(path: Path, samples: Tensor) -> None:
    """Write a sound to a WAV file, whatever its name."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes((samples * 0.5 * 32767).short().numpy().tobytes())


def check_times(segments: list[Segment], seconds: float) -> None:
    """Segments begin and end with their words, and follow each other within the sound."""
    at = 0.0
    for segment in segments:
        assert segment.words and "".join(word.word for word in segment.words) == segment.text
        assert segment.start == segment.words[0].start and segment.end == segment.words[-1].end
        for word in segment.words:
            assert at <= word.start <= word.end <= seconds
            at = word.end
