"""``generate()`` of an encoder-decoder model with its decoding loop in C++."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.generation.utils import (
    GenerateBeamEncoderDecoderOutput,
    GenerateEncoderDecoderOutput,
)

from lmdecode._decoding_cuda import DeviceDecoder, DeviceSearches
from lmdecode.beam import beam_finalize
from lmdecode.decoder_state import DecodingSearches
from lmdecode.decoder_weights import PackedDecoder
from lmdecode.integrations.transformers._decoding_rules import token_rules
from lmdecode.integrations.transformers._generate_call import (
    arguments_of_generate,
    refuse_assistance,
)
from lmdecode.integrations.transformers._plain_search import _end_tokens_of_criteria
from lmdecode.integrations.transformers._search_settings import (
    SearchSettings,
    new_search,
    raise_for_prompts,
)

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

__all__ = ["decode", "memory_of"]

_NOT_REAL = -1.0e25  # transformers' -inf, as GroupSearch has it
# What generate() hands on and is of no account here.
_IGNORED = frozenset(
    ("attention_mask", "cache_position", "encoder_outputs", "past_key_values", "use_cache",
     "decoder_attention_mask", "position_ids", "decoder_position_ids", "next_sequence_length")
)  # fmt: skip


def _refuse(config: GenerationConfig, model_kwargs: dict[str, Any], streamer: Any) -> None:
    """Raise ValueError for what ``generate()`` was asked for and the loop does not do."""
    if config.do_sample:
        raise ValueError("do_sample: expected False, Decoding searches and does not sample")
    if streamer is not None:
        raise ValueError("streamer: expected None, tokens stay in C++ until the search has ended")
    for name in ("output_attentions", "output_hidden_states", "output_logits"):
        if getattr(config, name, None):
            raise ValueError(f"{name}: expected False, Decoding keeps none of them")
    for name in ("constraints", "force_words_ids", "guidance_scale", "penalty_alpha"):
        value = getattr(config, name, None)
        if value is not None and not (name == "guidance_scale" and value == 1):
            raise ValueError(f"{name}: expected None, got {value!r}")
    groups, num_beams = config.num_beam_groups or 1, config.num_beams or 1
    if groups > 1 and (num_beams % groups or not (config.diversity_penalty or 0.0) > 0):
        raise ValueError(
            f"num_beam_groups: expected a divisor of num_beams = {num_beams} and a "
            f"diversity_penalty > 0, got {groups} and {config.diversity_penalty}"
        )
    if groups == 1 and config.diversity_penalty:
        raise ValueError("num_beam_groups: expected at least 2 with a diversity_penalty, got 1")
    if config.num_return_sequences > num_beams:
        raise ValueError(
            f"num_return_sequences: expected at most num_beams = {num_beams}, "
            f"got {config.num_return_sequences}"
        )
    if num_beams == 1 and config.return_dict_in_generate and config.output_scores:
        raise ValueError("output_scores: expected False without beams, Decoding keeps no logits")
    mask = model_kwargs.get("decoder_attention_mask")
    if mask is not None and not bool(mask.all()):
        raise ValueError(
            "decoder_attention_mask: expected ones, prompts of the decoder are not padded"
        )
    for name, value in model_kwargs.items():
        if name not in _IGNORED and value is not None and value is not False:
            raise ValueError(f"{name}: expected None, Decoding hands nothing on to a decoder")


def memory_of(
    encoder_outputs: Any,
    attention_mask: Tensor | None,
    device: torch.device = torch.device("cpu"),  # noqa: B008  a constant
) -> tuple[Tensor, Tensor]:
    """Return the memories, [B, S, M] float32, and their lengths, [B] int64, on a device.

    What the mask leaves out is taken out: attention to a memory does not depend on its order.
    """
    memory = encoder_outputs[0].detach().to(device=device, dtype=torch.float32)
    if attention_mask is None:
        full = torch.full((len(memory),), memory.shape[1], dtype=torch.int64, device=device)
        return memory, full
    mask = attention_mask.to(device).bool()
    lengths = mask.sum(dim=1)
    places = torch.arange(mask.shape[1], device=device)
    if not torch.equal(mask, places < lengths[:, None]):
        order = torch.argsort((~mask).to(torch.uint8), dim=1, stable=True)
        memory = memory.gather(1, order[..., None].expand_as(memory))
    return memory, lengths


def decode(
    decoder: PackedDecoder | DeviceDecoder,
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool | None = None,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Decode as ``generate()`` asks for: greedily, with beams, or with groups of beams.

    Parameters
    ----------
    decoder
        That of the model.
    model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs
        As ``generate()`` prepares them, the encoder's outputs among them.
    synced_gpus, streamer
        Of no use here.

    Returns
    -------
    Tensor or GenerateBeamEncoderDecoderOutput or GenerateEncoderDecoderOutput
        [B * num_return_sequences, length] int64. In the outputs ``scores`` is None: the
        log-probabilities of the whole vocabulary are nowhere kept.

    Raises
    ------
    ValueError
        Names an argument of ``generate()`` that this cannot do.
    RuntimeError
        A prompt has NaN in its logits, or no candidate above -inf.
    """
    config = generation_config
    caller = arguments_of_generate(sys._getframe(2))
    refuse_assistance(config, caller, "Decoding runs the model itself")
    _refuse(config, model_kwargs, streamer if streamer is not None else caller.streamer)
    config.num_beams = config.num_beams or 1
    device, input_ids = input_ids.device, input_ids.cpu()
    settings = SearchSettings.of(config, input_ids)
    greedy, groups = config.num_beams == 1, config.num_beam_groups or 1
    ends = _end_tokens_of_criteria(stopping_criteria, settings.max_length)
    if ends is None:
        names = ", ".join(type(criterion).__name__ for criterion in stopping_criteria)
        raise ValueError(
            f"stopping_criteria: expected a maximum length and end tokens, got {names}"
        )
    memory, lengths = memory_of(
        model_kwargs["encoder_outputs"], model_kwargs.get("attention_mask"), decoder.device
    )
    memory, lengths = memory[:: settings.num_beams], lengths[:: settings.num_beams]
    parameters, state = new_search(
        settings,
        input_ids,
        num_groups=groups,
        end_tokens=ends,
        keep_beam_indices=bool(config.return_dict_in_generate),
    )
    if greedy:
        parameters.early_stopping.fill_(1)
    searches = decoder.new_searches(
        state,
        parameters,
        token_rules(
            logits_processor,
            decoder.config.vocab_size,
            len(state.done),
            (config.diversity_penalty or 0.0) if groups > 1 else 0.0,
        ),
        memory.shape[1],
        num_groups=groups,
        num_candidates=max(2, 1 + len(ends)) * state.scores.shape[1],
        rules="scorer" if groups > 1 else "generate",
        greedy=greedy,
    )
    searches.read_memory(memory, lengths, torch.arange(settings.batch, device=decoder.device))
    steps = searches.run()
    state = searches.state
    if bool(state.status.any()):
        raise_for_prompts(state.status.view(settings.batch, groups).amax(dim=1), steps)
    if groups > 1:
        sequences, scores, indices = _group_result(settings, groups, searches)
    else:
        sequences, scores, indices = _plain_result(settings, input_ids, searches, greedy, config)
    if isinstance(searches, DecodingSearches):
        searches.release()
    sequences, scores, indices = sequences.to(device), scores.to(device), indices.to(device)
    if not config.return_dict_in_generate:
        return sequences
    result: dict[str, Any] = {"sequences": sequences}
    if greedy:
        return GenerateEncoderDecoderOutput(**result)
    result["sequences_scores"] = scores if config.output_scores else None
    result["beam_indices"] = indices
    return GenerateBeamEncoderDecoderOutput(**result)


