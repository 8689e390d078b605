"""A prompt of many windows in ``generate()``: equal text, time and memory, with and without us."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lmdecode
from lmdecode._tables import aligned_table
from lmdecode.demo._common import (
    DemoError,
    fastest,
    load_model,
    model_folder,
    print_model,
    pyplot,
    quoted,
    require,
    save_figure,
    say,
)
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
LENGTHS = (4, 16, 32)
_QUICK_LENGTHS = (8,)
_QUICK_TOKENS = 24
_SHORT = 16  # tokens of the prompt that warms up
# Of the masks that are drawn: more than three tiles of 128 tokens, and no multiple of them.
MASK_WINDOW, MASK_LENGTH, HEAD_SIZE = 600, 1536, 64
STOCK, OURS = "transformers", "lmdecode"
_IMPLEMENTATIONS = {STOCK: "sdpa", OURS: "lmdecode"}


def _load(folder: Path) -> tuple[Any, Any]:
    """Return the model, in float32, where rounding does not decide between tokens."""
    require("transformers")
    from lmdecode.integrations.transformers import register

    register()
    return load_model(folder, dtype=torch.float32)


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


def _check_greedy(model: Any, tokenizer: Any, prompt: Tensor, tokens: int) -> None:
    """Generate greedily with and without lmdecode, compare the ids, and print the text."""
    theirs, ours = (_generate(model, prompt, tokens, name) for name in (STOCK, OURS))
    length = prompt.shape[1]
    if not torch.equal(theirs, ours):
        first = int((theirs != ours)[0].nonzero()[0]) - length
        raise DemoError(
            f"greedy ids differ from those of transformers, first at new token {first} behind a "
            f"prompt of {length}"
        )
    say(
        f"Greedy: ids equal to those of transformers, {tokens} new tokens behind a prompt of "
        f"{length}, {length // model.config.sliding_window} windows. It ends, and goes on:\n"
    )
    print(quoted("... " + tokenizer.decode(prompt[0, -_SHORT:])))
    print("\n" + quoted(tokenizer.decode(ours[0, length:], skip_special_tokens=True)))


def _time(
    model: Any, prompts: list[Tensor], tokens: int, quick: bool
) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Time both on one thread: a token behind each prompt; and seconds of each token after it."""
    options = dict(seconds=0.2, rounds=2, min_calls=1) if quick else dict(seconds=2.0, rounds=4)

    def time(prompt: Tensor, tokens: int) -> dict[str, float]:
        calls = {name: partial(_generate, model, prompt, tokens, name) for name in (STOCK, OURS)}
        return fastest(calls, **options)  # type: ignore[arg-type]

    timings = [time(prompt, 1) for prompt in prompts]
    # Behind the shortest prompt, where the prompt's own time hides the least.
    longer = time(prompts[0], tokens + 1)
    each = {name: (longer[name] - timings[0][name]) / tokens for name in longer}
    return timings, each


def _call_of_prompt(folder: Path, length: int, name: str) -> Callable[[], object]:
    """Build what ``peak_memory`` measures: a prompt, and two tokens behind it."""
    model, tokenizer = _load(folder)
    _generate(model, _prompt(tokenizer, _SHORT), 2, name)
    return partial(_generate, model, _prompt(tokenizer, length), 2, name)


def _memory(folder: Path, lengths: list[int]) -> list[dict[str, int]]:
    """Measure bytes at the peak beyond the loaded model, two processes at a time."""
    names = (STOCK, OURS)
    with ThreadPoolExecutor(len(names)) as pool:
        peaks = [
            pool.map(partial(peak_memory, _call_of_prompt, folder, length), names)
            for length in lengths
        ]
        return [dict(zip(names, peak, strict=True)) for peak in peaks]


def _masks() -> tuple[Tensor, Tensor, Tensor]:
    """The mask of a window, its compressed form, and what that stands for: all bool."""
    mask = lmdecode.swa_mask(MASK_LENGTH, MASK_WINDOW, form="bool")
    compressed = lmdecode.compressed_swa_mask(MASK_WINDOW, HEAD_SIZE, form="bool")
    expanded = lmdecode.expand_compressed_swa_mask(compressed, MASK_LENGTH, MASK_WINDOW, HEAD_SIZE)
    if not torch.equal(mask, expanded):
        raise DemoError("the compressed mask, expanded, differs from the mask that it stands for")
    return mask, compressed, expanded


