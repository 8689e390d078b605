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

from lmdecode.beam.state import Rules
from lmdecode.beam.token_rules import repeat_token_rules
from lmdecode.decoder.device_loop import DeviceDecoder
from lmdecode.decoder.searches import DecodingSearches, length_limits, new_searches
from lmdecode.decoder.weights import PackedDecoder
from lmdecode.integrations.transformers.beam.plain_search import end_tokens_of_criteria
from lmdecode.integrations.transformers.beam.search import search_result
from lmdecode.integrations.transformers.beam.settings import (
    SearchSettings,
    new_search,
    raise_for_prompts,
)
from lmdecode.integrations.transformers.decoding.refused import (
    refuse_handed_on,
    refuse_inner_outputs,
)
from lmdecode.integrations.transformers.decoding.rules import (
    raise_for_processors,
    token_rules_of_processors,
)
from lmdecode.integrations.transformers.decoding.search import decode_with_any_rules
from lmdecode.integrations.transformers.decoding.step_logits import StepLogits
from lmdecode.integrations.transformers.generate_call import (
    arguments_of_generate,
    refuse_assistance,
    with_stop_strings,
)

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

__all__ = ["decode", "memory_of"]

# What generate() hands on and is of no account here; inputs_embeds are the encoder's.
_IGNORED = frozenset(
    ("attention_mask", "cache_position", "encoder_outputs", "inputs_embeds", "past_key_values",
     "use_cache", "decoder_attention_mask", "position_ids", "decoder_position_ids",
     "next_sequence_length")
)  # fmt: skip


