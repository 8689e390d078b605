"""Models without weights, which do everything but compute."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    GenerationConfig,
)

from lmdecode.readers.transformers.architecture import complete_modules

__all__ = [
    "ForwardOf",
    "auto_class_of",
    "empty_model",
    "is_stand_in",
    "refuse_stand_in",
    "skeleton",
    "skeleton_of",
    "without_weights",
]

# Types with other names of parameters in the causal language model than in their files.
_WITH_IMAGES = ("qwen3_5", "qwen3_5_moe")


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


class _EmptyOnMeta(TorchFunctionMode):
    """Make ``torch.empty``, which creates weights, return tensors without memory in this thread.

    Buffers are computed, so they have values.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if func is torch.empty and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def without_weights(model: Any) -> Any:
    """Replace each parameter of a model by one expanded value of the same shape and dtype.

    Running the model, its encoder or its decoder raises an error.
    """
    replaced: dict[int, Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in replaced:
                value = torch.zeros((), dtype=parameter.dtype, device="cpu").expand(parameter.shape)
                replaced[id(parameter)] = Parameter(value, requires_grad=False)
            setattr(module, name, replaced[id(parameter)])
    model.forward = WithoutWeights(type(model))
    if model.config.is_encoder_decoder:
        for stack in (model.get_encoder(), model.get_decoder()):
            stack.forward = WithoutWeights(type(stack))
    return model


def auto_class_of(config: Any) -> Any:
    """Return the transformers class that makes the model for a config's ``Decoding``."""
    if config.model_type in _WITH_IMAGES:
        return AutoModelForImageTextToText
    if not config.is_encoder_decoder:
        return AutoModelForCausalLM
    speech = AutoModelForSpeechSeq2Seq
    return speech if type(config) in speech._model_mapping else AutoModelForSeq2SeqLM


def empty_model(config: Any) -> Any:
    """Return the model of a config; its buffers have values, its parameters do not yet."""
    kind = auto_class_of(config)
    with torch.device("cpu"):
        with _EmptyOnMeta():
            model = kind.from_config(config, dtype=torch.float32)
        if any(buffer.is_meta for buffer in model.buffers()):  # one is written to after torch.empty
            model = kind.from_config(config, dtype=torch.float32)
    complete_modules(model)
    return model.eval()


def skeleton(config: Any, generation_config: GenerationConfig | None = None) -> Any:
    """Return the model of a config, with parameters that take no memory.

    Its ``generate()`` does everything except running the model.
    """
    model = without_weights(empty_model(config))
    if generation_config is not None:
        model.generation_config = generation_config
    return model


def skeleton_of(folder: Path, config: Any = None) -> Any:
    """Return the skeleton for a folder's configs; the model's config is read if not given."""
    generation_config = None
    if (folder / "generation_config.json").is_file():
        generation_config = GenerationConfig.from_pretrained(folder)
    if config is None:
        config = AutoConfig.from_pretrained(folder)
    return skeleton(config, generation_config)
