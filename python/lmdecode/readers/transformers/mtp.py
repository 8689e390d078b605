"""Weights that predict further tokens, which transformers does not load."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from lmdecode.linear.quantized_weight import split_columns
from lmdecode.models.configs import CausalConfig
from lmdecode.models.weights import CausalWeights
from lmdecode.readers.transformers.causal_models import causal_model_of
from lmdecode.readers.transformers.checkpoint import Checkpoint
from lmdecode.readers.transformers.module_weights import wide
from lmdecode.readers.transformers.stand_in import empty_model

__all__ = ["mtp_layer", "mtp_of", "mtp_of_folder", "mtp_shapes"]

_TYPES = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next")
_PREFIX = "mtp."
_OWN = ("fc.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight")
_IN_MODEL = {"model.embed_tokens.weight": "embedding", "lm_head.weight": "logits"}


def _refused(what: str) -> ValueError:
    return ValueError(f"Decoding.from_pretrained: {what}")


def _name(parameter: str) -> str:
    """Return the name of the tensor for a parameter of the one-layer model."""
    return _PREFIX + parameter.removeprefix("model.")


def mtp_shapes(layer: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of the layer and of the modules before it.

    The model's embedding and head are not among them.
    """
    size = layer.config.hidden_size
    shapes = {name: tuple(value.shape) for name, value in layer.named_parameters()}
    own = {name: (size, 2 * size) if name == "fc.weight" else (size,) for name in _OWN}
    return {name: shape for name, shape in shapes.items() if name not in _IN_MODEL} | own


def _check(checkpoint: Checkpoint, layer: Any) -> None:
    expected = {_name(name): list(shape) for name, shape in mtp_shapes(layer).items()}
    for name, shape in expected.items():
        if not checkpoint.has(name, shape):
            raise _refused(f"the folder has no {name} of shape {shape}; expected it with mtp=True")
    others = sorted(
        name
        for name in checkpoint.names
        if name.startswith(_PREFIX) and name not in expected and ".experts." not in name
    )
    if others:
        raise _refused(
            f"the folder has {len(others)} more tensors of mtp, {others[0]} the first; expected "
            "those of one layer, without an embedding of its own"
        )


def mtp_layer(model: Any) -> Any:
    """Return a one-layer model with attention for the head that predicts further tokens.

    Raises ValueError if models of this type have no such head.
    """
    kind = model.config.model_type
    if kind not in _TYPES:
        raise _refused(f"mtp is True for a model of {kind!r}; expected one of {', '.join(_TYPES)}")
    config = copy.deepcopy(model.config.get_text_config())
    config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    return empty_model(config)


def mtp_of(
    layer: Any, weights: CausalWeights, read: Callable[[str], Any]
) -> tuple[CausalConfig, CausalWeights]:
    """Return the config and the weights of the layer of ``mtp_layer`` and of the modules before it.

    ``weights`` are the model's: its embedding and head are shared. ``read`` returns the values of a
    parameter of ``layer`` or of the modules before it.
    """

    def shared_or_own(name: str) -> Any:
        part = _IN_MODEL.get(name)
        return read(name) if part is None else getattr(weights, part)

    config, of_layer = causal_model_of(layer, shared_or_own)
    size = config.model_size
    projection, *gammas = map(read, _OWN)
    halves: tuple[Any, Any] = split_columns(projection, size)
    return config, of_layer._replace(
        embedding_norm_gamma=1.0 + wide(gammas[0]),
        hidden_norm_gamma=1.0 + wide(gammas[1]),
        embedding_projection=halves[0],
        hidden_projection=halves[1],
    )


def mtp_of_folder(
    model: Any, weights: CausalWeights, checkpoint: Checkpoint
) -> tuple[CausalConfig, CausalWeights]:
    """Return the config and the weights of a folder's head that predicts further tokens.

    The parameters of ``model`` have no values. Raises ValueError if the folder has no such head, or
    other tensors than expected.
    """
    layer = mtp_layer(model)
    _check(checkpoint, layer)
    return mtp_of(layer, weights, lambda name: checkpoint.read(_name(name)))
