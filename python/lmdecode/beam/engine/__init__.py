"""``BeamSearch``: requests of different widths and rules come and go in one beam search."""

from lmdecode.beam.engine.request import BeamRequest, BeamResult
from lmdecode.beam.engine.search import BeamSearch, BeamSearchOutput, BeamSequences
from lmdecode.beam.engine.trace import BeamTrace, format_trace

__all__ = [
    "BeamRequest",
    "BeamResult",
    "BeamSearch",
    "BeamSearchOutput",
    "BeamSequences",
    "BeamTrace",
    "format_trace",
]
