"""``causal_steps_``: steps of a model and of a sampler's rows in one op are those one by one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lmdecode.decoder.causal_caches import CausalCaches
from lmdecode.sampling.sampler import Sampler
from tests.decoder.causal_steps import Entry, new_caches, packed, state, step
from tests.support.causal_models import VOCAB, random_tokens
from tests.support.op_contract import assert_op_refuses

ops = torch.ops.lmdecode

ROWS, STEPS = 3, 8
TOKENS, ENTRIES, STATE, TEXT, RULES, RESULTS, ENDS, CHOSEN = 4, 5, 7, 8, 9, 10, 11, 12
BYTES = 13  # of a row's results: its token, the count of kept tokens, its status


def running(architecture: str = "gemma3_text", variant: str = "plain") -> CausalCaches:
    """Return caches of three sequences, of different lengths."""
    caches = new_caches(packed(architecture, variant), ROWS, 96, max_rows=16)
    step(caches, *(Entry(row, random_tokens(3 + 20 * row, row)) for row in range(ROWS)))
    return caches


def new_sampler() -> Sampler:
    sampler = Sampler(
        ROWS, VOCAB, temperature=[0.0, 1.0, 0.7], top_k=[1, 20, 50], seed=[1, 2, 3],
        repetition_penalty=1.3, dialect="transformers",
    )  # fmt: skip
    for row in range(ROWS):
        sampler.insert(row, random_tokens(3 + 20 * row, row))
    return sampler


def arguments_of(
    caches: CausalCaches, sampler: Sampler, *, ends: Tensor | None = None, steps: int = STEPS
) -> list[Any]:
    """Return the arguments of the op: every sequence reads a token."""
    model, (_, text, rules) = caches.model, sampler._sizes
    table = torch.tensor([[row, 1, 0, 1] for row in range(ROWS)])
    results = torch.zeros(ROWS * BYTES, dtype=torch.uint8)
    chosen = torch.full((steps, ROWS), -7)
    ends = torch.full((ROWS, 2), -1) if ends is None else ends
    return [
        model.memory, caches._tensors,
        model.cache_windows, caches._workspace, torch.tensor([5, 6, 7]), table, caches.max_rows,
        sampler._state, text, rules, results, ends, chosen, 60.0,
    ]  # fmt: skip


def one_by_one(caches: CausalCaches, sampler: Sampler) -> Tensor:
    """Return the tokens of steps that return to Python, [steps, rows]."""
    tokens, chosen = torch.tensor([5, 6, 7]), []
    table = torch.tensor([[row, 1, 0, 1] for row in range(ROWS)])
    for _ in range(STEPS):
        tokens = sampler.sample(caches.forward(tokens, table, ROWS)).index
        chosen.append(tokens)
    return torch.stack(chosen)


def same_bits(a: list[Tensor], b: list[Tensor]) -> bool:
    views = ([t.contiguous().view(torch.uint8) for t in tensors] for tensors in (a, b))
    return all(map(torch.equal, *views))


@pytest.mark.parametrize(
    "kind",
    [
        ("gemma3_text", "plain"),
        ("mistral", "window"),
        ("gpt2", "plain"),
        ("falcon_h1", "multipliers"),
    ],
)
def test_the_tokens_states_and_caches_of_steps_one_by_one(kind: tuple[str, str]) -> None:
    caches, sampler = running(*kind), new_sampler()
    want = one_by_one(caches, sampler)
    others, other = running(*kind), new_sampler()
    arguments = arguments_of(others, other)
    assert ops.causal_steps_(*arguments) == STEPS
    assert arguments[CHOSEN].equal(want) and arguments[TOKENS].tolist() == [5, 6, 7]
    assert other._state.equal(sampler._state) and same_bits(state(others), state(caches))
    assert arguments[RESULTS][: 8 * ROWS].view(torch.int64).equal(want[-1])


@pytest.mark.parametrize(("row", "at"), [(0, 0), (1, 3), (2, 6), (2, 7)])
def test_an_end_is_the_last_step(row: int, at: int) -> None:
    want = one_by_one(running(), new_sampler())
    ends = torch.full((ROWS, 2), -1)
    ends[row, 1] = want[at, row]
    first = (want[:, row] == want[at, row]).nonzero()[0].item()
    caches, sampler = running(), new_sampler()
    arguments = arguments_of(caches, sampler, ends=ends)
    assert ops.causal_steps_(*arguments) == first + 1
    assert arguments[CHOSEN][: first + 1].equal(want[: first + 1])
    assert bool((arguments[CHOSEN][first + 1 :] == -7).all())
    assert sampler.output_lengths.tolist() == [first + 1] * ROWS
    assert caches.lengths.tolist() == [4 + first, 24 + first, 44 + first]


def test_a_row_that_fails_is_the_last_step() -> None:
    sampler = new_sampler()
    sampler.insert(1, [1], suppress_tokens=list(range(VOCAB)))
    arguments = arguments_of(running(), sampler)
    assert ops.causal_steps_(*arguments) == 1
    assert [bool(status) for status in arguments[RESULTS][-ROWS:]] == [False, True, False]


def test_steps_end_with_the_time() -> None:
    want = one_by_one(running(), new_sampler())
    arguments = arguments_of(running(), new_sampler())
    assert ops.causal_steps_(*arguments[:-1], 0.0) == 1
    assert arguments[CHOSEN][0].equal(want[0])


def test_no_rows() -> None:
    arguments = arguments_of(running(), Sampler(0, VOCAB, dialect="transformers"))
    nothing = torch.empty(0, dtype=torch.int64)
    for place, shape in ((TOKENS, [0]), (ENTRIES, [0, 4]), (ENDS, [0, 1]), (CHOSEN, [1 << 40, 0])):
        arguments[place] = nothing.view(shape)
    arguments[RESULTS] = torch.empty(0, dtype=torch.uint8)
    assert ops.causal_steps_(*arguments) == 0


def test_no_step_changes_nothing() -> None:
    caches, sampler = running(), new_sampler()
    before = [*state(caches), sampler._state.clone()]
    assert ops.causal_steps_(*arguments_of(caches, sampler, steps=0)) == 0
    assert same_bits([*state(caches), sampler._state], before)


@pytest.mark.parametrize(
    ("number", "change", "message"),
    [
        (TOKENS, lambda t: t.int(), "tokens has dtype int32; expected int64"),
        (TOKENS, lambda t: t[:2].contiguous(), r"entries has shape \[3, 4\]; expected \[2, 4\]"),
        (ENTRIES, lambda e: e[:2].contiguous(), r"entries has shape \[2, 4\]; expected \[3, 4\]"),
        (STATE, lambda s: s[:2], "state has 2 rows; expected 3, as tokens has"),
        (STATE, lambda s: s.int(), "state has dtype int32; expected uint8"),
        (TEXT, lambda n: -1, r"text_capacity is -1; expected 0 to 2\^28"),
        (RULES, lambda n: n + 1, "state has shape"),
        (RESULTS, lambda r: r[1:], "results has shape"),
        (ENDS, lambda e: e[:2].contiguous(), r"ends has shape \[2, 2\]; expected \[3, -1\]"),
        (ENDS, lambda e: e[0], r"ends has shape \[2\]; .* \[rows, ends\]"),
        (CHOSEN, lambda c: c[:, :2].contiguous(), r"chosen has shape \[8, 2\]; expected \[-1, 3\]"),
        (CHOSEN, lambda c: c[0], r"chosen has shape \[3\]; .* \[steps, rows\]"),
    ],
)
def test_arguments(number: int, change: Callable[[Any], Any], message: str) -> None:
    arguments = arguments_of(running(), new_sampler())
    arguments[number] = change(arguments[number])
    assert_op_refuses(
        ops.causal_steps_, (f"^causal_steps_: (?:{message})", {}, ValueError), *arguments
    )


@pytest.mark.parametrize(("column", "text"), [(1, "2 tokens and 1"), (3, "1 tokens and 0")])
def test_entries_of_one_token_each(column: int, text: str) -> None:
    arguments = arguments_of(running(), new_sampler())
    arguments[ENTRIES][1, column] = {1: 2, 3: 0}[column]
    message = rf"^causal_steps_: entries\[1\] has {text} rows of logits; expected 1 of each"
    assert_op_refuses(ops.causal_steps_, (message, {}, ValueError), *arguments)


def test_room_for_the_texts_of_all_steps() -> None:
    arguments = arguments_of(running(), new_sampler(), steps=1000)
    message = r"^causal_steps_: state\[.\] has .* tokens of text; expected room for 1000 more"
    assert_op_refuses(ops.causal_steps_, (message, {}, ValueError), *arguments)
