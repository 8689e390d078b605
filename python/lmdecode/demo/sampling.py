"""Sampling in ``generate()``: equal greedy tokens, sampled text, time of the sampling stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lmdecode
from lmdecode._tables import aligned_table
from lmdecode.cli.terminal import busy
from lmdecode.demo._common import (
    DemoError,
    bar_chart,
    fastest,
    load_model,
    microseconds,
    model_folder,
    print_model,
    quoted,
    require,
    say,
)
from lmdecode.sampling import STAGES

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
# What --explain shows: a parameter of each stage, and how many of the tokens that remain.
PARAMETERS: dict[str, Any] = {
    "temperature": 0.8, "top_k": 200, "top_p": 0.98, "min_p": 0.005, "top_n_sigma": 3.0,
    "epsilon_cutoff": 0.01, "typical_p": 0.95,
}  # fmt: skip
REPETITION_PENALTY = 1.1
_SHOWN = 8


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


def _sampled(model: Any, inputs: Any, tokens: int, **options: Any) -> Any:
    """Return the outputs of ``generate()`` by lmdecode, with the logits of each step."""
    from lmdecode.integrations.transformers import sample

    return model.generate(
        **inputs, max_new_tokens=tokens, do_sample=True, temperature=TEMPERATURE, top_k=TOP_K,
        top_p=TOP_P, custom_generate=sample, seed=SEED, return_dict_in_generate=True,
        output_logits=True, **options,
    )  # fmt: skip


def _sample_text(model: Any, tokenizer: Any, tokens: int) -> list[Tensor]:
    """Sample from each prompt, print two texts, return the logits [B, V] of each step."""
    tokenizer.padding_side = "left"
    inputs = tokenizer(
        list(PROMPTS), return_tensors="pt", padding=True, return_token_type_ids=False
    )
    outputs = _sampled(model, inputs, tokens, num_return_sequences=2)
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
    temperature = transformers.TemperatureLogitsWarper(TEMPERATURE)
    filters = [transformers.TopKLogitsWarper(TOP_K), transformers.TopPLogitsWarper(TOP_P)]
    warpers = transformers.LogitsProcessorList([temperature, *filters])
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
            logits, TOP_K, TOP_P, temperature=TEMPERATURE, seed=seeds, position=1,
            dialect="transformers",
        ).index  # fmt: skip

    return stage


def _time(cases: dict[str, Tensor], quick: bool) -> list[dict[str, float]]:
    """Time both stages of each case on one thread."""
    seconds, rounds = (0.1, 5) if quick else (1.0, 20)
    timings: list[dict[str, float]] = []
    with busy(lambda: f"Timing case {len(timings) + 1} of {len(cases)}"):
        for logits in cases.values():
            stages = {
                "transformers": transformers_stage(logits), "lmdecode": lmdecode_stage(logits)
            }  # fmt: skip
            timings.append(fastest(stages, seconds=seconds, rounds=rounds))
    return timings


def run_explain(model_path: Path | None, tokens: int) -> None:
    """Print what each stage of a ``Sampler`` leaves of one row of logits, after some new tokens."""
    folder = model_folder(model_path)
    model, tokenizer = load_model(folder)
    print_model(folder, model, f"vocabulary {model.config.vocab_size}")
    inputs = tokenizer(PROMPTS[0], return_tensors="pt", return_token_type_ids=False)
    outputs = _sampled(model, inputs, tokens)
    text = outputs.sequences[0, :-1].tolist()  # what the last row of logits is behind
    print("  text:")
    print(quoted(tokenizer.decode(text, skip_special_tokens=True)))
    print(f"\nThe token behind it, with a repetition penalty of {REPETITION_PENALTY}:\n")
    _explain(outputs.logits[-1][0].float(), text, tokenizer.decode)


def run(model_path: Path | None, plot: Path | None, tokens: int, quick: bool) -> None:
    """Run the demo; DemoError where greedy ids differ from those of transformers."""
    folder = model_folder(model_path)
    tokens = min(tokens, _QUICK_TOKENS) if quick else tokens
    model, tokenizer = load_model(folder)
    print_model(folder, model, f"vocabulary {model.config.vocab_size}")
    _check_greedy(model, tokenizer, tokens)
    step_logits = _sample_text(model, tokenizer, tokens)

    own = step_logits[len(step_logits) // 2].float().contiguous()  # of 8 sequences
    generator = torch.Generator().manual_seed(SEED)
    large = torch.randn(8, LARGE_VOCAB, generator=generator) * LOGIT_SCALE
    cases = {
        f"{name}, V = {rows.shape[1]}, B = {batch}": rows[:batch]
        for name, rows in (("this model's logits", own), ("normal logits", large))
        for batch in (1, len(rows))
    }
    timings = _time(cases, quick)
    say("\nThe sampling stage of one step, logits to token ids; one thread, fastest call:\n")
    names = ("transformers", "lmdecode")
    rows = [
        [case, *(microseconds(timing[name]) for name in names),
         f"{timing['transformers'] / timing['lmdecode']:.0f}x"]
        for case, timing in zip(cases, timings, strict=True)
    ]  # fmt: skip
    print(aligned_table(["case", "transformers us", "lmdecode us", "ratio"], rows))
    if plot is not None:
        bars = {name: [timing[name] * 1e6 for timing in timings] for name in names}
        title = f"Sampling stage: temperature {TEMPERATURE}, top-k {TOP_K}, top-p {TOP_P}"
        bar_chart(plot, title, [case.replace(", V", "\nV") for case in cases], bars)


def _explain(logits: Tensor, text: list[int], decode: Callable[[list[int]], str]) -> None:
    """Draw the token after ``text`` from logits [vocab]; print what each stage left."""
    vocab = len(logits)
    sampler = lmdecode.Sampler(
        1, vocab, repetition_penalty=REPETITION_PENALTY, num_logprobs=0, return_stages=True,
        return_kept_set=True, seed=SEED, **PARAMETERS,
    )  # fmt: skip
    sampler.insert(0, prompt=text)
    out = sampler.sample(logits[None])
    assert out.stage_counts is not None and out.kept_set is not None
    assert out.rank is not None and out.logprob is not None
    counts = dict(zip(STAGES, out.stage_counts[0].tolist(), strict=True))
    rows = [["logits", "", str(vocab)]]
    rows += [
        [name, f"{PARAMETERS[name]:g}", str(counts[name])] for name in STAGES if counts[name] >= 0
    ]
    print(aligned_table(["stage", "parameter", "tokens left"], rows))

    chosen = int(out.index[0])
    ids, probabilities = out.kept_set.ids.tolist(), out.kept_set.logprobs.exp().tolist()
    shares = sorted(zip(probabilities, ids, strict=True), reverse=True)
    print("\nDrawn from:\n")
    drawn_from = [[repr(decode([token])), f"{share:.3f}"] for share, token in shares[:_SHOWN]]
    print(aligned_table(["token", "probability"], drawn_from))
    if len(shares) > _SHOWN:
        print(f"... and {len(shares) - _SHOWN} more.")
    share = dict(zip(ids, probabilities, strict=True))[chosen]
    print(
        f"\nChosen: {decode([chosen])!r}, probability {share:.3f} of these, "
        f"{out.logprob.exp().item():.3f} of all, rank {out.rank.item()}."
    )
