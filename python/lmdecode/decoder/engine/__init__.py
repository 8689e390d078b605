"""``Engine``: continuous batching from prompts to texts."""

from lmdecode.decoder.engine.engine import Engine
from lmdecode.decoder.engine.request import (
    FinishReason,
    Request,
    RequestResult,
    RequestStats,
    TokenLogprob,
)
from lmdecode.decoder.engine.sequences import Grammar
from lmdecode.decoder.engine.stats import EngineStats

__all__ = [
    "Engine",
    "EngineStats",
    "FinishReason",
    "Grammar",
    "Request",
    "RequestResult",
    "RequestStats",
    "TokenLogprob",
]
