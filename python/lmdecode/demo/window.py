"""A prompt of many windows in ``generate()``: equal text, time and memory, with and without us."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmdecode.demo import harness
from lmdecode.demo.harness import OURS, STOCK, DemoError, Look, quote, say
from lmdecode.demo.peak_memory import peak_memory

PASSAGE = """Genesis 1
In the beginning God created the heaven and the earth. And the earth was without form, and void; \
and darkness was upon the face of the deep. And the Spirit of God moved upon the face of the \
waters. And God said, Let there be light: and there was light.
Psalms 23
The LORD is my shepherd; I shall not want. He maketh me to lie down in green pastures: he leadeth \
me beside the still waters. He restoreth my soul: he leadeth me in the paths of righteousness for \
his name's sake.
"""
# Prompts, in windows, as far as the model has positions for them.
_LENGTHS = {False: (4, 16, 32), True: (8,)}  # by whether the look is quick
_QUICK_TOKENS = 24
_SHORT = 16  # tokens of the prompt that warms up
_IMPLEMENTATIONS = {STOCK: "sdpa", OURS: "lmdecode"}


def _load(folder: Path) -> tuple[Any, Any]:
    """Return the model, in float32, where rounding does not decide between tokens."""
    harness.require("transformers")
    from lmdecode.integrations.transformers import register

    register()
    return harness.load_model(folder, torch.float32)


def _prompt(tokenizer: Any, length: int) -> Tensor:
    """The passage again and again, [1, length]."""
    ids = tokenizer(PASSAGE, return_tensors="pt").input_ids
    return ids.repeat(1, -(-length // ids.shape[1]))[:, :length]


def _generate(model: Any, prompt: Tensor, tokens: int, name: str) -> Tensor:
    """Generate as transformers does by itself, or with lmdecode's attention and cache."""
    from lmdecode.integrations.transformers import DynamicRingCache
    from lmdecode.integrations.transformers.generate_call import CACHE

    model.set_attn_implementation(_IMPLEMENTATIONS[name])
    cache = {CACHE: DynamicRingCache(model.config)} if name == OURS else {}
    return model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens,
        min_new_tokens=tokens, do_sample=False, **cache,
    )  # fmt: skip


def _calls(model: Any, prompt: Tensor, tokens: int) -> dict[str, Callable[[], Tensor]]:
    return {name: partial(_generate, model, prompt, tokens, name) for name in _IMPLEMENTATIONS}


def _call_of_prompt(folder: Path, length: int, name: str) -> Callable[[], object]:
    """Build what ``peak_memory`` measures: a prompt, and two tokens behind it."""
    model, tokenizer = _load(folder)
    _generate(model, _prompt(tokenizer, _SHORT), 2, name)
    return partial(_generate, model, _prompt(tokenizer, length), 2, name)


def run(look: Look) -> None:
    """Run the demo; DemoError where greedy ids differ from those of transformers."""
    folder, tokens = harness.model_folder(look.model), look.up_to(_QUICK_TOKENS)
    model, tokenizer = _load(folder)
    window, positions = model.config.sliding_window, model.config.max_position_embeddings
    most, wanted = (positions - tokens) // window if window else 0, _LENGTHS[look.quick]
    if most < wanted[0]:
        raise DemoError(
            f"the model in {folder} has a window of {window} and {positions} positions; expected "
            f"room for {wanted[0]} windows and {tokens} tokens"
        )
    lengths = [n * window for n in sorted({min(n, most) for n in wanted})]
    harness.print_model(folder, model, f"window {window}", "in float32")
    prompts = {length: _prompt(tokenizer, length) for length in lengths}
    last, length = prompts[lengths[-1]], lengths[-1]
    theirs, ours = (call() for call in _calls(model, last, tokens).values())
    harness.check_equal(ours, theirs, f"greedy, a prompt of {length}")
    say(
        f"Greedy: ids equal to those of transformers, {tokens} new tokens behind a prompt of "
        f"{length}, {length // window} windows. It ends, and goes on:\n"
    )
    quote("... " + tokenizer.decode(last[0, -_SHORT:]))
    print()
    quote(tokenizer.decode(ours[0, length:], skip_special_tokens=True))
    # Tokens behind the shortest prompt, where the prompt's own time hides the least.
    cases = {str(length): _calls(model, prompt, 1) for length, prompt in prompts.items()}
    cases["longer"] = _calls(model, prompts[lengths[0]], tokens + 1)
    timings = harness.timed(cases, look.quick)
    longer = timings.pop("longer")
    head, *rows = harness.compared("tokens", timings, "ms")
    head += [f"{name} MiB" for name in _IMPLEMENTATIONS]
    with ThreadPoolExecutor(2) as pool:
        for row, length in zip(rows, lengths, strict=True):
            of = partial(peak_memory, _call_of_prompt, folder, length)
            row += [f"{peak / 2**20:,.0f}" for peak in pool.map(of, _IMPLEMENTATIONS)]
    say(
        "\nThe whole model over a prompt, one thread, CPU time, fastest call; memory: the peak "
        "beyond the loaded model, each in a process of its own:\n"
    )
    harness.print_table(head, *rows)
    short = timings[str(lengths[0])]
    each = [f"{(longer[name] - short[name]) / tokens * 1e3:.2f} ms" for name in (STOCK, OURS)]
    say(f"\nEach token after a prompt of {lengths[0]}: {each[0]}, {each[1]} with lmdecode.")
