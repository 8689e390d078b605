"""A GGUF file's tensors as the parameters of a model of transformers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lmdecode.formats.gguf.delta_rule import KeyHeads, ValueHeads
from lmdecode.formats.gguf.experts import expert_tensors, read_parts
from lmdecode.formats.gguf.facts import Facts, refused
from lmdecode.formats.gguf.gemma4_config import unused_tensors
from lmdecode.formats.gguf.mamba2 import is_vector, shape_in_file
from lmdecode.formats.gguf.names import IGNORED, PERMUTED, PLUS_ONE, tensor_name
from lmdecode.linear.quantized_weight import LinearWeight, index_rows, join_rows

__all__ = ["Weights", "is_of_block"]

_SCALE = ".layer_scalar"  # a buffer that files need not have
_BLOCK = re.compile(r"blk\.([0-9]{1,9})\.")
_QKV = re.compile(r"(blk\.[0-9]{1,9}\.attn_)(q|k|v|qkv)\.(weight|bias)")


class Weights:
    """A file's tensors by the names and in the shapes of a model's parameters.

    Parameters
    ----------
    facts
        Of the file.
    model
        The skeleton, whose parameters say what is expected.
    keeps_blocks : bool
        Whether matrices in blocks stay what they are.
    """

    def __init__(self, facts: Facts, model: Any, keeps_blocks: bool) -> None:
        self._file, self._architecture = facts.file, facts.architecture
        self._ignored = ("v.", "mm.") if facts.is_ollamas else ()  # of images
        self._keeps_blocks = keeps_blocks
        config = model.config
        self._heads = dict[str, int]()
        if self._architecture in PERMUTED:  # whose layers are alike
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
        from lmdecode.integrations.transformers.decoding.checkpoint import READ_BUFFERS

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
        # Layers behind the model's predict more tokens than one.
        first = model.config.num_hidden_layers
        return {name for name in left if not is_of_block(name, first)}

    def _check(self, model: Any) -> None:
        """Raise for what is missing, is left over, or has another shape."""
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
