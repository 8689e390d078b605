"""A GGUF file's tensors as the parameters of a model of transformers."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lmdecode.linear.quantized_weight import (
    LinearWeight,
    QuantizedWeight,
    index_rows,
    join_rows,
)
from lmdecode.readers.gguf.configs import unused_tensors
from lmdecode.readers.gguf.metadata import Facts, refused
from lmdecode.readers.gguf.reader import GgufFile

__all__ = ["FurtherBlock", "Weights"]


_WHOLE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.final_layernorm": "output_norm",
    "model.embedding_norm": "token_embd_norm",
    "lm_head": "output",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
}
_OF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "router.proj": "ffn_gate_inp",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "self_attn.out_proj": "attn_output",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_qkvz": "ssm_in",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
    "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
# Architectures with a separate name for the norm after the attention, or before the feed-forward
# layer.
_NORM_BEHIND = (
    "gemma2", "gemma3", "gemma4", "gpt-oss", "olmo2", "qwen35", "qwen35moe", "qwen3next",
)  # fmt: skip
# Parameters of a layer with tensors that have no ending in their names, or another.
_OWN = {
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "mamba.A_log": "ssm_a",
    "mamba.D": "ssm_d",
    "mamba.dt_bias": "ssm_dt.bias",
    "pre_ff_layernorm.weight": "ffn_norm",
    "self_attn.sinks": "attn_sinks.weight",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}
_OF_OWN = re.compile(rf"model\.layers\.(\d+)\.({'|'.join(map(re.escape, _OWN))})")
_LAYER = re.compile(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.+)\.(weight|bias)")

#: Architectures with rows of queries and keys in pairs in llama.cpp, rather than in halves.
PERMUTED = ("granite", "granitehybrid", "granitemoe", "llama", "smollm3")
#: Architectures with norms stored as 1 + weight in llama.cpp, except the delta rule's.
PLUS_ONE = ("gemma2", "gemma3", "qwen35", "qwen35moe", "qwen3next")
#: Tensors that are no parameters.
IGNORED = ("rope_freqs.weight",)


def tensor_name(parameter: str, architecture: str) -> str:
    """Return the file's name of a parameter of a transformers model, made by one of ``CONFIGS``."""
    if (own := _OF_OWN.fullmatch(parameter)) is not None:
        return f"blk.{own[1]}.{_OWN[own[2]]}"
    found = _LAYER.fullmatch(parameter)
    if found is None:
        module, _, field = parameter.rpartition(".")
        return f"{_WHOLE[module]}.{field}"
    layer, module, field = found.groups()
    name = _OF_LAYER[module]
    if module == "post_attention_layernorm" and architecture in _NORM_BEHIND:
        name = "post_attention_norm"
    return f"blk.{layer}.{name}.{field}"


_ALL_OF_KEY_HEADS = re.compile(r"model\.layers\.(\d+)\.linear_attn\.in_proj_qkvz\.weight")


class ValueHeads:
    """The order of the delta rule's value heads: llama.cpp interleaves them over key heads.

    Its i-th value head belongs to key head i modulo the number of key heads.
    """

    def __init__(self, config: Any) -> None:
        self._key_heads, heads = config.linear_num_key_heads, config.linear_num_value_heads
        self._group, self._size = heads // self._key_heads, config.linear_value_head_dim
        self._before = 2 * self._key_heads * config.linear_key_head_dim

    def _index(self, size: int, before: int = 0) -> Tensor:
        rows = torch.arange(self._group * self._key_heads * size, device="cpu") + before
        grouped = rows.view(self._group, self._key_heads, size).transpose(0, 1).flatten()
        return torch.cat((torch.arange(before, device="cpu"), grouped))

    def in_groups(self, parameter: str, tensor: Any) -> Any:
        """Return a parameter with value heads of a key head side by side."""
        name = parameter.rpartition("linear_attn.")[2]
        if self._group == 1 or name == parameter:
            return tensor
        if name == "out_proj.weight":  # columns: blocks of columns cannot be moved in general
            floats = tensor.dequantize() if isinstance(tensor, QuantizedWeight) else tensor
            return floats[:, self._index(self._size)]
        if name in ("in_proj_qkv.weight", "conv1d.weight"):
            index = self._index(self._size, self._before)
        elif name == "in_proj_z.weight":
            index = self._index(self._size)
        elif name == "norm.weight":
            return tensor
        else:
            index = self._index(1)
        return index_rows(tensor, index)