def _refuse(config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    """Raise ValueError for what ``generate()`` was asked for and the loop does not do."""
    if config.do_sample:
        raise ValueError("do_sample: expected False, Decoding searches and does not sample")
    if config.num_beams is not None and config.num_beams < 1:
        raise ValueError(f"num_beams: expected at least 1, got {config.num_beams}")
    refuse_inner_outputs(config)
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
    mask = model_kwargs.get("decoder_attention_mask")
    if mask is not None and not bool(mask.all()):
        raise ValueError(
            "decoder_attention_mask: expected ones, prompts of the decoder are not padded"
        )
    refuse_handed_on(model_kwargs, _IGNORED, "decoder")


def _refuse_on_device(config: GenerationConfig) -> None:
    """Raise ValueError for outputs of each step, which only the loop on the CPU has."""
    if not config.return_dict_in_generate:
        return
    for name in ("output_logits", "output_scores"):
        # With beams output_scores asks for sequences_scores, too.
        if getattr(config, name) and (name == "output_logits" or (config.num_beams or 1) == 1):
            raise ValueError(f"{name}: expected False on a device, no logits are kept there")


def _check_max_length(decoder: PackedDecoder | DeviceDecoder, settings: SearchSettings) -> None:
    """Raise ValueError for sequences that might outgrow the model."""
    for most, name in length_limits(decoder):
        if settings.max_length > most + 1:
            raise ValueError(
                f"max_length: expected at most {most + 1}, as the decoder has {most} {name}, got "
                f"{settings.max_length}: a prompt of {settings.prompt_length} and "
                f"{settings.max_length - settings.prompt_length} new tokens"
            )


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
    *,
    stop_strings: str | list[str] | None = None,
    tokenizer: Any = None,
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
    stop_strings, tokenizer
        Texts at which a sequence ends, and the model's tokenizer.

    Returns
    -------
    Tensor or GenerateBeamEncoderDecoderOutput or GenerateEncoderDecoderOutput
        [B * num_return_sequences, length] int64. ``scores`` and ``logits`` of the outputs are as
        ``StepLogits`` has them.

    Raises
    ------
    ValueError
        Names an argument of ``generate()`` that this cannot do.
    RuntimeError
        A prompt has NaN in its logits, or no candidate above -inf.
    """
    config = generation_config
    caller = arguments_of_generate(sys._getframe(1))
    refuse_assistance(config, caller, "Decoding runs the model itself")
    stopping_criteria = with_stop_strings(stopping_criteria, stop_strings, tokenizer)
    _refuse(config, model_kwargs)
    config.num_beams = config.num_beams or 1
    device, input_ids = input_ids.device, input_ids.cpu()
    settings = SearchSettings.of(config, input_ids)
    _check_max_length(decoder, settings)
    search_rules: Rules = "scorer" if (config.num_beam_groups or 1) > 1 else "generate"
    greedy, groups = config.num_beams == 1, config.num_beam_groups or 1
    is_on_cpu = isinstance(decoder, PackedDecoder)
    if not is_on_cpu:
        _refuse_on_device(config)
    ends = end_tokens_of_criteria(stopping_criteria, settings.max_length)
    mask = model_kwargs.get("attention_mask")
    if model.main_input_name != "input_ids":
        mask = None  # Whisper's is one of input features: its decoder looks at all of the memory
    encoder_outputs = model_kwargs["encoder_outputs"]
    memory, lengths = memory_of(encoder_outputs, mask, decoder.device)
    if config.num_beams > 1:
        # generate() has repeated it for the beams, and keeps what it gave us until the end.
        memory, lengths = memory[:: config.num_beams].clone(), lengths[:: config.num_beams]
        if isinstance(encoder_outputs, dict) and "last_hidden_state" in encoder_outputs:
            encoder_outputs["last_hidden_state"] = memory
    rules, vocab_size = None, decoder.config.vocab_size
    if ends is not None:
        rules = token_rules_of_processors(
            logits_processor, vocab_size, has_timestamps=is_on_cpu
        )
    if ends is None or rules is None:
        if isinstance(decoder, PackedDecoder):
            return decode_with_any_rules(
                decoder,
                model,
                settings,
                input_ids,
                logits_processor,
                stopping_criteria,
                config,
                memory,
                lengths,
            )
        if ends is None:
            names = ", ".join(type(criterion).__name__ for criterion in stopping_criteria)
            raise ValueError(
                "stopping_criteria: expected a maximum length and end tokens on a device, got "
                f"{names}"
            )
        raise_for_processors(logits_processor, vocab_size, greedy)
    if groups > 1:
        rules.diversity_penalty.fill_(config.diversity_penalty or 0.0)
    parameters, state = new_search(
        settings,
        input_ids,
        num_groups=groups,
        end_tokens=ends,
        keep_beam_indices=bool(config.return_dict_in_generate),
    )
    if groups == 1:
        # Beams that go on where too few candidates do are run with it; results are filled below.
        parameters.pad_tokens.clamp_(0, vocab_size - 1)
    if greedy:
        parameters.early_stopping.fill_(1)
    searches = new_searches(
        decoder,
        state,
        parameters,
        repeat_token_rules(rules, len(state.done)),
        memory.shape[1],
        num_groups=groups,
        num_candidates=max(2, 1 + len(ends)) * state.scores.shape[1],
        rules=search_rules,
        greedy=greedy,
    )
    searches.read_memory(memory, lengths, torch.arange(settings.batch, device=decoder.device))
    outputs = StepLogits(config, logits_processor, is_kept=is_on_cpu)
    outputs.run(searches)
    state = searches.state
    failed = state.status != 0
    if bool(failed.any()):
        # The step that failed has counted.
        step = int(state.lengths[failed].min()) - settings.prompt_length - 1
        raise_for_prompts(state.status.view(settings.batch, groups).amax(dim=1), step)
    found = search_result(
        settings, searches.parameters, state, input_ids, num_groups=groups, rules=search_rules
    )
    if isinstance(searches, DecodingSearches):
        searches.release()
    sequences = found.sequences.to(device)
    if not config.return_dict_in_generate:
        return sequences
    result: dict[str, Any] = {"sequences": sequences}
    for name, kept in (("scores", outputs.scores), ("logits", outputs.logits)):
        result[name] = None if kept is None else tuple(tensor.to(device) for tensor in kept)
    if greedy:
        return GenerateEncoderDecoderOutput(**result)
    result["sequences_scores"] = found.scores.to(device) if config.output_scores else None
    assert found.beam_indices is not None
    result["beam_indices"] = found.beam_indices.to(device)
    return GenerateBeamEncoderDecoderOutput(**result)
