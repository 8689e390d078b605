"""Shape-only implementations of every op, for torch.compile and export; ``_ops`` registers them."""

from lmdecode._fakes import attention, beam, decoder, kv_cache, linear, sampling, system
from lmdecode._fakes.registry import FAKES

__all__ = [
    "FAKES",
    "attention",
    "beam",
    "decoder",
    "kv_cache",
    "linear",
    "sampling",
    "system",
]
