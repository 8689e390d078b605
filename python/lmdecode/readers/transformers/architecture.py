"""Interface of an architecture: its modules, as of each release of transformers, and switches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import transformers
from torch import Tensor

from lmdecode.models.configs import ActivationName, Norm
from lmdecode.models.mixers import Mixer

__all__ = [
    "NORMS",
    "Architecture",
    "EncoderDecoder",
    "ExpertModules",
    "LayerModules",
    "PerLayerModules",
    "PerLayerTrunk",
    "Rows",
    "Scaled",
    "SideBySide",
    "Trunk",
    "attention_layer",
    "complete_modules",
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
    """The modules that compute the inputs of layers beside embeddings.

    ``embedding`` has ``weight`` [V, L P] and ``embed_scale``. ``projection`` is a linear module [L
    P, D], multiplied by ``projection_scale`` before its ``norm`` [P]. ``scale`` multiplies the sum.
    """

    embedding: Any
    projection: Any
    norm: Any
    projection_scale: float
    scale: float


class Trunk(NamedTuple):
    """The modules of a model, without its head.

    Every parameter below ``root`` must be read. A module that the model lacks is None.
    ``positions`` is an ``Embedding``. Each layer is an argument of ``Architecture.layer``.
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
    """Linear modules of different inputs, ``Scaled`` ones too; their outputs are added."""

    modules: tuple[Any, ...]


def linears_of(part: Any) -> list[Any]:
    """Return the modules of a linear part: one, several, or a module with some of its rows."""
    if isinstance(part, (Rows, Scaled)):
        return linears_of(part.module)
    if isinstance(part, SideBySide):
        return [module for one in part.modules for module in linears_of(one)]
    return [part]


class ExpertModules(NamedTuple):
    """The modules of a layer's experts.

    ``router`` has ``weight`` [E, D] and may have ``bias``. ``experts`` has ``gate_up_proj`` and
    ``down_proj`` with E in front, and may have their biases. They are [E, 2 X, D], gates first, and
    [E, D, X]; if ``is_interleaved``, [E, D, 2 X] with gates at even places, and [E, X, D].

    Pairs are a module and the name of its parameter or buffer. ``choice_bias`` [E] is added to the
    scores that choose experts, ``router_norm`` [D] is the gamma of a norm before the router (times
    ``router_norm_factor``), and ``scales`` [E] multiplies the weights. ``shared_gate`` is the [1,
    D] gate of the shared expert; its layers are ``ffn_gate`` and so on.
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
    """The modules of one layer; norms are named as in ``CausalLayerWeights``.

    ``attention`` has ``head_dim`` and ``scaling``; it is None if the layer has a mixer. ``qkv``
    holds the modules of queries, keys and values, or one for all three, or ``Rows`` of modules;
    with a mixer, the modules of its first projection. It has no keys and values with
    ``shared_keys``, and no values with ``keys_are_values``. If ``ffn_gate`` and ``ffn_up`` are the
    same module, its outputs are the gate's, then the other's; ``ffn_gate`` is None without a gate.

    ``mixer`` holds sizes and ``convolution`` is a module. ``delta_rule`` is the module with
    ``A_log``, ``dt_bias`` and ``norm`` (and ``D`` for a ``Mamba2``). With ``experts``, ``ffn_up``
    and so on are the shared expert's, or None. ``scale`` is a module and the name of its buffer or
    parameter [1]; None: 1. Queries and keys are rotated if ``is_turned``. ``ffn_beside`` is the
    config's.
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
    is_turned: bool = True
    ffn_beside: bool = False


# The fields of ``LayerModules`` that are norms.
NORMS = ("attention_norm", "attention_out_norm", "query_norm", "key_norm", "ffn_norm",
         "ffn_out_norm", "per_layer_out_norm", "experts_norm", "experts_out_norm",
         "shared_out_norm")  # fmt: skip


def gated_ffn(ffn: Any) -> dict[str, Any]:
    """Return the arguments of ``LayerModules`` for a feed-forward layer with Llama's names."""
    return {"ffn_gate": ffn.gate_proj, "ffn_up": ffn.up_proj, "ffn_down": ffn.down_proj}


def joined_ffn(ffn: Any) -> dict[str, Any]:
    """Return them for a feed-forward layer of Granite: one module has the gate and ``ffn_up``."""
    return {"ffn_gate": ffn.input_linear, "ffn_up": ffn.input_linear, "ffn_down": ffn.output_linear}


