"""Tokenizers that a folder has in an old form, as the files that the package tokenizers reads."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from lmdecode._checks import install_hint
from lmdecode.readers.sentencepiece import keep_rules

__all__ = ["converted_tokenizer"]


def converted_tokenizer(folder: str | os.PathLike[str]) -> dict[str, bytes]:
    """Return ``tokenizer.json`` and the files that belong to it, by name, made by transformers.

    ``folder`` has a sentencepiece tokenizer, or a vocabulary with merges. Raises ImportError
    without transformers, or a package that it needs for this tokenizer; and ValueError if
    transformers cannot read it, has only a slow form of it, or it has a rule that
    ``tokenizer.json`` cannot keep.
    """
    try:
        from transformers import AutoTokenizer
        from transformers.utils import is_protobuf_available, is_sentencepiece_available
    except ImportError as error:
        raise ImportError(
            f"the tokenizer in {folder} needs transformers: {install_hint('transformers')}"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except ImportError:
        raise
    except Exception as error:  # of the packages, too, that read the files
        can_read = is_protobuf_available() and is_sentencepiece_available()
        if not can_read and any(map(_is_sentencepiece, Path(folder).glob("*.model"))):
            raise ImportError(
                f"the tokenizer in {folder} is of sentencepiece: transformers needs the packages "
                "sentencepiece and protobuf to read it (pip install sentencepiece protobuf)"
            ) from error
        what = " ".join(str(error).split())[:200]
        raise ValueError(f"{folder} has a tokenizer that cannot be read ({what})") from error
    if not tokenizer.is_fast:
        raise ValueError(
            f"{folder} has a {type(tokenizer).__name__}, which transformers has in Python alone; "
            "expected one that can be written as tokenizer.json"
        )
    with tempfile.TemporaryDirectory() as own:
        tokenizer.save_pretrained(own)
        files = {file.name: file.read_bytes() for file in Path(own).iterdir() if file.is_file()}
    sources = [Path(getattr(tokenizer, "vocab_file", None) or ""), *Path(folder).glob("*.model")]
    source = next(filter(_is_sentencepiece, sources), None)
    if source is not None:
        inner, settings = tokenizer.backend_tokenizer, json.loads(files["tokenizer_config.json"])
        words = keep_rules(inner, source, tokenizer.unk_token)
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # whose rules are the file's
        extra = settings.get("extra_special_tokens")  # transformers puts words of the user there
        if isinstance(extra, list):
            settings["extra_special_tokens"] = [one for one in extra if one not in words]
        data = json.loads(inner.to_str())
        for token in data["added_tokens"]:
            token["normalized"] |= token["content"] in words
        files["tokenizer.json"] = json.dumps(data, ensure_ascii=False).encode()
        files["tokenizer_config.json"] = json.dumps(settings, ensure_ascii=False).encode()
    return files


def _is_sentencepiece(file: Path) -> bool:
    """Return whether a file begins with a piece, not with the base64 of tiktoken's files."""
    if not file.is_file():
        return False
    with file.open("rb") as begin:
        return begin.read(1) == b"\n"
