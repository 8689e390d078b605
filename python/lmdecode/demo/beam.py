"""Beam search: the beams as a tree, the n best sequences, the time beside stock transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lmdecode.beam.engine.request import BeamRequest, BeamResult
from lmdecode.beam.engine.search import BeamSearch
from lmdecode.beam.engine.trace import BeamTrace
from lmdecode.demo._beam_tree import beam_tree, draw_tree, tree_text
from lmdecode.demo._model import load_model, print_model
from lmdecode.demo._output import (
    DemoError,
    aligned_table,
    model_folder,
    quoted,
    say,
    terminal_width,
)
from lmdecode.demo._timing import fastest

PROMPTS = (
    "Psalms 23\nThe LORD is my",
    "Genesis 1\nIn the beginning",
    "Proverbs 10\nA wise son",
    "Matthew 5\nBlessed are",
)
NUM_BEAMS = NUM_RESULTS = 4
_TREE_TOKENS = 16
_QUICK_TOKENS = 12


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
    """Run the demo.

    Parameters
    ----------
    model_path
        Folder of a causal language model and its tokenizer; None: the one of the source tree.
    plot
        PNG to write; None: none.
    tokens
        New tokens in the timing; the tree has fewer.
    quick
        Few tokens, rough timings.

    Raises
    ------
    DemoError
        Something is missing, or results differ from those of transformers.
    """
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
