"""The decoding loop of beam search around a model that costs nothing, against transformers'."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.goals import Goal, GoalOutcome, evaluate
from benchmarks.harness import LIMIT, OURS, Case, Contestant, Result
from benchmarks.limits import streaming_read

GROUP = "beam search"
SOURCES = ("beam/", "kv_cache/reorder_cache")
TRANSFORMERS = "transformers"
NUM_BEAMS, STEPS, PROMPT_LENGTH = 4, 16, 16
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
OPTIONS: dict[str, dict[str, Any]] = {
    "16 steps": {},
    "16 steps, three processors": {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 4,
    },
    "16 steps, all scores": {"output_scores": True, "return_dict_in_generate": True},
}


@lru_cache(maxsize=1)
def _model(rows: int, vocab: int, dtype: str) -> Any:
    """Return a model whose forward pass looks its outputs up."""
    from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import CausalLMOutputWithPast

    class Config(PretrainedConfig):
        model_type = "logits_of_a_table"
        vocab_size, num_hidden_layers, num_attention_heads, hidden_size = vocab, 1, 1, 4

    class Model(PreTrainedModel, GenerationMixin):
        config_class = Config

        def __init__(self, config: Config) -> None:
            super().__init__(config)
            self.weight = torch.nn.Parameter(torch.zeros(1))
            generator = torch.Generator().manual_seed(0)
            # A step finds its logits in the caches, as behind a real model.
            tables = torch.randn(4, rows, 1, vocab, generator=generator).mul_(3.0)
            self.outputs = [CausalLMOutputWithPast(logits=t) for t in tables.to(DTYPES[dtype])]
            self.steps = itertools.cycle(self.outputs)

        def forward(
            self, input_ids: Tensor, past_key_values: Any = None, **kwargs: Any
        ) -> CausalLMOutputWithPast:
            return next(self.steps)

    return Model(Config()).eval()


def _loop(model: Any, rows: int, options: dict[str, Any], loop: Callable) -> Callable[[], object]:
    """Build a call of the loop alone, with what ``generate()`` prepares for it."""
    from transformers import DynamicCache

    prepared: dict[str, Any] = {}

    def keep(model: Any, input_ids: Tensor, **arguments: Any) -> Tensor:
        prepared.update(arguments, input_ids=input_ids)
        return input_ids

    ids = torch.arange(rows // NUM_BEAMS * PROMPT_LENGTH).view(-1, PROMPT_LENGTH)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=NUM_BEAMS,
        max_new_tokens=STEPS,
        do_sample=False,
        eos_token_id=2,
        pad_token_id=0,
        custom_generate=keep,
        **options,
    )

    cache = DynamicCache()  # which follows the beams, but is next to nothing
    cache.update(torch.zeros(rows, 1, 1, 4), torch.zeros(rows, 1, 1, 4), 0)

    @torch.no_grad()
    def call() -> object:
        return loop(model, **{**prepared, "past_key_values": cache})

    return call


def _contestants(
    with_peers: bool, *, requests: int, vocab: int, dtype: str, options: dict[str, Any]
) -> list[Contestant]:
    from transformers import GenerationMixin

    from lmdecode.integrations.transformers import beam_search

    rows = requests * NUM_BEAMS
    model = _model(rows, vocab, dtype)
    contestants = [Contestant(OURS, _loop(model, rows, options, beam_search))]
    if with_peers:
        stock = GenerationMixin._beam_search
        reads = [streaming_read(outputs.logits[:, 0]) for outputs in model.outputs] * (STEPS // 4)
        contestants += [
            Contestant(LIMIT, lambda: [read() for read in reads]),
            Contestant(TRANSFORMERS, _loop(model, rows, options, stock)),
        ]
    return contestants


def cases(quick: bool) -> list[Case]:
    """Return every case, or with ``quick`` one small shape."""
    shapes = [(8, 32000, "f32"), (8, 32000, "bf16"), (1, 128256, "f32"), (8, 128256, "f32")]
    return [
        Case(
            GROUP,
            name,
            {"requests": requests, "beams": NUM_BEAMS, "V": vocab, "dtype": dtype},
            partial(_contestants, requests=requests, vocab=vocab, dtype=dtype, options=options),
        )
        for name, options in OPTIONS.items()
        for requests, vocab, dtype in ([(1, 8192, "f32")] if quick else shapes)
    ]


def _versus_transformers(result: Result) -> float | None:
    return result.ratio(TRANSFORMERS)


def _is_goal(result: Result) -> bool:
    return result.case.shape == {"requests": 8, "beams": 4, "V": 32000, "dtype": "f32"}


GOALS = [
    Goal(name, "warm", TRANSFORMERS, "at least", 8, _versus_transformers, [_is_goal])
    for name in ("16 steps", "16 steps, three processors")
]


def goals(results: list[Result]) -> list[GoalOutcome]:
    """Judge the goals on the worst of the cases that each speaks of."""
    return evaluate(GOALS, results)
