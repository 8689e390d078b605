"""Models without weights, which do everything but compute."""

from __future__ import annotations

import inspect
from typing import Any

__all__ = ["ForwardOf", "WithoutWeights", "is_stand_in", "refuse_stand_in"]


class ForwardOf:
    """Replacement for the ``forward`` of a model class, with the same signature."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    @property
    def __signature__(self) -> inspect.Signature:
        """Signature of the model's ``forward``, which ``generate()`` inspects."""
        found = inspect.signature(self._kind.forward)  # type: ignore[attr-defined]
        return found.replace(parameters=list(found.parameters.values())[1:])


class WithoutWeights(ForwardOf):
    """The ``forward`` of a stand-in, which raises an error."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Raise RuntimeError."""
        raise RuntimeError(
            f"{self._kind.__name__}: this model stands in for one that a Decoding has packed, and "
            "has no weights; expected decoding.generate, or a model that transformers has loaded"
        )


def is_stand_in(module: Any) -> bool:
    """Tell whether a model, or its encoder, has no weights."""
    return isinstance(getattr(module, "__dict__", {}).get("forward"), WithoutWeights)


def refuse_stand_in(op: str, model: Any) -> None:
    """Raise ValueError for a model without weights."""
    if is_stand_in(model):
        raise ValueError(
            f"{op}: model stands in for one that a Decoding has packed, and has no weights; "
            "expected a model that transformers has loaded, or its folder"
        )
