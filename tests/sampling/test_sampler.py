"""``Sampler`` and ``verify_draft`` against the reference, bit for bit, in random lives of rows."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import lmdecode
from lmdecode.reference.drafts import verify_draft as reference_verify_draft
from lmdecode.reference.sampler import Sampler as ReferenceSampler

DIALECTS = lmdecode.sampling.SAMPLER_DIALECTS
INF = float("inf")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Random = np.random.Generator


def random_parameters(random: Random, vocab: int) -> dict[str, Any]:
    """Some parameters of one row."""

    def token() -> int:
        return int(random.integers(vocab))

    choices: dict[str, Callable[[], Any]] = {
        "temperature": lambda: float(random.choice([0.0, 0.5, 1.0, 1.7, random.uniform(0.1, 3)])),
        "top_k": lambda: int(random.integers(-1, vocab + 2)),
        "top_p": lambda: float(random.choice([0.0, 0.5, 0.9, 1.0, random.random()])),
        "min_p": lambda: float(random.choice([0.0, 0.05, 1.0, random.random()])),
        "typical_p": lambda: float(random.choice([0.2, 0.95, 1.0, random.random()])),
        "epsilon_cutoff": lambda: float(random.choice([0.001, 0.3, random.random() / 9])),
        "eta_cutoff": lambda: float(random.choice([0.001, 0.3, random.random() / 9])),
        "top_n_sigma": lambda: float(random.uniform(0, 3)),
        "top_h": lambda: float(random.choice([0.4, 1.0, random.random()])),
        "xtc_probability": lambda: float(random.choice([0.5, 1.0])),
        "xtc_threshold": lambda: float(random.choice([0.1, 0.02])),
        "repetition_penalty": lambda: float(random.uniform(0.5, 2)),
        "presence_penalty": lambda: float(random.uniform(-1, 2)),
        "frequency_penalty": lambda: float(random.uniform(-1, 2)),
        "no_repeat_ngram_size": lambda: int(random.integers(0, 4)),
        "dry_multiplier": lambda: float(random.uniform(0, 2)),
        "dry_base": lambda: float(random.uniform(0.9, 2)),
        "dry_allowed_length": lambda: int(random.integers(0, 3)),
        "dry_breakers": lambda: [token() for _ in range(int(random.integers(0, 3)))],
        "mirostat_tau": lambda: float(random.uniform(0, 6)),
        "mirostat_eta": lambda: float(random.uniform(0, 1)),
        "dynamic_temperature_range": lambda: float(random.uniform(0, 2)),
        "dynamic_temperature_exponent": lambda: float(random.choice([1.0, 0.5, 2.0])),
        "adaptive_target": lambda: float(random.choice([-1.0, 0.0, 1.0, random.random()])),
        "adaptive_decay": lambda: float(random.uniform(0, 0.99)),
        "logit_bias": lambda: {
            **{token(): float(random.choice([-INF, 2.0, -3.0])) for _ in range(3)},
            (token(), token()): 1.5,
            (token(), token(), token()): -INF,
        },
        "bad_words_ids": lambda: [[token()], [token(), token()]],
        "suppress_tokens": lambda: [token(), token()],
        "forced_tokens": lambda: {int(random.integers(0, 9)): token()},
        "seed": lambda: int(random.choice([-1, random.integers(1 << 62)])),
    }
    picked = random.choice(list(choices), int(random.integers(0, 7)), replace=False)
    made = {name: choices[name]() for name in picked}
    if made.get("adaptive_target", -1) >= 0:
        made.pop("mirostat_tau", None)  # one of both
    made.setdefault("seed", int(random.integers(1 << 62)))
    if random.random() < 0.3:
        made |= {"min_tokens": int(random.integers(1, 9)), "eos_token_id": [token(), token()]}
    return made


def random_logits(random: Random, batch: int, vocab: int) -> torch.Tensor:
    x = torch.from_numpy(random.normal(0, random.choice([0.5, 3, 10]), (batch, vocab)))
    if random.random() < 0.4:
        x = (x * 2).round() / 2  # ties
    for value in (INF, -INF, float("nan")):
        if random.random() < 0.15:
            x[torch.from_numpy(random.random((batch, vocab)) < random.choice([0.01, 0.3, 1]))] = (
                value
            )
    x = x.to(DTYPES[int(random.integers(3))])
    return x.T.contiguous().T if random.random() < 0.2 else x


def random_bitmask(random: Random, batch: int, vocab: int) -> torch.Tensor | None:
    if random.random() < 0.6:
        return None
    words = random.integers(-(1 << 31), 1 << 31, (batch, (vocab + 31) // 32))
    if random.random() < 0.4:
        words &= random.integers(-(1 << 31), 1 << 31, words.shape)
        words &= random.integers(-(1 << 31), 1 << 31, words.shape)
    return torch.from_numpy(words).to(torch.int32)


def assert_same(ours: Any, expected: Any, where: str) -> None:
    for name, a, b in zip(ours._fields, ours, expected, strict=False):
        if a is None or b is None:
            assert a is None
            assert b is None
        elif isinstance(a, tuple):
            assert_same(a, b, where)
        else:
            a, b = a.contiguous(), b.contiguous()
            same = a.dtype == b.dtype and a.shape == b.shape
            if same and a.dtype.is_floating_point:
                same = torch.equal(a.view(torch.int32), b.view(torch.int32))
            assert same and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)), (
                f"{where}: {name} {a} {b}"
            )


def change_rows(random: Random, samplers: list[Any], vocab: int) -> None:
    """Do the same to the rows of both."""
    batch = samplers[0].batch
    row = int(random.integers(batch))
    what = int(random.integers(6))
    if what == 0:
        prompt = random.integers(0, vocab, int(random.integers(0, 30))).tolist()
        parameters = random_parameters(random, vocab)
        for sampler in samplers:
            sampler.insert(row, prompt, **parameters)
    elif what == 1:
        for sampler in samplers:
            sampler.remove(row)
    elif what == 2:
        order = random.integers(0, batch, batch).tolist()
        for sampler in samplers:
            sampler.reorder_(order)
    elif what == 3 and samplers[1].rows[row] is not None:
        tokens = random.integers(0, vocab, 3).tolist()
        for sampler in samplers:
            sampler.accept(row, tokens)
    elif what == 4 and samplers[1].rows[row] is not None:
        count = int(random.integers(0, len(samplers[1].rows[row].output) + 1))
        for sampler in samplers:
            sampler.rewind(row, count)
    elif what == 5:
        state = samplers[0].state_dict()
        fresh = lmdecode.Sampler(batch, vocab, dialect=samplers[0].dialect)
        fresh.load_state_dict(state)
        samplers[0].load_state_dict(fresh.state_dict())


def walk(seed: int, dialect: str, steps: int, vocab: int) -> None:
    random = np.random.default_rng([seed, DIALECTS.index(dialect)])
    batch = int(random.integers(1, 5))
    options = {
        "dialect": dialect,
        "num_logprobs": [None, 0, 5][int(random.integers(3))],
        "logprobs_mode": ["raw_logprobs", "processed_logprobs"][int(random.integers(2))],
    }
    for name in ("return_logits", "return_kept_set", "return_stages"):
        options[name] = bool(random.random() < 0.3)
    if options["num_logprobs"] is not None:
        options["num_logprobs"] = min(options["num_logprobs"], vocab)
    parameters = random_parameters(random, vocab)
    samplers = [
        make(batch, vocab, **options, **parameters) for make in (lmdecode.Sampler, ReferenceSampler)
    ]
    for step in range(steps):
        while random.random() < 0.3:
            change_rows(random, samplers, vocab)
        logits = random_logits(random, batch, vocab)
        bitmask = random_bitmask(random, batch, vocab)
        accept = bool(random.random() < 0.9)
        ours, expected = (sampler.sample(logits, bitmask, accept) for sampler in samplers)
        assert_same(ours, expected, f"seed {seed}, dialect {dialect}, step {step}")


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("seed", range(12))
def test_random_lives(dialect: str, seed: int) -> None:
    walk(seed, dialect, 12, int(np.random.default_rng(seed).choice([1, 2, 31, 64, 200, 1000])))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_large_vocabulary(dialect: str) -> None:
    walk(99, dialect, 3, 20_000)


def test_the_same_bits_as_top_k_top_p_sample() -> None:
    """Where these stages are all there is."""
    random = torch.Generator().manual_seed(5)
    seeds = torch.arange(6) + 17
    for dialect in ("lmdecode", "transformers", "vllm"):
        for vocab in (50, 5000, 40_000):
            logits = torch.randn(6, vocab, generator=random) * 4
            k = [0, 1, 5, 50, 49, 0]
            p = [1.0, 0.9, 0.5, 0.95, 1.0, 0.7]
            t = [1.0, 0.7, 1.3, 0.0, 2.0, 0.5]
            sampler = lmdecode.Sampler(
                6, vocab, dialect=dialect, top_k=k, top_p=p, temperature=t, min_p=0.01,
                seed=seeds, return_logits=True,
            )  # fmt: skip
            for position in range(3):
                expected = lmdecode.top_k_top_p_sample(
                    logits, k, p, min_p=0.01, temperature=t, seed=seeds, position=position,
                    return_logits=True, dialect=dialect,
                )  # fmt: skip
                ours = sampler.sample(logits)
                for name in ("index", "kept_logits", "kept_count", "status"):
                    assert torch.equal(getattr(ours, name), getattr(expected, name)), (
                        dialect,
                        name,
                    )


@pytest.mark.parametrize("seed", range(30))
def test_drafts(seed: int) -> None:
    random = np.random.default_rng(seed)
    vocab, batch = int(random.choice([3, 20, 300])), int(random.integers(1, 4))
    dialect = DIALECTS[seed % len(DIALECTS)]
    parameters = random_parameters(random, vocab)
    samplers = [
        make(batch, vocab, dialect=dialect, **parameters)
        for make in (lmdecode.Sampler, ReferenceSampler)
    ]
    for step in range(6):
        width = int(random.integers(1, 7))
        logits = random_logits(random, batch * (width + 1), vocab).reshape(batch, width + 1, vocab)
        draft = torch.from_numpy(random.integers(0, vocab, (batch, width)))
        if random.random() < 0.7:  # likely ones
            draft = logits[:, :-1].float().nan_to_num(-9.0).argmax(-1)
        options: dict[str, Any] = {"mode": ["match", "rejection"][int(random.integers(2))]}
        if random.random() < 0.5:
            options["num_draft"] = torch.from_numpy(random.integers(0, width + 1, batch))
        if options["mode"] == "rejection" and random.random() < 0.7:
            q = logits[:, :-1].float() + torch.from_numpy(random.normal(0, 1, 1)).float()
            noise = torch.from_numpy(random.normal(0, 2, q.shape)).float()
            options["draft_logits"] = q + noise
        elif options["mode"] == "match" and random.random() < 0.5:
            parents = [[int(random.integers(-1, i)) for i in range(width)] for _ in range(batch)]
            options["parents"] = torch.tensor(parents)
        ours = lmdecode.verify_draft(logits, draft, samplers[0], **options)
        expected = reference_verify_draft(logits, draft, samplers[1], **options)
        assert_same(ours, expected, f"seed {seed}, step {step}, {options}")
        # The states are the same.
        logits = random_logits(random, batch, vocab)
        ours, expected = (sampler.sample(logits) for sampler in samplers)
        assert_same(ours, expected, f"seed {seed}, behind step {step}")


@pytest.mark.parametrize("seed", range(6))
def test_results_of_a_step_stay_when_others_follow(seed: int) -> None:
    random = np.random.default_rng(seed)
    options: dict[str, Any] = {"num_logprobs": 3} if seed % 2 else {}
    for name in ("return_logits", "return_kept_set", "return_stages"):
        options[name] = bool(random.random() < 0.5)
    logits = [random_logits(random, 3, 40) for _ in range(5)]
    fresh, reused = (
        lmdecode.Sampler(3, 40, seed=seed, top_k=9, **options, **reuse)
        for reuse in ({}, {"reuse_outputs": True})
    )
    kept = [fresh.sample(step) for step in logits]
    for step, out in zip(logits, kept, strict=True):
        assert_same(out, reused.sample(step), f"seed {seed}")
    memory = {part.data_ptr() for out in kept for part in out if isinstance(part, torch.Tensor)}
    tensors = sum(isinstance(part, torch.Tensor) for out in kept for part in out)
    assert len(memory) == tensors
    again = [reused.sample(logits[0]).status.data_ptr() for _ in range(2)]
    assert len(set(again)) == 1


def test_the_chosen_tokens_of_a_step_stay_when_the_next_one_is_taken() -> None:
    logits = torch.randn(6, 3, 50, generator=torch.Generator().manual_seed(4))
    plain = lmdecode.Sampler(3, 50, seed=5)
    told = lmdecode.Sampler(3, 50, seed=5, num_logprobs=2)
    kept = lmdecode.Sampler(3, 50, seed=5, return_kept_set=True)
    steps = [(plain.sample(step), told.sample(step), kept.sample(step)) for step in logits]

    indices = torch.stack([mine.index for mine, _, _ in steps])
    assert len(set(map(tuple, indices.tolist()))) > 1
    assert all(torch.equal(told.index, mine.index) for mine, told, _ in steps)
    assert all(torch.equal(kept.index, mine.index) for mine, _, kept in steps)
    expected = logits.log_softmax(-1).gather(2, indices[..., None])[..., 0]
    torch.testing.assert_close(torch.stack([told.logprob for _, told, _ in steps]), expected)
    ranks = (logits > logits.gather(2, indices[..., None])).sum(-1) + 1
    assert torch.equal(torch.stack([told.rank for _, told, _ in steps]), ranks)
