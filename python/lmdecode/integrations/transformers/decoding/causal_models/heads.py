"""Sizes of the heads of a model's layers, and of their inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lmdecode.decoder.causal_config import Heads
from lmdecode.integrations.transformers.decoding.causal_models.architecture import (
    LayerModules,
    Trunk,
    refused,
)

__all__ = ["heads_of", "per_layer_numbers"]


def heads_of(
    num_heads: int,
    layers: Sequence[LayerModules],
    windows: Sequence[int | None],
    rotary: Sequence[int | None],
    frequencies: Sequence[Tensor],
) -> tuple[Heads, Heads]:
    """Return the heads of layers with a window, and of those without.

    Parameters
    ----------
    num_heads
        Of queries.
    layers, windows, rotary
        Of each layer its modules, its window and which of ``frequencies`` turn its heads.

    Raises
    ------
    ValueError
        Layers that are alike in their window have heads of several kinds.
    """
    by_kind: dict[bool, set[Heads]] = {True: set(), False: set()}
    for layer, window, turn in zip(layers, windows, rotary, strict=True):
        if (attention := layer.attention) is None:
            continue
        groups = getattr(attention, "num_key_value_groups", 1)
        turned = 0 if turn is None else 2 * frequencies[turn].shape[0]
        heads = Heads(num_heads, num_heads // groups, attention.head_dim, turned)
        by_kind[window is not None].add(heads)
    found = [_one_kind(by_kind[kind] or by_kind[not kind]) for kind in (True, False)]
    return found[0], found[1]


def _one_kind(kinds: set[Heads]) -> Heads:
    """Return the heads that layers have in common; layers that are not turned fit any."""
    most = max(heads.rotary_size for heads in kinds)
    found = {heads._replace(rotary_size=heads.rotary_size or most) for heads in kinds}
    if len(found) > 1:
        sizes = " and ".join(
            f"{h.num_kv_heads} heads of {h.head_size}, {h.rotary_size} turned"
            for h in sorted(found)
        )
        raise refused(f"layers that are alike in their window have {sizes}; expected one kind")
    return found.pop()


def per_layer_numbers(trunk: Trunk, num_layers: int, norm_epsilon: float) -> dict[str, Any]:
    """Return what ``CausalConfig`` has of inputs beside embeddings."""
    if trunk.per_layer is None:
        return {}
    embedding, scale = trunk.per_layer.embedding, trunk.per_layer.scale
    return {
        "per_layer_size": embedding.weight.shape[1] // num_layers,
        "per_layer_scale": float(embedding.embed_scale.to(embedding.weight.dtype)) * scale,
        # A norm of what is multiplied by a number is the norm with another epsilon.
        "per_layer_epsilon": norm_epsilon / trunk.per_layer.projection_scale**2,
    }
