"""A talk with a local model: streamed, and kept in a store, so that it goes on another day."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

import lmdecode
from lmdecode._checks import check_format
from lmdecode.decoder.causal_weights import PackedCausalModel
from lmdecode.decoder.config import FORMATS
from lmdecode.demo._model import load_tokenizer
from lmdecode.demo._output import DemoError, model_folder, one_line, readable_path, require

CAPACITY_BYTES = 1 << 30
DEFAULT_DTYPE = "int8"
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_k": 50, "top_p": 0.9}


def default_store() -> Path:
    """Return the folder of talks where none is given: in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "lmdecode" / "chat"


class Template:
    """Turns a line of the user into text of the prompt.

    The model's chat template is applied if there is one. Otherwise the talk is one plain text.

    Parameters
    ----------
    tokenizer
        The model's tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._has_template = getattr(tokenizer, "chat_template", None) is not None

    def _rendered(self, *texts: str, asks: bool) -> str:
        messages = [
            {"role": "assistant" if i % 2 else "user", "content": text}
            for i, text in enumerate(texts)
        ]
        rendered: str = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=asks
        )
        return rendered

    def tokens(self, line: str, is_first: bool) -> list[int]:
        """Return the tokens that a line adds to a talk."""
        if not self._has_template:
            text = line if is_first else f"\n{line}"
            ids: list[int] = self._tokenizer(text, add_special_tokens=is_first).input_ids
            return ids
        if is_first:
            text = self._rendered(line, asks=True)
        else:  # what a third message adds to any two
            before = self._rendered("Hello", "Hello", asks=False)
            text = self._rendered("Hello", "Hello", line, asks=True).removeprefix(before)
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)


def _decoding_of(folder: Path, dtype: str | None) -> lmdecode.Decoding:
    """Return the model of a folder; a saved one is in the format that it was saved in."""
    if not (folder / "lmdecode.json").is_file():
        return lmdecode.Decoding.from_pretrained(folder, dtype or DEFAULT_DTYPE)
    decoding = lmdecode.Decoding.load(folder)
    assert isinstance(decoding.decoder, PackedCausalModel)
    saved = decoding.decoder.weight_format
    if dtype is not None and check_format("demo chat", dtype, FORMATS) != saved:
        raise DemoError(f"--dtype is {dtype}; expected {saved}, in which {folder} was saved")
    return decoding


def _opened(path: Path, fingerprint: Any) -> Any:
    from lmdecode.store import KVStore, StoreError

    try:
        path.mkdir(parents=True, exist_ok=True)
        return KVStore(path, fingerprint=fingerprint, capacity_bytes=CAPACITY_BYTES)
    except (OSError, StoreError) as error:
        raise DemoError(f"--store {path}: {one_line(error)}") from error


def _talks_of_others(path: Path, session: str, fingerprint: Any) -> list[str]:
    """Return which other models, or formats of one, have a talk of this name in a folder."""
    from lmdecode.store import Fingerprint, KVStore, StoreError

    found = []
    for file in sorted(path.glob("*/fingerprint.json")):
        try:
            other = Fingerprint.decoded(file.read_bytes())
            if other == fingerprint:
                continue
            with KVStore(path, fingerprint=other, readonly=True) as store:
                has_talk = any(name == session for name, _ in store.sessions())
        except (OSError, StoreError, TypeError, ValueError):  # it is of no account here
            continue
        if has_talk:  # the layout names the format of weights and the level of the CPU
            found.append(", ".join([other.model_id, *other.layout.split("/")[1:]]))
    return found


def run(
    model_path: Path | None, store_path: Path | None, session: str, dtype: str | None, tokens: int
) -> None:
    """Talk until the end of the input, or an empty line.

    Parameters
    ----------
    model_path
        Folder of a causal language model and its tokenizer, or one that ``Decoding.save`` wrote;
        None: the model of the source tree.
    store_path
        Folder of talks; None: one in the user's cache.
    session
        Name of the talk.
    dtype
        Format of the weights; None: int8, or that of a saved model.
    tokens
        The most tokens of an answer.

    Raises
    ------
    DemoError
        Something is missing, or the model is one that ``Decoding`` does not run.
    """
    transformers = require("transformers")
    transformers.utils.logging.set_verbosity_error()
    folder, path = model_folder(model_path), store_path or default_store()
    try:
        decoding = _decoding_of(folder, dtype)
    except (OSError, ValueError) as error:
        raise DemoError(one_line(error)) from error
    tokenizer = load_tokenizer(folder)
    template = Template(tokenizer)
    fingerprint = decoding.fingerprint(tokenizer)
    with _opened(path, fingerprint) as store:
        said = list(store.session(session).tokens)
        print(f"Model: {readable_path(folder)}. Talk {session!r} in {path}.")
        if said:
            print(f"It goes on behind {len(said)} tokens.")
        elif others := _talks_of_others(path, session, fingerprint):
            print(f"It begins anew: the talk {session!r} there is of {'; '.join(others)}.")
        print("Write a line; an empty one ends the talk.", flush=True)
        while True:
            print("> ", end="", flush=True)
            line = sys.stdin.readline()
            if not line.strip():
                print()
                return
            prompt = [*said, *template.tokens(line.strip(), not said)]
            streamer = transformers.TextStreamer(
                tokenizer, skip_prompt=True, skip_special_tokens=True
            )
            try:
                ids = decoding.generate(
                    torch.tensor([prompt]),
                    attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                    max_new_tokens=tokens,
                    store=store,
                    session=session,
                    streamer=streamer,
                    pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
                    **SAMPLING,
                )
            except ValueError as error:  # such as a talk that is longer than the model's positions
                raise DemoError(one_line(error)) from error
            said = ids[0].tolist()
