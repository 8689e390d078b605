"""Model files that are not transformers' own: ``gguf`` and ``ctranslate2``."""

from importlib import import_module
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    if name in ("ctranslate2", "gguf"):
        return import_module(f"lmdecode.formats.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
