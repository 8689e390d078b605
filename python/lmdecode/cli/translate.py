"""``lmdecode translate``: lines of text through an encoder-decoder model."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from lmdecode._checks import install_hint
from lmdecode.cli import COMMANDS
from lmdecode.cli.errors import CommandError
from lmdecode.cli.options import MODEL_HELP, be_quiet, check_at_least_1, set_threads
from lmdecode.cli.terminal import busy
from lmdecode.decoding import Decoding
from lmdecode.models.packed_causal import PackedCausalModel
from lmdecode.models.saved import MANIFEST
from lmdecode.serving.text_model import DEFAULT_DTYPE, local_path

__all__ = ["add_command"]

_LINES = 512  # at a time: their results are written before the next ones are read


def add_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to a parser's commands."""
    parser = commands.add_parser(
        "translate",
        help=COMMANDS["translate"],
        usage="lmdecode translate MODEL [TEXT] [options]",
        description="Translate a text, or the lines of files, each by itself. Without a text, or "
        "with -, lines are read from the standard input. An empty line stays one.",
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("text", nargs="?", metavar="TEXT", help="text; -: standard input")
    add = parser.add_argument
    add("--file", action="append", default=[], type=Path, metavar="FILE",
        help="of lines in UTF-8; may be given again")  # fmt: skip
    add("--dtype", metavar="FORMAT", help=f"of weights (default {DEFAULT_DTYPE})")
    add("--beams", type=int, metavar="N", help="of the search (default: the model's)")
    add("--max-tokens", type=int, metavar="N", help="of a translation (default: the model's)")
    add("--batch-tokens", type=int, metavar="N", help="of sources that are searched at once")
    add("--prefix", default="", metavar="TEXT", help="put before each line, as T5 needs it")
    add("--from", dest="source", metavar="LANGUAGE", help="as the tokenizer calls it")
    add("--to", dest="target", metavar="LANGUAGE", help="as the tokenizer calls it")
    add("--threads", type=int, metavar="N", help="of the computation")
    parser.set_defaults(run=_run)


def _check_source(given: argparse.Namespace) -> None:
    """Check the files that are to be translated."""
    text = given.text
    for path in given.file:
        if not path.exists() or path.is_dir():
            raise CommandError(f"--file is {path}; expected a file")
    if text is None:
        return
    if given.file:
        raise CommandError(f"a text and --file are given: {text!r}; expected one of them")
    if not text.strip():
        raise CommandError("the text is empty; expected a text")
    if os.path.isfile(text):
        raise CommandError(f"the text is the name of a file; expected a text, or --file {text}")


def _lines(given: argparse.Namespace) -> Iterator[str]:
    if given.file:
        for path in given.file:
            with open(path, encoding="utf-8", errors="replace") as file:
                for line in file:
                    yield line.rstrip("\r\n")
    elif given.text not in (None, "-"):
        yield from (line.rstrip("\n") for line in io.StringIO(given.text, newline=None))
    else:
        if sys.stdin.isatty():
            print("Write the lines; Ctrl-D ends them.", file=sys.stderr)
        for data in sys.stdin.buffer:
            yield data.decode(errors="replace").rstrip("\r\n")


def _decoding(path: Path, dtype: str | None) -> Decoding:
    if (path / MANIFEST).is_file():
        decoding = Decoding.load(path)
        saved = decoding.decoder.weight_format
        if dtype not in (None, saved):
            raise CommandError(f"--dtype is {dtype}; expected {saved}, in which {path} was saved")
    else:
        decoding = Decoding.from_pretrained(path, dtype or DEFAULT_DTYPE, keep_model=False)
    if isinstance(decoding.decoder, PackedCausalModel):
        raise CommandError(f"{path} is a decoder-only model; expected an encoder-decoder one")
    return decoding


def _tokenizer(path: Path, given: argparse.Namespace) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise CommandError(f"needs transformers: {install_hint('transformers')}") from error
    from lmdecode.readers.ctranslate2.folder import is_ctranslate2
    from lmdecode.readers.ctranslate2.tokenizer import load_tokenizer

    is_theirs = is_ctranslate2(path)
    tokenizer = load_tokenizer(path) if is_theirs else AutoTokenizer.from_pretrained(path)
    for name, language in (("src_lang", given.source), ("tgt_lang", given.target)):
        if language is not None:
            if not hasattr(tokenizer, name):
                option = "--from" if name == "src_lang" else "--to"
                raise CommandError(f"{option} is given; expected none: the model has no languages")
            setattr(tokenizer, name, language)
    return tokenizer


def _forced(tokenizer: Any, target: str | None) -> dict[str, Any]:
    """Return what makes a model of many languages begin in this one."""
    if target is None:
        return {}
    known = getattr(tokenizer, "lang_code_to_id", None) or {}
    token = known.get(target)
    if token is None and hasattr(tokenizer, "get_lang_id"):
        token = tokenizer.get_lang_id(target)
    if token is None:
        token = tokenizer.convert_tokens_to_ids(target)
        if token is None or token == tokenizer.unk_token_id:
            raise CommandError(f"--to is {target!r}, which is no language of the model's tokenizer")
    return {"forced_bos_token_id": token}


def _run(given: argparse.Namespace) -> int:
    check_at_least_1(given, "beams", "max_tokens", "batch_tokens")
    _check_source(given)
    set_threads(given)
    be_quiet()
    path = local_path(given.model)
    with busy(f"Loading {given.model}"):
        decoding = _decoding(path, given.dtype)
        tokenizer = _tokenizer(path, given)
    options = {
        "num_beams": given.beams,
        "max_new_tokens": given.max_tokens,
        "max_batch_tokens": given.batch_tokens,
        **_forced(tokenizer, given.target),
    }
    lines = _lines(given)
    while batch := list(islice(lines, _LINES)):
        said = [line for line in batch if line.strip()]
        found = iter(_translated(decoding, tokenizer, [given.prefix + line for line in said],
                                 options))  # fmt: skip
        for line in batch:
            print(next(found) if line.strip() else "", flush=True)
    return 0


def _translated(
    decoding: Decoding, tokenizer: Any, lines: list[str], options: dict[str, Any]
) -> list[str]:
    if not lines:
        return []
    sources = tokenizer(lines).input_ids
    with busy(f"Translating {len(lines)} lines"):
        results = decoding.translate(sources, **options)
    texts = tokenizer.batch_decode(
        [result.new_tokens() for result in results], skip_special_tokens=True
    )
    return [" ".join(text.split("\n")) for text in texts]
