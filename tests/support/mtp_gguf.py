"""GGUF files with the block that predicts further tokens, as llama.cpp's converter writes it."""

from collections.abc import Container
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.support.gguf_files import tensors_of, write_model
from tests.support.mtp_models import MtpModel

__all__ = ["further_block", "mtp_tensors", "write_mtp_model"]


def further_block(writer: Any, count: int = 1) -> None:
    """Let the entries of a file have blocks more, which predict further tokens."""
    entries, key = writer.kv_data[0], f"{writer.arch}.attention.recurrent_layers"
    layers = [*entries.pop(key).value, *[False] * count]
    writer.add_array(key, layers)
    entries[f"{writer.arch}.block_count"].value = len(layers)
    writer.add_uint32(f"{writer.arch}.nextn_predict_layers", count)


def mtp_tensors(model: MtpModel) -> dict[str, Tensor]:
    """Return the tensors of the block, by the names and with the values that a file has."""
    block = f"blk.{model.model.config.num_hidden_layers}."
    of_layer = tensors_of(model.layer)
    tensors = {
        name.replace("blk.0.", block): tensor
        for name, tensor in of_layer.items()
        if name.startswith("blk.0.")
    }
    beside = {
        "eh_proj": model.fc, "enorm": model.norms[0] + 1.0, "hnorm": model.norms[1] + 1.0,
        "shared_head_norm": of_layer["output_norm.weight"],
    }  # fmt: skip
    return tensors | {f"{block}nextn.{name}.weight": tensor for name, tensor in beside.items()}


def write_mtp_model(
    path: Path,
    model: MtpModel,
    *entries: Any,
    count: int = 1,
    kinds: Any = None,
    without: Container[str] = (),
    **more: Tensor,
) -> None:
    """Write a model with its block, and entries that say there are ``count``: ``write_model``."""

    def further(writer: Any) -> None:
        further_block(writer, count)

    tensors = {**mtp_tensors(model), **more}
    tensors = {name: tensor for name, tensor in tensors.items() if name not in without}
    write_model(path, model.model, further, *entries, kinds=kinds, **tensors)
