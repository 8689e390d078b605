"""``BeamSearch``: requests of different widths and rules come and go in one beam search."""

from lmdecode.beam.engine.request import BeamRequest, BeamResult
from lmdecode.beam.engine.search import BeamSearch, RowTokens, StepOutput
from lmdecode.beam.engine.trace import BeamTrace, format_trace

__all__ = [
    "BeamRequest",
    "BeamResult",
    "BeamSearch",
    "BeamTrace",
    "RowTokens",
    "StepOutput",
    "format_trace",
]
