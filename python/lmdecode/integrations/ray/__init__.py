"""lmdecode inside Ray: batch jobs of Ray Data, and completions by Ray Serve.

``Generate``, ``Translate`` and ``Transcribe`` are classes for ``Dataset.map_batches``.
``build_app`` makes an application of Ray Serve.
docs/guides/serving_engines.md says how to use them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lmdecode._checks import install_hint

try:
    import ray as _ray  # noqa: F401  before the modules that need it
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"lmdecode.integrations.ray needs Ray and transformers: {install_hint('ray')}"
    ) from error

from lmdecode.integrations.ray.data import Generate, Transcribe, Translate

if TYPE_CHECKING:
    from lmdecode.integrations.ray.app import build_app

__all__ = ["Generate", "Transcribe", "Translate", "build_app"]


def __getattr__(name: str) -> Any:
    # When it is asked for: jobs of Ray Data need neither Ray Serve nor FastAPI.
    if name == "build_app":
        return import_module("lmdecode.integrations.ray.app").build_app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
