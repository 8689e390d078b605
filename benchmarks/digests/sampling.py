"""Cases of sampling: one call, and rows that live through steps and drafts."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

import lmdecode
from benchmarks.digests.kinds import Kinds, Parts
from tests.sampling.test_sampler import random_bitmask, random_logits, random_parameters
from tests.support.random_cases import LARGE_VOCAB_SIZES, MEDIUM_VOCAB_SIZES, sampling_cases
from tests.support.random_tensors import randint

KINDS = Kinds("sampling")


def _sampled(number: int, count: int, **options: Any) -> Parts:
    for case in sampling_cases(number, count, **options):
        yield case.call(lmdecode.top_k_top_p_sample)


@KINDS.add(100)
def top_k_top_p_sample(choice: random.Random, number: int) -> Parts:
    yield from _sampled(number, 6)


@KINDS.add(40)
def top_k_top_p_sample_of_thousands(choice: random.Random, number: int) -> Parts:
    yield from _sampled(number, 3, vocab_sizes=MEDIUM_VOCAB_SIZES)


@KINDS.add(8)
def top_k_top_p_sample_of_a_large_vocabulary(choice: random.Random, number: int) -> Parts:
    yield from _sampled(number, 1, vocab_sizes=LARGE_VOCAB_SIZES, max_batch=2)


@KINDS.add(100)
def sampler(choice: random.Random, number: int) -> Parts:
    """Rows of random parameters, which are exchanged between steps."""
    draw = np.random.default_rng(number)
    batch, vocab = choice.randint(1, 4), choice.choice((1, 2, 31, 64, 200, 1000, 5000))
    first = random_parameters(draw, vocab)
    # Either steers the draw: a row has one of both.
    other = "adaptive_target" if "mirostat_tau" in first else "mirostat_tau"
    rows = lmdecode.Sampler(
        batch, vocab, dialect=choice.choice(lmdecode.sampling.SAMPLER_DIALECTS),
        num_logprobs=choice.choice((None, 0, min(5, vocab))),
        logprobs_mode=choice.choice(("raw_logprobs", "processed_logprobs")),
        return_logits=choice.random() < 0.3, return_kept_set=choice.random() < 0.3,
        return_stages=choice.random() < 0.3, **first,
    )  # fmt: skip
    for _ in range(8):
        row = choice.randrange(batch)
        length = int(rows.output_lengths[row])
        change = choice.choice(("none", "insert", "reorder", "remove", "accept", "rewind"))
        if change == "insert":
            prompt = draw.integers(0, vocab, choice.randint(0, 30)).tolist()
            parameters = random_parameters(draw, vocab)
            parameters.pop(other, None)
            rows.insert(row, prompt, **parameters)
        elif change == "reorder":
            rows.reorder_([choice.randrange(batch) for _ in range(batch)])
        elif change == "remove":
            rows.remove(row)
        elif change == "accept" and length >= 0:
            rows.accept(row, draw.integers(0, vocab, 3).tolist())
        elif change == "rewind" and length >= 0:
            rows.rewind(row, choice.randint(0, length))
        if choice.random() < 0.3:
            yield _verified(choice, draw, rows)
        logits = random_logits(draw, batch, vocab)
        yield rows.sample(logits, random_bitmask(draw, batch, vocab), choice.random() < 0.9)
    yield rows.state_dict()["state"]


def _verified(choice: random.Random, draw: np.random.Generator, rows: lmdecode.Sampler) -> Any:
    batch, vocab, width = rows.batch, rows.vocab, choice.randint(1, 6)
    logits = random_logits(draw, batch * (width + 1), vocab).reshape(batch, width + 1, vocab)
    draft = logits[:, :-1].float().nan_to_num(-9.0).argmax(-1)  # likely ones
    if choice.random() < 0.3:
        draft = torch.from_numpy(draw.integers(0, vocab, (batch, width)))
    options: dict[str, Any] = {"mode": choice.choice(("match", "rejection"))}
    if choice.random() < 0.5:
        options["num_draft"] = torch.from_numpy(draw.integers(0, width + 1, batch))
    if choice.random() < 0.5:
        if options["mode"] == "match":
            parents = [[choice.randint(-1, i - 1) for i in range(width)] for _ in range(batch)]
            options["parents"] = torch.tensor(parents)
        else:
            noise = torch.from_numpy(draw.normal(0, 2, (batch, width, vocab))).float()
            options["draft_logits"] = logits[:, :-1].float() + noise
    return lmdecode.verify_draft(logits, draft, rows, **options)


@KINDS.add(10)
def prompt_lookup(choice: random.Random, number: int) -> Parts:
    batch, length = choice.randint(1, 3), choice.randint(0, 40)
    texts = randint(choice.randint(1, 6), batch, length, seed=number)
    lengths = randint(length + 1, batch, seed=number)
    yield lmdecode.prompt_lookup(texts, choice.randint(1, 6), choice.randint(1, 5), lengths=lengths)
