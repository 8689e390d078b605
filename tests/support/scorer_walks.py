"""Random beam searches for the scorers: two scorers walk through one and must agree in all."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_INF = math.inf


@dataclass(frozen=True)
class ScorerCase:
    """One search from the first step to ``finalize``, and what its candidates are like."""

    seed: int
    arguments: dict[str, Any]
    prompt: int
    vocab: int
    steps: int
    decoder_prompt_len: int
    eos_token_id: int | list[int] | None
    pad_token_id: int | None
    finalize_max_length: int | None
    with_beam_indices: bool
    end_share: float
    tied: bool
    infinite: bool
    unsorted: bool
    starved: bool

    @property
    def end_tokens(self) -> list[int]:
        """The end tokens as a list."""
        eos = self.eos_token_id
        return [] if eos is None else [eos] if isinstance(eos, int) else eos


def scorer_cases(count: int, seed: int = 0, *, groups: bool = True) -> Iterator[ScorerCase]:
    """Yield ``count`` different searches."""
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        num_groups = rng.choice((1, 1, 1, 2, 3)) if groups else 1
        group_size = rng.choice((1, 2, 3)) if num_groups > 1 else rng.choice((2, 3, 4, 5, 8))
        num_beams = num_groups * group_size
        prompt, steps, vocab = rng.randint(1, 5), rng.randint(1, 14), rng.choice((8, 12, 40))
        early_stopping = rng.choice((True, False, False, "never", "never"))
        eos = rng.choice((2, 2, [2], [2, 3], [3, 2, 5], None))
        has_limit = early_stopping == "never" or rng.random() < 0.7
        yield ScorerCase(
            seed=rng.randrange(2**31),
            arguments={
                "batch_size": rng.randint(1, 4),
                "num_beams": num_beams,
                "length_penalty": rng.choice((-1, -1.0, 0, 0.0, 0.5, 0.7, 1, 1.0, 1.0, 2, 2.0)),
                "do_early_stopping": early_stopping,
                "num_beam_hyps_to_keep": rng.randint(1, num_beams),
                "num_beam_groups": num_groups,
                "max_length": prompt + steps + rng.randint(0, 6) if has_limit else None,
            },
            prompt=prompt,
            vocab=vocab,
            steps=steps,
            decoder_prompt_len=rng.choice((0, 0, 1, prompt)),
            eos_token_id=eos,
            pad_token_id=rng.choice((0, 0, 0, 0, 1, 1, 2, None)),
            finalize_max_length=rng.choice((None, *[prompt + steps + n for n in (0, 0, 1, 5)])),
            with_beam_indices=rng.random() < 0.5,
            end_share=rng.choice((0.0, 0.1, 0.3, 0.6, 0.9)),
            tied=rng.random() < 0.4,
            infinite=rng.random() < 0.15,
            unsorted=rng.random() < 0.15,
            starved=rng.random() < 0.05,
        )


def random_constraints(seed: int, vocab: int) -> list[list[Any]]:
    """Return 1 to 4 constraints: the tokens of a phrase, or a list of alternatives."""
    rng = random.Random(seed)

    def tokens(most: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(rng.randint(1, most))]

    def alternatives() -> list[list[int]]:
        beginning = tokens(2) if rng.random() < 0.5 else []
        found: list[list[int]] = []
        for _ in range(rng.randint(1, 4)):
            new = beginning + tokens(3)
            # None may be the beginning of another.
            if all(new[: len(old)] != old and old[: len(new)] != new for old in found):
                found.append(new)
        return found

    return [rng.choice((lambda: tokens(3), alternatives))() for _ in range(rng.randint(1, 4))]


class _Walk:
    """One search, with the inputs that the scorers get."""

    def __init__(self, case: ScorerCase) -> None:
        self.case = case
        self.rng = random.Random(case.seed)
        self.batch = case.arguments["batch_size"]
        self.num_beams = case.arguments["num_beams"]
        self.groups = case.arguments["num_beam_groups"]
        self.group_size = self.num_beams // self.groups
        rows = self.batch * self.num_beams
        first = [
            [self.rng.randrange(case.vocab) for _ in range(case.prompt)] for _ in range(self.batch)
        ]
        self.input_ids = torch.tensor(first).repeat_interleave(self.num_beams, 0)
        self.beam_scores = torch.zeros(self.batch, self.num_beams)
        self.beam_scores[:, self.rng.randint(1, self.num_beams) :] = -1e9
        self.beam_scores = self.beam_scores.view(-1)
        self.beam_indices: Any = tuple(() for _ in range(rows)) if case.with_beam_indices else None

    def rows_of(self, group: int) -> list[int]:
        """Return the rows of one group of all requests."""
        return [
            request * self.num_beams + group * self.group_size + beam
            for request in range(self.batch)
            for beam in range(self.group_size)
        ]

    def candidates(self, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Draw each request's candidates: scores, tokens, beams, [batch, K] each."""
        case, rng = self.case, self.rng
        end_tokens = [token for token in case.end_tokens if 0 <= token < case.vocab]
        others = [token for token in range(case.vocab) if token not in end_tokens]
        count = max(2, 1 + len(case.end_tokens)) * self.group_size
        rows = []
        for request in scores.view(self.batch, self.group_size).tolist():
            drawn = []
            for _ in range(count):
                beam = rng.randrange(self.group_size)
                step = rng.choice((0.0, 0.5, 1.0, 2.0)) if case.tied else rng.expovariate(0.7)
                score = -_INF if case.infinite and rng.random() < 0.3 else request[beam] - step
                ends = end_tokens and rng.random() < case.end_share
                drawn.append((score, rng.choice(end_tokens if ends else others), beam))
            if not case.unsorted:
                drawn.sort(key=lambda candidate: -candidate[0])
            if not (case.starved and rng.random() < 0.2):
                going = sum(token not in case.end_tokens for _, token, _ in drawn)
                for rank in reversed(range(count)):
                    score, token, beam = drawn[rank]
                    if going < self.group_size and token in case.end_tokens:
                        drawn[rank] = (score, rng.choice(others), beam)
                        going += 1
            rows.append(drawn)
        table = list(zip(*(zip(*row, strict=True) for row in rows), strict=True))
        return torch.tensor(table[0]), torch.tensor(table[1]), torch.tensor(table[2])

    def advance(self, group: int, chosen: dict[str, Tensor]) -> Tensor:
        """Reorder the rows of a group; return its next tokens."""
        rows = self.rows_of(group)
        parents = chosen["next_beam_indices"]
        self.beam_scores[rows] = chosen["next_beam_scores"]
        self.input_ids[rows] = self.input_ids[rows][parents]
        if self.beam_indices is not None:
            own = [self.beam_indices[row] for row in rows]
            new = list(self.beam_indices)
            for row, parent in zip(rows, parents, strict=True):
                new[row] = (*own[parent], parent)
            self.beam_indices = tuple(new)
        return chosen["next_beam_tokens"]


