"""Files that ``Decoding`` loads, and saves beside its weights, for every source format."""

from __future__ import annotations

import copy
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from lmdecode.linear.formats import is_kept
from lmdecode.models.saved import MANIFEST
from lmdecode.readers.ctranslate2.folder import is_ctranslate2
from lmdecode.readers.gguf.hub import cached_gguf
from lmdecode.readers.gguf.reader import GgufFile, is_gguf
from lmdecode.readers.gguf.tokenizer import load_tokenizer, tokenizer_files, tokenizer_path

__all__ = ["check_as_it_is", "files_of", "folder_of_file", "load_parts", "pooling_of",
           "tokenizer_of"]  # fmt: skip


# Files of tokenizers and processors.
_TOKENIZER_FILES = (
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "merges.txt",
    "normalizer.json", "preprocessor_config.json", "processor_config.json",
    "sentencepiece.bpe.model", "sentencepiece.model", "shared_vocabulary.json",
    "shared_vocabulary.txt", "source.spm", "source_vocabulary.json", "source_vocabulary.txt",
    "special_tokens_map.json", "spiece.model", "target.spm", "target_vocab.json",
    "target_vocabulary.json", "target_vocabulary.txt", "tokenizer.gguf", "tokenizer.json",
    "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocabulary.json", "vocabulary.txt",
)  # fmt: skip


# Where sentence-transformers says how the vector of a text is made, and older releases' words.
_POOLING = "1_Pooling/config.json"
_POOLINGS = {"cls_token": "cls", "max_tokens": "max", "mean_tokens": "mean",
             "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
             "weightedmean_tokens": "weightedmean", "lasttoken": "lasttoken"}  # fmt: skip
_GGUF_POOLINGS = ("none", "mean", "cls", "last", "rank")


def check_as_it_is(source: object) -> None:
    """Raise ValueError where ``dtype=None`` is asked of what has no quantized weights to keep."""
    what: object = f"a {type(source).__name__}"
    if isinstance(source, str):
        source = cached_gguf("Decoding.from_pretrained", source)
    if isinstance(source, (str, os.PathLike)):
        if is_gguf(source) or has_mxfp4(Path(source)):
            return
        what = source
    raise ValueError(
        f"Decoding.from_pretrained: dtype is None for {what}; expected a format, as GGUF files "
        "and folders of gpt-oss in MXFP4 alone have weights that are kept as they are"
    )


def has_mxfp4(folder: Path) -> bool:
    """Whether a folder has a gpt-oss model with experts in blocks of MXFP4."""
    path = folder / "config.json"
    if not path.is_file():
        return False
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return isinstance(config, dict) and is_kept(
        config.get("model_type"), config.get("quantization_config")
    )


def _is_path(source: str | os.PathLike[str]) -> bool:
    """Whether this is written as a path, and cannot be the name of a model on a hub."""
    name = os.fspath(source)
    return (
        isinstance(source, os.PathLike)
        or name.startswith((".", "~", os.sep))
        or name.endswith(".gguf")
        or name.count(os.sep) > 1
    )


def load_parts(
    source: str | os.PathLike[str], *, keeps_blocks: bool = False, mtp: bool = False
) -> tuple[Any, Any, Any]:
    """Return a model, and the config and the weights that ``Decoding`` takes of it.

    ``source`` is a GGUF file, by its path or as ``cached_gguf`` takes it, a folder of CTranslate2,
    or the folder or the name of a model of transformers. ``keeps_blocks``: the linear weights of a
    GGUF file stay in their blocks. ``mtp``: with the weights that predict further tokens, of a GGUF
    file or of safetensors. Raises as ``Decoding.from_pretrained``.
    """
    source = cached_gguf("Decoding.from_pretrained", source)
    if _is_path(source) and not os.path.exists(source):
        raise FileNotFoundError(
            f"Decoding.from_pretrained: there is no file or folder {os.fspath(source)!r}"
        )
    if is_gguf(source):
        from lmdecode.readers.gguf.model import load_parts as load_gguf

        return load_gguf(source, keeps_blocks=keeps_blocks, mtp=mtp)
    if is_ctranslate2(Path(source)):
        if mtp:
            raise ValueError(
                f"Decoding.from_pretrained: mtp is True for {os.fspath(source)}; expected False "
                "for a folder of CTranslate2"
            )
        from lmdecode.readers.ctranslate2.model import load_parts as load_ctranslate2

        return load_ctranslate2(source)
    from lmdecode.readers.transformers.models import load_parts as load_folder

    try:
        return load_folder(source, mtp=mtp)
    except OSError as error:
        if not (Path(source) / MANIFEST).is_file():
            raise
        raise OSError(
            f"Decoding.from_pretrained: {source} was written by Decoding.save; expected "
            "Decoding.load, or the folder of a model of transformers"
        ) from error


