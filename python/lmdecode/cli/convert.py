"""``lmdecode convert``: pack a model's weights once, and save them with what its texts need."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any

from lmdecode.cli import COMMANDS
from lmdecode.cli.errors import CommandError
from lmdecode.cli.options import MODEL_HELP, be_quiet, set_threads
from lmdecode.cli.terminal import busy
from lmdecode.decoding import Decoding
from lmdecode.linear.formats import AS_IT_IS, FORMATS
from lmdecode.models.saved import MANIFEST
from lmdecode.readers.gguf.reader import is_gguf
from lmdecode.readers.tokenizer_files import converted_tokenizer
from lmdecode.serving.text_model import DEFAULT_DTYPE, local_path
from lmdecode.serving.tokenizer import Tokenizer

__all__ = ["add_command"]


def add_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to a parser's commands."""
    parser = commands.add_parser(
        "convert",
        help=COMMANDS["convert"],
        description="Pack a model's weights, and save them in FOLDER with its tokenizer and chat "
        "template. The folder is a MODEL of every command; its weights are mapped, not read.",
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="is made; a model is replaced")
    parser.add_argument(
        "--dtype",
        metavar="FORMAT",
        help=f"{', '.join(FORMATS)}, or {AS_IT_IS}: a GGUF file's own values (default of a GGUF "
        f"file {AS_IT_IS}, of others {DEFAULT_DTYPE})",
    )
    parser.add_argument("--cache-dtype", metavar="FORMAT", help="of keys and values")
    parser.add_argument(
        "--mtp", action="store_true", help="with the weights of multi-token prediction"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="of the computation")
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    set_threads(given)
    be_quiet()
    path: Path = local_path(given.model)
    if (path / MANIFEST).is_file():
        raise CommandError(f"{path} is a saved model; expected one of another kind")
    dtype = given.dtype or (AS_IT_IS if is_gguf(path) else DEFAULT_DTYPE)
    kind: Any = None if dtype == AS_IT_IS else dtype
    with busy(f"Packing the weights as {dtype}"):
        decoding = Decoding.from_pretrained(
            path, kind, cache_dtype=given.cache_dtype, keep_model=False, mtp=given.mtp
        )
    with busy(f"Writing {given.folder}"):
        decoding.save(given.folder)
        if not is_gguf(path):
            _add_tokenizer(path, given.folder)
    size = sum(file.stat().st_size for file in given.folder.iterdir() if file.is_file())
    print(f"{given.folder}: {decoding.decoder.weight_format}, {size / 1e6:,.1f} MB")
    try:
        Tokenizer.load(given.folder)
    except (ImportError, OSError, ValueError) as error:
        print(f"lmdecode convert: it has no tokenizer for lmdecode chat ({error})", file=sys.stderr)
    return 0


def _add_tokenizer(path: Path, folder: Path) -> None:
    """Write a ``tokenizer.json`` where the model has its tokenizer in another form."""
    if (path / "tokenizer.json").is_file():
        return
    with contextlib.suppress(ImportError, ValueError):  # there is none then
        for name, data in converted_tokenizer(path).items():
            (folder / name).write_bytes(data)
