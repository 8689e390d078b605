"""Output helpers of the demos: one-line errors, tables on a terminal, bar charts."""

from __future__ import annotations

import importlib
import os
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from lmdecode._checks import install_hint
from lmdecode._tables import aligned_table
from lmdecode.cli.shipped_models import CAUSAL_MODEL, shipped_model

__all__ = [
    "DemoError",
    "aligned_table",
    "bar_chart",
    "microseconds",
    "model_folder",
    "one_line",
    "quoted",
    "readable_path",
    "require",
    "require_packages",
]


class DemoError(Exception):
    """Ends a demo with its text, a line for the user, and exit status 1."""


def one_line(error: BaseException) -> str:
    """Return an error's message in one line."""
    return " ".join(str(error).split())


def require(package: str) -> ModuleType:
    """Import an optional package.

    Raises
    ------
    DemoError
        It is not installed; names the extra that has it.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise DemoError(f"the demo needs {package} ({error}): {install_hint('demo')}") from error


def require_packages(plot: Path | None) -> None:
    """Import what demos with a model of transformers need, before they take their time.

    Parameters
    ----------
    plot
        Picture that is drawn; None: none.

    Raises
    ------
    DemoError
        A package is not installed.
    """
    require("tqdm")  # before transformers, which imports it
    require("transformers")
    if plot is not None:
        require("matplotlib")


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


def quoted(text: str, indent: str = "    ") -> str:
    """Wrap a text to the terminal, each line indented, its own line breaks kept."""
    width = min(shutil.get_terminal_size((96, 24)).columns, 110) - 1
    lines = [
        textwrap.fill(line, width, initial_indent=indent, subsequent_indent=indent + "  ")
        for line in text.strip().splitlines()
        if line.strip()
    ]
    return os.linesep.join(lines)


def microseconds(seconds: float) -> str:
    """Write a duration with about three digits."""
    us = seconds * 1e6
    return f"{us:,.1f}" if us < 100 else f"{us:,.0f}"


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
    require("matplotlib").use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8.5, 1.4 + 0.75 * len(labels)), layout="constrained")
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
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
