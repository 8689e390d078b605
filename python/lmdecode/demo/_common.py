"""Errors, text and charts, models and a timer, which the demos share."""

from __future__ import annotations

import importlib
import os
import shutil
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from lmdecode._checks import install_hint
from lmdecode.cli.errors import CommandError, one_line
from lmdecode.cli.shipped_models import CAUSAL_MODEL, shipped_model

_MOST_COLUMNS = 100  # of prose: longer lines are hard to read


class DemoError(CommandError):
    """Ends a demo with its text, a line for the user, and exit status 1."""


class NotBuiltError(DemoError):
    """Ends a demo of a part that this build lacks; a run of several demos goes on."""


def require(package: str, extra: str = "demo") -> ModuleType:
    """Import an optional package of the extra, or raise a DemoError that names the extra."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise DemoError(f"the demo needs {package} ({error}): {install_hint(extra)}") from error


def pyplot() -> ModuleType:
    """Import matplotlib's pyplot, which draws into files; a DemoError without matplotlib."""
    require("matplotlib", "demo-all").use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def model_folder(
    chosen: Path | None, ships: Path = CAUSAL_MODEL, kind: str = "a causal language model"
) -> Path:
    """Return the folder the user chose, else ``ships``, a folder of the source tree.

    Raises DemoError where there is neither; ``kind`` is the error's word for the model.
    """
    if chosen is not None:
        if not (chosen / "config.json").is_file():
            raise DemoError(f"--model {chosen}: no config.json there; expected a model's folder")
        return chosen
    shipped = shipped_model(ships)
    if shipped is None:
        raise DemoError(
            "the demo's model is not part of the installed package: run the demo in a source "
            f"checkout, which has {ships}, or give --model DIR, the folder of {kind} with its "
            "tokenizer"
        )
    return shipped


def readable_path(path: Path) -> str:
    """Write a path relative to the working directory where it lies below."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def terminal_width() -> int:
    """Return how many columns a line may have: the terminal's, 80 where there is none."""
    return shutil.get_terminal_size((80, 24)).columns


def _filled(text: str, indent: str = "", further_indent: str = "") -> str:
    """Wrap a line to the terminal."""
    return textwrap.fill(
        text, min(terminal_width(), _MOST_COLUMNS), initial_indent=indent,
        subsequent_indent=further_indent, break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def say(text: str) -> None:
    """Print a paragraph, wrapped to the terminal; line breaks before and behind it are kept."""
    before, behind = (len(text) - len(cut) for cut in (text.lstrip("\n"), text.rstrip("\n")))
    print("\n" * before + _filled(text.strip("\n")) + "\n" * behind, flush=True)


def quoted(text: str, indent: str = "    ") -> str:
    """Wrap a text to the terminal, each line indented, its own line breaks kept."""
    lines = [
        _filled(line, indent, indent + "  ") for line in text.strip().splitlines() if line.strip()
    ]
    return os.linesep.join(lines)


def microseconds(seconds: float) -> str:
    """Write a duration with about three digits."""
    us = seconds * 1e6
    return f"{us:,.1f}" if us < 100 else f"{us:,.0f}"


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure of pyplot to a file, say where, and forget the figure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot().close(figure)
    say(f"\nPicture: {readable_path(path)}")


def bar_chart(
    path: Path, title: str, labels: Sequence[str], bars: Mapping[str, Sequence[float]]
) -> None:
    """Write a PNG of horizontal bars in microseconds on a log axis, one of each series a label."""
    figure, axes = pyplot().subplots(figsize=(8.5, 1.4 + 0.75 * len(labels)), layout="constrained")
    height = 0.8 / len(bars)
    for number, (name, values) in enumerate(bars.items()):
        places = [row + (number - (len(bars) - 1) / 2) * height for row in range(len(labels))]
        drawn = axes.barh(places, values, height * 0.94, label=name, color=f"C{(1 - number) % 10}")
        axes.bar_label(drawn, labels=[f"{value:,.0f} us" for value in values], padding=3)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xscale("log")
    low, high = min(map(min, bars.values())), max(map(max, bars.values()))
    axes.set_xlim(low / 3, high * 4)
    axes.set_xlabel("microseconds, log scale (shorter is better)")
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=len(bars), frameon=False)
    save_figure(figure, path)


# What the files of tokenizers are called.
_TOKENIZER_FILES = ("*token*", "vocab*", "merges.txt", "spiece.model", "sentencepiece*")


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a folder; a DemoError where none can be loaded."""
    transformers = require("transformers")
    try:
        return transformers.AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # of the packages, too, that read the files
        if not any(next(folder.glob(name), None) for name in _TOKENIZER_FILES):
            raise DemoError(f"no tokenizer in {folder}") from error
        raise DemoError(f"cannot load the tokenizer in {folder}: {one_line(error)}") from error


def load_model(
    folder: Path, dtype: torch.dtype | None = None, auto_class: str = "AutoModelForCausalLM"
) -> tuple[Any, Any]:
    """Return a model of the folder, in its files' dtype by default, and its tokenizer.

    Raises DemoError where they cannot be loaded.
    """
    transformers = require("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    options = {} if dtype is None else {"dtype": dtype}
    tokenizer = load_tokenizer(folder)
    try:
        model = getattr(transformers, auto_class).from_pretrained(folder, **options)
    except (OSError, ValueError) as error:
        raise DemoError(f"cannot load the model in {folder}: {one_line(error)}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model.eval(), tokenizer


def print_model(folder: Path, model: Any, *details: str) -> None:
    """Print a line with the model's folder, its size and further details."""
    size = f"{model.num_parameters() / 1e6:.1f} million parameters"
    say(f"Model: {readable_path(folder)}, {', '.join((size, *details))}.\n")


# Calls up to this long are repeated within a turn, after an untimed one, so that they find their
# data in the caches.
_SHORT_SECONDS = 0.002


def fastest(
    calls: Mapping[str, Callable[[], object]],
    *,
    seconds: float,
    rounds: int,
    min_calls: int = 3,
) -> dict[str, float]:
    """Return by name the CPU seconds of each call's fastest run; torch has one thread.

    The calls take turns, so that what disturbs the machine disturbs all of them alike: ``rounds``
    each, or as many as its share of ``seconds`` allows, and at least ``min_calls``.
    """
    best = {name: _taken(call) for name, call in calls.items()}
    turns = {}
    for name, call in calls.items():
        if best[name] < 0.2:  # else the first call is as good as any
            best[name] = _taken(call)
        affordable = int(seconds / len(calls) / max(best[name], 1e-6))
        turns[name] = max(min_calls, min(rounds, affordable))
    for turn in range(max(turns.values())):
        for name, call in calls.items():
            if turn < turns[name]:
                best[name] = min(best[name], _turn(call, best[name] < _SHORT_SECONDS))
    return best


def _turn(call: Callable[[], object], is_short: bool) -> float:
    if not is_short:
        return _taken(call)
    call()
    return min(_taken(call) for _ in range(8))


def _taken(call: Callable[[], object]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start
