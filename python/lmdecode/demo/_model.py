"""The model of a demo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lmdecode.demo._output import DemoError, readable_path, require

__all__ = ["load_model", "print_model"]


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
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = getattr(transformers, auto_class).from_pretrained(folder, **options)
    except (OSError, ValueError) as error:
        message = str(error).strip().splitlines()[0]
        raise DemoError(f"cannot load the model in {folder}: {message}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model.eval(), tokenizer


def print_model(folder: Path, model: Any, *details: str) -> None:
    """Print a line on a model: its folder, its size, and what else a demo says of it."""
    size = f"{model.num_parameters() / 1e6:.1f} million parameters"
    print(f"Model: {readable_path(folder)}, {', '.join((size, *details))}.\n", flush=True)
