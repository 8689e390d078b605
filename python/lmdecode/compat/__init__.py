"""The ops under the names and rules of other libraries: ``ascend``, ``faster_transformer``."""

from importlib import import_module
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    if name in ("ascend", "faster_transformer"):
        return import_module(f"lmdecode.compat.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
