"""Results of a transcription: segments, words, and facts about the sound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lmdecode.speech.options import TranscriptionOptions

__all__ = ["Segment", "TranscriptionInfo", "Word"]


@dataclass
class Word:
    """A word and its time.

    Attributes
    ----------
    start, end : float
        Seconds from the beginning of the sound, without the pause at a punctuation mark.
    word : str
        The text, with the space in front of it and its punctuation.
    probability : float
        Mean probability of its tokens by the model, 0 to 1.
    """

    start: float
    end: float
    word: str
    probability: float


@dataclass
class Segment:
    """A piece of the text and its time.

    Attributes
    ----------
    id : int
        Number of the segment, from 1.
    seek : int
        Frame, of 10 ms, at which its window begins.
    start, end : float
        Seconds from the beginning of the sound: those of the first and the last word if words are
        asked for, and otherwise what the decoder says.
    text : str
        The text, usually with a space in front.
    tokens : list of int
        Its tokens, times among them.
    avg_logprob : float
        Mean log-probability of the tokens of its window, the end token among them, each among
        those that the rules allow.
    compression_ratio : float
        Bytes of the text of its window over those that zlib makes of it: high for repetitions.
    no_speech_prob : float
        Probability that nobody speaks in its window.
    words : list of Word or None
        Its words, if asked for.
    temperature : float
        The last temperature that its window was tried with; 0 is a search.
    """

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    words: list[Word] | None
    temperature: float


@dataclass
class TranscriptionInfo:
    """Facts about a sound that are known before its text.

    Attributes
    ----------
    language : str
        Code, such as "en".
    language_probability : float
        Its probability; 1 if it was given, or the model knows only one.
    duration, duration_after_vad : float
        Seconds of the sound, and of the speech in it.
    all_language_probs : list of (str, float) or None
        Probability of every language, the largest first, if the language was detected.
    transcription_options : TranscriptionOptions
        How it is transcribed.
    vad_options : dict or None
        Options of the search for speech.
    """

    language: str
    language_probability: float
    duration: float
    duration_after_vad: float
    all_language_probs: list[tuple[str, float]] | None
    transcription_options: TranscriptionOptions
    vad_options: dict[str, Any] | None
