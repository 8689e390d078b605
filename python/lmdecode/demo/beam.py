"""Beam search: the beams as a tree, the n best sequences, the time beside stock transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lmdecode._tables import aligned_table
from lmdecode.beam.engine.request import BeamRequest, BeamResult
from lmdecode.beam.engine.search import BeamSearch
from lmdecode.beam.engine.trace import BeamTrace
from lmdecode.beam.types import REAL_BEAM_SCORE_BOUND
from lmdecode.demo._common import (
    DemoError,
    fastest,
    load_model,
    model_folder,
    print_model,
    pyplot,
    quoted,
    save_figure,
    say,
    terminal_width,
)

PROMPTS = (
    "Psalms 23\nThe LORD is my",
    "Genesis 1\nIn the beginning",
    "Proverbs 10\nA wise son",
    "Matthew 5\nBlessed are",
)
NUM_BEAMS = NUM_RESULTS = 4
_TREE_TOKENS = 16
_QUICK_TOKENS = 12
Decode = Callable[[Sequence[int]], str]


@dataclass
class BeamTree:
    """The token a beam ended in after ``depth`` tokens, and the beam's sum of log-probabilities.

    The root is the prompt, token -1. ``ended`` is the score of a hypothesis closed here,
    ``rank`` its place in the result, from 1; None where it was pushed out again.
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
        write_children(node, prefix + below)

    def write_children(node: BeamTree, prefix: str) -> None:
        for number, child in enumerate(node.children.values(), 1):
            is_last = number == len(node.children)
            write(child, prefix, "`- " if is_last else "|- ", "   " if is_last else "|  ")

    write_children(root, "")
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


def _search(
    model: Any, prompts: Sequence[torch.Tensor], tokens: int, end_tokens: Sequence[int]
) -> tuple[list[BeamResult], list[list[BeamTrace]]]:
    """Search all prompts in one batch, without a cache; return results and traces of each."""
    traces: list[list[BeamTrace]] = [[] for _ in prompts]
    engine = BeamSearch(on_step=lambda trace: traces[int(str(trace.request_id))].append(trace))
    for prompt in prompts:
        engine.insert(
            BeamRequest(
                prompt, max_new_tokens=tokens, num_beams=NUM_BEAMS,
                num_return_sequences=NUM_RESULTS, eos_token_id=end_tokens,
            )
        )  # fmt: skip
    with torch.no_grad():
        while engine.num_rows:
            ids, lengths = engine.input_ids()
            mask = (torch.arange(ids.shape[1])[None] < lengths[:, None]).long()
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            engine.step(logits[torch.arange(len(ids)), lengths - 1])
    results = {result.request_id: result for result in engine.pop_finished()}
    return [results[number] for number in range(len(prompts))], traces


def _check(
    model: Any, prompts: Sequence[torch.Tensor], results: Sequence[BeamResult], **options: Any
) -> None:
    """Compare the results with those of transformers, one prompt after another."""
    for number, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        theirs = model.generate(prompt[None], **options)
        if not torch.equal(theirs, result.sequences):
            raise DemoError(
                "beam search differs from that of transformers: "
                f"prompt {PROMPTS[number]!r}, {result.sequences.tolist()}, {theirs.tolist()}"
            )
    say(
        f"Beam search of {NUM_BEAMS} beams: the {NUM_RESULTS} best sequences equal to those of "
        f"transformers, {len(prompts)} prompts in one batch against one by one."
    )


def _time(model: Any, inputs: Any, quick: bool, **options: Any) -> None:
    """Time ``generate()`` with and without lmdecode, in turns, one thread, and print it."""
    from lmdecode.integrations.transformers import beam_search

    # No end: both take as many steps.
    options = {**options, "min_new_tokens": options["max_new_tokens"]}
    contestants = {
        "transformers": lambda: model.generate(**inputs, **options),
        "lmdecode": lambda: model.generate(**inputs, **options, custom_generate=beam_search),
    }
    seconds, rounds, calls = (0.2, 2, 2) if quick else (6.0, 4, 3)
    timing = fastest(contestants, seconds=seconds, rounds=rounds, min_calls=calls)
    steps = options["max_new_tokens"]
    theirs, ours = timing["transformers"], timing["lmdecode"]
    rows = [
        [name, f"{taken * 1e3:.0f}", f"{taken * 1e3 / steps:.2f}"]
        for name, taken in (("transformers", theirs), ("lmdecode", ours))
    ]
    say(
        f"\ngenerate() of {steps} tokens, {len(inputs['input_ids'])} prompts of {NUM_BEAMS} beams, "
        "the model's own time included; one thread, CPU time, fastest call:\n"
    )
    print(aligned_table(["", "ms", "ms a step"], rows))
    print(f"\n{theirs / ours:.2f}x: what is left is the forward pass of the model.")


def run(model_path: Path | None, plot: Path | None, tokens: int, quick: bool) -> None:
    """Run the demo; DemoError where results differ from those of transformers."""
    folder = model_folder(model_path)
    tokens = min(tokens, _QUICK_TOKENS) if quick else tokens
    # In float32 rounding does not decide between beams.
    model, tokenizer = load_model(folder, torch.float32)
    print_model(folder, model, f"vocabulary {model.config.vocab_size}", "in float32")
    prompts = [tokenizer(text, return_tensors="pt").input_ids[0] for text in PROMPTS]
    stop = tokenizer(".", add_special_tokens=False).input_ids
    ends = sorted({tokenizer.eos_token_id, *stop[-1:]} - {None, tokenizer.unk_token_id})
    options = {"do_sample": False, "num_beams": NUM_BEAMS, "pad_token_id": ends[0]}
    shown = min(tokens, _TREE_TOKENS)
    results, traces = _search(model, prompts, shown, ends)
    _check(
        model, prompts, results, **options, max_new_tokens=shown, eos_token_id=ends,
        num_return_sequences=NUM_RESULTS,
    )  # fmt: skip
    tree = beam_tree(traces[0])
    say(f"\nBeams after {PROMPTS[0]!r}, {len(traces[0])} steps; score, and what became of it:\n")
    print(tree_text(tree, tokenizer.decode, min(terminal_width(), 130)))
    print("\nThe best of each prompt; score: mean log-probability of a token:\n")
    for text, result in zip(PROMPTS, results, strict=True):
        print(f"  {text!r}")
        for rank, score in enumerate(result.scores.tolist()):
            print(quoted(f"{score:8.3f}  {tokenizer.decode(result.new_tokens(rank))!r}"))
    tokenizer.padding_side = "left"
    inputs = tokenizer(
        list(PROMPTS), return_tensors="pt", padding=True, return_token_type_ids=False
    )
    _time(model, inputs, quick, **options, max_new_tokens=tokens)
    if plot is not None:
        draw_tree(plot, f"Beam search, {NUM_BEAMS} beams: {PROMPTS[0]!r}", tree, tokenizer.decode)
