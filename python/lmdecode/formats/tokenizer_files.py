"""Tokenizers that a folder has in an old form, as the files that the package tokenizers reads."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from lmdecode._checks import install_hint

__all__ = ["converted_tokenizer"]


def converted_tokenizer(folder: str | os.PathLike[str]) -> dict[str, bytes]:
    """Return ``tokenizer.json`` and what belongs to it, by name, which transformers makes.

    Parameters
    ----------
    folder : str or path
        Of a model whose tokenizer is of sentencepiece, or a vocabulary with its merges.

    Raises
    ------
    ImportError
        transformers is missing, or a package that it needs for this tokenizer.
    ValueError
        It cannot read the tokenizer, or has it only in a form that is slow.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ImportError(
            f"the tokenizer in {folder} needs transformers: {install_hint('transformers')}"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except ImportError:
        raise
    except Exception as error:  # of the packages, too, that read the files
        what = " ".join(str(error).split())[:200]
        raise ValueError(f"{folder} has a tokenizer that cannot be read ({what})") from error
    if not tokenizer.is_fast:
        raise ValueError(
            f"{folder} has a {type(tokenizer).__name__}, which transformers has in Python alone; "
            "expected one that can be written as tokenizer.json"
        )
    with tempfile.TemporaryDirectory() as own:
        tokenizer.save_pretrained(own)
        return {file.name: file.read_bytes() for file in Path(own).iterdir() if file.is_file()}
