"""The beams of a search as a tree: which prefixes are shared, which beams die, which end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lmdecode.beam.engine.trace import BeamTrace
from lmdecode.beam.types import REAL_BEAM_SCORE_BOUND
from lmdecode.demo._output import pyplot, save_figure

__all__ = ["BeamTree", "beam_tree", "draw_tree", "tree_text"]


Decode = Callable[[Sequence[int]], str]


@dataclass
class BeamTree:
    """A node: the token that a beam ended in after a step, or the root, the prompt.

    Attributes
    ----------
    token : int
        -1 at the root.
    depth : int
        Generated tokens up to here.
    score : float
        The beam's sum of log-probabilities.
    children : dict
        By token.
    ended : float or None
        The score of the hypothesis that was closed here.
    rank : int or None
        Its place in the result, from 1; None: it was found and then pushed out.
    """

    token: int = -1
    depth: int = 0
    score: float = 0.0
    children: dict[int, BeamTree] = field(default_factory=dict)
    ended: float | None = None
    rank: int | None = None

    def add(self, tokens: Sequence[int], score: float) -> BeamTree:
        """Return the node of these tokens, which is made where it is missing, with this score."""
        node = self
        for token in tokens:
            node = node.children.setdefault(token, BeamTree(token, node.depth + 1))
        node.score = score
        return node

    def walk(self) -> Iterator[BeamTree]:
        """Yield this node and all below, depth first."""
        yield self
        for child in self.children.values():
            yield from child.walk()


def beam_tree(traces: Sequence[BeamTrace]) -> BeamTree:
    """Return the tree of one search, whose traces these are."""
    root = BeamTree()
    beams: list[tuple[int, ...]] = [()]
    for trace in traces:
        for candidate in trace.candidates:
            if candidate.decision == "closed":
                node = root.add((*beams[candidate.beam], candidate.token), candidate.score)
                node.ended = candidate.score  # until the hypotheses say better
        for hypothesis in trace.hypotheses:
            node = root.add(hypothesis.tokens, root.add(hypothesis.tokens, 0.0).score)
            node.ended = hypothesis.score
        beams = [beam.tokens for beam in trace.beams]
        for beam in trace.beams:
            if beam.score > REAL_BEAM_SCORE_BOUND:
                root.add(beam.tokens, beam.score)
    last = traces[-1]
    best = sorted(last.hypotheses, key=lambda hypothesis: -hypothesis.score)
    for rank, hypothesis in enumerate(best, 1):
        root.add(hypothesis.tokens, 0.0).rank = rank
    return root


def _fate(node: BeamTree) -> str:
    """Say what became of a leaf."""
    if node.ended is None:
        return f"{node.score:8.3f}  dropped after {node.depth}"
    place = f"result {node.rank}" if node.rank is not None else "ended, pushed out"
    return f"{node.ended:8.3f}  {place}"


def tree_text(root: BeamTree, decode: Decode, width: int) -> str:
    """Write the tree, a line for each run of tokens that nothing branches from.

    decode: of tokens to text; width: of a line, where text is cut.
    """
    lines: list[str] = []

    def write(node: BeamTree, prefix: str, branch: str, below: str) -> None:
        run = [node.token]
        while len(node.children) == 1 and node.ended is None:
            node = next(iter(node.children.values()))
            run.append(node.token)
        fate = _fate(node) if not node.children or node.ended is not None else ""
        text = repr(decode(run))
        room = max(width - len(prefix + branch) - 32, 12)
        if len(text) > room:
            text = text[: room - 4] + "...'"
        lines.append((prefix + branch + text).ljust(width - 30) + fate)
        children = list(node.children.values())
        for number, child in enumerate(children):
            end = number == len(children) - 1
            write(child, prefix + below, "`- " if end else "|- ", "   " if end else "|  ")

    children = list(root.children.values())
    for number, child in enumerate(children):
        end = number == len(children) - 1
        write(child, "", "`- " if end else "|- ", "   " if end else "|  ")
    return "\n".join(line.rstrip() for line in lines)


def draw_tree(path: Path, title: str, root: BeamTree, decode: Decode) -> None:
    """Write a PNG of the tree: steps from left to right, results in colour, dropped beams grey."""
    rows: dict[int, float] = {}  # id of a node to its height
    leaves = 0

    def place(node: BeamTree) -> float:
        nonlocal leaves
        if node.children:
            heights = [place(child) for child in node.children.values()]
            rows[id(node)] = sum(heights) / len(heights)
        else:
            rows[id(node)] = leaves
            leaves += 1
        return rows[id(node)]

    def best_rank(node: BeamTree) -> int | None:
        ranks = [n.rank for n in node.walk() if n.rank is not None]
        return min(ranks, default=None)

    place(root)
    deepest = max(node.depth for node in root.walk())
    figure, axes = pyplot().subplots(
        figsize=(min(4 + 0.75 * deepest, 22), min(1.6 + 0.26 * leaves, 18)), layout="constrained"
    )
    for node in root.walk():
        for child in node.children.values():
            rank = best_rank(child)
            color = "0.75" if rank is None else f"C{(rank - 1) % 10}"
            axes.plot(
                [node.depth, child.depth], [rows[id(node)], rows[id(child)]], color=color,
                linewidth=1.0 if rank is None else 2.0, zorder=1 if rank is None else 2,
            )  # fmt: skip
            axes.annotate(
                decode([child.token]).replace("\n", "\\n").replace("$", r"\$"),
                (child.depth, rows[id(child)]), (0, 3), textcoords="offset points", fontsize=7,
                ha="center", va="bottom", color="0.55" if rank is None else "black",
            )  # fmt: skip
            if child.ended is not None:
                axes.plot(
                    child.depth, rows[id(child)], "o", color=color, markersize=5, zorder=3,
                    label=None if child.rank is None else f"result {child.rank}: {child.ended:.3f}",
                )  # fmt: skip
    axes.invert_yaxis()
    axes.set_yticks([])
    axes.set_xlabel("generated tokens; grey: beams that were dropped, dots: sequences that ended")
    axes.set_title(title)
    axes.spines[["top", "right", "left"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        order = sorted(range(len(labels)), key=lambda number: labels[number])
        axes.legend([handles[n] for n in order], [labels[n] for n in order], frameon=False)
    save_figure(figure, path)
