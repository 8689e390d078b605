"""Errors, models, text, tables and a timer, which the demos share."""

from __future__ import annotations

import importlib
import math
import shutil
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from lmdecode._checks import install_hint
from lmdecode._tables import aligned_table
from lmdecode.cli.errors import CommandError, one_line
from lmdecode.cli.options import be_quiet
from lmdecode.cli.shipped_models import CAUSAL_MODEL, shipped_model
from lmdecode.cli.terminal import busy

PROMPTS = (
    "Genesis 1\nIn the beginning",
    "Psalms 23\nThe LORD is my",
    "Proverbs 10\nA wise son",
    "Matthew 5\nBlessed are",
)
STOCK, OURS = "transformers", "lmdecode"
_MOST_COLUMNS = 100  # of prose: longer lines are hard to read
_UNITS = {"ms": 1e3, "us": 1e6}
# Calls up to this long are repeated within a turn, so that they find their data in the caches.
_SHORT_SECONDS, _REPEATS = 0.002, 8

Timings = dict[str, dict[str, float]]  # seconds by case and contestant


class DemoError(CommandError):
    """Ends a demo with its text, a line for the user, and exit status 1."""


class NotBuiltError(DemoError):
    """Ends a demo of a part that this build lacks; a run of several demos goes on."""


@dataclass(frozen=True)
class Look:
    """What the command line asks of a demo: a model's folder, a picture, how much to show."""

    model: Path | None = None
    plot: Path | None = None
    tokens: int = 60
    quick: bool = False
    words: Sequence[str] = ()

    def up_to(self, tokens: int) -> int:
        """Return the number of tokens, at most ``tokens`` in a quick look."""
        return min(self.tokens, tokens) if self.quick else self.tokens


def require(package: str, extra: str = "demo") -> ModuleType:
    """Import an optional package of the extra, or raise a DemoError that names the extra."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise DemoError(f"the demo needs {package} ({error}): {install_hint(extra)}") from error


def model_folder(chosen: Path | None, ships: Path = CAUSAL_MODEL) -> Path:
    """Return the folder the user chose, else ``ships``, a folder of the source tree."""
    folder = chosen or shipped_model(ships)
    if folder is None:
        raise DemoError(
            "the demo's model is not part of the installed package: run the demo in a source "
            f"checkout, which has {ships}, or give --model DIR, of a model and its tokenizer"
        )
    if not (folder / "config.json").is_file():
        raise DemoError(f"--model {folder}: no config.json there; expected a model's folder")
    return folder


def load_model(
    folder: Path, dtype: torch.dtype | None = None, auto_class: str = "AutoModelForCausalLM"
) -> tuple[Any, Any]:
    """Return a model of the folder, in its files' dtype by default, and its tokenizer."""
    transformers = require("transformers")
    be_quiet()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = getattr(transformers, auto_class).from_pretrained(folder, dtype=dtype or "auto")
    except Exception as error:  # of the packages, too, that read the files
        raise DemoError(f"cannot load the model in {folder}: {one_line(error)}") from error
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return model.eval(), tokenizer


def print_model(folder: Path, model: Any, *details: str) -> None:
    """Print a line with the model's folder, its size and further details."""
    size = f"{model.num_parameters() / 1e6:.1f} million parameters"
    say(f"Model: {readable_path(folder)}, {', '.join((size, *details))}.\n")


def check_equal(ours: Any, theirs: Any, where: str, whose: str = "those of transformers") -> None:
    """Raise DemoError where token ids, a tensor or a list, differ."""
    ours, theirs = (torch.as_tensor(ids).flatten().tolist() for ids in (ours, theirs))
    if ours != theirs:
        pairs = enumerate(zip(ours, theirs, strict=False))
        first = next((at for at, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
        raise DemoError(f"ids differ from {whose}: {where}, first at token {first}")


def readable_path(path: Path) -> str:
    """Write a path relative to the working directory where it lies below."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def terminal_width() -> int:
    """Return how many columns a line may have: the terminal's, 80 where there is none."""
    return shutil.get_terminal_size((80, 24)).columns


def wrapped(text: str, indent: str = "") -> str:
    """Wrap each line of a text to the terminal."""
    lines = textwrap.TextWrapper(
        min(terminal_width(), _MOST_COLUMNS), indent, indent and indent + "  ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return "\n".join(map(lines.fill, text.split("\n")))


def say(text: str) -> None:
    """Print a text, wrapped to the terminal."""
    print(wrapped(text), flush=True)


def quote(text: str) -> None:
    """Print a text without its empty lines, indented and wrapped."""
    print(wrapped("\n".join(filter(str.strip, text.strip().splitlines())), " " * 4), flush=True)


def batch_of(tokenizer: Any, texts: Sequence[str]) -> Any:
    """Return the inputs of prompts in one batch."""
    options: Any = dict(padding=True, padding_side="left", return_token_type_ids=False)
    return tokenizer(list(texts), return_tensors="pt", **options)


def print_table(head: Sequence[str], *rows: Sequence[str]) -> None:
    """Print a table."""
    print(aligned_table(head, rows), flush=True)


def figure(value: float) -> str:
    """Write a number with three digits, or all those before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def compared(first: str, timings: Timings, unit: str) -> list[list[str]]:
    """Return a table's head and rows: the times of each case, and the first over the last."""
    rows = [[first, *(f"{name} {unit}" for name in next(iter(timings.values()))), "ratio"]]
    for case, timing in timings.items():
        times = [*timing.values()]
        ratio = f"{figure(times[0] / times[-1])}x"
        rows.append([case, *(figure(seconds * _UNITS[unit]) for seconds in times), ratio])
    return rows


def timed(cases: Mapping[str, Mapping[str, Callable[[], object]]], quick: bool) -> Timings:
    """Return the CPU seconds of each call's fastest run; torch has one thread.

    The calls of a case take turns, so that what disturbs the machine disturbs all of them alike.
    """
    least, most, seconds = (2, 4, 0.2) if quick else (3, 20, 2.0)
    timings: Timings = {}
    with busy(lambda: f"Timing case {len(timings) + 1} of {len(cases)}"):
        for case, calls in cases.items():
            best = dict.fromkeys(calls, math.inf)
            turn, begun = 0, time.thread_time()
            while turn < least or (turn < most and time.thread_time() - begun < seconds):
                turn += 1
                for name, call in calls.items():
                    for _ in range(_REPEATS if best[name] < _SHORT_SECONDS else 1):
                        start = time.thread_time()
                        call()
                        best[name] = min(best[name], time.thread_time() - start)
            timings[case] = best
    return timings


def pyplot() -> ModuleType:
    """Import matplotlib's pyplot, which draws into files; a DemoError without matplotlib."""
    require("matplotlib", "demo-all").use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def save_figure(drawn: Any, path: Path) -> None:
    """Write a figure of pyplot to a file, say where, and forget the figure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path, dpi=130)
    pyplot().close(drawn)
    say(f"\nPicture: {readable_path(path)}")
