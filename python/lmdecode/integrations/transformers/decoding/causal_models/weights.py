"""A model of transformers, read by its entry of the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lmdecode.decoder.causal_config import (
    CausalConfig,
    CausalLayerWeights,
    CausalWeights,
)
from lmdecode.decoder.mixers import Mamba2
from lmdecode.integrations.transformers.decoding.causal_models.architecture import (
    NORMS,
    Architecture,
    ExpertModules,
    LayerModules,
    Rows,
    Scaled,
    SideBySide,
    Trunk,
    refused,
)
from lmdecode.integrations.transformers.decoding.causal_models.architectures import (
    CAUSAL_MODEL_TYPES,
)
from lmdecode.integrations.transformers.decoding.causal_models.experts import (
    expert_weights,
    experts_config,
    inner_size,
)
from lmdecode.integrations.transformers.decoding.causal_models.heads import (
    heads_of,
    per_layer_numbers,
)
from lmdecode.integrations.transformers.decoding.causal_models.module_checks import (
    check_modules,
)
from lmdecode.integrations.transformers.decoding.causal_models.values import (
    chunks,
    floats,
    scaled,
    times,
    wide,
)
from lmdecode.integrations.transformers.decoding.modules import ACTIVATIONS, joined
from lmdecode.linear.quantized_weight import index_rows, join_columns

__all__ = ["causal_model_of", "refuse_rope_types"]

# The types of rotary embeddings whose frequencies do not depend on the length of the text.
_ROPE_TYPES = ("default", "linear", "llama3", "proportional", "yarn")


def refuse_rope_types(config: Any) -> None:
    """Raise ValueError for rotary embeddings of an unknown type: no model can be made."""
    rope = getattr(config, "rope_parameters", None) or {}
    by_kind = [entry for entry in rope.values() if isinstance(entry, dict)]
    for entry in by_kind or [rope]:
        _refuse_rope_type(entry.get("rope_type", "default"))


def _refuse_rope_type(rope_type: Any) -> None:
    if rope_type not in _ROPE_TYPES:
        raise refused(f"the rope_type is {rope_type!r}; expected one of {', '.join(_ROPE_TYPES)}")


def causal_model_of(
    model: Any, read: Callable[[str], Any] | None = None
) -> tuple[CausalConfig, CausalWeights]:
    """Return the config and the weights of a decoder-only model.

    Weights are the model's own tensors, except that queries, keys and values are joined, and that
    a factor or 1 + weight is folded into some. The weights of a layer are made each time it is
    requested, so that only one layer needs to be in memory at a time.

    Parameters
    ----------
    model
        A causal language model of transformers, of a type in ``CAUSAL_MODEL_TYPES``.
    read : callable, optional
        Returns the parameter of a name, for a model whose parameters have no values. A linear
        weight or an embedding may be a ``QuantizedWeight``, [out, in] even for a ``Conv1D``. Then
        those of the result are, too, unless a factor is folded in. Of ``gate_up_proj`` and
        ``down_proj`` of experts it returns a function of an expert's index: to its gate and its up,
        or to its down, [out, in].

    Raises
    ------
    ValueError
        The model has another type, or a feature that ``CausalConfig`` does not express; it is
        named.
    """
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in CAUSAL_MODEL_TYPES or not isinstance(model, PreTrainedModel):
        raise refused(
            f"model is a {type(model).__name__} of type {kind!r}; "
            f"expected a causal language model of {', '.join(CAUSAL_MODEL_TYPES)}"
        )
    head = model.get_output_embeddings()
    if head is None:
        raise refused(
            f"model is a {type(model).__name__}, which has no logits; "
            "expected a causal language model"
        )
    with torch.no_grad():
        return _Reader(model, head, CAUSAL_MODEL_TYPES[kind], read).read()


class _Layers(Sequence[CausalLayerWeights]):
    """The layers of a reader, each read when it is requested."""

    def __init__(self, reader: _Reader) -> None:
        self._reader = reader

    def __len__(self) -> int:
        return len(self._reader.layers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        with torch.no_grad():
            return self._reader.layer(self._reader.layers[index])


class _Rotary(NamedTuple):
    """The distinct frequencies, their scales, and the index of each layer's."""

    layers: tuple[int | None, ...]
    frequencies: tuple[Tensor, ...]
    scales: tuple[float, ...]


