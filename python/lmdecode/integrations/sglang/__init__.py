"""lmdecode inside SGLang: a sampling backend, and the storage of HiCache on disk.

``register`` is the plug-in that SGLang calls in each of its processes, by the entry point
``lmdecode`` of the group ``sglang.srt.plugins``; ``--sampling-backend lmdecode`` then chooses the
sampler. ``LmdecodeStorage`` is named in ``--hicache-storage-backend-extra-config``.
docs/guides/serving_engines.md says how to use them. ``make test-sglang`` runs both in SGLang's own
classes; its engine, which needs a GPU, has not run them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmdecode.integrations.sglang.storage import LmdecodeStorage

__all__ = ["LmdecodeStorage", "register"]


def register() -> None:
    """Add the sampling backend ``lmdecode`` to SGLang, which calls it. Done again it does nothing.

    Raises
    ------
    ImportError
        SGLang is not installed.
    """
    import_module("lmdecode.integrations.sglang.sampler").register()


def __getattr__(name: str) -> Any:
    # When it is asked for: the plug-in is loaded before all of SGLang can be.
    if name == "LmdecodeStorage":
        return import_module("lmdecode.integrations.sglang.storage").LmdecodeStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
