"""Code beside transformers' own in a model: methods that are overridden, and hooks.

Replacements of modules read only configs and weights, and would ignore such code.
"""

from __future__ import annotations

import functools
from inspect import isfunction, ismethod
from typing import Any

from torch import nn

__all__ = ["decides_what_is_computed", "foreign_code", "refuse_foreign_code"]

_LIBRARIES = ("transformers.", "torch.", "lmdecode.")
_MODELS = "transformers.models."
# Hooks of these libraries record outputs and move tensors, and do not change values.
_WRAPPERS = ("transformers.", "accelerate.")
# Methods that decide the result of a module: these, and all in the files of models
_METHODS = ("forward", "__call__", "prepare_inputs_for_generation")
# except methods that construct a module, are called by others, or serve training.
_OTHER_METHODS = (
    "__", "_init", "extra_repr", "get_", "prepare_decoder", "reset_", "resize_", "set_", "tie_",
)  # fmt: skip


def _home(function: Any) -> str:
    """Return the name of the module that defines an unwrapped function, and a period."""
    while True:
        if (inner := _without_torch(function)) is not function:
            function = inner
        elif isinstance(function, functools.partial):
            function = function.func
        elif ismethod(function):
            function = function.__func__
        else:
            break
    if isfunction(function):  # not its __module__, which functools.wraps copies
        return f"{function.__globals__.get('__name__')}."
    return f"{type(function).__module__}."


def _without_torch(function: Any) -> Any:
    """Return what torch has decorated or compiled, as by ``torch.no_grad()``."""
    while True:
        if hasattr(function, "_torchdynamo_orig_callable"):
            function = function._torchdynamo_orig_callable
        elif isfunction(function) and hasattr(function, "__wrapped__"):
            if not f"{function.__globals__.get('__name__')}.".startswith("torch."):
                return function
            function = function.__wrapped__
        else:
            return function


def decides_what_is_computed(method: str) -> bool:
    """Tell by its name whether a method in a model's file affects the module's result."""
    return method in _METHODS or not method.startswith(_OTHER_METHODS)


def _methods_of(kind: type) -> dict[str, type]:
    """Return the methods that affect a class's result, each with the class that defines it."""
    names = dict.fromkeys(name for name in _METHODS if hasattr(kind, name))
    for base in kind.__mro__:
        if base.__module__.startswith(_MODELS) and issubclass(base, nn.Module):
            for name, value in vars(base).items():
                if isfunction(value) and decides_what_is_computed(name):
                    names[name] = None
    return {name: next(base for base in kind.__mro__ if name in vars(base)) for name in names}


def _foreign_method(module: nn.Module, uses_kernels: bool) -> str | None:
    kind: Any = type(module)
    if kind.__module__ == "torch._dynamo.eval_frame":  # runs the module that it holds
        return None
    for name, base in _methods_of(kind).items():
        of_class, own = vars(base)[name], vars(module).get(name)
        for home in (f"{base.__module__}.", _home(of_class)):
            if not home.startswith(_LIBRARIES):
                return name
        if own is None or getattr(_without_torch(own), "__func__", None) is of_class:
            continue
        if uses_kernels and hasattr(kind, "kernel_layer_name"):
            continue
        home = _home(own)  # a method of another model is foreign, too
        if home.startswith(_MODELS) or not home.startswith((*_WRAPPERS, "lmdecode.")):
            return name
    return None


def foreign_code(module: nn.Module, *, uses_kernels: bool = False) -> str | None:
    """Describe code of other libraries that a module runs, its submodules left out; None if none.

    ``uses_kernels`` says whether ``from_pretrained`` has replaced methods by kernels of a hub.
    """
    method = _foreign_method(module, uses_kernels)
    if method is not None:
        return f"a {type(module).__name__} whose {method} is not that of transformers or torch"
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    hooks += [hook for hook in [getattr(module, "_hf_hook", None)] if hook is not None]
    for hook in hooks:
        home = _home(hook)
        if not home.startswith(_WRAPPERS):
            name = getattr(hook, "__qualname__", type(hook).__name__)
            return f"a {type(module).__name__} with the forward hook {home}{name}"
    return None


def refuse_foreign_code(op: str, model: nn.Module, expected: str) -> None:
    """Raise ValueError if a model, or a module in it, has methods or hooks of foreign code."""
    uses_kernels = bool(getattr(model, "use_kernels", False))
    of_all = nn.modules.module
    for hook in [
        *of_all._global_forward_pre_hooks.values(),
        *of_all._global_forward_hooks.values(),
    ]:
        name = getattr(hook, "__qualname__", type(hook).__name__)
        raise ValueError(
            f"{op}: all modules have the forward hook {_home(hook)}{name}; expected {expected}"
        )
    for name, module in model.named_modules():
        found = foreign_code(module, uses_kernels=uses_kernels)
        if found is not None:
            raise ValueError(f"{op}: {name or 'model'} is {found}; expected {expected}")
