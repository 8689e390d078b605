"""Pictures of the demo of pronunciation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from lmdecode.demo._output import pyplot, save_figure
from lmdecode.demo.cmudict_words import ErrorRates

__all__ = ["draw_error_rates", "draw_pronunciations"]


def draw_error_rates(
    path: Path, labels: Sequence[str], rates: Sequence[ErrorRates], num_words: int
) -> None:
    """Write a picture of the error rates of each search, two bars a label."""
    figure, axes = pyplot().subplots(figsize=(7.5, 3.8), layout="constrained")
    for number, name in enumerate(("phoneme", "word")):
        places = [at + (number - 0.5) * 0.38 for at in range(len(labels))]
        values = [100 * getattr(rate, name) for rate in rates]
        drawn = axes.bar(places, values, 0.36, label=f"{name} error rate", color=f"C{1 - number}")
        axes.bar_label(drawn, labels=[f"{value:.2f} %" for value in values], padding=2)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_ylabel("% (lower is better)")
    axes.set_title(f"Pronunciation of {num_words:,} held-out words")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2)
    save_figure(figure, path)


def draw_pronunciations(
    path: Path, pronunciations: Mapping[str, Sequence[tuple[float, str]]]
) -> None:
    """Write a picture of the n best of each word: a bar a result, as long as exp(score)."""
    count = sum(map(len, pronunciations.values()))
    figure, panels = pyplot().subplots(
        len(pronunciations), 1, squeeze=False, sharex=True, layout="constrained",
        figsize=(8.5, min(1.0 + 0.3 * count + 0.5 * len(pronunciations), 40)),
    )  # fmt: skip
    for axes, (word, results) in zip(panels[:, 0], pronunciations.items(), strict=True):
        values = [math.exp(score) for score, _ in results]
        drawn = axes.barh(range(len(results)), values, 0.8, color=["C0"] + ["0.75"] * len(results))
        axes.bar_label(drawn, labels=[f"{score:.3f}" for score, _ in results], padding=3)
        axes.set_yticks(range(len(results)), [text for _, text in results])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.12)
        axes.set_title(word.replace("$", r"\$"), loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel(
        "geometric mean of the probabilities of the tokens; in figures: its logarithm, the score"
    )
    save_figure(figure, path)
