"""Where the parameters of transformers' experts are in a GGUF file: several tensors each."""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor

from lmdecode.formats.gguf.reader import GgufFile
from lmdecode.linear.quantized_weight import QuantizedWeight, join_rows

__all__ = ["expert_tensors", "read_parts"]

_PARAMETER = re.compile(
    r"model\.layers\.(\d+)\.(?:(?:mlp|block_sparse_moe|feed_forward)\.)?"
    r"experts\.(gate_up_proj|down_proj)(_bias)?"
)
_BOTH = "ffn_gate_up_exps.weight"  # gates, then the others
_SHARED = re.compile(r"model\.layers\.(\d+)\.shared_mlp\.(input|output)_linear\.weight")


def expert_tensors(
    parameter: str, shape: tuple[int, ...], architecture: str, tensors: Container[str]
) -> dict[str, tuple[int, ...]] | None:
    """Return the names and shapes of the tensors of a parameter that has several, else None.

    Parameters
    ----------
    parameter, shape
        Of the model.
    architecture
        That of the file. Matrices of gpt-oss are [E, in, out] in the model.
    tensors
        Names of the file's: gates and others may be in one, and there may be no experts.
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
