"""A whole model in C++: equal tokens, and the tokens a second of each format of weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import lmdecode
from lmdecode.demo._model import load_model, print_model
from lmdecode.demo._output import (
    DemoError,
    aligned_table,
    bar_chart,
    model_folder,
    one_line,
    quoted,
    readable_path,
    require_packages,
)
from lmdecode.demo._timing import fastest

PROMPTS = ("And Jesus said unto them,", "Psalms 23\nThe LORD is my", "In those days there was")
FORMATS = ("float32", "bfloat16", "int8")
_SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "4 beams": {"do_sample": False, "num_beams": 4},
    "sampled": {"do_sample": True, "top_k": 50, "top_p": 0.95},
}
_QUICK_TOKENS = 12


def _check(model: Any, decoding: lmdecode.Decoding, tokenizer: Any, tokens: int) -> int:
    """Generate with both, and compare ids; return how many texts there were."""
    texts = 0
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        for name in ("greedy", "4 beams"):
            options = {"max_new_tokens": tokens, **_SEARCHES[name]}
            if not torch.equal(
                model.generate(**inputs, **options), decoding.generate(**inputs, **options)
            ):
                raise DemoError(f"ids differ from those of transformers: {name}, prompt {prompt!r}")
            texts += 1
    return texts


def run(model_path: Path | None, plot: Path | None, tokens: int, quick: bool) -> None:
    """Run the demo.

    Parameters
    ----------
    model_path
        Folder of a causal language model and its tokenizer; None: the one of the source tree.
    plot
        PNG to write; None: none.
    tokens
        New tokens to generate for each prompt.
    quick
        Few tokens, rough timings.

    Raises
    ------
    DemoError
        Something is missing, or ids differ from those of transformers.
    """
    require_packages(plot)
    folder = model_folder(model_path)
    tokens = min(tokens, _QUICK_TOKENS) if quick else tokens
    try:  # before the tokenizer is asked for, which a model that is not supported may lack
        engines = {name: lmdecode.Decoding.from_pretrained(folder, name) for name in FORMATS}
    except (OSError, ValueError) as error:
        raise DemoError(one_line(error)) from error
    model, tokenizer = load_model(folder, torch.float32)
    print_model(folder, model)
    inputs = tokenizer(PROMPTS[0], return_tensors="pt", return_token_type_ids=False)
    ids = engines["float32"].generate(**inputs, max_new_tokens=tokens, **_SEARCHES["4 beams"])
    print("4 beams, float32, the whole model in C++:\n")
    print(quoted(tokenizer.decode(ids[0], skip_special_tokens=True)), flush=True)
    texts = _check(model, engines["float32"], tokenizer, tokens)
    print(f"\nIn float32, {texts} of {texts} texts have the ids of transformers.", flush=True)

    def contestant(generate: Callable[..., Any], options: dict[str, Any]) -> Callable[[], Any]:
        length = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        return lambda: generate(**inputs, **length, **options)

    timings: list[dict[str, float]] = []
    for options in _SEARCHES.values():
        engine_calls = {
            name: contestant(engine.generate, options) for name, engine in engines.items()
        }
        contestants = {"transformers": contestant(model.generate, options), **engine_calls}
        seconds, rounds = (0.1, 2) if quick else (0.3, 3)
        timings.append(fastest(contestants, seconds=seconds, rounds=rounds))
    print(f"\ngenerate() of {tokens} tokens; tokens a second on one thread, fastest call:\n")
    names = ("transformers", *FORMATS)
    rows = []
    for search, timing in zip(_SEARCHES, timings, strict=True):
        stock = timing["transformers"]
        cells = [f"{tokens / timing[name]:,.0f}" for name in names]
        cells += [f"{stock / timing[name]:.1f}x" for name in FORMATS]
        rows.append([search, *cells])
    ratios = [f"{name} ratio" for name in FORMATS]
    print(aligned_table(["search", *names, *ratios], rows))
    if plot is not None:
        bars = {name: [timing[name] / tokens * 1e6 for timing in timings] for name in names}
        bar_chart(plot, "generate(): time a token", list(_SEARCHES), bars)
        print(f"\nChart: {readable_path(plot)}")
