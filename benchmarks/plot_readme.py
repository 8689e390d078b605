"""``python -m benchmarks.plot_readme``: the README's table of speeds, and its chart.

Both come from benchmarks/results/cpu.md, which ``python -m benchmarks --output`` writes. The table
is printed; the chart is written to docs/images/speed.png.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.report import RESULTS, sections

CHART = Path(__file__).resolve().parent.parent / "docs" / "images" / "speed.png"


class Speed(NamedTuple):
    """A row of the README.

    Attributes
    ----------
    what
        The work, as the README names it.
    group
        The section of the results.
    case
        Columns of the results that single out one row.
    peer
        The column with the peer's time as a multiple of ours.
    name
        The peer, as the README names it.
    """

    what: str
    group: str
    case: dict[str, str]
    peer: str
    name: str


SPEEDS = (
    Speed(
        "sampling, top-k and top-p, 8 rows of 128,256 logits",
        "top_k_top_p_sample",
        {"case": "k+p", "B": "8", "V": "128256", "dtype": "f32", "caches": "warm"},
        "transformers",
        "transformers",
    ),
    Speed(
        "beam search, one step of 8 requests with 4 beams",
        "beam_step",
        {"case": "whole step", "requests": "8", "V": "32000"},
        "transformers",
        "transformers",
    ),
    Speed(
        "a KV cache of 537 MB follows its beams, 8 of 32 rows move",
        "reorder_cache_",
        {"case": "[B, H, S, D]", "moved": "8"},
        "index_select",
        "index_select",
    ),
    Speed(
        "`generate()`, prompt of 8192 tokens, sliding window, bf16",
        "generate, sliding window",
        {"case": "prompt and 2 tokens", "S": "8192", "dtype": "bf16"},
        "sdpa",
        "transformers, sdpa",
    ),
    Speed(
        "first token after 4096 tokens, loaded from the store",
        "resume",
        {"case": "time to first token", "work": "4096 tokens, 8 layers of 1024, f32"},
        "computed",
        "transformers, computing",
    ),
    Speed(
        "translation, one step of transformer-base, batch 8, int8",
        "decoder",
        {"case": "a step of translation", "batch": "8", "dtype": "int8"},
        "CTranslate2",
        "CTranslate2, int8",
    ),
)


def _rows(text: str) -> Iterator[dict[str, str]]:
    """Rows of all tables of a section, by the names of their columns."""
    head: list[str] | None = None
    for line in text.splitlines():
        if not line.startswith("|"):
            head = None
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if head is None:
            head = cells
        elif set(line) - set("|-: "):
            yield dict(zip(head, cells, strict=True))


def measured(speed: Speed) -> tuple[float, float]:
    """Microseconds of lmdecode, and how many times longer the peer takes.

    Raises
    ------
    ValueError
        No row of the results is the one asked for, or several are.
    """
    found = [
        row
        for row in _rows(sections(RESULTS.read_text())[speed.group])
        if all(row.get(name) == value for name, value in speed.case.items())
    ]
    if len(found) != 1:
        raise ValueError(f"{speed.group}: {len(found)} rows are {speed.case}; expected one")
    ours = float(found[0]["ours us (median)"].split()[0])
    return ours, float(found[0][speed.peer].rstrip("x"))


def duration(microseconds: float) -> str:
    """Write a duration with two digits or more, in the unit that fits it."""
    units = {"us": 1.0, "ms": 1e3, "s": 1e6}
    unit = next((unit for unit, size in units.items() if microseconds < 1000 * size), "s")
    value = microseconds / units[unit]
    return f"{value:.{0 if value >= 10 else 1 if value >= 1 else 2}f} {unit}"


def times(ratio: float) -> str:
    """Write a ratio with two digits, or all of them before the point."""
    return f"{ratio:.{0 if ratio >= 10 else 1}f}x"


def table() -> str:
    """Lay out the README's table."""
    lines = ["| work, one thread | lmdecode | other | times longer |", "|---|---|---|---|"]
    for speed in SPEEDS:
        ours, ratio = measured(speed)
        lines.append(f"| {speed.what} | {duration(ours)} | {speed.name} | {times(ratio)} |")
    return "\n".join(lines)


def draw(path: Path) -> None:
    """Write the chart: a bar a row, how many times longer the peer takes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = [measured(speed) for speed in SPEEDS]
    figure, axes = pyplot.subplots(figsize=(9.6, 3.6), layout="constrained")
    bars = axes.barh(range(len(SPEEDS)), [ratio for _, ratio in found], 0.62, color="C0")
    labels = [
        f"{times(ratio)}  {speed.name} {duration(ours * ratio)}, ours {duration(ours)}"
        for speed, (ours, ratio) in zip(SPEEDS, found, strict=True)
    ]
    axes.bar_label(bars, labels=labels, padding=4, fontsize=8.5)
    axes.set_yticks(
        range(len(SPEEDS)), [s.what.replace("`", "").replace(", ", ",\n", 1) for s in SPEEDS]
    )
    axes.tick_params(axis="y", labelsize=8.5, length=0)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(1, max(ratio for _, ratio in found) * 60)
    axes.set_xticks([1, 10, 100], ["1x", "10x", "100x"])
    axes.minorticks_off()
    axes.set_xlabel("times longer than lmdecode, one CPU thread, log scale")
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    print(table())
    draw(CHART)