def files_of(model: Any) -> dict[str, bytes]:
    """Return a model's configs as files, by name, and the tokenizer's where it came with one."""
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        generation_config = copy.deepcopy(model.generation_config)
        # transformers reads only known entries of a marked config, so not Whisper's languages.
        generation_config._from_model_config = False
        generation_config.save_pretrained(folder)
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}
    source = getattr(model.config, "_name_or_path", "") or model.name_or_path
    if source and Path(source).is_dir():
        paths = [Path(source) / name for name in _TOKENIZER_FILES]
        files |= {path.name: path.read_bytes() for path in paths if path.is_file()}
        files |= _named_templates(Path(source), files)
    return {**files, **tokenizer_files(source)} if is_gguf(source) else files


def _named_templates(folder: Path, files: dict[str, bytes]) -> dict[str, bytes]:
    """Return the files that change if a folder has more than one chat template.

    They move from a folder of their own into ``tokenizer_config.json``.
    """
    named = {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if not named:
        return {}
    if "chat_template.jinja" in files:
        named = {"default": folder / "chat_template.jinja", **named}
    config = json.loads(files.get("tokenizer_config.json", b"{}"))
    config["chat_template"] = [
        {"name": name, "template": path.read_text(encoding="utf-8")} for name, path in named.items()
    ]
    files.pop("chat_template.jinja", None)
    return {"tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False).encode()}


def folder_of_file(name: str, file: str) -> Path | None:
    """Return the folder in the cache that holds a file of a hub's model, if there is one."""
    from transformers.utils.hub import cached_file

    options: dict[str, Any] = {
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,
    }
    found = cached_file(name, file, **options)
    return None if found is None else Path(found).parent


def tokenizer_of(source: str | os.PathLike[str]) -> Any:
    """Return the tokenizer of transformers for a file, or a folder or name of a model.

    Raises OSError or ValueError where there is none.
    """
    if tokenizer_path(source) is not None:
        return load_tokenizer(source)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(source)


def pooling_of(source: str | os.PathLike[str]) -> str:
    """Return the word of a GGUF file, or a folder or name of a model, for how vectors are made.

    It is "last" where nothing says it. Raises ValueError for a damaged file.
    """
    if is_gguf(source):
        metadata = GgufFile(source).metadata
        kind = metadata.get(f"{metadata.get('general.architecture')}.pooling_type", 3)
        is_known = isinstance(kind, int) and 0 <= kind < len(_GGUF_POOLINGS)
        return _GGUF_POOLINGS[kind] if is_known else repr(kind)
    path = Path(source) / _POOLING
    if not os.path.exists(source) and not _is_path(source):
        cached = folder_of_file(os.fspath(source), _POOLING)
        path = path if cached is None else cached / path.name
    if not path.is_file():
        return "last"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        modes = config.get("pooling_mode")
        if modes is None:
            known = [word for name, word in _POOLINGS.items() if config.get(f"pooling_mode_{name}")]
            modes = known or "mean"
        word = modes if isinstance(modes, str) else "+".join(modes)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path} does not say how vectors are made: {error}") from error
    return "last" if word == "lasttoken" else word
