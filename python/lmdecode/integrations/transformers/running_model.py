"""A model of transformers as a ``StepwiseModel``, with its arguments and its cache."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor
from transformers.generation.utils import ALL_CACHE_NAMES

from lmdecode.integrations.transformers._recorder import Recorder
from lmdecode.integrations.transformers.caches.beam_caches import beam_cache, reorder_beams
from lmdecode.integrations.transformers.generate_call import CACHE, next_inputs, prefill

if TYPE_CHECKING:
    from transformers import GenerationConfig
    from transformers._typing import GenerativePreTrainedModel

    from lmdecode.integrations.transformers.sampling.speculation import Speculation

__all__ = ["RunningModel"]


class RunningModel:
    """A model of transformers during ``generate()``; a context manager of its loop.

    The steps change ``model_kwargs``, and ``recorder`` gets their outputs. With ``optimizes`` the
    steps after the prompt run in ``_optimize_model_for_decode``. ``speculation`` must be set before
    the prompt is read.
    """

    speculation: Speculation | None = None

    def __init__(
        self,
        model: GenerativePreTrainedModel,
        config: GenerationConfig,
        model_kwargs: dict[str, Any],
        recorder: Recorder,
        *,
        synced_gpus: bool,
        optimizes: bool = False,
    ) -> None:
        self._model, self._config, self._recorder = model, config, recorder
        self._kwargs, self._synced_gpus, self._optimizes = model_kwargs, synced_gpus, optimizes
        self._context = ExitStack()
        self.forward: Any = model
        if model._valid_auto_compile_criteria(model_kwargs, config):
            self.forward = model.get_compiled_call(config.compile_config)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    @property
    def cache(self) -> Any:
        """The model's cache of keys and values, or None."""
        name = self._cache_name
        return None if name is None else self._kwargs[name]

    @property
    def _cache_name(self) -> str | None:
        return next((name for name in ALL_CACHE_NAMES if name in self._kwargs), None)

    def follow_beams(self) -> None:
        """Replace the cache by one with a fast ``reorder``; called before the prompt is read."""
        if self._kwargs["use_cache"] and not hasattr(self._model, "_reorder_cache"):
            beam_cache(self._kwargs.get(CACHE))

    def read_prompts(self, input_ids: Tensor) -> Tensor:
        outputs = prefill(self._model, input_ids, self._config, self._kwargs)
        if self._optimizes:
            self._context.enter_context(self._model._optimize_model_for_decode())
        if self.speculation is not None:
            self._context.callback(self.speculation.close)
        self._others_go_on(input_ids, finished=False)
        return self._logits(outputs, input_ids)

    def read(self, input_ids: Tensor) -> Tensor:
        self._others_go_on(input_ids, finished=False)
        if self.speculation is not None:
            outputs = self.speculation.outputs(input_ids, self._kwargs)
        else:
            outputs = self._run(input_ids)
        return self._logits(outputs, input_ids)

    def reorder(self, parents: Tensor) -> None:
        name = self._cache_name
        if name is None:
            return
        if hasattr(self._model, "_reorder_cache"):
            self._kwargs[name] = self._model._reorder_cache(self._kwargs[name], parents)
        else:
            reorder_beams(self._kwargs[name], parents)

    def wait_for_others(self, input_ids: Tensor) -> None:
        """Run the model after [rows, length] until the other processes have ended."""
        while self._others_go_on(input_ids, finished=True):
            self._follow(self._run(input_ids))

    def _others_go_on(self, input_ids: Tensor, *, finished: bool) -> bool:
        """Exchange the state with the other processes; return whether any continues."""
        return bool(
            self._model._has_unfinished_sequences(
                finished, self._synced_gpus, device=input_ids.device
            )
        )

    def _run(self, input_ids: Tensor) -> Any:
        return self.forward(**next_inputs(self._model, input_ids, self._kwargs), return_dict=True)

    def _follow(self, outputs: Any) -> None:
        """Update the arguments for the next step."""
        self._kwargs = self._model._update_model_kwargs_for_generation(
            outputs, self._kwargs, is_encoder_decoder=self._model.config.is_encoder_decoder
        )

    def _logits(self, outputs: Any, input_ids: Tensor) -> Tensor:
        self._follow(outputs)
        self._recorder.record_outputs(outputs)
        logits: Tensor = outputs.logits[:, -1].to(input_ids.device)
        return logits
