"""The decoding loop that every kind of beam search shares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor
from transformers.generation.utils import ALL_CACHE_NAMES

from lmdecode.integrations.transformers.caches.beam_caches import beam_cache, reorder_beams
from lmdecode.integrations.transformers.generate_call import next_inputs, prefill

if TYPE_CHECKING:
    from transformers import GenerationConfig
    from transformers._typing import GenerativePreTrainedModel


class NextBeams(NamedTuple):
    """What follows from the logits of a step.

    Attributes
    ----------
    sequences : Tensor
        [rows, length + 1] int64: the next beams.
    parents : Tensor or None
        [rows] int64: the row that each goes on from; None where each is its own.
    finished : bool
        Whether every search has ended.
    """

    sequences: Tensor
    parents: Tensor | None
    finished: bool


class SearchResult(NamedTuple):
    """The best sequences: [batch * num_return_sequences, ...].

    Attributes
    ----------
    sequences : Tensor
        [n, length] int64.
    scores : Tensor
        [n] float32.
    beam_indices : Tensor or None
        [n, generated tokens] int32: the row of each step's scores that a token comes from, -1
        behind the end.
    """

    sequences: Tensor
    scores: Tensor
    beam_indices: Tensor | None


class Search(Protocol):
    """One kind of beam search."""

    def step(self, outputs: Any, logits: Tensor, input_ids: Tensor) -> NextBeams:
        """Choose the next beams.

        Parameters
        ----------
        outputs
            What the model returned, for the record.
        logits
            [rows, V], a view of the model's in its dtype.
        input_ids
            [rows, length] int64: the beams.
        """

    def finish(self, input_ids: Tensor) -> SearchResult:
        """Return the result; input_ids are the beams, [rows, length], after the last step."""


def _reorder_cache(model: Any, model_kwargs: dict[str, Any], name: str, parents: Tensor) -> None:
    """Let row r of the cache of this name go on as row ``parents[r]``."""
    if hasattr(model, "_reorder_cache"):
        model_kwargs[name] = model._reorder_cache(model_kwargs[name], parents)
    else:
        reorder_beams(model_kwargs[name], parents)


def decode(
    model: GenerativePreTrainedModel,
    search: Search,
    input_ids: Tensor,
    generation_config: GenerationConfig,
    synced_gpus: bool,
    model_kwargs: dict[str, Any],
) -> tuple[Tensor, dict[str, Any]]:
    """Run the model and the search in turns until the search has finished.

    Parameters
    ----------
    model, search
        What proposes tokens, and what chooses.
    input_ids
        [rows, S] int64: the prompts, once for each beam.
    generation_config
        As ``generate()`` prepares it.
    synced_gpus
        Run the model until every process is done.
    model_kwargs
        Arguments of the model's forward pass.

    Returns
    -------
    tuple
        The beams after the last step, [rows, length], and the arguments as they are then.
    """
    device = input_ids.device
    forward = model
    if model._valid_auto_compile_criteria(model_kwargs, generation_config):
        forward = model.get_compiled_call(generation_config.compile_config)
    if model_kwargs["use_cache"] and not hasattr(model, "_reorder_cache"):
        beam_cache(model_kwargs.get("past_key_values"))
    outputs = prefill(model, input_ids, generation_config, model_kwargs)
    finished = False
    while model._has_unfinished_sequences(finished, synced_gpus, device=device):
        if outputs is None:
            outputs = forward(**next_inputs(model, input_ids, model_kwargs), return_dict=True)
        model_kwargs = model._update_model_kwargs_for_generation(
            outputs, model_kwargs, is_encoder_decoder=model.config.is_encoder_decoder
        )
        if not finished:  # else it is the other processes that are not
            logits = outputs.logits[:, -1].to(device)
            input_ids, parents, finished = search.step(outputs, logits, input_ids)
            del logits
            name = next((name for name in ALL_CACHE_NAMES if name in model_kwargs), None)
            if name is not None and parents is not None:
                _reorder_cache(model, model_kwargs, name, parents)
        outputs = None  # the logits of a long prompt must not live on
    return input_ids, model_kwargs
