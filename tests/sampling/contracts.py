"""The ops of sampling, and calls of them (tests/support/contracts.py)."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import lmdecode
from lmdecode.sampling.types import DIALECTS
from tests.support.cases import SamplingCase
from tests.support.contracts import Call, Contract
from tests.support.random_cases import sampling_cases
from tests.support.random_tensors import randint, randn

OPS = torch.ops.lmdecode
BATCH, VOCAB = 3, 40
LOGITS = randn(BATCH, VOCAB)
OUTPUTS = {"return_logits": True, "return_logprob": True}

# --- top_k_top_p_sample ---------------------------------------------------------------------------

NUMBERS: dict[str, Any] = {"top_k": 5, "top_p": 0.9, "min_p": 0.01, "temperature": 0.7}
TENSORS: dict[str, Any] = {
    "top_k": torch.tensor([0, 5, 40]), "top_p": torch.tensor([1.0, 0.5, 0.9]),
    "min_p": torch.tensor([0.0, 0.01, 0.5]), "temperature": torch.tensor([1.0, 0.0, 1.3]),
}  # fmt: skip
OTHER_DTYPES = {
    "top_k": TENSORS["top_k"].int(), "top_p": TENSORS["top_p"].bfloat16(),
    "temperature": TENSORS["temperature"].half(),
}  # fmt: skip
NOISE = {"q": torch.empty(BATCH, VOCAB).exponential_(generator=torch.Generator().manual_seed(1))}
SEEDS = {"seed": torch.tensor([1, -1, 3]), "position": torch.tensor([0, 7, 2**40])}
SAMPLES: dict[str, tuple[Tensor, dict[str, Any]]] = {
    "numbers": (LOGITS, {**NUMBERS, "seed": 11, "position": 3}),
    "half, tensors, noise": (LOGITS.half(), {**TENSORS, **NOISE}),
    "tensors, seeds": (LOGITS, {**TENSORS, **SEEDS}),
    "bfloat16, other dtypes, seeds": (LOGITS.bfloat16(), {**OTHER_DTYPES, **SEEDS}),
    "numbers, noise": (LOGITS, {**NUMBERS, **NOISE}),
}


def sample(name: str, return_logits: bool, return_logprob: bool) -> Call:
    logits, options = SAMPLES[name]
    return Call(
        lmdecode.top_k_top_p_sample, logits, **options,
        return_logits=return_logits, return_logprob=return_logprob,
    )  # fmt: skip


def sample_of(dialect: str) -> Call:
    x = LOGITS.softmax(-1)
    options = {**TENSORS, **NOISE, **OUTPUTS, "dialect": dialect}
    return Call(lmdecode.top_k_top_p_sample, x, **options)


def with_row_seeds(case: SamplingCase) -> SamplingCase:
    """Replace an int seed, which means other seeds in another batch, by the seeds that it means."""
    seed = case.arguments.get("seed")
    if not isinstance(seed, int) or seed < 0:
        return case
    rows = [(seed + row * 0x9E3779B97F4A7C15) % 2**63 for row in range(len(case.logits))]
    case.arguments["seed"] = torch.tensor(rows)
    return case


def cases(seed: int, count: int, **options: Any) -> Iterator[SamplingCase]:
    return map(with_row_seeds, sampling_cases(seed, count, **options))


def as_call(case: SamplingCase) -> Call:
    return Call(lmdecode.top_k_top_p_sample, case.logits, **{**case.arguments, **OUTPUTS})


def many_samples() -> Iterator[Call]:
    chosen = (
        cases(0, 60, vocab_sizes=(3, 64, 1000), max_batch=40),
        cases(1, 12, vocab_sizes=(32000, 128256), max_batch=5),
        cases(2, 3, vocab_sizes=(2**20,), max_batch=2),
        cases(3, 3, vocab_sizes=(50,), max_batch=3000),
    )
    return map(as_call, itertools.chain(*chosen))


def everywhere() -> Iterator[Call]:
    chosen = (
        sampling_cases(6, 1500),
        sampling_cases(7, 60, vocab_sizes=(1000, 4099, 32000)),
        sampling_cases(8, 3, vocab_sizes=(2**20,), max_batch=1),
    )
    return map(as_call, itertools.chain(*chosen))


# --- rows of a Sampler ----------------------------------------------------------------------------

SIZES = (50, 64, 16)  # vocabulary, text, rules
INTEGERS = torch.tensor([0, 1, 5, 0, 2, 0, 1])
FLOATS = torch.tensor(
    [0.7, 0.9, 0, 1, 0, 0, 0, 0, 0, 0.1, 1.1, 0, 0.5, 0, 1.75, 0, 0.1, 0, 1, -1, 0.9],
    dtype=torch.float64,
)


def of_rows(op: Callable[..., Any], *arguments: Any) -> Call:
    """Return a call on a state of two sequences."""
    state = torch.zeros(2, OPS.sampler_row_bytes(*SIZES), dtype=torch.uint8)
    rules = torch.tensor([1, 0, 0, 0, 0, 3, 0], dtype=torch.int32)
    for row in range(2):
        integers = INTEGERS.clone()
        integers[1] = row
        OPS.sampler_insert_(state, *SIZES, row, integers, FLOATS, rules, torch.tensor([1, 2, 3]))
    return Call(op, state, *arguments)


def insert() -> Call:
    rules = torch.zeros(0, dtype=torch.int32)
    zeros = torch.zeros(21, dtype=torch.float64)
    return of_rows(OPS.sampler_insert_, *SIZES, 0, INTEGERS, zeros, rules, torch.tensor([1]))


def copy_rows() -> Call:
    larger = torch.zeros(2, OPS.sampler_row_bytes(50, 128, 16), dtype=torch.uint8)
    state = of_rows(OPS.sampler_copy_).arguments[0]
    return Call(OPS.sampler_copy_, larger, 128, 16, state, 64, 16, 50)


def results() -> Tensor:
    return torch.zeros(2 * (8 + 4 + 1), dtype=torch.uint8)


def choose() -> Call:
    nothing = (None, None, None)
    return of_rows(OPS.sampler_step_, randn(2, 50), None, results(), *nothing, *SIZES, -1, 1)


def verify() -> Call:
    drafted = [torch.zeros(2, 3).long(), torch.zeros(2, 2).long()]
    return of_rows(
        OPS.sampler_verify_, randn(2, 3, 50, seed=1), None, torch.tensor([[1, 2], [3, 4]]), None,
        None, None, results(), *drafted, torch.zeros(2).long(), *SIZES, False,
    )  # fmt: skip


CONTRACTS = [
    Contract(
        "top_k_top_p_sample",
        {
            **{
                f"{name}{', logits' * logits}{', logprob' * logprob}": (
                    lambda name=name, wanted=(logits, logprob): sample(name, *wanted)
                )
                for name in SAMPLES
                for logits in (False, True)
                for logprob in (False, True)
            },
            **{dialect: lambda dialect=dialect: sample_of(dialect) for dialect in DIALECTS},
        },
        strided=(0, *TENSORS, "q", "seed", "position"),
        many=many_samples,
        everywhere=everywhere,
    ),
    Contract(
        "prompt_lookup",
        {
            "lengths": lambda: Call(
                lmdecode.prompt_lookup, randint(5, 2, 12), 3, 2, lengths=torch.tensor([12, 7])
            )
        },
        strided=(0, "lengths"),
        rows=(0, "lengths"),
    ),
    Contract("sampler_insert_", {"a sequence": insert}, compiles=False),
    Contract(
        "sampler_accept_",
        {"two tokens": lambda: of_rows(OPS.sampler_accept_, *SIZES, 0, torch.tensor([4, 5]))},
        compiles=False,
    ),
    Contract(
        "sampler_rewind_",
        {"nothing": lambda: of_rows(OPS.sampler_rewind_, *SIZES, 0, 0)},
        compiles=False,
    ),
    Contract("sampler_copy_", {"larger rows": copy_rows}, compiles=False),
    Contract("sampler_step_", {"two rows": choose}, compiles=False),
    Contract("sampler_verify_", {"two rows": verify}, compiles=False),
]