def _plain_result(
    settings: SearchSettings,
    input_ids: Tensor,
    searches: DecodingSearches | DeviceSearches,
    greedy: bool,
    config: GenerationConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return sequences, scores and beam indices, as ``PlainSearch.finish`` does."""
    final = beam_finalize(searches.state, searches.parameters, settings.num_return_sequences)
    start = settings.prompt_length
    lengths = final.lengths.clamp(min=start)
    length = int(lengths.max())
    fill = settings.fill
    if greedy and config._pad_token_tensor is not None:
        fill = int(config._pad_token_tensor)
    sequences = torch.where(
        torch.arange(length) < lengths[..., None], final.sequences[..., :length], fill
    )
    sequences[..., :start] = input_ids.view(settings.batch, settings.num_beams, -1)[:, :1]
    first_rows = torch.arange(0, len(input_ids), settings.num_beams, dtype=torch.int32)
    beams = final.beam_indices[..., start:length]
    indices = torch.where(beams < 0, beams, beams + first_rows[:, None, None])
    return (
        sequences.flatten(0, 1),
        final.scores.flatten().to(torch.float32),
        indices.flatten(0, 1),
    )


def _group_result(
    settings: SearchSettings, groups: int, searches: DecodingSearches | DeviceSearches
) -> tuple[Tensor, Tensor, Tensor]:
    """Return sequences, scores and beam indices, as ``GroupSearch.finish`` does."""
    size = settings.num_beams // groups
    final = beam_finalize(
        searches.state,
        searches.parameters,
        settings.num_return_sequences,
        num_groups=groups,
        rules="scorer",
    )
    length = int(final.lengths.max())
    if settings.end_tokens:
        length = min(length + 1, settings.max_length)
    first_rows = torch.arange(settings.batch)[:, None] * settings.num_beams
    first_rows = first_rows + torch.div(final.places, size, rounding_mode="floor") * size
    beams = final.beam_indices[..., settings.prompt_length : length]
    indices = torch.where(beams < 0, beams, beams + first_rows[..., None].to(torch.int32))
    scores = final.scores.masked_fill(final.scores < _NOT_REAL, -torch.inf)
    return (
        final.sequences[..., :length].flatten(0, 1),
        scores.flatten().to(torch.float32),
        indices.flatten(0, 1),
    )