def _call(function: Any, *args: Any, **kwargs: Any) -> tuple[Any, Exception | None]:
    try:
        return function(*args, **kwargs), None
    except (ValueError, TypeError, IndexError, RuntimeError, ZeroDivisionError) as error:
        return None, error


def _assert_same_error(actual: Exception | None, expected: Exception | None, case: object) -> None:
    """Both raise or neither; where the oracle raises ValueError, it is no accident."""
    assert (actual is None) == (expected is None), f"{actual!r}, expected {expected!r} ({case})"
    if isinstance(expected, ValueError):
        assert isinstance(actual, ValueError), f"{actual!r}, expected {expected!r} ({case})"


def _plain(value: Any) -> Any:
    """Return tensors, scalars and sequences of them as numbers and lists."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def assert_same_result(actual: Any, expected: Any, case: object = "") -> None:
    """Compare two dictionaries of tensors (or None): keys, shapes, dtypes, bits."""
    assert list(actual) == list(expected), f"{list(actual)}, expected {list(expected)} ({case})"
    for name, tensor in expected.items():
        if tensor is None:
            assert actual[name] is None, f"{name}: {actual[name]} ({case})"
            continue
        assert actual[name].dtype == tensor.dtype, f"{name}: {actual[name].dtype} ({case})"
        assert actual[name].shape == tensor.shape, f"{name}: {actual[name].shape} ({case})"
        assert torch.equal(actual[name], tensor), f"{name}: {actual[name]}, not {tensor} ({case})"


def assert_same_state(actual: Any, expected: Any, case: object = "") -> None:
    """Compare the hypotheses of two scorers, and whether they are done."""
    assert actual.is_done.dtype == torch.bool and actual.is_done.shape == ()
    assert bool(actual.is_done) == bool(expected.is_done), f"is_done ({case})"
    assert actual._done.tolist() == expected._done.tolist(), f"_done ({case})"
    assert len(actual._beam_hyps) == len(expected._beam_hyps)
    for place, (ours, theirs) in enumerate(
        zip(actual._beam_hyps, expected._beam_hyps, strict=True)
    ):
        assert len(ours) == len(theirs), f"hypotheses of {place} ({case})"
        assert ours.worst_score == theirs.worst_score, f"worst_score of {place} ({case})"
        assert _plain(ours.beams) == _plain(theirs.beams), f"hypotheses of {place} ({case})"


def walk(case: ScorerCase, actual: Any, expected: Any, *, vocab_scores: bool = False) -> int:
    """Drive both scorers, compare results, errors and state in each step; return steps a group."""
    state, compared, after_done = _Walk(case), 0, 0
    for _ in range(case.steps):
        tokens = torch.zeros(len(state.input_ids), dtype=torch.int64)
        for group in range(state.groups):
            rows = state.rows_of(group)
            inputs = [state.input_ids[rows], *state.candidates(state.beam_scores[rows])]
            options = {
                "pad_token_id": case.pad_token_id, "eos_token_id": case.eos_token_id,
                "beam_indices": state.beam_indices, "decoder_prompt_len": case.decoder_prompt_len,
            }  # fmt: skip
            if vocab_scores:
                noise = [[-state.rng.expovariate(1) for _ in range(case.vocab)] for _ in rows]
                inputs.append(state.beam_scores[rows].unsqueeze(1) + torch.tensor(noise))
            else:
                options["group_index"] = group
            ours, our_error = _call(actual.process, *inputs, **options)
            theirs, their_error = _call(expected.process, *inputs, **options)
            compared += 1
            _assert_same_error(our_error, their_error, case)
            if their_error is not None:
                return compared
            assert_same_result(ours, theirs, case)
            assert_same_state(actual, expected, case)
            tokens[rows] = state.advance(group, ours)
        state.input_ids = torch.cat((state.input_ids, tokens.unsqueeze(1)), 1)
        after_done += bool(expected.is_done)
        if after_done > 2:
            break
    for keep in (case.arguments["num_beam_hyps_to_keep"], state.num_beams, 1):
        actual.num_beam_hyps_to_keep = expected.num_beam_hyps_to_keep = keep
        inputs = [state.input_ids, state.beam_scores, tokens, torch.zeros_like(tokens)]
        options = {
            "max_length": case.finalize_max_length, "pad_token_id": case.pad_token_id,
            "eos_token_id": case.eos_token_id, "beam_indices": state.beam_indices,
            "decoder_prompt_len": case.decoder_prompt_len,
        }  # fmt: skip
        ours, our_error = _call(actual.finalize, *inputs, **options)
        theirs, their_error = _call(expected.finalize, *inputs, **options)
        if "dtype of NoneType" in str(their_error):
            # A hypothesis without beam indices behind one that has them: ours gives a row of -1.
            assert our_error is None and (ours["beam_indices"] == -1).all(1).any(), case
        else:
            _assert_same_error(our_error, their_error, case)
            if their_error is None:
                assert_same_result(ours, theirs, case)
        assert_same_state(actual, expected, case)
    return compared
