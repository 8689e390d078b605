"""``python -m lmdecode perplexity``: what each format of weights costs a model, in one table."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmdecode._checks import check_format, install_hint
from lmdecode._tables import aligned_table
from lmdecode.decoding import Decoding
from lmdecode.linear.formats import AS_IT_IS, FORMATS
from lmdecode.models.saved import MANIFEST
from lmdecode.quality import Perplexity, bits_per_weight, perplexity
from lmdecode.readers.gguf.reader import is_gguf
from lmdecode.readers.gguf.tokenizer import load_tokenizer, tokenizer_path

__all__ = ["add_command"]

_HEAD = ["format", "bits a weight", "perplexity", "+-", "to the first", "tokens a second"]


class _CommandError(Exception):
    """Ends the command with its text, a line for the user."""


def add_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to a parser's commands."""
    about = "Measure the perplexity of a text, in one or several formats of weights."
    parser = commands.add_parser(
        "perplexity",
        help=about,
        description=f"{about} The rule is that of llama-perplexity: the text is cut into windows, "
        "and the second half of each is scored.",
    )
    parser.add_argument(
        "model",
        type=Path,
        help="the folder of a decoder-only model of transformers, one that Decoding.save wrote, or "
        "a GGUF file",
    )
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="in UTF-8")
    parser.add_argument(
        "--dtype",
        nargs="+",
        metavar="FORMAT",
        help=f"{', '.join(FORMATS)}, or {AS_IT_IS}: a GGUF file's own values. Default: all; of a "
        "saved model the one that it has",
    )
    parser.add_argument("--window", type=int, default=512, metavar="N", help="tokens (default 512)")
    parser.add_argument("--tokens", type=int, metavar="N", help="read so many of the text at most")
    parser.add_argument("--cache-dtype", metavar="FORMAT", help="of keys and values")
    parser.add_argument("--threads", type=int, metavar="N", help="of torch")
    parser.set_defaults(run=_run)


def _formats(model: Path, chosen: list[str] | None) -> list[str | None]:
    """Return the weight formats to load the model in; None is the format it was saved in."""
    if (model / MANIFEST).is_file():
        if chosen is not None:
            raise _CommandError(
                f"--dtype {' '.join(chosen)}: {model} was written by Decoding.save; expected none, "
                "as it has its format"
            )
        return [None]
    if chosen is None:
        return [*([AS_IT_IS] if is_gguf(model) else []), *FORMATS]
    of = {name: name for name in (*FORMATS, AS_IT_IS)}
    return [check_format("--dtype", name, of, name="a format") for name in chosen]


def _load(model: Path, kind: str | None, cache_dtype: str | None) -> Decoding:
    if kind is None:
        return Decoding.load(model, cache_dtype=cache_dtype)
    dtype: Any = None if kind == AS_IT_IS else kind
    return Decoding.from_pretrained(model, dtype, cache_dtype=cache_dtype, keep_model=False)


def _read(model: Path, text: Path, limit: int | None) -> tuple[Tensor, int | None]:
    """Return a text's tokens, and the token that the model's tokenizer puts in front of texts."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise _CommandError(f"needs transformers: {install_hint('transformers')}") from error
    written = text.read_text(encoding="utf-8")
    tokenizer = (load_tokenizer if tokenizer_path(model) else AutoTokenizer.from_pretrained)(model)
    bos = tokenizer.bos_token_id
    if bos is not None and tokenizer("a").input_ids[0] != bos:
        bos = None
    found = tokenizer(written, add_special_tokens=False, verbose=False).input_ids
    ids = torch.tensor([*([] if bos is None else [bos]), *found], dtype=torch.int64)
    return ids if limit is None else ids[:limit], bos


@contextlib.contextmanager
def _progress(name: str, total: int) -> Iterator[Any]:
    """Yield what takes the tokens that have been read: a bar on a terminal, if there is tqdm."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield None
        return
    with tqdm(desc=name, total=total, unit=" tokens", leave=False, disable=None) as bar:
        yield bar.update


def _row(name: str, bits: float, found: Perplexity, first: float) -> list[str]:
    return [
        name,
        f"{bits:.2f}",
        f"{found.perplexity:.4f}",
        f"{found.standard_error:.4f}",
        f"{100 * (found.perplexity / first - 1):+.2f} %",
        f"{found.tokens_per_second:,.0f}",
    ]


def _measure(given: argparse.Namespace) -> None:
    for name in ("threads", "tokens"):
        value = getattr(given, name)
        if value is not None and value < 1:
            raise _CommandError(f"--{name} is {value}; expected at least 1")
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    if not given.model.exists():
        raise _CommandError(f"{given.model}: there is no such file or folder")
    kinds = _formats(given.model, given.dtype)
    ids, bos = _read(given.model, given.text, given.tokens)
    rows, first, scored, windows = [], None, 0, 0
    for kind in kinds:
        decoding = _load(given.model, kind, given.cache_dtype)
        name = kind or decoding.decoder.weight_format
        with _progress(name, len(ids)) as on_tokens:
            found = perplexity(decoding, ids, given.window, bos=bos, on_tokens=on_tokens)
        first = found.perplexity if first is None else first
        scored, windows = found.scored, found.read // given.window
        rows.append(_row(name, bits_per_weight(decoding), found, first))
        del decoding  # one format is held at a time
    print(f"{given.text}: {windows} windows of {given.window} tokens, {scored} tokens scored\n")
    print(aligned_table(_HEAD, rows))


def _run(given: argparse.Namespace) -> int:
    try:
        _measure(given)
    except (_CommandError, OSError, TypeError, ValueError) as error:
        print(f"perplexity: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0
