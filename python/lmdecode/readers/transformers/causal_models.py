"""A model of transformers, read by its entry of the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lmdecode.linear.quantized_weight import index_rows, join_columns
from lmdecode.models.configs import CausalConfig, ExpertsConfig, Heads
from lmdecode.models.mixers import Mamba2
from lmdecode.models.weights import CausalLayerWeights, CausalWeights, ExpertMatrices
from lmdecode.readers.transformers.architecture import (
    NORMS,
    Architecture,
    ExpertModules,
    LayerModules,
    Rows,
    Scaled,
    SideBySide,
    Trunk,
    complete_modules,
    linears_of,
    refused,
)
from lmdecode.readers.transformers.architectures import (
    CAUSAL_MODEL_TYPES,
)
from lmdecode.readers.transformers.module_weights import (
    ACTIVATIONS,
    chunks,
    expert_parts,
    floats,
    joined,
    scaled,
    times,
    wide,
)

__all__ = ["causal_model_of", "refuse_rope_types"]


def heads_of(
    num_heads: int,
    layers: Sequence[LayerModules],
    windows: Sequence[int | None],
    rotary: Sequence[int | None],
    frequencies: Sequence[Tensor],
) -> tuple[Heads, Heads]:
    """Return the heads of layers with a window, and of layers without one.

    ``num_heads`` counts queries; ``rotary`` has the index in ``frequencies`` for each layer. Raises
    ValueError if layers that agree in having a window differ in their heads.
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
    """Return the layers' common heads; layers without rotation fit any."""
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
    """Return the arguments of ``CausalConfig`` for inputs beside embeddings."""
    if trunk.per_layer is None:
        return {}
    embedding, scale = trunk.per_layer.embedding, trunk.per_layer.scale
    return {
        "per_layer_size": embedding.weight.shape[1] // num_layers,
        "per_layer_scale": float(embedding.embed_scale.to(embedding.weight.dtype)) * scale,
        # Scaling the input of a norm equals a norm with another epsilon.
        "per_layer_epsilon": norm_epsilon / trunk.per_layer.projection_scale**2,
    }


def check_modules(
    trunk: Trunk,
    head: Any,
    layers: Sequence[LayerModules],
    names: Mapping[Any, str],
    *,
    is_read_by_name: bool,
) -> None:
    """Refuse modules of unexpected types, and parameters that are not read.

    ``names`` has the name of each module. ``is_read_by_name``: values come from elsewhere, by the
    parameters' names. Raises ValueError if a linear module has another type, a norm an unexpected
    bias, weights are no floats or have no values, or no module of ``trunk`` and ``layers`` reads a
    parameter.
    """
    modules = [trunk.embedding, trunk.final_norm, trunk.positions]
    linears, read = [head], set[int]()
    if trunk.per_layer is not None:
        modules += [trunk.per_layer.embedding, trunk.per_layer.norm]
        linears.append(trunk.per_layer.projection)
    for layer in layers:
        ffn = (layer.ffn_gate, layer.ffn_up, layer.ffn_down)
        parts = (*layer.qkv, layer.attention_out, *ffn)
        linears += [m for part in parts if part is not None for m in linears_of(part)]
        if layer.experts is not None:
            shared_gate = layer.experts.shared_gate
            linears += [] if shared_gate is None else [shared_gate]
            modules.append(layer.experts.router)
            read |= {id(parameter) for parameter in layer.experts.experts.parameters()}
            if layer.experts.choice_bias is not None:
                read.add(id(getattr(*layer.experts.choice_bias)))
            for around in (layer.experts.router_norm, layer.experts.scales):
                read |= set() if around is None else {id(getattr(*around))}
        linears += [] if layer.per_layer is None else list(layer.per_layer)
        if layer.sinks:
            read.add(id(layer.attention.sinks))
        if layer.delta_rule is not None:
            parameters = ("A_log", "dt_bias", "D")
            read |= {id(getattr(layer.delta_rule, name, None)) for name in parameters}
        for name in NORMS:
            norm = getattr(layer, name)
            has_bias = getattr(norm, "bias", None) is not None
            if has_bias and f"{name}_beta" not in CausalLayerWeights._fields:
                raise refused(f"{names[norm]} has a bias; expected none")
            modules.append(norm)
        modules.append(layer.convolution)
        if layer.delta_rule is not None and hasattr(layer.delta_rule.norm, "weight"):
            modules.append(layer.delta_rule.norm)
    for module in linears:
        if type(module) not in (torch.nn.Linear, Conv1D):
            raise refused(
                f"{names[module]} is a {type(module).__name__}; expected a torch.nn.Linear"
            )
    modules = [module for module in (*modules, *linears) if module is not None]
    for module in modules:
        weight = module.weight
        is_there = is_read_by_name or not weight.is_meta
        if not weight.is_floating_point() or not is_there:
            come = f"of {weight.dtype}" if is_there else "not loaded"
            raise refused(f"the weights of {names[module]} are {come}; expected floats")
    read |= {id(parameter) for module in modules for parameter in module.parameters(recurse=False)}
    others = [
        name for name, parameter in trunk.root.named_parameters() if id(parameter) not in read
    ]
    if others:
        raise refused(
            f"model has {len(others)} parameters that its type does not have, {others[0]} "
            "the first; expected none"
        )


def inner_size(layer: LayerModules) -> int:
    """Return the inner features of a feed-forward layer without experts."""
    up = layer.ffn_up
    size = int(up.weight.shape[1 if type(up) is Conv1D else 0])
    return size // 2 if up is layer.ffn_gate else size