class KeyHeads:
    """Qwen 3 Next's projection, which transformers has as queries to gates of a key head in turn.

    llama.cpp has queries, keys and values of all heads as one tensor, and the gates as another.
    Older files have transformers' as it is.
    """

    def __init__(self, config: Any) -> None:
        self._heads, keys = config.linear_num_key_heads, config.linear_key_head_dim
        values = config.linear_num_value_heads // self._heads * config.linear_value_head_dim
        self._sizes = (keys, keys, values, values)

    def tensors(
        self, parameter: str, shape: tuple[int, ...], tensors: Container[str]
    ) -> dict[str, tuple[int, ...]] | None:
        """Return names and shapes of a parameter's tensors in the file, None where it has one."""
        found = _ALL_OF_KEY_HEADS.fullmatch(parameter)
        if found is None or f"blk.{found[1]}.ssm_in.weight" in tensors:
            return None
        gates = self._sizes[-1] * self._heads
        return {
            f"blk.{found[1]}.attn_qkv.weight": (shape[0] - gates, *shape[1:]),
            f"blk.{found[1]}.attn_gate.weight": (gates, *shape[1:]),
        }

    def read(self, file: GgufFile, names: Sequence[str]) -> LinearWeight:
        """Return the rows of these tensors in transformers' order."""
        joined = join_rows([file.tensor(name) for name in names])
        parts = torch.arange(joined.shape[0], device="cpu").split(
            [size * self._heads for size in self._sizes]
        )
        index = torch.cat([part.view(self._heads, -1) for part in parts], dim=1).flatten()
        return index_rows(joined, index)


_PARAMETER = re.compile(
    r"model\.layers\.(\d+)\.(?:(?:mlp|block_sparse_moe|feed_forward)\.)?"
    r"experts\.(gate_up_proj|down_proj)(_bias)?"
)
_BOTH = "ffn_gate_up_exps.weight"  # gates, then the others
_SHARED = re.compile(r"model\.layers\.(\d+)\.shared_mlp\.(input|output)_linear\.weight")


