"""Sentences that espeak-ng speaks, and what a recogniser made of them."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import wave
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lmdecode.demo.cmudict_words import edit_distance

__all__ = ["RATE", "WHY_NOT", "can_speak", "sentences", "speak", "word_error_rate", "words"]

RATE = 16000  # samples a second, as Whisper has them
WHY_NOT = "Speech: not measured, the program espeak-ng is not installed"


def can_speak() -> bool:
    """Tell whether there is a voice."""
    return shutil.which("espeak-ng") is not None


def sentences() -> list[str]:
    """Return the sentences, one a line of ``sentences.txt``."""
    return (Path(__file__).parent / "sentences.txt").read_text(encoding="utf-8").splitlines()


def speak(text: str) -> Tensor:
    """Return the sound of a sentence, [samples] float32 at ``RATE``."""
    done = subprocess.run(
        ["espeak-ng", "-v", "en-us", "--stdout", text], capture_output=True, check=True
    )
    with wave.open(io.BytesIO(done.stdout)) as file:
        rate, width = file.getframerate(), file.getsampwidth()
        if file.getnchannels() != 1 or width != 2:
            raise ValueError(f"espeak-ng wrote {file.getnchannels()} channels of {width} bytes")
        # Written to a pipe, the header's count of frames is none: read what there is.
        samples = torch.frombuffer(bytearray(file.readframes(1 << 30)), dtype=torch.int16)
    sound = samples.float() / 32768
    places = torch.arange(int(len(sound) * RATE / rate), dtype=torch.float64) * (rate / RATE)
    left = places.long()
    right = (left + 1).clamp_max(len(sound) - 1)
    share = (places - left).float()
    return sound[left] * (1 - share) + sound[right] * share


def words(text: str) -> list[str]:
    """Return the words of a text, without case and punctuation."""
    return re.sub(r"[^a-z0-9' ]", " ", text.lower()).split()


def word_error_rate(spoken: Sequence[str], heard: Sequence[str]) -> float:
    """Return the insertions, deletions and substitutions of words over the words that were spoken.

    Over all texts together: 0.05 for 5 %.
    """
    edits = sum(edit_distance(words(a), words(b)) for a, b in zip(spoken, heard, strict=True))
    return edits / sum(len(words(text)) for text in spoken)
