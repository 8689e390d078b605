"""The model of a demo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lmdecode.demo._output import DemoError, one_line, readable_path, require, say

__all__ = ["load_model", "load_tokenizer", "print_model"]

# What the files of tokenizers are called.
_TOKENIZER_FILES = ("*token*", "vocab*", "merges.txt", "spiece.model", "sentencepiece*")


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a folder.

    Raises
    ------
    DemoError
        There is none, or it cannot be loaded.
    """
    transformers = require("transformers")
    try:
        return transformers.AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # of the packages, too, that read the files
        if not any(next(folder.glob(name), None) for name in _TOKENIZER_FILES):
            raise DemoError(f"no tokenizer in {folder}") from error
        raise DemoError(f"cannot load the tokenizer in {folder}: {one_line(error)}") from error


def load_model(
    folder: Path, dtype: torch.dtype | None = None, auto_class: str = "AutoModelForCausalLM"
) -> tuple[Any, Any]:
    """Return a language model, in the dtype of its files by default, and its tokenizer.

    Parameters
    ----------
    folder
        Of both.
    dtype
        Of the weights.
    auto_class
        The class of transformers that loads the model.

    Raises
    ------
    DemoError
        They cannot be loaded.
    """
    transformers = require("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    options = {} if dtype is None else {"dtype": dtype}
    tokenizer = load_tokenizer(folder)
    try:
        model = getattr(transformers, auto_class).from_pretrained(folder, **options)
    except (OSError, ValueError) as error:
        raise DemoError(f"cannot load the model in {folder}: {one_line(error)}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model.eval(), tokenizer


def print_model(folder: Path, model: Any, *details: str) -> None:
    """Print a line on a model: its folder, its size, and what else a demo says of it."""
    size = f"{model.num_parameters() / 1e6:.1f} million parameters"
    say(f"Model: {readable_path(folder)}, {', '.join((size, *details))}.\n")
