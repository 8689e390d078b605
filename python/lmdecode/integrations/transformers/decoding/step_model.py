"""What the loops of ``sample`` and ``beam_search`` ask of a model, where C++ stands in for it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["StepModel", "StepOutputs"]


class StepOutputs(NamedTuple):
    """What a loop takes of a model's outputs; logits are [rows, 1, V] float32."""

    logits: Tensor


class StepModel:
    """A model to those loops; a subclass has ``config``, ``_prefill`` and ``__call__``."""

    def prepare_inputs_for_generation(self, input_ids: Tensor, **options: Any) -> dict[str, Any]:
        return {"input_ids": input_ids}

    @staticmethod
    def _update_model_kwargs_for_generation(
        outputs: StepOutputs, model_kwargs: dict[str, Any], **options: Any
    ) -> dict[str, Any]:
        return model_kwargs

    @staticmethod
    def _valid_auto_compile_criteria(*arguments: Any) -> bool:
        return False

    @staticmethod
    def _optimize_model_for_decode() -> AbstractContextManager:
        return nullcontext()

    @staticmethod
    def _has_unfinished_sequences(finished: bool, *arguments: Any, **options: Any) -> bool:
        return not finished
