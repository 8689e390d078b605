"""Beam search: the beams as a tree, the n best sequences, the time beside stock transformers."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lmdecode.beam.engine.trace import BeamTrace
from lmdecode.beam.types import REAL_BEAM_SCORE_BOUND
from lmdecode.demo import harness
from lmdecode.demo.harness import OURS, STOCK, Look, quote, say

PROMPTS = [harness.PROMPTS[number] for number in (1, 0, 2, 3)]
NUM_BEAMS = 4
_TREE_TOKENS, _QUICK_TOKENS = 16, 12
_NO_RANK = 99
Tokens = tuple[int, ...]
Decode = Callable[[Sequence[int]], str]


class BeamTree(NamedTuple):
    """Beams by their tokens behind the prompt, which is ().

    ``ended`` has the score of those closed, ``scores`` the sum of log-probabilities of all,
    ``ranks`` the place in the result, from 1.
    """

    children: dict[Tokens, list[Tokens]]
    scores: dict[Tokens, float]
    ended: dict[Tokens, float]
    ranks: dict[Tokens, int]


def beam_tree(traces: Sequence[BeamTrace]) -> BeamTree:
    """Return the tree of one search, whose traces these are."""
    scores: dict[Tokens, float] = {}
    ended: dict[Tokens, float] = {}
    beams: list[Tokens] = [()]
    for trace in traces:
        closed = [c for c in trace.candidates if c.decision == "closed"]
        found = {(*beams[c.beam], c.token): c.score for c in closed}  # the hypotheses say better
        ended |= found | {h.tokens: h.score for h in trace.hypotheses}
        scores |= found | {
            b.tokens: b.score for b in trace.beams if b.score > REAL_BEAM_SCORE_BOUND
        }
        beams = [beam.tokens for beam in trace.beams]
    children: dict[Tokens, list[Tokens]] = defaultdict(list)
    for tokens in scores:
        children[tokens[:-1]].append(tokens)
    best = sorted(traces[-1].hypotheses, key=lambda hypothesis: -hypothesis.score)
    ranks = {hypothesis.tokens: rank for rank, hypothesis in enumerate(best, 1)}
    return BeamTree(dict(children), scores, ended, ranks)


def tree_lines(
    tree: BeamTree, decode: Decode, width: int, root: Tokens = (), prefix: str = ""
) -> Iterator[str]:
    """Write what is below the root, a line for each run of tokens that nothing branches from."""
    below = tree.children.get(root, [])
    for left, child in zip(range(len(below))[::-1], below, strict=True):
        node = child
        while len(tree.children.get(node, [])) == 1 and node not in tree.ended:
            node = tree.children[node][0]
        fate = ""
        if node in tree.ended:
            place = f"result {tree.ranks[node]}" if node in tree.ranks else "ended, pushed out"
            fate = f"{tree.ended[node]:8.3f}  {place}"
        elif node not in tree.children:
            fate = f"{tree.scores[node]:8.3f}  dropped after {len(node)}"
        start, text = prefix + ("|- " if left else "`- "), repr(decode(node[len(root) :]))
        room = max(width - len(start) - 32, 12)
        text = text if len(text) <= room else text[: room - 4] + "...'"
        yield ((start + text).ljust(width - 30) + fate).rstrip()
        yield from tree_lines(tree, decode, width, node, prefix + ("|  " if left else "   "))


def draw_tree(path: Path, title: str, tree: BeamTree, decode: Decode) -> None:
    """Write a PNG of the tree: steps from left to right, results in colour, dropped beams grey."""
    figure, axes = harness.pyplot().subplots(layout="constrained")
    leaves = itertools.count()

    def draw(node: Tokens) -> tuple[float, int]:
        """Draw what is below; return the node's height, and the best rank that it led to."""
        below = [(child, *draw(child)) for child in tree.children.get(node, [])]
        row = sum(height for _, height, _ in below) / len(below) if below else float(next(leaves))
        for child, height, rank in below:
            lost, depth = rank == _NO_RANK, len(child)
            color = "0.75" if lost else f"C{(rank - 1) % 10}"
            axes.plot([depth - 1, depth], [row, height], color=color,
                      linewidth=1.0 if lost else 2.0, zorder=1 if lost else 2)  # fmt: skip
            axes.annotate(
                decode(child[-1:]).replace("\n", "\\n").replace("$", r"\$"), (depth, height),
                (0, 3), textcoords="offset points", fontsize=7, ha="center", va="bottom",
                color="0.55" if lost else "black",
            )  # fmt: skip
            if child in tree.ended:
                own = tree.ranks.get(child)
                label = own and f"result {own}: {tree.ended[child]:.3f}"
                axes.plot(depth, height, "o", color=color, markersize=5, zorder=3, label=label)
        return row, min([tree.ranks.get(node, _NO_RANK), *(rank for _, _, rank in below)])

    draw(())
    width, height = 4 + 0.75 * max(map(len, tree.scores)), 1.6 + 0.26 * next(leaves)
    figure.set_size_inches(min(width, 22), min(height, 18))
    axes.invert_yaxis()
    axes.set(
        title=title, yticks=[],
        xlabel="generated tokens; grey: beams that were dropped, dots: sequences that ended",
    )  # fmt: skip
    axes.spines[["top", "right", "left"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    results = dict(sorted(zip(labels, handles, strict=True)))
    axes.legend(results.values(), results, frameon=False)
    harness.save_figure(figure, path)


def run(look: Look) -> None:
    """Run the demo; DemoError where results differ from those of transformers."""
    harness.require("transformers")
    from lmdecode.integrations.transformers import beam_search, compare_with_transformers

    folder, steps = harness.model_folder(look.model), look.up_to(_QUICK_TOKENS)
    # In float32 rounding does not decide between beams.
    model, tokenizer = harness.load_model(folder, torch.float32)
    harness.print_model(folder, model, f"vocabulary {model.config.vocab_size}", "in float32")
    stop = tokenizer(".", add_special_tokens=False).input_ids
    ends = sorted({tokenizer.eos_token_id, *stop[-1:]} - {None, tokenizer.unk_token_id})
    options: dict[str, Any] = {"do_sample": False, "num_beams": NUM_BEAMS, "pad_token_id": ends[0]}
    shown = {**options, "max_new_tokens": min(steps, _TREE_TOKENS), "eos_token_id": ends}
    shown["num_return_sequences"] = NUM_BEAMS
    inputs = harness.batch_of(tokenizer, PROMPTS)
    asked = dict(custom_generate=beam_search, return_dict_in_generate=True, output_scores=True)
    out = model.generate(**inputs, **shown, **asked)
    all_scores = out.sequences_scores.split(NUM_BEAMS)
    results = out.sequences[:, inputs.input_ids.shape[1] :].split(NUM_BEAMS)
    prompts = [tokenizer(text, return_tensors="pt").input_ids for text in PROMPTS]
    for text, prompt, ours in zip(PROMPTS, prompts, results, strict=True):
        theirs = model.generate(prompt, **shown)[:, prompt.shape[1] :]
        found, expected = (ids[ids != ends[0]] for ids in (ours, theirs))  # without padding
        harness.check_equal(found, expected, f"beam search, prompt {text!r}")
    say(
        f"Beam search of {NUM_BEAMS} beams: the {NUM_BEAMS} best sequences equal to those of "
        f"transformers, {len(prompts)} prompts in one batch against one by one."
    )
    comparison = compare_with_transformers(model, prompts[0], **shown)
    if comparison.difference is not None:
        raise harness.DemoError(comparison.difference)
    tree, decode = beam_tree(comparison.traces), tokenizer.decode
    count = len(comparison.traces)
    say(f"\nBeams after {PROMPTS[0]!r}, {count} steps; score, and what became of it:\n")
    print(*tree_lines(tree, decode, min(harness.terminal_width(), 130)), sep="\n")
    print("\nThe best of each prompt; score: mean log-probability of a token:\n")
    for text, ours, scores in zip(PROMPTS, results, all_scores, strict=True):
        print(f"  {text!r}")
        for tokens, score in zip(ours, scores.tolist(), strict=True):
            quote(f"{score:8.3f}  {decode(tokens[tokens != ends[0]])!r}")
    # No end: both take as many steps.
    call = partial(model.generate, **inputs, **options, max_new_tokens=steps, min_new_tokens=steps)
    calls = {STOCK: call, OURS: partial(call, custom_generate=beam_search)}
    (timing,) = harness.timed({"": calls}, look.quick).values()
    say(
        f"\ngenerate() of {steps} tokens, {len(prompts)} prompts of {NUM_BEAMS} beams, "
        "the model's own time included; one thread, CPU time, fastest call:\n"
    )
    step = {name: seconds / steps for name, seconds in timing.items()}
    harness.print_table(*harness.compared("", {"a call": timing, "a step": step}, "ms"))
    print("\nWhat is left is the forward pass of the model.")
    if look.plot is not None:
        draw_tree(look.plot, f"Beam search, {NUM_BEAMS} beams: {PROMPTS[0]!r}", tree, decode)
