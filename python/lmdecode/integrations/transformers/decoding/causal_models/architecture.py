"""Interface of an architecture of decoder-only models: its modules and its switches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor

from lmdecode.decoder.config import ActivationName, Norm
from lmdecode.decoder.mixers import Mixer

__all__ = [
    "NORMS",
    "Architecture",
    "ExpertModules",
    "LayerModules",
    "PerLayerModules",
    "PerLayerTrunk",
    "Rows",
    "Scaled",
    "SideBySide",
    "Trunk",
    "attention_layer",
    "gated_ffn",
    "joined_ffn",
    "linears_of",
    "refused",
    "trunk_of",
]


def refused(what: str, others: str = "other models", function: str = "pack_linears_") -> ValueError:
    """Return the error for a model that is not in the table, or has an unsupported feature.

    It names the function for other models.
    """
    return ValueError(
        f"Decoding.from_pretrained: {what}; for {others} there is "
        f"lmdecode.integrations.transformers.{function}"
    )


class PerLayerTrunk(NamedTuple):
    """What a model gives to its layers beside embeddings.

    Attributes
    ----------
    embedding
        Has ``weight`` [V, L P] and ``embed_scale``.
    projection, norm
        A linear module [L P, D], and a norm of [P].
    projection_scale, scale : float
        What the projection is multiplied by before its norm, and what all is at last.
    """

    embedding: Any
    projection: Any
    norm: Any
    projection_scale: float
    scale: float


class Trunk(NamedTuple):
    """The modules of a model, without its head.

    Attributes
    ----------
    root
        Every parameter below it must be read.
    embedding, final_norm, rotary, positions
        ``positions`` is an ``Embedding``. None if the model has no such module.
    layers
        The layers, each an argument of ``Architecture.layer``.
    per_layer : PerLayerTrunk or None
        Where layers have inputs beside embeddings.
    """

    root: Any
    embedding: Any
    layers: Any
    final_norm: Any
    rotary: Any = None
    positions: Any = None
    per_layer: PerLayerTrunk | None = None


class Rows(NamedTuple):
    """Some rows of a linear module's weights, in another order: ``order`` is [n] int64."""

    module: Any
    order: Tensor


class Scaled(NamedTuple):
    """A linear module whose inputs and outputs have factors."""

    module: Any
    inputs: float = 1.0
    outputs: float | Tensor = 1.0


class SideBySide(NamedTuple):
    """Linear modules, ``Scaled`` ones too, of different inputs, whose outputs are added."""

    modules: tuple[Any, ...]


def linears_of(part: Any) -> list[Any]:
    """Return the modules of a linear part, which may have some of theirs, or more than one."""
    if isinstance(part, (Rows, Scaled)):
        return linears_of(part.module)
    if isinstance(part, SideBySide):
        return [module for one in part.modules for module in linears_of(one)]
    return [part]


class ExpertModules(NamedTuple):
    """The modules of a layer's experts.

    Attributes
    ----------
    router
        Has ``weight`` [E, D], and may have ``bias``.
    experts
        Has ``gate_up_proj`` and ``down_proj``, with E in front, and may have their biases.
    choice_bias
        A module and the name of its parameter or buffer [E], added to what experts are chosen by.
    shared_gate
        Of the shared expert, whose layers are ``ffn_gate`` and so on: [1, D].
    is_interleaved : bool
        Whether ``gate_up_proj`` is [E, D, 2 X], gates at even places; else it is [E, 2 X, D], gates
        first. ``down_proj`` likewise is [E, X, D], or [E, D, X].
    router_norm, scales
        Modules and the names of their parameters: the gamma of a norm of what the router reads [D],
        to be multiplied by ``router_norm_factor``; and what weights are multiplied by [E].
    """

    router: Any
    experts: Any
    choice_bias: tuple[Any, str] | None = None
    shared_gate: Any = None
    is_interleaved: bool = False
    router_norm: tuple[Any, str] | None = None
    router_norm_factor: float = 1.0
    scales: tuple[Any, str] | None = None


class PerLayerModules(NamedTuple):
    """Linear modules of a layer with inputs beside embeddings: [P, D] and [D, P]."""

    gate: Any
    out: Any


