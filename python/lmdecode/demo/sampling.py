"""Sampling in ``generate()``: equal greedy tokens, sampled text, time of the sampling stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import lmdecode
from lmdecode.cli.terminal import busy
from lmdecode.demo._explain import REPETITION_PENALTY, explain
from lmdecode.demo._model import load_model, print_model
from lmdecode.demo._output import (
    DemoError,
    aligned_table,
    bar_chart,
    microseconds,
    model_folder,
    quoted,
    require,
    say,
)
from lmdecode.demo._timing import fastest

PROMPTS = (
    "Genesis 1\nIn the beginning",
    "Psalms 23\nThe LORD is my",
    "Proverbs 10\nA wise son",
    "Matthew 5\nBlessed are",
)
TEMPERATURE, TOP_K, TOP_P = 0.8, 50, 0.95
SEED = 2024
# A vocabulary of today's larger models; logits of a normal distribution.
LARGE_VOCAB, LOGIT_SCALE = 128256, 3.0
_QUICK_TOKENS = 24


class _Case(NamedTuple):
    name: str
    logits: Tensor


def _check_greedy(model: Any, tokenizer: Any, tokens: int) -> None:
    """Generate greedily with and without lmdecode, one prompt after another, and compare ids."""
    from lmdecode.integrations.transformers import sample

    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        options = {"max_new_tokens": tokens, "do_sample": False}
        theirs = model.generate(**inputs, **options)
        ours = model.generate(**inputs, **options, custom_generate=sample)
        if not torch.equal(theirs, ours):
            first = next(
                (at for at, (a, b) in enumerate(zip(theirs[0], ours[0], strict=False)) if a != b),
                min(theirs.shape[1], ours.shape[1]),
            )
            raise DemoError(
                "greedy ids differ from those of transformers: "
                f"prompt {prompt!r}, first at token {first}"
            )
    say(
        f"Greedy: ids equal to those of transformers, {len(PROMPTS)} prompts, "
        f"up to {tokens} new tokens each."
    )


def _sample_text(model: Any, tokenizer: Any, tokens: int) -> list[Tensor]:
    """Sample from each prompt, print two texts, return the logits [B, V] of each step."""
    from lmdecode.integrations.transformers import sample

    tokenizer.padding_side = "left"
    inputs = tokenizer(
        list(PROMPTS), return_tensors="pt", padding=True, return_token_type_ids=False
    )
    outputs = model.generate(
        **inputs,
        max_new_tokens=tokens,
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=TOP_K,
        top_p=TOP_P,
        num_return_sequences=2,
        custom_generate=sample,
        seed=SEED,
        return_dict_in_generate=True,
        output_logits=True,
    )
    say(
        f"\nSampled with lmdecode (temperature {TEMPERATURE}, top-k {TOP_K}, top-p {TOP_P}, "
        f"seed {SEED}):"
    )
    for row in (0, 2):
        prompt = PROMPTS[row // 2]
        new = outputs.sequences[row, inputs.input_ids.shape[1] :]
        print(f"\n  prompt: {prompt!r}")
        print(quoted(prompt + tokenizer.decode(new, skip_special_tokens=True)))
    return list(outputs.logits)


def transformers_stage(logits: Tensor) -> Callable[[], Tensor]:
    """Build the sampling stage of a step of ``generate()``: logits [B, V] to ids [B]."""
    transformers = require("transformers")
    warpers = transformers.LogitsProcessorList(
        [
            transformers.TemperatureLogitsWarper(TEMPERATURE),
            transformers.TopKLogitsWarper(TOP_K),
            transformers.TopPLogitsWarper(TOP_P),
        ]
    )
    input_ids = torch.zeros(len(logits), 1, dtype=torch.int64)

    def stage() -> Tensor:
        scores = warpers(input_ids, logits.to(torch.float32, copy=True))
        return torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1).squeeze(1)

    return stage


def lmdecode_stage(logits: Tensor) -> Callable[[], Tensor]:
    """Build the same stage as ``lmdecode.integrations.transformers.sample`` has it."""
    seeds = torch.arange(len(logits)) + SEED

    def stage() -> Tensor:
        return lmdecode.top_k_top_p_sample(
            logits,
            TOP_K,
            TOP_P,
            temperature=TEMPERATURE,
            seed=seeds,
            position=1,
            dialect="transformers",
        ).index

    return stage


def _time(cases: list[_Case], quick: bool) -> list[dict[str, float]]:
    """Time both stages of each case on one thread."""
    seconds, rounds = (0.1, 5) if quick else (1.0, 20)
    timings: list[dict[str, float]] = []
    with busy(lambda: f"Timing case {len(timings) + 1} of {len(cases)}"):
        for case in cases:
            contestants = {
                "transformers": transformers_stage(case.logits),
                "lmdecode": lmdecode_stage(case.logits),
            }
            timings.append(fastest(contestants, seconds=seconds, rounds=rounds))
    return timings


def run_explain(model_path: Path | None, tokens: int) -> None:
    """Print what each stage of a ``Sampler`` leaves of one row of logits.

    Parameters
    ----------
    model_path
        Folder of a causal language model and its tokenizer; None: the one of the source tree.
    tokens
        New tokens, at most, of the text that the row stands behind.

    Raises
    ------
    DemoError
        Something is missing.
    """
    from lmdecode.integrations.transformers import sample

    folder = model_folder(model_path)
    model, tokenizer = load_model(folder)
    print_model(folder, model, f"vocabulary {model.config.vocab_size}")
    outputs = model.generate(
        **tokenizer(PROMPTS[0], return_tensors="pt", return_token_type_ids=False),
        max_new_tokens=tokens,
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=TOP_K,
        top_p=TOP_P,
        custom_generate=sample,
        seed=SEED,
        return_dict_in_generate=True,
        output_logits=True,
    )
    text = outputs.sequences[0, :-1].tolist()  # what the last row of logits is behind
    print("  text:")
    print(quoted(tokenizer.decode(text, skip_special_tokens=True)))
    print(f"\nThe token behind it, with a repetition penalty of {REPETITION_PENALTY}:\n")
    explain(outputs.logits[-1][0].float(), text, tokenizer.decode, SEED)


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
        Something is missing, or greedy ids differ from those of transformers.
    """
    folder = model_folder(model_path)
    tokens = min(tokens, _QUICK_TOKENS) if quick else tokens
    model, tokenizer = load_model(folder)
    print_model(folder, model, f"vocabulary {model.config.vocab_size}")
    _check_greedy(model, tokenizer, tokens)
    step_logits = _sample_text(model, tokenizer, tokens)

    own = step_logits[len(step_logits) // 2].float().contiguous()  # of 8 sequences
    generator = torch.Generator().manual_seed(SEED)
    large = torch.randn(8, LARGE_VOCAB, generator=generator) * LOGIT_SCALE
    cases = [
        _Case(f"{name}, V = {rows.shape[1]}, B = {batch}", rows[:batch])
        for name, rows in (("this model's logits", own), ("normal logits", large))
        for batch in (1, len(rows))
    ]
    timings = _time(cases, quick)
    say("\nThe sampling stage of one step, logits to token ids; one thread, fastest call:\n")
    print(
        aligned_table(
            ["case", "transformers us", "lmdecode us", "ratio"],
            [
                [
                    case.name,
                    microseconds(timing["transformers"]),
                    microseconds(timing["lmdecode"]),
                    f"{timing['transformers'] / timing['lmdecode']:.0f}x",
                ]
                for case, timing in zip(cases, timings, strict=True)
            ],
        )
    )
    if plot is not None:
        bars = {
            name: [timing[name] * 1e6 for timing in timings]
            for name in ("transformers", "lmdecode")
        }
        title = f"Sampling stage: temperature {TEMPERATURE}, top-k {TOP_K}, top-p {TOP_P}"
        bar_chart(plot, title, [case.name.replace(", V", "\nV") for case in cases], bars)
