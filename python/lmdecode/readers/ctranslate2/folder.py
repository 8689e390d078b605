"""A folder of CTranslate2: its config, its vocabularies, and its model in transformers' terms.

This module does not need transformers: a ``Source`` has the config of the transformers model, and
reads its parameters one by one.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from lmdecode.readers.ctranslate2.decoder_only import causal_of
from lmdecode.readers.ctranslate2.encoder_decoder import BIAS, seq2seq_of, t5_of, whisper_of
from lmdecode.readers.ctranslate2.generation_config import (
    check_settings,
    generation_of,
    whisper_generation_of,
)
from lmdecode.readers.ctranslate2.model_file import ModelFile
from lmdecode.readers.ctranslate2.names import Names, Part

__all__ = ["Source", "is_ctranslate2", "load_vocabulary", "open_folder", "read_json"]


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


MODEL = "model.bin"
_KINDS = {
    "WhisperSpec": "a Whisper",
    "TransformerSpec": "a model of BART's or T5's kind, as CTranslate2's converters write them",
    "TransformerDecoderSpec": "a decoder-only model of GPT-2's, Llama's or Gemma's kind",
}


@dataclass
class Source:
    """The config and the parameters of a transformers model, from the files.

    Attributes
    ----------
    folder
        The folder of the files.
    config, generation
        Entries of its config, with ``model_type``, and of its generation config.
    parts
        The part for each parameter, and for some buffers. Parameters with equal parts are tied.
    norm_epsilon
        Epsilon of layer norms, if transformers' config has no entry for it; else None.
    """

    folder: Path
    file: ModelFile
    config: dict[str, Any]
    generation: dict[str, Any]
    parts: dict[str, Part] = field(repr=False)
    norm_epsilon: float | None = None

    def read(self, name: str) -> Tensor:
        """Return a parameter: in the dtype of the file's floats, or float32 of its integers."""
        return self.parts[name].read(self.file)


def is_ctranslate2(folder: Path) -> bool:
    """Whether a folder holds a model of CTranslate2, and none of safetensors."""
    return (folder / MODEL).is_file() and not any(folder.glob("model*.safetensors*"))


def read_json(path: Path, kind: type) -> Any:
    """Read a JSON file. Raise a ValueError that names it if its content is not of this type."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON ({error})") from error
    if not isinstance(found, kind):
        raise ValueError(f"{path} has a {type(found).__name__}; expected a {kind.__name__}")
    return found


def _norm_epsilon(folder: Path, settings: dict[str, Any]) -> float | None:
    epsilon = settings.get("layer_norm_epsilon")
    if epsilon is not None and not (isinstance(epsilon, (int, float)) and 0.0 < epsilon < 1.0):
        raise ValueError(
            f"{folder / 'config.json'} has {epsilon!r} for layer_norm_epsilon; expected a number "
            "between 0 and 1"
        )
    return epsilon


def open_folder(folder: Path) -> Source:
    """Return the model of a folder.

    Raises
    ------
    OSError
        A file is missing.
    ValueError
        A file is damaged, or the model is of an unknown kind; the error names the file.
    """
    file = ModelFile(folder / MODEL)
    if file.spec not in _KINDS:
        raise ValueError(f"{file.path} is a {file.spec!r}; expected one of {', '.join(_KINDS)}")
    path = folder / "config.json"  # files before version 6 have none
    settings = read_json(path, dict) if path.is_file() else {}
    check_settings(folder, settings)
    names = Names(file, _KINDS[file.spec])
    epsilon = _norm_epsilon(folder, settings)
    is_t5 = f"decoder/layer_0/{BIAS}" in names
    if file.spec == "WhisperSpec":
        config = whisper_of(names)
    elif file.spec == "TransformerDecoderSpec":
        config, epsilon = causal_of(names, epsilon), None
    elif is_t5:
        config = t5_of(names)
        config["layer_norm_epsilon"], epsilon = epsilon or config["layer_norm_epsilon"], None
    else:
        config = seq2seq_of(names)
    if file.spec == "WhisperSpec":
        vocabulary = load_vocabulary(folder)
        generation = whisper_generation_of(folder, settings, vocabulary, config)
    else:
        vocabulary = load_vocabulary(folder, "target")
        sources = load_vocabulary(folder, "source")
        generation = generation_of(folder, settings, vocabulary, sources, config)
    rows = config.get("decoder_vocab_size", config["vocab_size"])
    if len(vocabulary) > rows:
        raise ValueError(
            f"{folder} has a vocabulary of {len(vocabulary)} tokens for {rows} rows of embeddings"
        )
    return Source(folder, file, config, generation, names.parts, epsilon)
