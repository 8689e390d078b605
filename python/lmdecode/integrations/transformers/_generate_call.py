"""Where ``generate()`` hands a decoding loop too little, or differs between versions."""

from __future__ import annotations

import inspect
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from transformers.generation import utils as generation_utils

# Before 5.3 the cache positions in model_kwargs say which inputs are new.
_TAKES_NEXT_SEQUENCE_LENGTH = (
    "next_sequence_length"
    in inspect.signature(generation_utils.GenerationMixin.prepare_inputs_for_generation).parameters
)

if TYPE_CHECKING:
    from transformers._typing import GenerativePreTrainedModel
    from transformers.generation.streamers import BaseStreamer


def arguments_of_generate(caller: FrameType | None) -> tuple[BaseStreamer | None, bool | None]:
    """Return the ``streamer`` and ``synced_gpus`` that ``generate()`` was called with.

    transformers (5.0 to 5.23) replaces the arguments of a decoding loop by those which a callable
    adds to the signature of ``_sample``. So a callable never gets these two: a streamer would be
    given the prompt and then nothing, and whoever iterates over it would wait for ever. They are
    read from the frame of ``generate()``, where it is the direct caller.

    Parameters
    ----------
    caller
        The frame that called the loop.

    Returns
    -------
    tuple
        (None, None) where the caller is not ``generate()``.
    """
    generate = inspect.unwrap(generation_utils.GenerationMixin.generate)
    if caller is None or caller.f_code is not generate.__code__:
        return None, None
    if caller.f_locals.get("assistant_model") is not None:
        raise ValueError("assistant_model: expected None, this loop samples one token a step")
    return caller.f_locals.get("streamer"), caller.f_locals.get("synced_gpus")


def refuse_other_modes(generation_config: Any) -> None:
    """Raise ValueError where ``generate()`` was asked for a loop that is not sampling or greedy.

    ``generate()`` leaves its own choice of a loop to the callable, so these would be ignored.
    """
    if (generation_config.num_beams or 1) > 1:
        raise ValueError(f"num_beams: expected 1 for sampling, got {generation_config.num_beams}")
    for name in ("prompt_lookup_num_tokens", "assistant_early_exit", "dola_layers"):
        value = getattr(generation_config, name, None)
        if value is not None:
            raise ValueError(
                f"{name}: expected None, this loop samples one token a step, got {value!r}"
            )
    penalty_alpha = getattr(generation_config, "penalty_alpha", None)
    if penalty_alpha and not generation_config.do_sample:
        raise ValueError(
            f"penalty_alpha: expected None, this is no contrastive search, got {penalty_alpha}"
        )


def needs_synced_gpus(model: Any) -> bool:
    """Tell whether every process has to run the model until the last one is done.

    So it is where the weights are spread over processes and each forward pass gathers them; the
    default of ``generate()``.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return False
    return generation_utils.is_deepspeed_zero3_enabled() or (
        generation_utils.is_fsdp_managed_module(model)
    )


def next_inputs(
    model: GenerativePreTrainedModel, input_ids: torch.Tensor, model_kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of the next forward pass; input_ids are all tokens, [B, S]."""
    options = {}
    if _TAKES_NEXT_SEQUENCE_LENGTH:
        options["next_sequence_length"] = 1 if model_kwargs["use_cache"] else None
    return model.prepare_inputs_for_generation(input_ids, **options, **model_kwargs)
