"""What ``Decoding`` loads, and saves beside its weights, whatever the format it came in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lmdecode.decoder.saved_model import MANIFEST
from lmdecode.formats.gguf import is_gguf, tokenizer_files

__all__ = ["files_of", "load_parts"]


def load_parts(
    source: str | os.PathLike[str], *, keeps_blocks: bool = False
) -> tuple[Any, Any, Any]:
    """Return a model, and the config and the weights that ``Decoding`` takes of it.

    Parameters
    ----------
    source
        The path of a GGUF file, or the folder or the name of a model of transformers.
    keeps_blocks : bool
        Whether the linear weights of a GGUF file stay in their blocks.

    Raises
    ------
    ValueError, OSError
        As ``Decoding.from_pretrained``.
    """
    if is_gguf(source):
        from lmdecode.formats.gguf.model import load_parts as load_gguf

        return load_gguf(source, keeps_blocks=keeps_blocks)
    from lmdecode.integrations.transformers.decoding.models import load_parts as load_folder

    try:
        return load_folder(source)
    except OSError as error:
        if not (Path(source) / MANIFEST).is_file():
            raise
        raise OSError(
            f"Decoding.from_pretrained: {source} was written by Decoding.save; expected "
            "Decoding.load, or the folder of a model of transformers"
        ) from error


def files_of(model: Any) -> dict[str, bytes]:
    """Return a model's configs as files, by name, and its tokenizer's where it came with one."""
    from lmdecode.integrations.transformers.decoding.checkpoint import files_of as configs_of

    files, source = configs_of(model), getattr(model.config, "_name_or_path", "")
    return {**files, **tokenizer_files(source)} if is_gguf(source) else files
