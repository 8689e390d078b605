"""The weights of a folder that predict further tokens, which transformers does not load."""

from __future__ import annotations

import copy
from typing import Any

from lmdecode.decoder.causal_config import CausalConfig, CausalWeights
from lmdecode.integrations.transformers.decoding.causal_models import causal_model_of
from lmdecode.integrations.transformers.decoding.causal_models.architecture import refused
from lmdecode.integrations.transformers.decoding.causal_models.values import wide
from lmdecode.integrations.transformers.decoding.checkpoint import Checkpoint, empty_model

__all__ = ["mtp_of"]

_TYPES = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next")
_PREFIX = "mtp."
_OWN = ("fc.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight")
_IN_MODEL = {"model.embed_tokens.weight": "embedding", "lm_head.weight": "logits"}


def _name(parameter: str) -> str:
    """Return the tensor that is a parameter of a model of one layer."""
    return _PREFIX + parameter.removeprefix("model.")


def _one_layer(config: Any) -> Any:
    """Return a model of one layer with attention, as the one that predicts further tokens is."""
    config = copy.deepcopy(config.get_text_config())
    config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    return empty_model(config)


def _check(checkpoint: Checkpoint, model: Any, size: int) -> None:
    shapes = {name: list(value.shape) for name, value in model.named_parameters()}
    expected = {_name(name): shape for name, shape in shapes.items() if name not in _IN_MODEL}
    own = {"fc.weight": [size, 2 * size]}
    expected |= {_PREFIX + name: own.get(name, [size]) for name in _OWN}
    for name, shape in expected.items():
        if not checkpoint.has(name, shape):
            raise refused(f"the folder has no {name} of shape {shape}; expected it with mtp=True")
    others = sorted(
        name
        for name in checkpoint.names
        if name.startswith(_PREFIX) and name not in expected and ".experts." not in name
    )
    if others:
        raise refused(
            f"the folder has {len(others)} more tensors of mtp, {others[0]} the first; expected "
            "those of one layer, without an embedding of its own"
        )


def mtp_of(
    model: Any, weights: CausalWeights, checkpoint: Checkpoint
) -> tuple[CausalConfig, CausalWeights]:
    """Return the config and the weights of what predicts further tokens.

    Parameters
    ----------
    model, weights
        The model of the folder, whose parameters have no values, and its weights.
    checkpoint
        The tensors of the folder.

    Raises
    ------
    ValueError
        The folder has none, or other tensors than expected.
    """
    kind = model.config.model_type
    if kind not in _TYPES:
        raise refused(f"mtp is True for a model of {kind!r}; expected one of {', '.join(_TYPES)}")
    size = weights.embedding.shape[1]
    layer = _one_layer(model.config)
    _check(checkpoint, layer, size)

    def read(name: str) -> Any:
        part = _IN_MODEL.get(name)
        return checkpoint.read(_name(name)) if part is None else getattr(weights, part)

    config, of_layer = causal_model_of(layer, read)
    projection, *gammas = (checkpoint.read(_PREFIX + name) for name in _OWN)
    return config, of_layer._replace(
        embedding_norm_gamma=1.0 + wide(gammas[0]),
        hidden_norm_gamma=1.0 + wide(gammas[1]),
        embedding_projection=projection[:, :size],
        hidden_projection=projection[:, size:],
    )
