"""Requests for ``BeamSearch``, a language model in a table, a driver: for tests and benchmarks."""

import importlib
import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lmdecode.beam.engine.request import BeamRequest, BeamResult
from lmdecode.beam.engine.search import BeamSearch
from tests.support.cases import bits

__all__ = [
    "TableModel", "as_transformers_model", "assert_same_result", "generate_arguments",
    "random_request", "run_requests",
]  # fmt: skip


class TableModel:
    """A language model with a row of logits for the last three tokens; levels: scores tie."""

    def __init__(
        self, vocab_size: int, seed: int, *, scale: float = 2.0, levels: int = 0, entries: int = 509
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        table = torch.randn(entries, vocab_size, generator=generator)
        if levels:
            table = (table * levels).round() / levels
        self.table = table * scale

    def __call__(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        """Return [rows, V] logits after the first ``lengths`` tokens of [rows, longest]."""
        number = torch.zeros(len(input_ids), dtype=torch.int64, device=input_ids.device)
        for back, factor in ((1, 1), (2, 31), (3, 977)):
            at = (lengths - back).clamp(min=0)[:, None]
            token = input_ids.gather(1, at).squeeze(1)
            number += torch.where(lengths >= back, token + 1, 0) * factor
        return self.table.to(input_ids.device)[number % len(self.table)]


def random_request(
    choice: random.Random, vocab_size: int, *, processors: bool = True, **changes: Any
) -> BeamRequest:
    """Return a request of random parameters; processors: also what changes log-probabilities."""
    groups = choice.choice((1, 1, 1, 2, 3))
    beams = groups * choice.randint(1, 4 if groups == 1 else 2)
    dialect = choice.choice(("generate", "generate", "scorer", "fairseq"))
    ends = choice.sample(range(vocab_size), choice.choice((0, 1, 1, 1, 2)))
    prompt = [choice.randrange(vocab_size) for _ in range(choice.randint(1, 6))]
    arguments: dict[str, Any] = {
        "max_new_tokens": choice.randint(1, 12),
        "num_beams": beams,
        "num_return_sequences": choice.randint(1, beams),
        "length_penalty": choice.choice((1.0, 1.0, 0.0, 2.0, -1.0, 0.6)),
        "early_stopping": False if dialect == "fairseq" else choice.choice((False, True, "never")),
        "eos_token_id": ends,
        "num_beam_groups": groups,
        "dialect": dialect,
        "patience": choice.choice((1.0, 1.0, 1.0, 1.5, 2.0)),
    }
    if processors and choice.random() < 0.5:
        arguments |= {
            "diversity_penalty": choice.choice((0.0, 0.5, 3.0)) if groups > 1 else 0.0,
            "min_new_tokens": choice.choice((0, 0, 1, arguments["max_new_tokens"] // 2)),
            "repetition_penalty": choice.choice((1.0, 1.0, 1.3, 0.7)),
            "no_repeat_ngram_size": choice.choice((0, 0, 2, 3)),
            "suppress_tokens": choice.sample(range(5, vocab_size), choice.choice((0, 0, 2))),
            "forced_bos_token_id": choice.choice((None, None, 3)),
            "forced_eos_token_id": choice.choice((None, None, 1)),
            "logit_bias": choice.choice(({}, {}, {2: 1.5, 4: -0.75})),
        }
    return BeamRequest(prompt, **{**arguments, **changes})


def run_requests(
    engine: BeamSearch,
    model: Callable[[Tensor, Tensor], Tensor],
    arrivals: Sequence[tuple[int, BeamRequest]],
    *,
    on_logits: Callable[[Tensor], dict[str, Any]] | None = None,
) -> dict[Hashable, BeamResult]:
    """Run requests, each inserted before its step; return their results by id, or else number."""
    waiting = []
    for number, (at, request) in sorted(enumerate(arrivals), key=lambda item: item[1][0]):
        request_id = number if request.request_id is None else request.request_id
        waiting.append((at, replace(request, request_id=request_id)))
    results: dict[Hashable, BeamResult] = {}
    step = 0
    while waiting or engine.num_rows:
        while waiting and waiting[0][0] <= step:
            engine.insert(waiting.pop(0)[1])
        logits = model(*engine.input_ids())
        engine.step(logits, **(on_logits(logits) if on_logits is not None else {}))
        results |= {result.request_id: result for result in engine.pop_finished()}
        step += 1
    return results


def assert_same_result(actual: BeamResult, expected: BeamResult, case: object = "") -> None:
    """Raise AssertionError where two results differ in any bit; their ids may."""
    for name in ("sequences", "scores", "lengths", "log_probs", "beam_indices", "groups"):
        got, want = getattr(actual, name), getattr(expected, name)
        assert got.dtype == want.dtype and got.shape == want.shape, f"{name}, {case}"
        assert torch.equal(bits(got.cpu()), bits(want.cpu())), (
            f"{name}: {got} instead of {want}, {case}"
        )
    for name in ("prompt_length", "num_steps", "status"):
        got, want = getattr(actual, name), getattr(expected, name)
        assert got == want, f"{name}: {got} instead of {want}, {case}"


def generate_arguments(request: BeamRequest) -> dict[str, Any]:
    """Return the arguments of transformers' ``generate()`` for this request, ids and all."""
    ends = list(request.eos_token_id)
    arguments = {
        "input_ids": torch.tensor([request.prompt_ids]),
        "attention_mask": torch.ones(1, len(request.prompt_ids), dtype=torch.int64),
        "do_sample": False,
        "eos_token_id": ends or None,
        "pad_token_id": request.pad_token,
        "return_dict_in_generate": True,
        "output_scores": True,
        "suppress_tokens": list(request.suppress_tokens) or None,
        "min_new_tokens": request.min_new_tokens or None,
        "sequence_bias": {(token,): bias for token, bias in request.logit_bias.items()} or None,
    }
    for name in (
        "num_beams", "num_return_sequences", "max_new_tokens", "length_penalty", "early_stopping",
        "repetition_penalty", "no_repeat_ngram_size", "forced_bos_token_id", "forced_eos_token_id",
    ):  # fmt: skip
        arguments[name] = getattr(request, name)
    if request.num_beam_groups > 1:
        arguments["num_beam_groups"] = request.num_beam_groups
        arguments["diversity_penalty"] = request.diversity_penalty
    return arguments


def as_transformers_model(table: TableModel) -> Any:
    """Return the table as a model for ``generate()``, without a cache; transformers 4.38 or 5."""
    library: Any = importlib.import_module("transformers")
    outputs: Any = importlib.import_module("transformers.modeling_outputs")

    class TableConfig(library.PretrainedConfig):
        model_type = "table"

    class TableLM(library.PreTrainedModel, library.GenerationMixin):
        config_class = TableConfig
        main_input_name = "input_ids"

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.parameter = torch.nn.Parameter(torch.zeros(1))  # it tells the device

        def prepare_inputs_for_generation(
            self, input_ids: Tensor, attention_mask: Any = None, **_: Any
        ) -> dict[str, Tensor]:
            return {"input_ids": input_ids}

        def forward(self, input_ids: Tensor, **_: Any) -> Any:
            lengths = torch.full((len(input_ids),), input_ids.shape[1])
            return outputs.CausalLMOutput(logits=table(input_ids, lengths)[:, None])

    sizes: Any = {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 1}
    return TableLM(TableConfig(vocab_size=table.table.shape[1], **sizes))
