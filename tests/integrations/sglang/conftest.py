"""SGLang's modules on a CPU: they import torchvision, of which no build for CPUs is on PyPI."""

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Empty(ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _EmptyTorchvision(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        is_of_it = name.partition(".")[0] == "torchvision"
        return ModuleSpec(name, self, is_package=True) if is_of_it else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


if importlib.util.find_spec("sglang") and not importlib.util.find_spec("torchvision"):
    import sglang  # noqa: F401  # patches what transformers has, which asks for torchvision

    sys.meta_path.append(_EmptyTorchvision())
