"""lmdecode inside Ray: batch jobs of Ray Data.

``Generate``, ``Translate`` and ``Transcribe`` are classes for ``Dataset.map_batches``.
docs/guides/serving_engines.md says how to use them.
"""

from __future__ import annotations

from lmdecode._checks import install_hint

try:
    import ray as _ray  # noqa: F401  before the modules that need it
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"lmdecode.integrations.ray needs Ray and transformers: {install_hint('ray')}"
    ) from error

from lmdecode.integrations.ray.data import Generate, Transcribe, Translate

__all__ = ["Generate", "Transcribe", "Translate"]