def expert_tensors(
    parameter: str, shape: tuple[int, ...], architecture: str, tensors: Container[str]
) -> dict[str, tuple[int, ...]] | None:
    """Return the names and shapes of a parameter's several tensors; None if it has one alone.

    Matrices of gpt-oss are [E, in, out] in the model. ``tensors`` are the names in the file, in
    which gates and others may be one tensor, and experts may be missing.
    """
    if found := _SHARED.fullmatch(parameter):
        # Without a router it is no shared expert, but the feed-forward layer.
        is_shared = f"blk.{found[1]}.ffn_gate_inp.weight" in tensors
        parts = ("gate", "up") if found[2] == "input" else ("down",)
        end = "_shexp.weight" if is_shared else ".weight"
        names = [f"blk.{found[1]}.ffn_{name}{end}" for name in parts]
        return dict.fromkeys(names, (shape[0] // len(parts), shape[1]))
    found = _PARAMETER.fullmatch(parameter)
    if found is None:
        return None
    layer, kind, bias = found.groups()
    field = "bias" if bias else "weight"
    both = f"blk.{layer}.{_BOTH}"
    if kind == "gate_up_proj" and both in tensors:
        return {both: shape}
    parts = ("gate", "up") if kind == "gate_up_proj" else ("down",)
    whole = list(shape)
    if architecture == "gpt-oss" and not bias:
        whole[1:] = whole[:0:-1]
    whole[1] //= len(parts)
    return {f"blk.{layer}.ffn_{name}_exps.{field}": tuple(whole) for name in parts}


def read_parts(file: GgufFile, names: list[str], keeps_blocks: bool) -> Any:
    """Return what ``causal_model_of`` reads of a parameter with these tensors."""
    if names[0].endswith("_exps.weight"):
        return _matrices(file, names, keeps_blocks)
    parts = [file.tensor(name) for name in names]
    if names[0].endswith(".bias"):  # of gates and others in turn
        floats = [part.float() for part in parts if isinstance(part, Tensor)]
        return floats[0] if len(floats) == 1 else torch.stack(floats, dim=-1).flatten(1)
    joined = join_rows(parts)
    is_kept = keeps_blocks and isinstance(joined, QuantizedWeight)
    return joined if isinstance(joined, Tensor) or is_kept else joined.dequantize()


def _halves(matrix: Any) -> Any:
    rows = matrix.shape[0]
    if isinstance(matrix, Tensor):
        return matrix.chunk(2)
    return matrix.rows(0, rows // 2), matrix.rows(rows // 2, rows)


def _matrices(file: GgufFile, names: list[str], keeps_blocks: bool) -> Callable[[int], Any]:
    def read(expert: int) -> Any:
        parts = [file.matrix(name, expert) for name in names]
        if names[0].endswith(_BOTH):
            parts = list(_halves(parts[0]))
        if not keeps_blocks:
            parts = [p.dequantize() if isinstance(p, QuantizedWeight) else p for p in parts]
        return tuple(parts) if len(parts) > 1 else parts[0]

    return read


_VECTOR = re.compile(r"model\.layers\.\d+\.mamba\.(A_log|D|norm\.weight)")


def is_vector(parameter: str) -> bool:
    """Whether a parameter is a vector that files have as a matrix."""
    return _VECTOR.fullmatch(parameter) is not None


def shape_in_file(parameter: str, size: int, groups: int) -> tuple[int, int]:
    """Return the shape of such a vector: norms are by groups, decays and skips are columns."""
    if parameter.endswith("norm.weight"):
        return groups, size // groups
    return size, 1


_SCALE = ".layer_scalar"  # a buffer that files need not have
_BLOCK = re.compile(r"blk\.([0-9]{1,9})\.")
_QKV = re.compile(r"(blk\.[0-9]{1,9}\.attn_)(q|k|v|qkv)\.(weight|bias)")


class Weights:
    """A file's tensors by the names and in the shapes of a model's parameters.

    ``model`` is the skeleton with the expected parameters. With ``keeps_blocks`` matrices in blocks
    stay blocks.
    """

    def __init__(self, facts: Facts, model: Any, keeps_blocks: bool) -> None:
        self._file, self._architecture = facts.file, facts.architecture
        self._ignored = ("v.", "mm.") if facts.is_ollamas else ()  # of images
        self._keeps_blocks = keeps_blocks
        config = model.config
        self._heads = dict[str, int]()
        if self._architecture in PERMUTED:  # their layers are alike
            self._heads = {
                "q_proj": config.num_attention_heads,
                "k_proj": getattr(config, "num_key_value_heads", config.num_attention_heads),
            }
        self._parts = dict[str, list[str]]()
        self._in_turn = dict[str, list[str]]()
        self._rows = dict[str, Tensor]()  # of a tensor that has others, too
        self._value_heads, self._key_heads = None, None
        if self._architecture in ("qwen35", "qwen35moe"):
            self._value_heads = ValueHeads(config)
        if self._architecture == "qwen3next":
            self._key_heads = KeyHeads(config)
        self._check(model)

    def _name(self, parameter: str) -> str:
        return tensor_name(parameter, self._architecture)

    def _is_transposed(self, parameter: str) -> bool:
        """Whether a parameter is [in, out], of the module ``Conv1D``."""
        return self._architecture == "gpt2" and ".c_" in parameter and parameter.endswith("weight")

    def _expected(self, model: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the names and shapes of the tensors that a model's parameters are in."""
        tensors, shapes = self._file.tensors, dict(self._parameters(model))
        for parameter, shape in shapes.items():
            parts = expert_tensors(parameter, shape, self._architecture, tensors)
            if parts is not None:
                self._parts[parameter] = list(parts)
                yield from parts.items()
                continue
            if ".self_attn." in parameter:
                parts = self._otherwise_joined(parameter, shapes, model.config)
            elif self._key_heads is not None:
                parts = self._key_heads.tensors(parameter, shape, tensors)
            if parts is not None:
                self._in_turn[parameter] = list(parts)
                yield from parts.items()
                continue
            name = self._name(parameter)
            if is_vector(parameter):
                shape = shape_in_file(parameter, shape[0], model.config.mamba_n_groups)
            if len(shape) == 3 and shape[1] == 1:  # a convolution of each feature
                shape = (shape[0], shape[2])
            elif len(shape) == 2 and shape[0] == 1 and self._is_vector(name):
                shape = shape[1:]
            yield name, shape[:: -1 if self._is_transposed(parameter) else 1]

    def _otherwise_joined(
        self, parameter: str, shapes: dict[str, tuple[int, ...]], config: Any
    ) -> dict[str, tuple[int, ...]] | None:
        """Return tensors of queries, keys and values that the file has as one, or the model."""
        tensors, name, shape = self._file.tensors, self._name(parameter), shapes[parameter]
        found = _QKV.fullmatch(name)
        if found is None or name in tensors:
            return None
        begin, kind, field = found.groups()
        own, whole = [f"{begin}{part}.{field}" for part in "qkv"], f"{begin}qkv.{field}"
        if kind == "qkv" and all(part in tensors for part in own):
            heads = (config.num_attention_heads, *[config.num_key_value_heads] * 2)
            sizes = [shape[0] * count // sum(heads) for count in heads]
            return {part: (size, *shape[1:]) for part, size in zip(own, sizes, strict=True)}
        alike = [parameter.replace(f".{kind}_proj.", f".{part}_proj.") for part in "qkv"]
        is_one = whole in tensors and not any(part in tensors for part in own)
        if not is_one or not shapes.keys() >= {*alike}:
            return None
        sizes = [shapes[part][0] for part in alike]
        rows = torch.arange(sum(sizes), device="cpu").split(sizes)
        self._rows[parameter] = rows["qkv".index(kind)]
        return {whole: (sum(sizes), *shape[1:])}

    def _parameters(self, model: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the names and shapes of the parameters, and of the buffers that are tensors."""
        for parameter, value in (*model.named_parameters(), *self._buffers(model)):
            yield parameter, tuple(value.shape)

    def _is_vector(self, name: str) -> bool:
        return name in self._file.tensors and len(self._file.tensors[name].shape) == 1

    def _buffers(self, model: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers that are tensors of the file."""
        from lmdecode.readers.transformers.checkpoint import READ_BUFFERS

        for name, buffer in model.named_buffers():
            is_read = name.endswith(READ_BUFFERS)
            if is_read and not (name.endswith(_SCALE) and self._is_left_out(name)):
                yield name, buffer

    def _is_left_out(self, name: str) -> bool:
        return self._name(name) not in self._file.tensors

    def _tensors(self, model: Any) -> set[str]:
        """Return the names of the tensors that must all be of the model."""
        tensors = self._file.tensors
        left = {name for name in tensors if not name.startswith(self._ignored)} - set(IGNORED)
        if self._architecture == "gemma4":
            left -= unused_tensors(model.config)
        # Layers after the model's predict further tokens.
        first = model.config.num_hidden_layers
        return {name for name in left if not is_of_block(name, first)}

    def _check(self, model: Any) -> None:
        """Raise for a tensor that is missing, is left over, or has another shape."""
        left = self._tensors(model)
        for name, shape in self._expected(model):
            if name not in self._file.tensors:
                raise refused(self._file, f"has no tensor {name!r}; expected one")
            if self._file.tensors[name].shape != shape:
                raise refused(
                    self._file,
                    f"has {name} of shape {list(self._file.tensors[name].shape)}; expected "
                    f"{list(shape)}",
                )
            is_flat = len(shape) < 2 or name.endswith("norm.weight")
            if isinstance(self._file.tensors[name].kind, str) and is_flat:
                raise refused(self._file, f"has {name} in blocks; expected floats")
            left.discard(name)
        if left:
            raise refused(
                self._file,
                f"has {len(left)} tensors that its architecture does not have, {min(left)!r} one "
                "of them; expected none",
            )

    def read(self, parameter: str) -> Any:
        """Return a parameter's values: floats, or a ``QuantizedWeight``, which is [out, in]."""
        if parameter in self._parts:
            return read_parts(self._file, self._parts[parameter], self._keeps_blocks)
        if parameter.endswith(_SCALE) and self._is_left_out(parameter):
            return torch.ones(1, dtype=torch.float32, device="cpu")
        tensor = self._in_order(parameter)
        if not isinstance(tensor, Tensor):
            if self._keeps_blocks:
                return tensor
            tensor = tensor.dequantize()
        if tensor.dtype == torch.float16:
            tensor = tensor.float()
        if is_vector(parameter):
            tensor = tensor.flatten()
        if parameter.endswith("A_log"):
            tensor = (-tensor.float()).log()  # the file has -exp of it
        is_norm = parameter.split(".")[-2].endswith("norm") and ".linear_attn." not in parameter
        if is_norm and self._architecture in PLUS_ONE:
            tensor = tensor.float() - 1.0  # the file has 1 + weight
        return tensor.T if self._is_transposed(parameter) else tensor

    def _in_order(self, parameter: str) -> LinearWeight:
        """Return a parameter's tensor, with rows in the order that transformers has them."""
        names = self._in_turn.get(parameter)
        if names and self._key_heads is not None and ".self_attn." not in parameter:
            return self._key_heads.read(self._file, names)
        tensor = join_rows([self._file.tensor(name) for name in names or [self._name(parameter)]])
        if parameter in self._rows:
            tensor = index_rows(tensor, self._rows[parameter])
        module = parameter.split(".")[-2]
        if module in self._heads:
            tensor = _in_halves(tensor, self._heads[module])
        if self._value_heads is not None:
            tensor = self._value_heads.in_groups(parameter, tensor)
        return tensor


def is_of_block(name: str, first: int) -> bool:
    """Return whether a tensor is of a block from the first-th on."""
    found = _BLOCK.match(name)
    return found is not None and int(found[1]) >= first


def _in_halves(tensor: LinearWeight, heads: int) -> LinearWeight:
    """Undo what llama.cpp does to rows: in a head it has pairs of those that turn as neighbours."""
    index = (
        torch.arange(tensor.shape[0], device="cpu").view(heads, -1, 2).transpose(1, 2).reshape(-1)
    )
    return index_rows(tensor, index)


_ARCHITECTURES = ("qwen35", "qwen35moe", "qwen3next")
_FIRST_LAYER = "model.layers.0."
# Parameters beside the layer, and their names in the file.
_BESIDE = {
    "fc.weight": "eh_proj.weight",
    "pre_fc_norm_embedding.weight": "enorm.weight",
    "pre_fc_norm_hidden.weight": "hnorm.weight",
    "model.norm.weight": "shared_head_norm.weight",
}
_PREFIX = "nextn."


class FurtherBlock(Weights):
    """The tensors of a block, as a model of one layer and the projections before it.

    The embedding and the head are the model's. Its parameters have no values, nor have the ones of
    ``layer``, the model of one layer. Raises ValueError if the file has no such block, more than
    one, or other tensors than expected.
    """

    def __init__(self, facts: Facts, model: Any, keeps_blocks: bool) -> None:
        from lmdecode.readers.transformers.mtp import mtp_layer

        if facts.architecture not in _ARCHITECTURES:
            raise refused(
                facts.file,
                f"is of {facts.architecture!r}, and mtp is True; expected one of "
                f"{', '.join(_ARCHITECTURES)}",
            )
        key = "nextn_predict_layers"
        count = facts.count(key, 0, least=0)
        if count != 1:
            found = f"has {count} for" if facts.has(key) else "has no"
            raise refused(
                facts.file, f"{found} {facts.architecture}.{key}; expected 1, as mtp is True"
            )
        self._block = model.config.num_hidden_layers
        for name, part in (("embed_tokens", "embedding"), ("shared_head_head", "head")):
            own = f"blk.{self._block}.{_PREFIX}{name}.weight"
            if own in facts.file.tensors:
                raise refused(facts.file, f"has {own}; expected none: the model's {part} is used")
        self.layer = mtp_layer(model)
        super().__init__(facts, self.layer, keeps_blocks)

    def _in_file(self, parameter: str) -> str:
        if parameter in _BESIDE:
            return _PREFIX + _BESIDE[parameter]
        return parameter.replace(_FIRST_LAYER, f"model.layers.{self._block}.", 1)

    def _name(self, parameter: str) -> str:
        if not parameter.startswith(_PREFIX):
            return super()._name(parameter)
        name = f"blk.{self._block}.{parameter}"
        is_last = name.endswith("shared_head_norm.weight")
        return "output_norm.weight" if is_last and name not in self._file.tensors else name

    def _parameters(self, model: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
        from lmdecode.readers.transformers.mtp import mtp_shapes

        for parameter, shape in mtp_shapes(model).items():
            yield self._in_file(parameter), shape

    def _tensors(self, model: Any) -> set[str]:
        return {name for name in self._file.tensors if is_of_block(name, self._block)}

    def read(self, parameter: str) -> Any:
        """Return the values of a parameter of the layer or of the projections before it."""
        return super().read(self._in_file(parameter))
