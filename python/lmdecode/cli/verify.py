"""``lmdecode verify``: the same text has the same bits, whatever else is done."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from lmdecode.cli import COMMANDS
from lmdecode.cli.errors import one_line
from lmdecode.cli.options import MODEL_HELP, add_format_options, load_chat_model
from lmdecode.cli.random_model import CONTEXT, VOCAB, random_model
from lmdecode.cli.shipped_models import CAUSAL_MODEL, shipped_model
from lmdecode.cli.verify_checks import Checks, Found, NotChecked
from lmdecode.cli.verify_store import ProcessError
from lmdecode.cli.verify_texts import COMPARED, Texts, digest
from lmdecode.decoder.saved_model import MANIFEST
from lmdecode.decoding import Decoding
from lmdecode.serving.text_model import local_path

__all__ = ["add_command"]

# Where no MODEL is given: sums of floats have an order, which could differ.
_DTYPE = "float32"
_TEXT = (
    "In the beginning God created the heaven and the earth. And the earth was without form, and "
    "void; and darkness was upon the face of the deep. And the Spirit of God moved upon the face "
    "of the waters. And God said, Let there be light: and there was light."
)
_RANDOM_TOKENS = [(17 * i * i + 5 * i + 3) % VOCAB for i in range(61)]
_WIDTH = 34  # of the names of lines
_ABOUT = f"""\
A digest is of {len(COMPARED)} texts (tokens and log-probabilities; greedy, sampled, beams), or of
what ops (sampling, beams, caches, integer products) give for fixed inputs. Ops have
the same bits at every CPU level; texts have others, as floats are summed otherwise."""


class _Model(NamedTuple):
    """A model, what it is called, its texts, and its folder if ``Decoding.load`` takes it."""

    decoding: Decoding
    name: str
    texts: Texts
    saved: Path | None


def add_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to those of a parser."""
    parser = commands.add_parser(
        "verify",
        help=COMMANDS["verify"],
        usage="lmdecode verify [MODEL] [options]",
        description="Write the same texts alone, in a batch, on one thread and on two, with "
        "drafts, at every CPU level, and from a store whose writer was killed, and compare their "
        "bits. Exit status 1: some differ. Without MODEL: the small model of the source tree, or "
        "one of random weights.",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    add_format_options(parser)
    parser.set_defaults(run=_run, context=None, threads=None, chat_template=None)


def _given_model(given: argparse.Namespace) -> _Model:
    model = load_chat_model(given)
    texts = Texts(model.tokenizer.encode(_TEXT), model.context_length or CONTEXT)
    path = local_path(given.model)
    saved = path if (path / MANIFEST).is_file() else None
    return _Model(model.decoding, str(given.model), texts, saved)


def _model(given: argparse.Namespace) -> _Model:
    """Return the model that is given, or the one of the source tree, or one of random weights."""
    if given.model is not None:
        return _given_model(given)
    given.dtype = given.dtype or _DTYPE
    shipped, why = shipped_model(), "give MODEL for one of yours"
    if shipped is not None:
        given.model = shipped
        try:
            return _given_model(given)._replace(name=str(CAUSAL_MODEL))
        except ImportError as error:
            why = f"{CAUSAL_MODEL} is not used: {one_line(error)}"
    decoding = random_model(given.dtype, given.cache_dtype)
    return _Model(decoding, f"random weights ({why})", Texts(_RANDOM_TOKENS, CONTEXT), None)


class _Lines:
    """Writes a line as each check ends, and counts."""

    def __init__(self) -> None:
        self._same = self._wrong = self._not_checked = 0

    def write(self, name: str, check: Callable[[], Found]) -> None:
        """Run a check, and write its line."""
        try:
            text = self._text_of(check())
        except NotChecked as error:
            self._not_checked += 1
            text = f"not checked: {one_line(error)}"
        except (ArithmeticError, LookupError, MemoryError, OSError, ProcessError, RuntimeError,
                ValueError) as error:  # fmt: skip
            self._wrong += 1
            text = f"FAILED: {one_line(error)}"
        print(f"{name:<{_WIDTH}}{text}".rstrip(), flush=True)

    def _text_of(self, found: Found) -> str:
        differing = found.differing
        verdict = f"DIFFERS: {'; '.join(differing)}" if differing else "same"
        if found.fault:
            verdict += f"; WRONG: {found.fault}"
        if differing or found.fault:
            self._wrong += 1
        elif found.expected is None:
            verdict = ""
        else:
            self._same += 1
        note = f" ({found.note})" if found.note else ""
        return f"{digest(found.bits)}  {verdict}{note}"

    def end(self) -> int:
        """Write the last line, and return the exit status."""
        missing = f"; {self._not_checked} not checked" if self._not_checked else ""
        count = self._same + self._wrong
        print(f"{self._same} of {count} comparisons found the same bits{missing}", flush=True)
        return 1 if self._wrong else 0


def _run(given: argparse.Namespace) -> int:
    print(_ABOUT, flush=True)
    model = _model(given)
    formats = (model.decoding.decoder.weight_format, model.decoding.cache_dtype)
    print(f"model: {model.name}; weights {formats[0]}, caches {formats[1]}", flush=True)
    lines = _Lines()
    with tempfile.TemporaryDirectory(prefix="lmdecode-verify-") as folder:
        checks = Checks(model.decoding, model.texts, Path(folder), model.saved)
        for name, check in checks.lines():
            lines.write(name, check)
    return lines.end()
