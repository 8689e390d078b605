"""Tiny models with sliding windows, ``generate()`` on every cache, and the comparison of runs."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers

from lmdecode.integrations.transformers import DynamicRingCache, StaticRingCache, register
from tests.support import tiny_models
from tests.support.tiny_models import HYBRID, VOCAB, WINDOW

register()

NEW_TOKENS = 130
# Many windows long; the second row is shorter than one.
LENGTH, PADDING = 33, (0, 30, 12)
LLAMA_LIKE = {**tiny_models.LLAMA_LIKE, "max_position_embeddings": 512}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"use_sliding_window": True, **HYBRID},
    "Mistral": {"sliding_window": WINDOW},
    "Gemma2": {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0, **HYBRID},
    "Gemma3": {"query_pre_attn_scalar": 8, **HYBRID},
    "GptOss": {"num_local_experts": 2, "num_experts_per_tok": 1, **HYBRID},
}
# With 3, two beams of Qwen3 end 2e-5 apart, where transformers' own implementations part too.
SEEDS = {"Qwen3": 4}
CACHES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "none": lambda config: {"use_cache": False},
    "dynamic": lambda config: {},
    "static": lambda config: {"cache_implementation": "static"},
    "dynamic ring": lambda config: {"past_key_values": DynamicRingCache(config)},
    "static ring": lambda config: {
        "past_key_values": StaticRingCache(config, LENGTH + NEW_TOKENS)
    },
}  # fmt: skip


@functools.cache
def build_window_model(name: str) -> Any:
    return tiny_models.llama_like(
        name, seed=SEEDS.get(name, 3), random_sinks=name == "GptOss", max_position_embeddings=512,
        **MODELS[name],
    )  # fmt: skip


def prompts(padding: tuple[int, ...] = PADDING, length: int = LENGTH) -> dict[str, torch.Tensor]:
    """Return ids [B, length] and their mask, padded on the left."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, VOCAB, (len(padding), length), generator=generator)
    mask = (torch.arange(length) >= torch.tensor(padding)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


class Run(NamedTuple):
    """A call of ``generate()``: [rows, tokens], and of each step the ids so far and the logits."""

    sequences: torch.Tensor
    ids: list[torch.Tensor]
    logits: list[torch.Tensor]


class _Recorder(transformers.LogitsProcessor):
    def __init__(self) -> None:
        self.ids: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.ids.append(input_ids.clone())
        return scores


def generate(model: Any, cache: str, tokens: int = NEW_TOKENS, **options: Any) -> Run:
    recorder = _Recorder()
    out = model.generate(
        **prompts(), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
        output_logits=True, return_dict_in_generate=True, logits_processor=[recorder],
        **CACHES[cache](model.config), **options,
    )  # fmt: skip
    return Run(out.sequences, recorder.ids, list(out.logits))


@functools.cache
def expected(name: str, num_beams: int) -> Run:
    model = build_window_model(name)
    model.set_attn_implementation("eager")
    return generate(model, "dynamic", num_beams=num_beams)


def assert_equal_runs(got: Run, want: Run, num_beams: int = 1) -> None:
    """Equal tokens, logits within 1e-4; beams may change places where scores differ by rounding."""
    assert torch.equal(got.sequences, want.sequences)
    scores = _running_scores(want, num_beams)
    for step, (ids, other_ids) in enumerate(zip(got.ids, want.ids, strict=True)):
        places = _places(ids.tolist(), other_ids.tolist(), num_beams)
        distance = (got.logits[step] - want.logits[step][places]).abs().max()
        assert distance < 1e-4, (step, distance)
        for row, place in enumerate(places):
            assert abs(scores[step][row] - scores[step][place]) < 1e-3, (step, row, place)


def _places(rows: list[list[int]], others: list[list[int]], num_beams: int) -> list[int]:
    """Where each row is among the others of its request."""
    places = []
    for number, row in enumerate(rows):
        first = number // num_beams * num_beams
        same = others[number] == row  # at first all beams of a request are equal
        places.append(number if same else others.index(row, first, first + num_beams))
    assert len(rows[0]) == LENGTH or sorted(places) == list(range(len(rows)))
    return places


def _running_scores(run: Run, num_beams: int) -> list[list[float]]:
    """Sum the log-probabilities of each row's tokens, step by step."""
    scores = [[0.0] * len(run.ids[0])]
    for before, after, logits in zip(run.ids, run.ids[1:], run.logits, strict=False):
        log_probs, rows = logits.double().log_softmax(-1), before.tolist()
        step = []
        for number, (*parent, token) in enumerate(after.tolist()):
            first = number // num_beams * num_beams
            place = rows.index(parent, first, first + num_beams)
            step.append(scores[-1][place] + float(log_probs[place, token]))
        scores.append(step)
    return scores
