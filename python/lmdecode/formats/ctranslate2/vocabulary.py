"""The vocabularies in a folder of CTranslate2."""

from __future__ import annotations

import json
import os
from pathlib import Path

__all__ = ["load_vocabulary"]

_NAMES = {
    "source": ("shared_vocabulary", "source_vocabulary", "vocabulary"),
    "target": ("shared_vocabulary", "target_vocabulary", "vocabulary"),
}


def load_vocabulary(folder: str | os.PathLike[str], side: str = "target") -> list[str]:
    """Return the tokens of a model, in the order of their ids.

    Parameters
    ----------
    folder
        A folder with ``shared_vocabulary``, ``source_vocabulary`` and ``target_vocabulary``, or
        ``vocabulary``, as .json or .txt.
    side : {"target", "source"}
        Side of the tokens, if the vocabularies differ.

    Raises
    ------
    FileNotFoundError
        There is no such file.
    ValueError
        It is not a list of strings, or ``side`` is another word.
    """
    if side not in _NAMES:
        raise ValueError(f"load_vocabulary: side is {side!r}; expected one of {', '.join(_NAMES)}")
    paths = [Path(folder) / f"{name}.{end}" for name in _NAMES[side] for end in ("json", "txt")]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        names = ", ".join(path.name for path in paths)
        raise FileNotFoundError(f"{folder} has no vocabulary; expected one of {names}")
    try:
        text = path.read_text(encoding="utf-8")
        tokens = json.loads(text) if path.suffix == ".json" else text.split("\n")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no vocabulary ({error})") from error
    if path.suffix == ".txt" and tokens[-1] == "":
        tokens.pop()
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise ValueError(f"{path} is no vocabulary; expected a list of strings")
    return tokens
