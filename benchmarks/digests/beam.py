"""Cases of beam search: candidates, steps of a state, and searches of many requests."""

from __future__ import annotations

import random
from typing import Any

import lmdecode
from benchmarks.digests.kinds import Kinds, Parts
from tests.beam.held_to_tries import held_to_tries
from tests.beam.random_searches import random_search
from tests.beam.test_beam_search_step import random_life
from tests.support.beam_searches import TableModel, random_request, run_requests
from tests.support.random_cases import MEDIUM_VOCAB_SIZES, beam_cases

KINDS = Kinds("beam")


@KINDS.add(100)
def log_softmax_top_k(choice: random.Random, number: int) -> Parts:
    for case in beam_cases(number, 6, processors=choice.random() < 0.5):
        yield case.call(lmdecode.log_softmax_top_k)


@KINDS.add(40)
def log_softmax_top_k_of_thousands(choice: random.Random, number: int) -> Parts:
    processed = choice.random() < 0.5
    for case in beam_cases(number, 3, vocab_sizes=MEDIUM_VOCAB_SIZES, processors=processed):
        yield case.call(lmdecode.log_softmax_top_k)


@KINDS.add(30)
def log_softmax_top_k_in_tries(choice: random.Random, number: int) -> Parts:
    for case in held_to_tries(number, 3, (5, 33, 64, 500, 4099)):
        yield case.call(lmdecode.log_softmax_top_k)


@KINDS.add(40)
def beam_step(choice: random.Random, number: int) -> Parts:
    """A search of many steps, its state and its results."""
    steps = []

    def step(search: Any, arguments: dict[str, Any]) -> Any:
        steps.append(lmdecode.beam_step(search.state, search.parameters, **arguments))
        return steps[-1]

    search = random_search(number, step)
    yield steps
    yield search.state
    yield lmdecode.beam_finalize(
        search.state, search.parameters, choice.randint(1, 8), num_groups=search.groups,
        dialect=search.dialect, slots=search.options.get("slots"),
        add_open=choice.choice((None, False, True)),
    )  # fmt: skip


@KINDS.add(30)
def beam_search(choice: random.Random, number: int) -> Parts:
    """Requests of every kind that come and go."""
    yield random_life(number)


@KINDS.add(5)
def beam_search_of_thousands(choice: random.Random, number: int) -> Parts:
    vocab = choice.choice((1000, 5003, 40009))
    arrivals = [(choice.randint(0, 4), random_request(choice, vocab)) for _ in range(3)]
    yield run_requests(lmdecode.BeamSearch(), TableModel(vocab, number, entries=31), arrivals)