def _draw(path: Path, lengths: list[int], timings: list[dict[str, float]], window: int) -> None:
    """Write a PNG: the three masks, black where masked, and the time over the prompt's length."""
    figure, axes = pyplot().subplots(2, 2, figsize=(9.5, 9), layout="constrained")
    titles = (
        f"mask of a window of {MASK_WINDOW}, {MASK_LENGTH} tokens; black: masked",
        "its compressed form, 512 x 512, for any length",
        "the compressed form, expanded",
    )
    for panel, mask, title in zip(axes.flat[:3], _masks(), titles, strict=True):
        panel.imshow(mask.numpy(), cmap="gray_r", interpolation="nearest")
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("key")
        panel.set_ylabel("query")
    panel = axes[1, 1]
    for number, name in enumerate((STOCK, OURS)):
        times = [timing[name] * 1e3 for timing in timings]
        panel.plot(lengths, times, marker="o", label=name, color=f"C{1 - number}")
    panel.set_title(f"the model over a prompt, window {window}, one thread", fontsize=10)
    panel.set_xlabel("tokens of the prompt")
    panel.set_ylabel("milliseconds")
    panel.set_ylim(bottom=0)
    panel.legend(frameon=False)
    panel.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


def _lengths(model: Any, folder: Path, tokens: int, quick: bool) -> list[int]:
    """Return the lengths of the prompts, multiples of the window."""
    window = getattr(model.config, "sliding_window", None)
    if window is None:
        raise DemoError(f"the model in {folder} has no sliding_window; expected one with a window")
    most = (model.config.max_position_embeddings - tokens) // window
    wanted = _QUICK_LENGTHS if quick else LENGTHS
    windows = [n for n in wanted if n <= most]
    if not windows:
        raise DemoError(
            f"the model in {folder} has a window of {window} and max_position_embeddings of "
            f"{model.config.max_position_embeddings}; expected room for {wanted[0]} windows and "
            f"{tokens} tokens"
        )
    if not quick and windows[-1] < min(most, LENGTHS[-1]):
        windows.append(most)
    return [n * window for n in windows]


def run(model_path: Path | None, plot: Path | None, tokens: int, quick: bool) -> None:
    """Run the demo; DemoError where greedy ids differ from those of transformers."""
    folder = model_folder(model_path)
    tokens = min(tokens, _QUICK_TOKENS) if quick else tokens
    model, tokenizer = _load(folder)
    lengths = _lengths(model, folder, tokens, quick)
    window = model.config.sliding_window
    print_model(folder, model, f"window {window}", "in float32")
    prompts = [_prompt(tokenizer, length) for length in lengths]
    _check_greedy(model, tokenizer, prompts[-1], tokens)
    timings, each = _time(model, prompts, tokens, quick)
    memory = _memory(folder, lengths)
    rows = []
    for length, timing, peak in zip(lengths, timings, memory, strict=True):
        times = [timing[name] * 1e3 for name in (STOCK, OURS)]
        peaks = [f"{peak[name] / 2**20:,.0f}" for name in (STOCK, OURS)]
        ratio = f"{times[0] / times[1]:.1f}x"
        rows.append([str(length), *(f"{ms:,.0f}" for ms in times), ratio, *peaks])
    say(
        "\nThe whole model over a prompt, one thread, CPU time, fastest call; memory: the peak "
        "beyond the loaded model, each in a process of its own:\n"
    )
    units = [f"{name} {unit}" for unit in ("ms", "MiB") for name in (STOCK, OURS)]
    print(aligned_table(["tokens", *units[:2], "ratio", *units[2:]], rows))
    say(
        f"\nEach token after a prompt of {lengths[0]}: {each[STOCK] * 1e3:.2f} ms, "
        f"{each[OURS] * 1e3:.2f} ms with lmdecode."
    )
    if plot is not None:
        _draw(plot, lengths, timings, window)