class LayerModules(NamedTuple):
    """The modules of one layer; the norms' names are those of ``CausalLayerWeights``.

    Attributes
    ----------
    attention
        Has ``head_dim`` and ``scaling``. None if the layer has a mixer.
    qkv
        Modules of queries, keys and values, or one for all three, or ``Rows`` of modules. Of a
        layer with a mixer those of its first projection.
    ffn_gate, ffn_up
        If both are the same module, its outputs are the gate's, then the other's. None: no gate.
    mixer, convolution, delta_rule
        A mixer's sizes, the module of its convolution, and of a ``GatedDeltaRule`` or a ``Mamba2``
        the module that has ``A_log``, ``dt_bias`` and ``norm``, of a ``Mamba2`` ``D``, too.
    experts : ExpertModules or None
        Where there are any, ``ffn_up`` and so on are the shared expert's, or None.
    sinks
        Whether the attention has a parameter ``sinks``.
    shared_keys, keys_are_values
        As of ``CausalConfig``; ``qkv`` then has no keys and values, or no values.
    per_layer : PerLayerModules or None
        Where the trunk has such inputs.
    scale
        A module and the name of its buffer or parameter [1]; None: 1.
    """

    attention: Any
    qkv: tuple[Any, ...]
    attention_out: Any
    ffn_gate: Any = None
    ffn_up: Any = None
    ffn_down: Any = None
    attention_norm: Any = None
    attention_out_norm: Any = None
    query_norm: Any = None
    key_norm: Any = None
    ffn_norm: Any = None
    ffn_out_norm: Any = None
    mixer: Mixer | None = None
    convolution: Any = None
    delta_rule: Any = None
    experts: ExpertModules | None = None
    sinks: bool = False
    shared_keys: int | None = None
    keys_are_values: bool = False
    per_layer: PerLayerModules | None = None
    per_layer_out_norm: Any = None
    experts_norm: Any = None
    experts_out_norm: Any = None
    shared_out_norm: Any = None
    scale: tuple[Any, str] | None = None


# The fields of ``LayerModules`` that are norms.
NORMS = ("attention_norm", "attention_out_norm", "query_norm", "key_norm", "ffn_norm",
         "ffn_out_norm", "per_layer_out_norm", "experts_norm", "experts_out_norm",
         "shared_out_norm")  # fmt: skip


def gated_ffn(ffn: Any) -> dict[str, Any]:
    """Return the arguments of ``LayerModules`` for a feed-forward layer with Llama's names."""
    return {"ffn_gate": ffn.gate_proj, "ffn_up": ffn.up_proj, "ffn_down": ffn.down_proj}


def joined_ffn(ffn: Any) -> dict[str, Any]:
    """Return them for a feed-forward layer of Granite: one module has the gate and the other."""
    return {"ffn_gate": ffn.input_linear, "ffn_up": ffn.input_linear, "ffn_down": ffn.output_linear}


def trunk_of(body: Any) -> Trunk:
    """Return the modules of a body with Llama's names."""
    return Trunk(body, body.embed_tokens, body.layers, body.norm, rotary=body.rotary_emb)


def attention_layer(layer: Any) -> LayerModules:
    """Return all modules of a layer with Llama's names but those of the feed-forward layer."""
    attention = layer.self_attn
    return LayerModules(
        attention=attention,
        attention_norm=layer.input_layernorm,
        qkv=(attention.q_proj, attention.k_proj, attention.v_proj),
        attention_out=attention.o_proj,
        ffn_norm=layer.post_attention_layernorm,
    )


@dataclass(frozen=True)
class Architecture:
    """How to read the models of one type. Strings are names of entries of their config.

    Parameters
    ----------
    trunk, layer : callable
        They return a model's modules, and a layer's.
    norm, norm_epsilon
        Kind of every norm, and the entry of its epsilon.
    gamma_plus_one : bool
        Norms multiply by 1 + weight.
    activation
        The entry of the activation's name.
    fixed_activation
        The activation, if the config has no such entry.
    value_norm : bool
        Heads of values have a norm without weights.
    attention_gate : bool
        The last rows of attention layers' ``qkv`` are an output gate's.
    windows
        Which layers have a window: none; all, of ``sliding_window`` tokens, if that is not None; or
        those that ``layer_types`` calls ``sliding_attention``.
    layers_without_positions : bool
        Layers whose attention has a false ``use_rope`` do not rotate queries and keys.
    embedding_scaled : bool
        The embedding has an ``embed_scale``.
    attention_softcap, logits_softcap, embedding_multiplier, residual_multiplier, logits_divisor
        Entries; None if the architecture has no such number.
    logits_multiplier
        Likewise.
    experts : callable, optional
        Returns, for a config, the arguments of ``ExpertsConfig`` but ``layers``.
    must_be_off : tuple of str
        Entries that must be off, as their feature is not supported.
    """

    trunk: Callable[[Any], Trunk]
    layer: Callable[[Any], LayerModules]
    norm: Norm = "rms_norm"
    norm_epsilon: str = "rms_norm_eps"
    gamma_plus_one: bool = False
    activation: str = "hidden_act"
    fixed_activation: ActivationName | None = None
    value_norm: bool = False
    attention_gate: bool = False
    windows: Literal["none", "sliding_window", "layer_types"] = "none"
    layers_without_positions: bool = False
    embedding_scaled: bool = False
    attention_softcap: str | None = None
    logits_softcap: str | None = None
    embedding_multiplier: str | None = None
    residual_multiplier: str | None = None
    logits_divisor: str | None = None
    logits_multiplier: str | None = None
    experts: Callable[[Any], dict[str, Any]] | None = None
    must_be_off: tuple[str, ...] = ()
