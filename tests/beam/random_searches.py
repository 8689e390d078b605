"""Random beam searches, driven many steps: what the tests of beam_step and beam_finalize run."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from lmdecode import BeamParameters, BeamState, BeamStep, beam_parameters, new_beam_state

DIALECTS = ("generate", "scorer", "fairseq")
EARLY_STOPPING = (False, True, "never")
PENALTIES = (1.0, 0.0, -1.0, 2.0, 0.6, -0.3, 30.0, -400.0, 4000.0)
INF = float("inf")


def clone(parts: Sequence[Tensor]) -> BeamState:
    return BeamState(*(part.clone() for part in parts))


@dataclass
class Search:
    """State, parameters and the options of a batch of searches in some slots of a state."""

    dialect: str
    state: BeamState
    parameters: BeamParameters
    options: dict[str, Any]  # of every step
    vocab: int
    max_steps: int
    choice: random.Random
    groups: int = 1
    steps: list[dict[str, Any]] = field(default_factory=list)

    @property
    def slots(self) -> list[int]:
        given = self.options.get("slots")
        return list(range(len(self.state.lengths))) if given is None else given.tolist()

    @property
    def widths(self) -> list[int]:
        return self.parameters.num_beams[self.slots].tolist()

    @property
    def has_room(self) -> bool:
        """Whether every search that goes on may have one more token."""
        slots = self.slots
        lengths, done = self.state.lengths[slots], self.state.done[slots]
        return bool(((lengths < self.state.sequences.shape[2]) | (done != 0)).all())


def _generator(choice: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(choice.getrandbits(40))


def new_search(seed: int) -> Search:
    """Return a search of random size, dialect and parameters."""
    choice = random.Random(seed)
    generator = _generator(choice)
    dialect = choice.choice(DIALECTS)
    slots = choice.choice((1, 1, 2, 3, 6))
    groups = choice.choice([g for g in (1, 1, 1, 2, 3) if slots % g == 0])
    beams = choice.choice((1, 2, 3, 4, 4, 8))
    widths = [beams] * slots
    if choice.random() < 0.4:
        widths = [choice.randint(1, beams) for _ in range(slots)]
    num_hypotheses = list(widths)
    if choice.random() < 0.3:
        num_hypotheses = [choice.randint(1, 2 * beams) for _ in range(slots)]
    prompts = [choice.randint(0, 3) for _ in range(slots)]
    new = choice.choice((1, 3, 8, 20))
    capacity = max(prompts) + new
    vocab = choice.choice((3, 5, 20, 200))
    # Where many tokens are end tokens, most of the candidates close hypotheses.
    end_counts = [choice.choice((0, 1, 1, 2, min(vocab, 7))) for _ in range(slots)]
    end_tokens = [choice.sample(range(vocab), min(count, vocab)) for count in end_counts]
    state = new_beam_state(
        slots,
        beams,
        capacity,
        num_hypotheses=max(num_hypotheses) + choice.choice((0, 0, 2)),
        keep_log_probs=choice.random() < 0.5,
        keep_beam_indices=choice.random() < 0.5,
    )
    state.sequences.random_(0, vocab, generator=generator)
    state.scores[:, 1:] = choice.choice((-1e9, 0.0, -INF))
    state.lengths.copy_(torch.tensor(prompts))
    maximum = [choice.choice((0, p + new, p + max(new // 2, 1))) for p in prompts]
    parameters = beam_parameters(
        slots,
        widths,
        num_hypotheses=num_hypotheses,
        prompt_lengths=prompts,
        max_lengths=maximum,
        length_penalty=[choice.choice(PENALTIES) for _ in range(slots)],
        early_stopping=[choice.choice(EARLY_STOPPING) for _ in range(slots)],
        end_tokens=end_tokens,
        pad_tokens=[choice.randint(0, vocab) for _ in range(slots)],
    )
    options: dict[str, Any] = {"dialect": dialect}
    if choice.random() < 0.5 and groups == 1:
        order = choice.sample(range(slots), choice.randint(1, slots))
        options["slots"] = torch.tensor(order)
    search = Search(dialect, state, parameters, options, vocab, new, choice, groups)
    if choice.random() < 0.5:
        ends = [0]
        for width in search.widths:
            ends.append(ends[-1] + width)
        options["row_offsets"] = torch.tensor(ends)
    if choice.random() < 0.2:
        requests = len(search.slots)
        first = [choice.randint(0, 50) for _ in range(requests)]
        if choice.random() < 0.5:
            first = sorted([*first, 60])
        options["parent_offsets"] = torch.tensor(first)
    return search


def candidates(search: Search, num_candidates: int | None = None) -> dict[str, Any]:
    """Return random candidates of a step: with ties, and with fewer than asked."""
    choice, generator = search.choice, _generator(search.choice)
    requests, beams = len(search.slots), search.state.scores.shape[1]
    ends = search.parameters.end_tokens.shape[1]
    count = max(2, 1 + ends) * beams if num_candidates is None else num_candidates
    if choice.random() < 0.15:
        count = choice.randint(1, count)
    scores = -torch.rand(requests, count, generator=generator) * choice.choice((1.0, 30.0))
    if choice.random() < 0.3:
        scores = scores.round()
    if choice.random() < 0.05:
        scores[:, 0] = choice.choice((0.0, INF, 1e30))
    if choice.random() < 0.1:
        scores -= 1e9
    scores = scores.sort(descending=True).values
    if choice.random() < 0.15:
        for row in scores:
            row[choice.randint(0, count) :] = -INF
    tokens = torch.randint(0, search.vocab, (requests, count), generator=generator)
    widths = torch.tensor(search.widths)[:, None]
    rows = torch.randint(0, 1 << 20, (requests, count), generator=generator) % widths
    if choice.random() < 0.2:
        rows[:, choice.randrange(count) :] = 0
    step: dict[str, Any] = {"scores": scores, "tokens": tokens, "beams": rows}
    if choice.random() < 0.2:  # any strides
        step = {name: part.t().contiguous().t() for name, part in step.items()}
    if choice.random() < 0.6:
        step["log_probs"] = -torch.rand(requests, count, generator=generator)
    if choice.random() < 0.15:
        weights = torch.tensor([6.0, 1.0, 1.0])
        drawn = torch.multinomial(weights, requests, replacement=True, generator=generator)
        step["status"] = torch.tensor([0, 1, 2], dtype=torch.uint8)[drawn]
    if choice.random() < 0.15:
        step["stopped"] = torch.rand(requests, count, generator=generator) < 0.3
    if choice.random() < 0.2:
        step["bonus"] = torch.randn(requests, beams, generator=generator)
        if choice.random() < 0.1:
            step["bonus"][:, 0] = choice.choice((INF, -INF, float("nan"), -0.0))
    return step


def random_search(
    seed: int, check: Callable[[Search, dict[str, Any]], BeamStep], *, kept: bool = True
) -> Search:
    """Drive a random search; ``check(search, arguments)`` makes each step; kept: by the state."""
    search = new_search(seed)
    generator = _generator(search.choice)
    requests, beams = len(search.slots), search.state.scores.shape[1]
    capacity = search.state.sequences.shape[2]
    length = int(search.parameters.prompt_lengths.max())
    for _ in range(search.max_steps):
        arguments = {**candidates(search), **search.options}
        if kept:
            if not search.has_room:
                break
        else:
            if length + (search.dialect != "scorer") > capacity:
                break
            sequences = torch.randint(
                0, search.vocab, (requests, beams, length), generator=generator
            )
            arguments["sequences"] = sequences
            length += 1
        search.steps.append(arguments)
        check(search, arguments)
    return search


def check_refused(op: Callable[..., Any], call: dict[str, Any], message: str) -> None:
    """Make a wrong call: its message says this, and the state stays as it was."""
    is_type = "is of type" in message
    parts = [part for part in call["state"] or () if isinstance(part, Tensor)]
    before = [part.clone() for part in parts]
    with pytest.raises(TypeError if is_type else ValueError) as error:
        op(**call)
    said, expected = str(error.value), f"{op.__name__}: {message}"
    assert said == expected if is_type else expected in said
    for part, was in zip(parts, before, strict=True):
        assert torch.equal(part, was)
