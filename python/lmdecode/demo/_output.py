"""Output helpers of the demos: one-line errors, tables on a terminal, bar charts."""

from __future__ import annotations

import importlib
import os
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from lmdecode._checks import install_hint
from lmdecode._tables import aligned_table
from lmdecode.cli.errors import CommandError, one_line
from lmdecode.cli.shipped_models import CAUSAL_MODEL, shipped_model

__all__ = [
    "DemoError",
    "NotBuiltError",
    "aligned_table",
    "bar_chart",
    "microseconds",
    "model_folder",
    "one_line",
    "pyplot",
    "quoted",
    "readable_path",
    "require",
    "save_figure",
    "say",
    "terminal_width",
]

_MOST_COLUMNS = 100  # of prose: longer lines are hard to read


class DemoError(CommandError):
    """Ends a demo with its text, a line for the user, and exit status 1."""


class NotBuiltError(DemoError):
    """Ends a demo of what this build of lmdecode has not; it does not end a run of several."""


def require(package: str, extra: str = "demo") -> ModuleType:
    """Import an optional package, which the extra has.

    Raises
    ------
    DemoError
        It is not installed; names the extra.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise DemoError(f"the demo needs {package} ({error}): {install_hint(extra)}") from error


def pyplot() -> ModuleType:
    """Import matplotlib's pyplot, which draws into files.

    Raises
    ------
    DemoError
        matplotlib is not installed.
    """
    require("matplotlib", "demo-all").use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def model_folder(
    chosen: Path | None, ships: Path = CAUSAL_MODEL, kind: str = "a causal language model"
) -> Path:
    """Return the folder of the model: the chosen one, else the one that the source tree ships.

    Parameters
    ----------
    chosen
        By the user; None: the shipped one.
    ships
        The shipped model's folder, from the root of the source tree.
    kind
        Of model, for the error.

    Raises
    ------
    DemoError
        There is none.
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
    """Write a PNG with groups of horizontal bars, a group a label: microseconds, log axis.

    Parameters
    ----------
    path
        Of the PNG.
    title
        Above the chart.
    labels
        Of the groups, from the top.
    bars
        Name of a series to its microseconds, one a group.
    """
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
