"""A step of wide beams that are held to a trie: against transformers', and against plain beams."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor

import lmdecode
from benchmarks.beam.bench_beam_engine import transformers_step
from benchmarks.goals import Goal, GoalOutcome, evaluate
from benchmarks.harness import OURS, Case, Contestant, Result

GROUP = "Trie"
SOURCES = ("beam/token_trie", "beam/beam_step", "beam/log_softmax_top_k")
END_TOKEN = 2
CODES = 64  # of each place of an item, tokens that no other place has
PLACES = 4

TRANSFORMERS = "transformers' loop with prefix_allowed_tokens_fn, without the model"
PLAIN = "plain beams"


@lru_cache(maxsize=1)
def _items(count: int) -> Tensor:
    """Return [count, PLACES + 1] items, nearly all different."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, CODES, (count, PLACES), generator=generator)
    codes += 3 + CODES * torch.arange(PLACES)
    return torch.cat((codes, torch.full((count, 1), END_TOKEN)), dim=1)


@lru_cache(maxsize=1)
def _trie(count: int) -> lmdecode.Trie:
    return lmdecode.Trie(_items(count))


def _step(logits: Tensor, begun: Tensor, trie: lmdecode.Trie | None) -> Callable[[], object]:
    """Return a step of one search whose beams have begun like this, from the same state always."""
    beams, length = begun.shape
    state = lmdecode.new_beam_state(1, beams, 64)
    state.sequences[0, :, 1 : length + 1] = begun
    parameters = lmdecode.beam_parameters(
        1, beams, prompt_lengths=1, max_lengths=64, end_tokens=[[END_TOKEN]]
    )
    scores = -torch.rand(1, beams).sort(dim=1).values
    held = {} if trie is None else {"trie": trie, "nodes": trie.nodes_of(begun)}

    def step() -> object:
        state.scores.copy_(scores)
        state.lengths.fill_(length + 1)
        found = lmdecode.log_softmax_top_k(
            logits, state.scores.view(-1), 2 * beams, num_beams=beams, **held
        )
        done = lmdecode.beam_step(
            state, parameters, *found[:3], log_probs=found.log_probs, status=found.status
        )
        return None if trie is None else trie.step(held["nodes"][done.parents], done.tokens)

    return step


def _transformers(logits: Tensor, begun: Tensor, trie: lmdecode.Trie) -> Callable[[], object]:
    """Build its step with a function that has every answer ready."""
    from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor

    beams, length = begun.shape
    answers = {tuple(row): trie.allowed(row).tolist() for row in begun.tolist()}
    processor = PrefixConstrainedLogitsProcessor(
        lambda _, tokens: answers[tuple(tokens[:length].tolist())], beams
    )
    return transformers_step(logits, beams, begun, processor)


def _contestants(with_peers: bool, *, beams: int, vocab: int, items: int) -> list[Contestant]:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(beams, vocab, generator=generator).mul_(3.0)
    trie = _trie(items)
    begun = _items(items)[:beams, :2].contiguous()
    contestants = [
        Contestant(OURS, _step(logits, begun, trie)),
        Contestant(PLAIN, _step(logits, begun, None)),
    ]
    if with_peers and importlib.util.find_spec("transformers") is not None:
        contestants.append(Contestant(TRANSFORMERS, _transformers(logits, begun, trie)))
    return contestants


def _build_contestants(_: bool, *, items: int) -> list[Contestant]:
    rows = _items(items)
    return [Contestant(OURS, lambda: lmdecode.Trie(rows))]


def cases(quick: bool) -> list[Case]:
    """Return every case, or with ``quick`` small ones."""
    shapes = [(8, 1024, 1000)] if quick else [(50, 32000, 10**6), (400, 32000, 10**6)]
    return [
        *(
            Case(
                GROUP,
                "step",
                {"beams": beams, "V": vocab, "items": items},
                partial(_contestants, beams=beams, vocab=vocab, items=items),
            )
            for beams, vocab, items in shapes
        ),
        Case(
            GROUP,
            "build",
            {"beams": 0, "V": 0, "items": shapes[-1][2]},
            partial(_build_contestants, items=shapes[-1][2]),
        ),
    ]


def _of_400(result: Result) -> bool:
    return result.case.shape["beams"] == 400


GOALS = [
    Goal("step", "warm", TRANSFORMERS, "at least", 50, lambda r: r.ratio(TRANSFORMERS), [_of_400]),
    Goal("step", "warm", PLAIN, "at least", 0.5, lambda r: r.ratio(PLAIN), [_of_400]),
]


def goals(results: list[Result]) -> list[GoalOutcome]:
    """Judge the goals on the case that they speak of."""
    return evaluate(GOALS, results)
