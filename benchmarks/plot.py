"""The ratios to the peers as a bar chart."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness import LIMIT, Result


def _ratio(value: float) -> str:
    return f"{value:,.0f}x" if value >= 100 else f"{value:.3g}x"


def plot(results: list[Result], path: Path) -> None:
    """Write a PNG: how many times longer than ours each peer takes, warm cases."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    results = [result for result in results if result.case.caches == "warm" and result.best_peer()]
    peers = list(
        dict.fromkeys(
            name
            for result in results
            for name, complete in result.complete.items()
            if complete and name != LIMIT and result.ratio(name) is not None and name != "lmdecode"
        )
    )
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.17 * len(results) * (len(peers) + 1)))
    height = 0.8 / max(1, len(peers))
    for number, peer in enumerate(peers):
        shown = [(row, r.ratio(peer)) for row, r in enumerate(results) if r.ratio(peer)]
        places = [row + (number - (len(peers) - 1) / 2) * height for row, _ in shown]
        bars = axes.barh(places, [ratio for _, ratio in shown], height, label=peer)
        axes.bar_label(
            bars,
            fmt=lambda value: f"{value:,.0f}x" if value >= 100 else f"{value:.3g}x",
            fontsize=7,
            padding=2,
        )
    axes.set_yticks(
        range(len(results)),
        [r.case.key.partition("/")[2].removesuffix(" warm") for r in results],
        fontsize=8,
    )
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.margins(x=0.12, y=0.01)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("time of the peer / time of lmdecode, log scale")
    axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=len(peers), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(figure)
