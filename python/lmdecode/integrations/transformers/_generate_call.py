"""Where ``generate()`` hands a decoding loop too little, or differs between versions."""

from __future__ import annotations

import inspect
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from transformers.generation import utils as generation_utils

# Before 5.3 the cache positions in model_kwargs say which inputs are new.
_TAKES_NEXT_SEQUENCE_LENGTH = (
    "next_sequence_length"
    in inspect.signature(generation_utils.GenerationMixin.prepare_inputs_for_generation).parameters
)

if TYPE_CHECKING:
    from transformers import GenerationConfig
    from transformers._typing import GenerativePreTrainedModel
    from transformers.generation.streamers import BaseStreamer


class CallerArguments(NamedTuple):
    """Arguments of ``generate()`` that a callable is not given; None where they are not known."""

    streamer: BaseStreamer | None = None
    synced_gpus: bool | None = None
    assistant_model: Any = None


def arguments_of_generate(caller: FrameType | None) -> CallerArguments:
    """Return what ``generate()`` was called with and does not hand on.

    transformers (5.0 to 5.23) replaces the arguments of a decoding loop by those which a callable
    adds to the signature of ``_sample``. So a callable never gets these: a streamer would be
    given the prompt and then nothing, and whoever iterates over it would wait for ever. They are
    read from the frame of ``generate()``, where it is the direct caller.

    Parameters
    ----------
    caller
        The frame that called the loop.

    Returns
    -------
    CallerArguments
        All None where the caller is not ``generate()``.
    """
    generate = inspect.unwrap(generation_utils.GenerationMixin.generate)
    if caller is None or caller.f_code is not generate.__code__:
        return CallerArguments()
    return CallerArguments(*(caller.f_locals.get(name) for name in CallerArguments._fields))


def refuse_other_modes(generation_config: Any) -> None:
    """Raise ValueError where ``generate()`` was asked for a loop that is not sampling or greedy.

    ``generate()`` leaves its own choice of a loop to the callable, so these would be ignored.
    """
    if (generation_config.num_beams or 1) > 1:
        raise ValueError(f"num_beams: expected 1 for sampling, got {generation_config.num_beams}")
    penalty_alpha = getattr(generation_config, "penalty_alpha", None)
    if penalty_alpha and not generation_config.do_sample:
        raise ValueError(
            f"penalty_alpha: expected None, this is no contrastive search, got {penalty_alpha}"
        )


def refuse_assistance(generation_config: Any, caller: CallerArguments, reason: str) -> None:
    """Raise ValueError where ``generate()`` was asked for tokens that something else proposes."""
    if caller.assistant_model is not None:
        raise ValueError(f"assistant_model: expected None, {reason}")
    for name in ("prompt_lookup_num_tokens", "assistant_early_exit", "dola_layers"):
        value = getattr(generation_config, name, None)
        if value is not None:
            raise ValueError(f"{name}: expected None, {reason}, got {value!r}")


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


def prefill(
    model: GenerativePreTrainedModel,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> Any:
    """Run the model over the prompts, [B, S], and return its outputs."""
    options = {"is_first_iteration": False} if generation_config.is_assistant else {}
    return model._prefill(input_ids, generation_config, model_kwargs, **options)
