"""lmdecode inside vLLM: its sampler on CPUs, its KV cache on disk, and beam search.

``register`` is the plug-in that vLLM calls in each of its processes, by the entry point
``lmdecode`` of the group ``vllm.general_plugins``. ``LmdecodeConnector`` is named in
``--kv-transfer-config``, and so is ``LmdecodeTier``, of vLLM's offloading. ``beam_search`` is
called with an engine.
docs/guides/serving_engines.md says how to use them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lmdecode.integrations.vllm.beam_search import beam_search
from lmdecode.integrations.vllm.sampler import register

if TYPE_CHECKING:
    from lmdecode.integrations.vllm.connector import LmdecodeConnector
    from lmdecode.integrations.vllm.tier import LmdecodeTier

__all__ = ["LmdecodeConnector", "LmdecodeTier", "beam_search", "register"]


def __getattr__(name: str) -> Any:
    # When it is asked for: the plug-in is loaded before all of vLLM can be.
    if name == "LmdecodeConnector":
        return import_module("lmdecode.integrations.vllm.connector").LmdecodeConnector
    if name == "LmdecodeTier":
        return import_module("lmdecode.integrations.vllm.tier").LmdecodeTier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
