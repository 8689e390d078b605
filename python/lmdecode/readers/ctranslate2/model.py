"""Models of CTranslate2's folders: transformers' classes with the weights of the file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Embedding, LayerNorm, Parameter
from transformers import AutoConfig, GenerationConfig

from lmdecode.readers.ctranslate2.folder import Source, open_folder
from lmdecode.readers.transformers.causal_models import causal_model_of
from lmdecode.readers.transformers.models import parts_of
from lmdecode.readers.transformers.stand_in import empty_model, skeleton

__all__ = ["load_parts"]

# Tables with their own number of rows in the file, where the config has one for several.
_FREE = ("embed_positions.weight", "embed_positions.weights", "encoder.embed_tokens.weight")


def load_parts(folder: str | os.PathLike[str]) -> tuple[Any, Any, Any]:
    """Return a folder's model, and its config and weights for ``Decoding``.

    Raises ValueError if it is damaged, or of an unsupported architecture.
    """
    source = open_folder(Path(folder))
    model = _model_of(source)
    if model.config.is_encoder_decoder:
        return model, *parts_of(model)
    return model, *causal_model_of(model, source.read)


def _model_of(source: Source) -> Any:
    """Return the model of a file: an encoder-decoder one in float32, else one without weights.

    Raises ValueError if the file's tensors do not fit its architecture.
    """
    fields = dict(source.config)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    config._name_or_path = str(source.folder)
    generation = GenerationConfig(**source.generation)
    if config.is_encoder_decoder:
        model = empty_model(config)
        model.generation_config = generation
        _fill(model, source)
        if source.norm_epsilon is not None:
            for module in model.modules():
                if isinstance(module, LayerNorm):
                    module.eps = source.norm_epsilon
    else:
        model = skeleton(config, generation)
        _check_shapes(model, source)
    return model


def _refused(source: Source, what: str) -> ValueError:
    kind = source.config["model_type"]
    return ValueError(f"{source.file.path} {what}, as a model of type {kind!r}")


def _places(model: Any, source: Source) -> dict[str, Tensor]:
    """Return the parameters of a model, and the buffers that the file has, by their names."""
    places: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    places |= {name: value for name, value in model.named_buffers() if name in source.parts}
    missing, more = places.keys() - source.parts.keys(), source.parts.keys() - places.keys()
    if missing or more:
        raise _refused(source, f"lacks {sorted(missing)[:3]} and has {sorted(more)[:3]} beside")
    return places


def _check(source: Source, name: str, value: Tensor, place: Tensor) -> Tensor:
    """Return a value in the shape of its place."""
    if value.dim() == 1 and place.dim() == 2:  # BART's final_logits_bias
        value = value[None]
    if value.shape != place.shape and not (
        name.endswith(_FREE) and value.shape[1:] == place.shape[1:]
    ):
        raise _refused(
            source, f"has shape {list(value.shape)} for {name}; expected {list(place.shape)}"
        )
    return value


def _check_shapes(model: Any, source: Source) -> None:
    """Raise ValueError if a tensor of the file has another shape than its parameter."""
    for name, place in _places(model, source).items():
        _check(source, name, source.parts[name].empty(source.file), place)


def _fill(model: Any, source: Source) -> None:
    """Fill a model with the file's weights, in float32; equal parts become one tensor."""
    made: dict[Any, Parameter] = {}
    for name, place in _places(model, source).items():
        path, _, own = name.rpartition(".")
        module, part = model.get_submodule(path), source.parts[name]
        if own in module._buffers:
            module._buffers[own] = _check(source, name, source.read(name).float(), place)
            continue
        if part not in made or part.variable is None:
            value = _check(source, name, source.read(name).to(torch.float32), place)
            made[part] = Parameter(value, requires_grad=False)
        _check(source, name, made[part], place)
        setattr(module, own, made[part])
        if isinstance(module, Embedding):
            module.num_embeddings = rows = len(made[part])
            if module.padding_idx is not None and module.padding_idx >= rows:
                module.padding_idx = None  # it is the other vocabulary's
