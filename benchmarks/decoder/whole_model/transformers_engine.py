"""transformers as an engine of the benchmark, with torch's linear layers or with others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.decoder.whole_model.engine import Engine

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_model(folder: Path, dtype: torch.dtype) -> Any:
    """Load a model that never ends a sequence."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    return model


def generate_arguments(tokens: Sequence[int], new_tokens: int, beams: int) -> dict[str, Any]:
    """Return the arguments of a call of ``generate()``."""
    ids = torch.tensor([tokens])
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": new_tokens,
        "num_beams": beams,
        "do_sample": False,
    }


def _quantise_dynamically(folder: Path) -> Any:
    model = load_model(folder, torch.float32)
    return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)


def _torchao_int4(folder: Path) -> Any:
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization import quantize_

    model = load_model(folder, torch.bfloat16)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())  # untied
    quantize_(model, PrototypeInt4WeightOnlyConfig(group_size=128, set_inductor_config=False))
    return model


def _pack_linears(folder: Path, number_format: str) -> Any:
    from lmdecode.integrations.transformers import pack_linears_

    return pack_linears_(load_model(folder, torch.float32), number_format)


class TransformersEngine(Engine):
    """A model whose every call is one of ``forward()``, or of ``generate()``."""

    def __init__(self, folder: Path, number_format: str, threads: int, longest: int) -> None:
        super().__init__(folder, number_format, threads, longest)
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        if number_format in DTYPES:
            self._model = load_model(folder, DTYPES[number_format])
        elif number_format == "quantize_dynamic":
            self._model = _quantise_dynamically(folder)
        elif number_format == "torchao int4":
            self._model = _torchao_int4(folder)
        else:
            self._model = _pack_linears(folder, number_format.removeprefix("pack_linears_ "))

    def version(self) -> str:
        if self.number_format == "torchao int4":
            import torchao

            return torchao.__version__
        import transformers

        return transformers.__version__

    def _read(self, rows: list[list[int]], cache: Any) -> torch.Tensor:
        ids = torch.tensor(rows)
        return self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits

    def _cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self._model.config)

    def logits(self, tokens: Sequence[int], steps: int) -> Any:
        cache = self._cache()
        logits = self._read([list(tokens[: len(tokens) - steps])], cache)
        for token in tokens[len(tokens) - steps :]:
            logits = self._read([[token]], cache)
        return logits[0, -1].float().numpy()

    def prefill(self, tokens: Sequence[int]) -> None:
        self._read([list(tokens)], self._cache())

    def prepare(self, tokens: Sequence[int], rows: int) -> None:
        self._rows, self._steps = self._cache(), 0
        self._read([list(tokens)], self._rows)
        self._rows.batch_repeat_interleave(rows)

    def rewind(self) -> None:
        if self._steps:
            self._rows.crop(-self._steps)
        self._steps = 0

    def step(self, tokens: Sequence[int]) -> None:
        self._read([[token] for token in tokens], self._rows)
        self._steps += 1

    def generate(self, tokens: Sequence[int], new_tokens: int, beams: int) -> None:
        self._model.generate(**generate_arguments(tokens, new_tokens, beams))


ENGINE = TransformersEngine
