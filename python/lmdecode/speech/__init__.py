"""Speech to text: ``Transcriber``."""

from lmdecode.speech.options import TranscriptionOptions
from lmdecode.speech.segments import Segment, TranscriptionInfo, Word
from lmdecode.speech.transcriber import Segments, Transcriber

__all__ = [
    "Segment",
    "Segments",
    "Transcriber",
    "TranscriptionInfo",
    "TranscriptionOptions",
    "Word",
]
