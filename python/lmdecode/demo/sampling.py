"""Sampling in ``generate()``: equal greedy tokens, sampled text, time of the sampling stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import lmdecode
from lmdecode.demo import harness
from lmdecode.demo.harness import OURS, PROMPTS, STOCK, Look, quote, say
from lmdecode.sampling import STAGES

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


def _loaded(look: Look) -> tuple[Any, Any]:
    folder = harness.model_folder(look.model)
    model, tokenizer = harness.load_model(folder)
    harness.print_model(folder, model, f"vocabulary {model.config.vocab_size}")
    return model, tokenizer


def _sampled(model: Any, inputs: Any, tokens: int, **options: Any) -> Any:
    """Return the outputs of ``generate()`` by lmdecode, with the logits of each step."""
    from lmdecode.integrations.transformers import sample

    return model.generate(
        **inputs, max_new_tokens=tokens, do_sample=True, temperature=TEMPERATURE, top_k=TOP_K,
        top_p=TOP_P, custom_generate=sample, seed=SEED, return_dict_in_generate=True,
        output_logits=True, **options,
    )  # fmt: skip


def _stages(logits: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Build the sampling stage of a step of ``generate()``, of both: logits [B, V] to ids [B]."""
    transformers = harness.require("transformers")
    warpers = transformers.LogitsProcessorList(
        [transformers.TemperatureLogitsWarper(TEMPERATURE), transformers.TopKLogitsWarper(TOP_K),
         transformers.TopPLogitsWarper(TOP_P)]
    )  # fmt: skip
    input_ids = torch.zeros(len(logits), 1, dtype=torch.int64)
    seeds = torch.arange(len(logits)) + SEED

    def theirs() -> Tensor:
        scores = warpers(input_ids, logits.to(torch.float32, copy=True))
        return torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1).squeeze(1)

    def ours() -> Tensor:
        return lmdecode.top_k_top_p_sample(
            logits, TOP_K, TOP_P, temperature=TEMPERATURE, seed=seeds, position=1,
            dialect="transformers",
        ).index  # fmt: skip

    return {STOCK: theirs, OURS: ours}


def run(look: Look) -> None:
    """Run the demo; DemoError where greedy ids differ from those of transformers."""
    from lmdecode.integrations.transformers import sample

    tokens = look.up_to(_QUICK_TOKENS)
    model, tokenizer = _loaded(look)
    for prompt in PROMPTS:
        inputs = harness.batch_of(tokenizer, [prompt])
        options = {"max_new_tokens": tokens, "do_sample": False}
        ours = model.generate(**inputs, **options, custom_generate=sample)
        harness.check_equal(ours, model.generate(**inputs, **options), f"greedy, prompt {prompt!r}")
    say(
        f"Greedy: ids equal to those of transformers, {len(PROMPTS)} prompts, "
        f"up to {tokens} new tokens each."
    )
    inputs = harness.batch_of(tokenizer, PROMPTS)
    outputs = _sampled(model, inputs, tokens, num_return_sequences=2)
    say(
        f"\nSampled with lmdecode (temperature {TEMPERATURE}, top-k {TOP_K}, top-p {TOP_P}, "
        f"seed {SEED}):"
    )
    for row in (0, 2):
        prompt, new = PROMPTS[row // 2], outputs.sequences[row, inputs.input_ids.shape[1] :]
        print(f"\n  prompt: {prompt!r}")
        quote(prompt + tokenizer.decode(new, skip_special_tokens=True))

    own = outputs.logits[len(outputs.logits) // 2].float().contiguous()  # of 8 sequences
    generator = torch.Generator().manual_seed(SEED)
    large = torch.randn(8, LARGE_VOCAB, generator=generator) * LOGIT_SCALE
    cases = {
        f"{name}, V = {rows.shape[1]}, B = {batch}": _stages(rows[:batch])
        for name, rows in (("this model's logits", own), ("normal logits", large))
        for batch in (1, len(rows))
    }
    timings = harness.timed(cases, look.quick)
    say("\nThe sampling stage of one step, logits to token ids; one thread, fastest call:\n")
    harness.print_table(*harness.compared("case", timings, "us"))


def explain(look: Look) -> int:
    """Print what each stage of a ``Sampler`` leaves of one row of logits, after some new tokens."""
    model, tokenizer = _loaded(look)
    inputs = harness.batch_of(tokenizer, PROMPTS[:1])
    outputs = _sampled(model, inputs, look.tokens)
    text = outputs.sequences[0, :-1].tolist()  # what the last row of logits is behind
    print("  text:")
    quote(tokenizer.decode(text, skip_special_tokens=True))
    print(f"\nThe token behind it, with a repetition penalty of {REPETITION_PENALTY}:\n")
    sampler = lmdecode.Sampler(
        1, model.config.vocab_size, repetition_penalty=REPETITION_PENALTY, num_logprobs=0,
        return_stages=True, return_kept_set=True, seed=SEED, **PARAMETERS,
    )  # fmt: skip
    sampler.insert(0, prompt=text)
    out: Any = sampler.sample(outputs.logits[-1][:1].float())
    counts = zip(STAGES, out.stage_counts[0].tolist(), strict=True)
    stages = [[name, f"{PARAMETERS[name]:g}", str(left)] for name, left in counts if left >= 0]
    logits = ["logits", "", str(model.config.vocab_size)]
    harness.print_table(["stage", "parameter", "tokens left"], logits, *stages)

    chosen = int(out.index[0])
    ids, probabilities = out.kept_set.ids.tolist(), out.kept_set.logprobs.exp().tolist()
    shares = sorted(zip(probabilities, ids, strict=True), reverse=True)
    print("\nDrawn from:\n")
    rows = [[repr(tokenizer.decode([token])), f"{share:.3f}"] for share, token in shares[:_SHOWN]]
    harness.print_table(["token", "probability"], *rows)
    if len(shares) > _SHOWN:
        print(f"... and {len(shares) - _SHOWN} more.")
    print(
        f"\nChosen: {tokenizer.decode([chosen])!r}, probability "
        f"{dict(zip(ids, probabilities, strict=True))[chosen]:.3f} of these, "
        f"{out.logprob.exp().item():.3f} of all, rank {out.rank.item()}."
    )
    return 0
