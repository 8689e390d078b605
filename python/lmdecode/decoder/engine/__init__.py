"""``Engine``: continuous batching from prompts to texts."""

from lmdecode.decoder.engine.engine import Engine, EngineStats
from lmdecode.decoder.engine.request import (
    FinishReason,
    Grammar,
    Request,
    RequestResult,
    RequestStats,
    TokenLogprob,
)

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
