"""The ops of beam search, and calls of them (tests/support/contracts.py)."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import lmdecode
import lmdecode.reference
from lmdecode import Trie, log_softmax_top_k
from tests.beam.held_to_tries import held_to_tries
from tests.support.cases import BeamCase
from tests.support.contracts import Call, Contract
from tests.support.random_cases import beam_cases
from tests.support.random_tensors import randint, randn

OPS = torch.ops.lmdecode
VOCAB = 40
VOCABS = (1, 2, 5, 63, 64, 65, 200, 1000, 1025, 4099)
SCORES = torch.tensor([0.0, -1.5, -0.5, -float("inf")])
TREE = Trie([[5, 7, 2], [5, 9, 2], [6, 2], [5, 7]])


def best(
    candidates: int, num_beams: Any, dtype: torch.dtype = torch.float32, **options: Any
) -> Call:
    x = randn(4, VOCAB).to(dtype)
    return Call(log_softmax_top_k, x, SCORES, candidates, num_beams=num_beams, **options)


def as_call(case: BeamCase) -> Call:
    tensors = (case.logits, case.beam_scores)
    return Call(
        log_softmax_top_k, *tensors, case.num_candidates,
        num_beams=case.num_beams, **case.processors,
    )  # fmt: skip


def many_of(*cases: BeamCase, **options: Any) -> Iterator[Call]:
    yield from map(as_call, cases)
    wide = BeamCase("wide", randn(64, 9000) * 3, randn(64, seed=1), 8, 4, options)
    yield as_call(wide)


def many_processed() -> Iterator[Call]:
    cases = beam_cases(14, 60, processors=True, vocab_sizes=(200, 4099))
    yield from many_of(*cases, sequences=randint(9000, 64, 40), repetition_penalty=1.3)


def many_plain() -> Iterator[Call]:
    many = BeamCase("many", randn(6000, 20) * 3, randn(6000, seed=1), 8, 2)
    yield from many_of(many, *beam_cases(7, 60, vocab_sizes=VOCABS))


def everywhere(*groups: tuple[int, int, dict[str, Any]]) -> Iterator[Call]:
    for seed, count, options in groups:
        yield from map(as_call, beam_cases(seed, count, **options))


# --- processors -----------------------------------------------------------------------------------

SEQUENCES = torch.arange(24).view(4, 6) % 5
NUMBERS: dict[str, Any] = {
    "sequences": SEQUENCES, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3,
    "end_tokens": torch.tensor([7, -1]), "min_lengths": 5,
}  # fmt: skip


def processors(requests: int = 2) -> dict[str, Any]:
    """Return all of them, tensors of one a request where there may be one."""
    return {
        "sequences": SEQUENCES,
        "lengths": torch.arange(requests) + 4,
        "repetition_penalty": torch.linspace(1.1, 2.0, requests),
        "no_repeat_ngram_size": torch.tensor([2, 0]),
        "end_tokens": torch.tensor([7, -1]),
        "min_lengths": torch.full((requests,), 5),
        "suppressed_tokens": torch.arange(requests * 3).view(requests, 3),
        "forced_tokens": torch.arange(4) - 3,
        "diversity_tokens": torch.full((requests, 2), 9),
        "diversity_penalty": torch.linspace(0.5, 1.0, requests),
        "bias": torch.linspace(-1, 1, 4 * VOCAB).view(4, VOCAB),
        "token_bitmask": torch.full((requests, 2), -3, dtype=torch.int32),
    }


def in_tries(seed: int, count: int, vocabs: tuple[int, ...]) -> Iterator[Call]:
    torch.manual_seed(seed)
    yield from map(as_call, held_to_tries(seed, count, vocabs))


# --- states ---------------------------------------------------------------------------------------


def searches(**options: Any) -> tuple[lmdecode.BeamState, lmdecode.BeamParameters]:
    """Return three slots, of two, one and three beams."""
    state = lmdecode.new_beam_state(3, 3, 6, **options)
    state.lengths.fill_(2)
    return state, lmdecode.beam_parameters(3, [2, 1, 3], end_tokens=[5], max_lengths=6)


def candidates() -> tuple[Tensor, Tensor, Tensor]:
    scores = torch.tensor([[-1.0, -2.0, -3.0, -4.0], [-0.5, -1.0, -1.5, -2.0]])
    tokens = torch.tensor([[5, 3, 4, 3], [1, 2, 5, 3]])
    return scores, tokens, torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0]])


def step(keeps: bool, **options: Any) -> Call:
    search = searches(keep_log_probs=keeps, keep_beam_indices=keeps)
    return Call(lmdecode.beam_step, *search, *candidates(), **options)


def every_option() -> dict[str, Any]:
    scores = candidates()[0]
    return {
        "log_probs": scores / 2, "status": torch.tensor([0, 1], dtype=torch.uint8),
        "slots": torch.tensor([0, 2]), "row_offsets": torch.tensor([0, 2, 5]),
        "parent_offsets": torch.tensor([0, 2]), "stopped": scores < -3, "bonus": torch.ones(2, 3),
        "rows": 5, "dialect": "scorer",
    }  # fmt: skip


STEPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "every option": every_option(),
    "sequences": {**every_option(), "sequences": torch.zeros(2, 3, 4).long()},
}


def finalize(keeps: str, count: int, **options: Any) -> Call:
    return Call(lmdecode.beam_finalize, *searches(**{keeps: True}), count, **options)


ENDS: dict[str, dict[str, Any]] = {
    "groups": {"keeps": "keep_log_probs", "count": 2, "num_groups": 3},
    "slots": {
        "keeps": "keep_beam_indices", "count": 4, "slots": torch.tensor([2, 0]),
        "dialect": "scorer",
        "scores": torch.ones(2, 3), "sequences": torch.ones(2, 3, 3).long(),
    },
}  # fmt: skip


def many_steps() -> Iterator[Call]:
    """Requests enough that they are spread over threads."""
    requests, beams, capacity = 512, 4, 400
    generator = torch.Generator().manual_seed(0)
    state = lmdecode.new_beam_state(
        requests, beams, capacity, keep_log_probs=True, keep_beam_indices=True
    )
    state.sequences.random_(0, 1000, generator=generator)
    state.lengths.random_(0, capacity, generator=generator)
    parameters = lmdecode.beam_parameters(requests, beams, end_tokens=[0, 1, 2])
    scores = torch.rand(requests, 16, generator=generator).neg().sort(descending=True).values
    tokens, rows = randint(6, requests, 16), randint(beams, requests, 16, seed=1)
    yield Call(lmdecode.beam_step, state, parameters, scores, tokens, rows)


def whole_step(**changes: Any) -> Call:
    from tests.beam.test_beam_search_step import step_arguments

    return Call(OPS.beam_search_step_, *step_arguments(**changes))


def flat_items() -> tuple[Tensor, Tensor]:
    return torch.tensor([5, 7, 2, 5, 9, 2, 6, 2, 5, 7]), torch.tensor([0, 3, 6, 8, 10])


def nodes(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


Calls = dict[str, Callable[[], Call]]
BEST: Calls = {
    "float32": lambda: best(5, 2),
    "half": lambda: best(5, 2, torch.float16),
    "bfloat16": lambda: best(5, 2, torch.bfloat16),
    "a list of widths": lambda: best(5, [1, 3]),
    "a tensor of widths": lambda: best(5, torch.tensor([1, 3])),
    "more candidates than tokens": lambda: best(100, 4),
}
CONTRACTS = [
    Contract(
        "log_softmax_top_k", BEST, strided=(0, 1), many=many_plain,
        everywhere=lambda: everywhere((8, 600, {}), (9, 30, {"vocab_sizes": (1000, 4099, 32000)})),
    ),
    Contract(
        "log_softmax_top_k.processed",
        {
            "numbers": lambda: best(5, 2, **NUMBERS),
            "tensors": lambda: best(5, 2, **processors()),
            "half, widths": lambda: best(100, [1, 3], torch.float16, **processors()),
        },
        strided=(0, 1),
        many=many_processed,
        everywhere=lambda: everywhere(
            (15, 500, {"processors": True}),
            (16, 120, {"processors": True, "vocab_sizes": (1000, 4099, 32000)}),
        ),
    ),
    Contract(
        "log_softmax_top_k.trie",
        {
            "nodes": lambda: best(5, 2, trie=TREE, nodes=nodes(0, 1, -1, 3)),
            "processors": lambda: best(5, 2, trie=TREE, nodes=nodes(0, 1, -1, 3), **processors()),
        },
        strided=(0, 1),
        many=lambda: in_tries(4, 40, (500, 4099)),
        everywhere=lambda: in_tries(6, 80, (33, 1000)),
    ),
    Contract(
        "beam_step",
        {
            name + ", all is kept" * keeps: partial(step, keeps, **options)
            for keeps in (False, True)
            for name, options in STEPS.items()
        },
        many=many_steps,
        reference=lmdecode.reference.beam_step,
    ),
    Contract(
        "beam_finalize",
        {
            name + ", open beams" * is_open: partial(finalize, add_open=is_open, **options)
            for is_open in (False, True)
            for name, options in ENDS.items()
        },
        reference=lmdecode.reference.beam_finalize,
    ),
    Contract(
        "beam_search_step_", {"a trace": whole_step, "no trace": lambda: whole_step(trace=[])},
        compiles=False,
    ),
    Contract(
        "trie_build", {"four items": lambda: Call(OPS.trie_build, *flat_items())}, compiles=False,
        has_fakes=False,
    ),
    Contract(
        "trie_step",
        {
            "nodes": lambda: Call(
                OPS.trie_step, *TREE.tensors, nodes(0, 1, -1, 3), torch.tensor([5, 7, 7, 2]),
            ),
        },
        compiles=False,
    ),
]  # fmt: skip