def trunk_of(body: Any) -> Trunk:
    """Return the modules of a body with Llama's names."""
    return Trunk(body, body.embed_tokens, body.layers, body.norm, rotary=body.rotary_emb)


def attention_layer(layer: Any) -> LayerModules:
    """Return a layer's modules with Llama's names, without the feed-forward layer's."""
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

    ``trunk`` and ``layer`` return the modules of a model and of a layer. ``norm_epsilon`` and
    ``activation`` are entries; ``fixed_activation`` is the activation itself, if the config has no
    entry. With ``gamma_plus_one`` norms multiply by 1 + weight. With ``value_norm`` the heads of
    values have a norm without weights. With ``attention_gate`` the last rows of attention layers'
    ``qkv`` are an output gate's.

    ``windows`` says which layers have a window: none; all, of ``sliding_window`` tokens, if that is
    not None; or those that ``layer_types`` calls ``sliding_attention``. Softcaps, multipliers and
    the divisor are entries, or None. ``experts`` returns, for a config, the arguments of
    ``ExpertsConfig`` but ``layers``. Entries in ``must_be_off`` turn on features that are not
    supported.
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
    embedding_scaled: bool = False
    attention_softcap: str | None = None
    logits_softcap: str | None = None
    embedding_multiplier: str | None = None
    residual_multiplier: str | None = None
    logits_divisor: str | None = None
    logits_multiplier: str | None = None
    experts: Callable[[Any], dict[str, Any]] | None = None
    must_be_off: tuple[str, ...] = ()


@dataclass(frozen=True)
class EncoderDecoder:
    """How to read the encoder and the decoder of the models of one type.

    Their modules are those of BART, or with ``is_t5`` those of T5; the other fields are of BART's.
    ``position_offset`` returns the row of position 0 in a module of positions. With
    ``skips_padding`` padding has no position. With ``scaled_embedding`` the config's
    ``scale_embedding`` counts. Without ``reads_tokens`` the encoder reads rows of features.
    """

    is_t5: bool = False
    norm_first: bool = True
    position_offset: Callable[[Any], int] = lambda positions: 0
    skips_padding: bool = False
    scaled_embedding: bool = True
    reads_tokens: bool = True


# --- Modules of earlier releases ------------------------------------------------------------------


def _gpt2_scaling(attention: Any) -> float:
    scale = attention.head_dim**-0.5 if attention.scale_attn_weights else 1.0
    return scale / (attention.layer_idx + 1 if attention.scale_attn_by_inverse_layer_idx else 1)


def _gemma_scale(embedding: Any) -> Tensor:
    return torch.tensor(embedding.embedding_dim**0.5, dtype=torch.float64, device="cpu")


# Type of model to the attribute that its modules lack, another one that tells these modules from
# others, and the value.
_ATTRIBUTES: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    "gpt2": ("scaling", "scale_attn_weights", _gpt2_scaling),
    **dict.fromkeys(("lfm2", "lfm2_moe"), ("conv_kernel_size", "L_cache", lambda m: m.L_cache)),
    **dict.fromkeys(("gemma", "gemma2"), ("embed_scale", "embedding_dim", _gemma_scale)),
    "falcon_h1": ("norm", "mamba_rms_norm", lambda mixer: None),
    "gpt_neox": ("head_dim", "head_size", lambda attention: attention.head_size),
}  # fmt: skip


def complete_modules(model: Any) -> None:
    """Set the attributes that the modules of a model have in later releases alone.

    Raises ``ValueError`` for a model whose experts have another layout there.
    """
    config = model.config
    attribute, mark, value_of = _ATTRIBUTES.get(config.model_type, ("", "", None))
    for module in model.modules():
        if value_of is not None and hasattr(module, mark) and not hasattr(module, attribute):
            setattr(module, attribute, value_of(module))
        if config.model_type == "gpt_oss" and hasattr(module, "limit"):
            # Here the model does not look at its config for them.
            config.swiglu_alpha, config.swiglu_limit = module.alpha, module.limit
        if "ParallelExperts" in type(module).__name__:
            raise refused(
                f"model is a {type(model).__name__} of transformers {transformers.__version__}, "
                "which stores its experts in another layout; expected a later release"
            )
