"""A whole model in C++: equal tokens, and the tokens a second of each format of weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import lmdecode
from lmdecode.cli.terminal import busy
from lmdecode.demo._model import load_model, print_model
from lmdecode.demo._output import (
    DemoError,
    aligned_table,
    bar_chart,
    model_folder,
    one_line,
    quoted,
    readable_path,
    require,
    say,
)
from lmdecode.demo._shipped_weights import pack_shipped_model
from lmdecode.demo._timing import fastest
from lmdecode.serving.tokenizer import Tokenizer

PROMPTS = ("Psalms 23\nThe LORD is my", "And Jesus said unto them,", "In those days there was")
FORMATS = ("float32", "bfloat16", "int8")
_SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "4 beams": {"do_sample": False, "num_beams": 4},
    "sampled": {"do_sample": True, "top_k": 50, "top_p": 0.95},
}
_QUICK_TOKENS = 40
_FIRST_CALLS = 8


def _first_text(folder: Path, tokens: int) -> list[int]:
    """Go on with the first prompt by lmdecode alone, print it, and return all of its tokens."""
    say(f"{readable_path(folder)}, by lmdecode alone; transformers is not imported yet:\n")
    decoding, tokenizer = pack_shipped_model(folder), Tokenizer.load(folder)
    prompt = tokenizer.encode(PROMPTS[0])
    with decoding.engine(max_requests=1, capacity=len(prompt) + tokens) as engine:
        seconds = []
        for _ in range(_FIRST_CALLS):
            request = engine.submit(prompt, max_new_tokens=tokens, do_sample=False)
            new = request.result().tokens
            seconds.append(request.stats.total or 0.0)
    print(quoted(tokenizer.decode(prompt + new)))
    say(
        f"\n{len(new)} tokens in {min(seconds) * 1e3:.0f} ms, in float32, on one thread: "
        f"{len(new) / min(seconds):,.0f} tokens a second.\n"
    )
    return prompt + new


def _check(
    model: Any, decoding: lmdecode.Decoding, tokenizer: Any, tokens: int, first: list[int] | None
) -> int:
    """Generate with both, and compare ids; return how many texts there were."""
    texts = 0
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        for name in ("greedy", "4 beams"):
            options = {"max_new_tokens": tokens, **_SEARCHES[name]}
            theirs = model.generate(**inputs, **options)
            ours = [decoding.generate(**inputs, **options)]
            if first is not None and (prompt, name) == (PROMPTS[0], "greedy"):
                ours.append(torch.tensor([first]))
            for ids in ours:
                if not torch.equal(theirs, ids):
                    raise DemoError(
                        f"ids differ from those of transformers: {name}, prompt {prompt!r}"
                    )
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
    folder = model_folder(model_path)
    tokens = min(tokens, _QUICK_TOKENS) if quick else tokens
    first = _first_text(folder, tokens) if model_path is None else None
    with busy("Loading transformers"):
        require("transformers")
        try:  # before the tokenizer is asked for, which a model that is not supported may lack
            engines = {name: lmdecode.Decoding.from_pretrained(folder, name) for name in FORMATS}
        except (OSError, ValueError) as error:
            raise DemoError(one_line(error)) from error
        model, tokenizer = load_model(folder, torch.float32)
    print_model(folder, model)
    inputs = tokenizer(PROMPTS[1], return_tensors="pt", return_token_type_ids=False)
    ids = engines["float32"].generate(**inputs, max_new_tokens=tokens, **_SEARCHES["4 beams"])
    print("4 beams, float32, the whole model in C++:\n")
    print(quoted(tokenizer.decode(ids[0], skip_special_tokens=True)), flush=True)
    texts = _check(model, engines["float32"], tokenizer, tokens, first)
    say(f"\nIn float32, {texts} of {texts} texts have the ids of transformers.")

    def contestant(generate: Callable[..., Any], options: dict[str, Any]) -> Callable[[], Any]:
        length = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        return lambda: generate(**inputs, **length, **options)

    timings: list[dict[str, float]] = []
    for options in _SEARCHES.values():
        engine_calls = {
            name: contestant(engine.generate, options) for name, engine in engines.items()
        }
        contestants = {"transformers": contestant(model.generate, options), **engine_calls}
        seconds, rounds, calls = (0.1, 2, 2) if quick else (0.3, 3, 3)
        timings.append(fastest(contestants, seconds=seconds, rounds=rounds, min_calls=calls))
    say(
        f"\ngenerate() of {tokens} tokens; tokens a second on one thread, fastest call, and how "
        "many times those of transformers:\n"
    )
    rows = []
    for search, timing in zip(_SEARCHES, timings, strict=True):
        stock = timing["transformers"]
        cells = [f"{tokens / timing[n]:,.0f} {stock / timing[n]:5.1f}x" for n in FORMATS]
        rows.append([search, f"{tokens / stock:,.0f}", *cells])
    print(aligned_table(["search", "transformers", *FORMATS], rows))
    if plot is not None:
        names = ("transformers", *FORMATS)
        bars = {name: [timing[name] / tokens * 1e6 for timing in timings] for name in names}
        bar_chart(plot, "generate(): time a token", list(_SEARCHES), bars)