class _Reader:
    """A model and its architecture, while it is read."""

    def __init__(
        self,
        model: Any,
        head: Any,
        architecture: Architecture,
        read: Callable[[str], Any] | None,
    ) -> None:
        self.config = model.config.get_text_config()
        self.read_parameter = read
        self.architecture = architecture
        self.head = head
        self.trunk: Trunk = architecture.trunk(model)
        self.layers = [architecture.layer(layer) for layer in self.trunk.layers]
        attentions = [modules.attention for modules in self.layers]
        if all(attention is None for attention in attentions):
            raise refused("model has no layer with attention; expected one at least")
        self.attention = next(attention for attention in attentions if attention is not None)
        self.names = {module: name for name, module in model.named_modules()}
        self.experts = experts_config(architecture, self.config, self.layers)
        self._check(model)
        check_modules(
            self.trunk, self.head, self.layers, self.names, is_read_by_name=read is not None
        )

    def _check(self, model: Any) -> None:
        if getattr(model, "is_quantized", False):
            method = getattr(model, "quantization_method", None)
            raise refused(f"the weights of model are quantized ({method}); expected floats")
        for name in self.architecture.must_be_off:
            if getattr(self.config, name, None):
                raise refused(f"{name} is {getattr(self.config, name)!r}; expected False")
        rows, columns = self.head.weight.shape[0], self.trunk.embedding.weight.shape[0]
        if rows != columns:
            raise refused(f"model embeds {columns} tokens and has logits of {rows}; expected equal")

    def read(self) -> tuple[CausalConfig, CausalWeights]:
        """Return the config and the weights."""
        config, architecture, trunk = self.config, self.architecture, self.trunk
        rotary = self._rotary()
        embedding = self._weight(trunk.embedding)
        is_tied = self.head.weight is trunk.embedding.weight
        head_bias = self._parameter(self.head, "bias")
        final_gamma, final_beta = self._norm(trunk.final_norm)
        weights = CausalWeights(
            embedding=embedding,
            positions=None if trunk.positions is None else floats(self._weight(trunk.positions)),
            rotary=rotary.frequencies,
            final_norm_gamma=final_gamma,
            final_norm_beta=final_beta,
            logits=None if is_tied else self._weight(self.head),
            logits_bias=head_bias,
            layers=_Layers(self),
            **self._per_layer_weights(),
        )
        windows = self._windows()
        windowed, of_global = heads_of(
            config.num_attention_heads, self.layers, windows, rotary.layers, rotary.frequencies
        )
        return (
            CausalConfig(
                num_layers=len(self.layers),
                model_size=embedding.shape[1],
                num_heads=config.num_attention_heads,
                num_kv_heads=windowed.num_kv_heads,
                head_size=windowed.head_size,
                ffn_size=self._ffn_size(),
                vocab_size=embedding.shape[0],
                windows=windows,
                rotary=rotary.layers,
                rotary_size=windowed.rotary_size,
                rotary_scales=rotary.scales,
                norm=architecture.norm,
                norm_epsilon=getattr(config, architecture.norm_epsilon),
                activation=self._activation(),
                gated=self._is_gated(),
                attention_scale=self.attention.scaling,
                attention_softcap=self._number(architecture.attention_softcap, 0.0),
                logits_softcap=self._number(architecture.logits_softcap, 0.0),
                embedding_scale=self._embedding_scale(),
                logits_scale=self._number(architecture.logits_multiplier, 1.0)
                / self._number(architecture.logits_divisor, 1.0),
                mixers=tuple(modules.mixer for modules in self.layers),
                attention_gate=architecture.attention_gate,
                attention_beside=any(
                    modules.attention is not None and modules.mixer is not None
                    for modules in self.layers
                ),
                experts=self.experts,
                global_head_size=of_global.head_size,
                global_num_kv_heads=of_global.num_kv_heads,
                global_rotary_size=of_global.rotary_size,
                ffn_sizes=self._ffn_sizes(),
                shared_keys=tuple(modules.shared_keys for modules in self.layers),
                keys_are_values=tuple(modules.keys_are_values for modules in self.layers),
                value_norm=architecture.value_norm,
                **per_layer_numbers(
                    trunk, len(self.layers), getattr(config, architecture.norm_epsilon)
                ),
            ),
            weights,
        )

    # --- switches ---------------------------------------------------------------------------------

    def _number(self, name: str | None, default: float) -> float:
        """Return an entry of the config; None is the default."""
        number = None if name is None else getattr(self.config, name)
        return default if number is None else float(number)

    def _activation(self) -> Any:
        if self.architecture.fixed_activation is not None:
            return self.architecture.fixed_activation
        name = getattr(self.config, self.architecture.activation)
        if not isinstance(name, str) or name not in ACTIVATIONS:
            raise refused(
                f"the activation function is {name!r}; expected one of {', '.join(ACTIVATIONS)}"
            )
        return ACTIVATIONS[name]

    def _embedding_scale(self) -> float:
        embedding = self.trunk.embedding
        if self.architecture.embedding_scaled:  # rounded as the model rounds it
            return float(embedding.embed_scale.to(embedding.weight.dtype))
        return self._number(self.architecture.embedding_multiplier, 1.0)

    def _layer_types(self) -> list[str]:
        kinds = list(self.config.layer_types)
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention"):
                raise refused(
                    f"layer_types has {kind!r}; expected full_attention and sliding_attention"
                )
        return kinds

    def _windows(self) -> tuple[int | None, ...]:
        windows = self.architecture.windows
        if windows == "none":
            return (None,) * len(self.layers)
        window = self.config.sliding_window
        if windows == "sliding_window":
            return (window,) * len(self.layers)
        sliding = [kind == "sliding_attention" for kind in self._layer_types()]
        if window is None and any(sliding):
            raise refused(
                "layer_types has 'sliding_attention', sliding_window is None; expected a number"
            )
        return tuple(window if is_sliding else None for is_sliding in sliding)

    def _rotary(self) -> _Rotary:
        module = self.trunk.rotary
        if module is None:
            return _Rotary((None,) * len(self.layers), (), ())
        if isinstance(module.rope_type, dict):  # by the type of the layer
            kinds = sorted(module.rope_type)
            places: list[int | None] = [kinds.index(kind) for kind in self._layer_types()]
            rope_types, prefixes = module.rope_type, [f"{kind}_" for kind in kinds]
        else:
            places, rope_types, prefixes = [0] * len(self.layers), {"": module.rope_type}, [""]
        for rope_type in rope_types.values():
            _refuse_rope_type(rope_type)
        for place, layer in enumerate(self.layers):
            attention, some = layer.attention, self.architecture.layers_without_positions
            if attention is None or (some and not attention.use_rope):
                places[place] = None
        frequencies = tuple(
            getattr(module, f"{prefix}inv_freq").to(torch.float32) for prefix in prefixes
        )
        scales = tuple(float(getattr(module, f"{prefix}attention_scaling")) for prefix in prefixes)
        return _Rotary(tuple(places), frequencies, scales)

    # --- weights ----------------------------------------------------------------------------------

    def _parameter(self, module: Any, name: str) -> Tensor | None:
        parameter: Tensor | None = getattr(module, name, None)
        if parameter is None or self.read_parameter is None:
            return parameter
        return self.read_parameter(f"{self.names[module]}.{name}")

    def _weight(self, module: Any) -> Any:
        weight = self._parameter(module, "weight")
        assert weight is not None
        return weight

    def _linear(self, module: Any) -> tuple[Any, Tensor | None]:
        """Return [out, in] weights, and a bias."""
        if isinstance(module, Rows):
            weight, bias = self._linear(module.module)
            index = module.order
            return index_rows(weight, index), None if bias is None else bias[index]
        if isinstance(module, Scaled):
            return scaled(module.inputs, module.outputs, *self._linear(module.module))
        if isinstance(module, SideBySide):
            weights, biases = zip(*map(self._linear, module.modules), strict=True)
            own = [bias for bias in biases if bias is not None]
            return join_columns(weights), sum(own) if own else None
        weight, bias = self._weight(module), self._parameter(module, "bias")
        if type(module) is Conv1D and isinstance(weight, Tensor):
            weight = weight.T
        return weight, bias

    def _ffn_size(self) -> int:
        """Return the inner size of layers without experts; of a shared or an expert's without."""
        dense = [inner_size(layer) for layer in self.layers if layer.experts is None]
        if dense:
            return max(dense)
        assert self.experts is not None
        return self.experts.shared_size or self.experts.size

    def _ffn_sizes(self) -> tuple[int, ...]:
        """Return the inner sizes of layers; of those with experts, which are told there, all."""
        most = self._ffn_size()
        return tuple(most if m.experts is not None else inner_size(m) for m in self.layers)

    def _per_layer_weights(self) -> dict[str, Any]:
        per_layer = self.trunk.per_layer
        if per_layer is None:
            return {}
        gamma, _ = self._norm(per_layer.norm)
        assert gamma is not None
        return {
            "per_layer_embedding": self._weight(per_layer.embedding),
            "per_layer_projection": self._weight(per_layer.projection),
            "per_layer_norm_gamma": wide(gamma) * per_layer.scale,
        }

    def _is_gated(self) -> bool:
        return any(layer.experts is not None or layer.ffn_gate is not None for layer in self.layers)

    def _experts(self, modules: ExpertModules, factor: float) -> dict[str, Any]:
        name, read = self.names[modules.experts], self.read_parameter
        matrices = None if read is None else lambda field: read(f"{name}.{field}")
        return expert_weights(modules, self._parameter, matrices, factor)

    def _norm(self, module: Any) -> tuple[Tensor | None, Tensor | None]:
        if module is None:
            return None, None
        gamma = self._weight(module)
        if self.architecture.gamma_plus_one:
            gamma = 1.0 + wide(gamma)
        return gamma, self._parameter(module, "bias")

    def layer(self, modules: LayerModules) -> CausalLayerWeights:
        """Return the weights of a layer."""
        qkv, qkv_bias = joined([self._linear(module) for module in modules.qkv])
        # A scale of scores that differs from the first layer's is folded into the queries.
        of_layer = self.attention if modules.attention is None else modules.attention
        ratio = of_layer.scaling / self.attention.scaling
        if ratio != 1.0:
            qkv = wide(qkv)
            factors = torch.ones(qkv.shape[0], dtype=qkv.dtype, device=qkv.device)
            factors[: self.config.num_attention_heads * modules.attention.head_dim] = ratio
            qkv = qkv * factors[:, None]
            qkv_bias = None if qkv_bias is None else qkv_bias * factors
        factor = self._number(self.architecture.residual_multiplier, 1.0)
        out, out_bias = times(factor, *self._linear(modules.attention_out))
        down, down_bias, up, up_bias = None, None, None, None
        if modules.ffn_down is not None:
            down, down_bias = times(factor, *self._linear(modules.ffn_down))
            up, up_bias = self._linear(modules.ffn_up)
        gate, gate_bias = None, None
        if modules.ffn_gate is not None and modules.ffn_gate is modules.ffn_up:
            gate, up = chunks(up)
            if up_bias is not None:
                gate_bias, up_bias = up_bias.chunk(2)
        elif modules.ffn_gate is not None:
            gate, gate_bias = self._linear(modules.ffn_gate)
        norms = {}
        for name in NORMS:
            gamma, beta = self._norm(getattr(modules, name))
            norms[f"{name}_gamma"] = gamma
            if f"{name}_beta" in CausalLayerWeights._fields:
                norms[f"{name}_beta"] = beta
        return CausalLayerWeights(
            qkv=qkv,
            qkv_bias=qkv_bias,
            attention_out=out,
            attention_out_bias=out_bias,
            ffn_up=up,
            ffn_up_bias=up_bias,
            ffn_gate=gate,
            ffn_gate_bias=gate_bias,
            ffn_down=down,
            ffn_down_bias=down_bias,
            sinks=self._parameter(modules.attention, "sinks") if modules.sinks else None,
            **({} if modules.experts is None else self._experts(modules.experts, factor)),
            **norms,
            **self._state_weights(modules),
            **self._input_weights(modules),
        )

    def _input_weights(self, modules: LayerModules) -> dict[str, Any]:
        """Return the weights of a layer's inputs beside embeddings, and its scale."""
        scale = None if modules.scale is None else self._parameter(*modules.scale)
        weights: dict[str, Any] = {"layer_scale": scale}
        if modules.per_layer is not None:
            weights["per_layer_gate"] = self._weight(modules.per_layer.gate)
            weights["per_layer_out"] = self._weight(modules.per_layer.out)
        return weights

    def _state_weights(self, modules: LayerModules) -> dict[str, Tensor | None]:
        """Return the weights that only a layer with a mixer has."""
        if modules.convolution is None:
            return {}
        kernel = floats(self._weight(modules.convolution))  # [channels, 1, taps], or without 1
        weights: dict[str, Tensor | None] = {
            "convolution": kernel.flatten(1),
            "convolution_bias": self._parameter(modules.convolution, "bias"),
        }
        if (delta := modules.delta_rule) is not None:
            decay, decay_bias = self._parameter(delta, "A_log"), self._parameter(delta, "dt_bias")
            assert decay is not None
            weights["decay"] = -wide(decay).exp()
            weights["decay_bias"] = decay_bias
            if getattr(delta.norm, "weight", None) is not None:
                weights["mixer_norm_gamma"] = self._weight(delta.norm)
            if isinstance(modules.mixer, Mamba2):
                weights["mixer_skip"] = self._parameter(delta, "D")
        return weights
