"""Interface of an architecture of decoder-only models: its modules and its switches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from lmdecode.decoder.config import Norm

__all__ = ["Architecture", "LayerModules", "Trunk", "refused"]


def refused(what: str, others: str = "other models", function: str = "pack_linears_") -> ValueError:
    """Return the error of a model that is not one of the table's, or has what there is not.

    It names the function that there is for others.
    """
    return ValueError(
        f"Decoding.from_pretrained: {what}; for {others} there is "
        f"lmdecode.integrations.transformers.{function}"
    )


class Trunk(NamedTuple):
    """The modules of a model, without its head.

    Attributes
    ----------
    root
        Every parameter below it must be one that is read.
    embedding, final_norm, rotary, positions
        ``positions``: an ``Embedding``. None: there is none.
    layers
        The layers, each of which ``Architecture.layer`` takes.
    """

    root: Any
    embedding: Any
    layers: Any
    final_norm: Any
    rotary: Any = None
    positions: Any = None


class LayerModules(NamedTuple):
    """The modules of one layer; the norms' names are those of ``CausalLayerWeights``.

    Attributes
    ----------
    attention
        Has ``head_dim`` and ``scaling``.
    qkv
        Those of queries, keys and values, or one of all.
    ffn_gate, ffn_up
        The same module twice: its outputs are the gate's, then the other's. No gate: None.
    """

    attention: Any
    qkv: tuple[Any, ...]
    attention_out: Any
    ffn_gate: Any
    ffn_up: Any
    ffn_down: Any
    attention_norm: Any = None
    attention_out_norm: Any = None
    query_norm: Any = None
    key_norm: Any = None
    ffn_norm: Any = None
    ffn_out_norm: Any = None


@dataclass(frozen=True)
class Architecture:
    """How the models of one type are read; a name in quotes is that of an entry of their config.

    Parameters
    ----------
    trunk, layer : callable
        A model's modules, and a layer's.
    norm, norm_epsilon
        Of every norm; the entry that has its epsilon.
    gamma_plus_one : bool
        Norms multiply by 1 + weight.
    activation
        The entry with its name.
    windows
        No layer has one; every layer has that of ``sliding_window``, if it is not None; or those
        layers that ``layer_types`` calls ``sliding_attention``.
    layers_without_positions : bool
        Layers whose attention has a false ``use_rope`` do not turn queries and keys.
    embedding_scaled : bool
        The embedding has an ``embed_scale``.
    attention_softcap, logits_softcap, embedding_multiplier, residual_multiplier, logits_divisor
        Entries; None: there is no such thing.
    must_be_off : tuple of str
        Entries that change the model into one that there is not.
    """

    trunk: Callable[[Any], Trunk]
    layer: Callable[[Any], LayerModules]
    norm: Norm = "rms_norm"
    norm_epsilon: str = "rms_norm_eps"
    gamma_plus_one: bool = False
    activation: str = "hidden_act"
    windows: Literal["none", "sliding_window", "layer_types"] = "none"
    layers_without_positions: bool = False
    embedding_scaled: bool = False
    attention_softcap: str | None = None
    logits_softcap: str | None = None
    embedding_multiplier: str | None = None
    residual_multiplier: str | None = None
    logits_divisor: str | None = None
    must_be_off: tuple[str, ...] = ()