def experts_config(
    architecture: Architecture, config: Any, layers: Sequence[LayerModules]
) -> ExpertsConfig | None:
    """Return the config of the layers' experts, or None if there are none."""
    are_there = [layer.experts is not None for layer in layers]
    if architecture.experts is None or not any(are_there):
        return None
    of_experts = [layer for layer in layers if layer.experts is not None]
    first = of_experts[0]
    assert first.experts is not None
    shared = sorted({0 if m.ffn_up is None else inner_size(m) for m in of_experts})
    if len(shared) > 1:
        raise refused(
            f"feed-forward layers beside experts have {', '.join(map(str, shared))} inner "
            "features; expected the same number in all layers"
        )
    down = first.experts.experts.down_proj
    return ExpertsConfig(
        size=int(down.shape[1 if first.experts.is_interleaved else 2]),
        shared_size=shared[0],
        layers=tuple(are_there),
        **architecture.experts(config),
    )


def expert_weights(
    modules: ExpertModules,
    parameter: Callable[[Any, str], Tensor | None],
    read: Callable[[str], Any] | None,
    factor: float,
) -> dict[str, Any]:
    """Return the weights of a layer's experts; each matrix is read when it is requested.

    ``parameter`` returns a module's parameter by name. ``read`` returns a function of an expert's
    index for ``gate_up_proj`` and ``down_proj`` (see ``causal_model_of``); None: the module's own
    parameters. ``factor`` multiplies the outputs.
    """
    experts, count = modules.experts, modules.router.weight.shape[0]

    def of_module(kind: str) -> Callable[[int], Any]:
        return lambda e: expert_parts(kind, getattr(experts, kind)[e], modules.is_interleaved)

    read = read or of_module
    gate_up, down = read("gate_up_proj"), read("down_proj")
    choice, shared = modules.choice_bias, None
    if modules.shared_gate is not None:
        shared = parameter(modules.shared_gate, "weight")

    def half(index: int) -> ExpertMatrices:
        return ExpertMatrices(count, lambda e: gate_up(e)[index])

    gate_up_bias = parameter(experts, "gate_up_proj_bias")
    down_bias = parameter(experts, "down_proj_bias")
    gate_bias, up_bias = None, None
    if gate_up_bias is not None:
        halves = (
            (gate_up_bias[:, ::2], gate_up_bias[:, 1::2])
            if modules.is_interleaved
            else gate_up_bias.chunk(2, dim=1)
        )
        gate_bias, up_bias = halves
    return {
        "router": parameter(modules.router, "weight"),
        "router_bias": parameter(modules.router, "bias"),
        "router_choice_bias": None if choice is None else parameter(*choice),
        "experts_gate": half(0),
        "experts_gate_bias": gate_bias,
        "experts_up": half(1),
        "experts_up_bias": up_bias,
        "experts_down": ExpertMatrices(count, lambda e: times(factor, down(e), None)[0]),
        "experts_down_bias": None if down_bias is None else times(factor, down_bias, None)[0],
        "shared_gate": None if shared is None else floats(shared).reshape(-1),
        **_around(modules, parameter),
    }


def _around(
    modules: ExpertModules, parameter: Callable[[Any, str], Tensor | None]
) -> dict[str, Tensor | None]:
    """Return the router's norm, and the factors of the weights."""
    gamma = None
    if modules.router_norm is not None:
        gamma = parameter(*modules.router_norm)
        assert gamma is not None
        gamma = wide(gamma) * modules.router_norm_factor
    scales = None if modules.scales is None else parameter(*modules.scales)
    return {"router_norm_gamma": gamma, "router_scale": scales}


# Types of rotary embeddings with frequencies that do not depend on the length of the text.
_ROPE_TYPES = ("default", "linear", "llama3", "proportional", "yarn")


def refuse_rope_types(config: Any) -> None:
    """Raise ValueError for rotary embeddings of an unknown type."""
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

    Weights are the model's own tensors, except that queries, keys and values are joined, and that a
    factor or 1 + weight is folded into some. The weights of a layer are made each time it is
    requested, so that only one layer needs to be in memory at a time.

    For a model whose parameters have no values, ``read`` returns a parameter by name. A linear
    weight or an embedding may be a ``QuantizedWeight``, [out, in] even for a ``Conv1D``; it stays
    quantized unless a factor is folded in. For ``gate_up_proj`` and ``down_proj`` of experts,
    ``read`` returns a function of an expert's index that returns its gate and its up, or its down,
    [out, in].

    Raises ValueError if the type is not in ``CAUSAL_MODEL_TYPES``, or names a feature that
    ``CausalConfig`` does not express.
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
    complete_modules(model)
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
        if getattr(self.config, "is_causal", None) is False:  # transformers masks nothing then
            raise refused("is_causal is False; expected True")
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
                ffn_beside=self.layers[0].ffn_beside,
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
            if layer.attention is None or not layer.is_turned:
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
        """Return the inner size of layers without experts, or else of a shared or single expert."""
        dense = [inner_size(layer) for layer in self.layers if layer.experts is None]
        if dense:
            return max(dense)
        assert self.experts is not None
        return self.experts.shared_size or self.experts.size

    def _ffn_sizes(self) -> tuple[int, ...]:
        """Return the inner sizes of layers; layers with experts get the common size."""
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
