"""A whole model in C++: equal tokens, and the tokens a second of each format of weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

import lmdecode
from lmdecode.cli.terminal import busy
from lmdecode.demo import harness
from lmdecode.demo.harness import STOCK, Look, quote, say
from lmdecode.serving.text_model import TextModel

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
    say(f"{harness.readable_path(folder)}, by lmdecode alone; transformers is not imported yet:\n")
    model = TextModel.load(folder, dtype="float32")
    prompt = model.tokenizer.encode(PROMPTS[0])
    with model.decoding.engine(max_requests=1, capacity=len(prompt) + tokens) as engine:
        seconds = []
        for _ in range(_FIRST_CALLS):
            request = engine.submit(prompt, max_new_tokens=tokens, do_sample=False)
            new = request.result().tokens
            seconds.append(request.stats.total or 0.0)
    quote(model.tokenizer.decode(prompt + new))
    say(
        f"\n{len(new)} tokens in {min(seconds) * 1e3:.0f} ms, in float32, on one thread: "
        f"{len(new) / min(seconds):,.0f} tokens a second.\n"
    )
    return prompt + new


def run(look: Look) -> None:
    """Run the demo; DemoError where ids differ from those of transformers."""
    folder, tokens = harness.model_folder(look.model), look.up_to(_QUICK_TOKENS)
    first = _first_text(folder, tokens) if look.model is None else None
    with busy("Loading transformers"):
        harness.require("transformers")
        engines = {name: lmdecode.Decoding.from_pretrained(folder, name) for name in FORMATS}
        model, tokenizer = harness.load_model(folder, torch.float32)
    harness.print_model(folder, model)
    all_inputs = [harness.batch_of(tokenizer, [text]) for text in PROMPTS]
    texts = 0
    for inputs, prompt in zip(all_inputs, PROMPTS, strict=True):
        for name in ("greedy", "4 beams"):
            options = {"max_new_tokens": tokens, **_SEARCHES[name]}
            theirs = model.generate(**inputs, **options)
            ours = [engines["float32"].generate(**inputs, **options)]
            if (prompt, name) == (PROMPTS[1], "4 beams"):
                print("4 beams, float32, the whole model in C++:\n")
                quote(tokenizer.decode(ours[0][0], skip_special_tokens=True))
            if first is not None and (prompt, name) == (PROMPTS[0], "greedy"):
                ours.append(torch.tensor([first]))
            for ids in ours:
                harness.check_equal(ids, theirs, f"{name}, prompt {prompt!r}")
            texts += len(ours)
    say(f"\nIn float32, {texts} of {texts} texts have the ids of transformers.")

    length: Any = {**all_inputs[1], "max_new_tokens": tokens, "min_new_tokens": tokens}
    contestants = {STOCK: model, **engines}
    timings = harness.timed(
        {search: {name: partial(of.generate, **length, **options)
                  for name, of in contestants.items()}
         for search, options in _SEARCHES.items()},
        look.quick,
    )  # fmt: skip
    say(
        f"\ngenerate() of {tokens} tokens; tokens a second on one thread, fastest call, and how "
        "many times those of transformers:\n"
    )
    rows = []
    for search, timing in timings.items():
        stock = timing[STOCK]
        cells = [f"{tokens / timing[n]:,.0f} {stock / timing[n]:5.1f}x" for n in FORMATS]
        rows.append([search, f"{tokens / stock:,.0f}", *cells])
    harness.print_table(["search", STOCK, *FORMATS], *rows)
