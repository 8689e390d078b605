"""Checks of GGUF files that tests write: their tokens, and that they are refused."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lmdecode
from tests.support.causal_models import random_tokens
from tests.support.gguf_files import tensors_of, write_model

OPTIONS: dict[str, Any] = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}


def check_tokens(path: Path, model: Any) -> None:
    """Greedy tokens of a file are those of the model."""
    ids = torch.stack([random_tokens(12, seed) for seed in range(2)])
    decoding = lmdecode.Decoding.from_pretrained(path)
    assert torch.equal(decoding.generate(ids, **OPTIONS), model.generate(ids, **OPTIONS))


def check_file_refused(path: Path, message: str) -> None:
    """The error has this in it."""
    with pytest.raises(ValueError, match=re.escape(message)):
        lmdecode.Decoding.from_pretrained(path)


def check_missing(path: Path, model: Any, tensor: str) -> None:
    """A file without a tensor is refused by the tensor's name."""
    write_model(path, model, without={tensor})
    check_file_refused(path, f"has no tensor '{tensor}'; expected one")


def replaced(key: str, value: Any) -> Callable[[Any], None]:
    """Return a change of a writer: an entry of the architecture has this value."""

    def change(writer: Any) -> None:
        name = f"{writer.arch}.{key}"
        if isinstance(value, str):
            writer.kv_data[0].pop(name)
            writer.add_string(name, value)
            return
        if name not in writer.kv_data[0]:
            writer.add_uint32(name, value)
        writer.kv_data[0][name].value = value

    return change


def flattened(model: Any, ending: str, count: int) -> dict[str, Tensor]:
    """Return the tensors of a file with an ending, so many, as vectors."""
    found = {
        name: tensor.flatten()
        for name, tensor in tensors_of(model).items()
        if name.endswith(ending)
    }
    assert len(found) == count
    return found
