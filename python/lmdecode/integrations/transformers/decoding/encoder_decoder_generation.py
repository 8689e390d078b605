"""``generate()`` of an encoder-decoder model with its decoding loop in C++."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.generation.utils import (
    GenerateBeamEncoderDecoderOutput,
    GenerateEncoderDecoderOutput,
)

from lmdecode.beam.state import SearchDialect
from lmdecode.beam.token_rules import TokenRules, repeat_token_rules
from lmdecode.decoder.device_loop import DeviceDecoder, DeviceSearches
from lmdecode.decoder.searches import DecodingSearches, length_limits, new_searches
from lmdecode.generation_options import option_names
from lmdecode.integrations.transformers.beam.fused_processors import (
    looks_back,
    raise_for_processors,
    token_rules_of_processors,
    trie_of_processors,
)
from lmdecode.integrations.transformers.beam.search import search_result
from lmdecode.integrations.transformers.beam.settings import (
    SearchSettings,
    check_groups,
    new_search,
    raise_for_prompts,
)
from lmdecode.integrations.transformers.decoding.ctranslate2_rules import (
    FolderProcessors,
    with_rules,
)
from lmdecode.integrations.transformers.decoding.encoder_decoder_rows import (
    SearchCall,
    decode_by_sampling,
    decode_with_any_rules,
    leave_out,
    prompt_padding,
)
from lmdecode.integrations.transformers.decoding.encoding import memory_of
from lmdecode.integrations.transformers.decoding.whisper import (
    CallSounds,
    NoSpeech,
    cross_attentions,
)
from lmdecode.integrations.transformers.generate_call import (
    CACHE,
    behind_prompt,
    check_tries,
    end_tokens_of_criteria,
    has_trie,
    refuse_assistance,
    refuse_handed_on,
    refuse_inner_outputs,
    refuse_seed_of_beams,
    refuse_trie,
    seeds_of_rows,
    with_stop_strings,
)
from lmdecode.models.packed_stack import PackedDecoder

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

__all__ = ["decode_encoder_decoder"]

# Arguments that have no effect here; inputs_embeds are the encoder's.
_IGNORED = ("encoder_outputs", "inputs_embeds", CACHE, "decoder_attention_mask",
            "decoder_position_ids")  # fmt: skip


def _refuse(config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    """Raise ValueError for arguments of ``generate()`` that the loop does not support."""
    if config.num_beams is not None and config.num_beams < 1:
        raise ValueError(f"num_beams: expected at least 1, got {config.num_beams}")
    refuse_inner_outputs(config)
    for name in (*option_names("constraints"), "guidance_scale", "penalty_alpha"):
        value = getattr(config, name, None)
        if value is not None and not (name == "guidance_scale" and value == 1):
            raise ValueError(f"{name}: expected None, got {value!r}")
    num_beams = config.num_beams = config.num_beams or 1
    check_groups(config)
    if config.num_return_sequences > num_beams and not (config.do_sample and num_beams == 1):
        raise ValueError(
            f"num_return_sequences: expected at most num_beams = {num_beams}, "
            f"got {config.num_return_sequences}"
        )
    refuse_handed_on(model_kwargs, _IGNORED, "decoder")


def _refuse_on_device(config: GenerationConfig, padding: Tensor | None) -> None:
    """Raise ValueError for arguments that only the loop on the CPU supports."""
    if config.do_sample:
        raise ValueError("do_sample: expected False on a device, got True")
    if padding is not None:
        raise ValueError("decoder_attention_mask: expected ones on a device, got zeros")
    if not config.return_dict_in_generate:
        return
    for name in ("output_logits", "output_scores"):
        # With beams output_scores includes sequences_scores.
        if getattr(config, name) and (name == "output_logits" or (config.num_beams or 1) == 1):
            raise ValueError(f"{name}: expected False on a device, no logits are kept there")


def _check_max_length(decoder: PackedDecoder | DeviceDecoder, settings: SearchSettings) -> None:
    """Raise ValueError if sequences may become longer than the model supports."""
    for most, name in length_limits(decoder):
        if settings.max_length > most + 1:
            raise ValueError(
                f"max_length: expected at most {most + 1}, as the decoder has {most} {name}, got "
                f"{settings.max_length}: a prompt of {settings.prompt_length} and "
                f"{settings.max_length - settings.prompt_length} new tokens"
            )


def decode_encoder_decoder(
    decoder: PackedDecoder | DeviceDecoder,
    sounds: CallSounds | None,
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool | None = None,
    streamer: Any = None,
    *,
    seed: Any = None,
    stop_strings: str | list[str] | None = None,
    tokenizer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Decode by the arguments of ``generate()``: greedily, by sampling, or with any beam search.

    ``sounds`` are those of Whisper's rows, else None; ``synced_gpus`` and ``streamer`` are unused.
    ``seed`` is as for ``sample``, and an error with beam sampling. Returns what ``generate()``
    does: [B * num_return_sequences, length] int64, or outputs with the ``scores`` and ``logits`` of
    ``StepOutputs``. Raises ValueError for an argument that is not supported, and RuntimeError for
    NaN in the logits of a prompt, or no candidate above -inf.
    """
    config = generation_config
    refuse_assistance(config, None, "Decoding runs the model itself")
    stopping_criteria = with_stop_strings(stopping_criteria, stop_strings, tokenizer)
    # Whisper's generate() requests attentions to find the times of tokens.
    aligns_tokens = bool(getattr(config, "return_token_timestamps", None))
    if aligns_tokens:
        config.output_attentions = False
        model_kwargs.pop("output_attentions", None)
    _refuse(config, model_kwargs)
    device, input_ids = input_ids.device, input_ids.cpu()
    settings = SearchSettings.of(config, input_ids)
    logits_processor = behind_prompt(logits_processor, settings.prompt_length)
    logits_processor = with_rules(model, config, logits_processor, input_ids)
    check_tries(logits_processor, decoder.config.vocab_size)
    padding = prompt_padding(model, model_kwargs, input_ids)
    _check_max_length(decoder, settings)
    if sounds is not None and sounds.count:
        # With beams nothing is drawn, until a temperature is tried without beams.
        seed = seeds_of_rows(seed, input_ids[:1].expand(sounds.count, -1), config)
        if isinstance(seed, Tensor):
            seed = seed[sounds.of_rows()]
    else:
        if config.num_beams > 1:
            refuse_seed_of_beams(seed)
        seed = seeds_of_rows(seed, input_ids, config)
    is_on_cpu = isinstance(decoder, PackedDecoder)
    if not is_on_cpu:
        _refuse_on_device(config, padding)
        refuse_trie(logits_processor, "prefix_allowed_tokens_fn", "None on a device", "it")
    ends = end_tokens_of_criteria(stopping_criteria, settings.max_length)
    mask = model_kwargs.get("attention_mask")
    if model.main_input_name != "input_ids":
        mask = None  # Whisper's mask is of input features: its decoder attends to all of the memory
    encoder_outputs = model_kwargs["encoder_outputs"]
    memory, lengths = memory_of(encoder_outputs, mask, decoder.device)
    if config.num_beams > 1:
        # generate() has repeated it for the beams, and keeps its own reference until the end.
        memory, lengths = memory[:: config.num_beams].clone(), lengths[:: config.num_beams]
        if isinstance(encoder_outputs, dict) and "last_hidden_state" in encoder_outputs:
            encoder_outputs["last_hidden_state"] = memory
    no_speech: NoSpeech | None = None
    if is_on_cpu:
        no_speech, logits_processor = NoSpeech.take_from(
            logits_processor, input_ids, config.num_beams
        )
    rules, vocab_size = None, decoder.config.vocab_size
    if ends is not None and not config.do_sample:
        rules = token_rules_of_processors(logits_processor, vocab_size, has_timestamps=is_on_cpu)
        keeps_steps = config.return_dict_in_generate and (
            config.output_scores or config.output_logits
        )
        if isinstance(logits_processor, FolderProcessors) and config.num_beams > 1:
            if is_on_cpu and not keeps_steps and not has_trie(logits_processor):
                rules = logits_processor.rules_of_first_step(vocab_size, settings.prompt_length)
    if rules is not None and padding is not None and looks_back(rules):
        rules = None  # transformers' processors see the padding, too
    if (config.num_beam_groups or 1) > 1 and has_trie(logits_processor):
        rules = None  # with groups the loop in C++ continues with any token
    call = SearchCall(
        model, settings, input_ids, padding, logits_processor, stopping_criteria, config, memory,
        lengths, no_speech,
    )  # fmt: skip
    result: Any
    if rules is not None and ends is not None:
        result = _decode_in_cpp(decoder, call, rules, ends)
    elif isinstance(decoder, PackedDecoder):
        if config.do_sample and config.num_beams == 1:
            result = decode_by_sampling(decoder, call, seed)
        else:
            result = decode_with_any_rules(decoder, call)
    elif ends is None:
        names = ", ".join(type(criterion).__name__ for criterion in stopping_criteria)
        raise ValueError(
            f"stopping_criteria: expected a maximum length and end tokens on a device, got {names}"
        )
    else:
        raise_for_processors(logits_processor, vocab_size, config.num_beams == 1)
    if aligns_tokens:
        result["cross_attentions"] = cross_attentions(
            model, result["sequences"], memory, padding, config.num_beams
        )
    return _on_device(result, device)


def _on_device(result: Any, device: torch.device) -> Any:
    """Return the result on the device of the inputs."""
    if device.type == "cpu":
        return result
    if isinstance(result, Tensor):
        return result.to(device)
    for name, value in result.items():
        if isinstance(value, Tensor):
            result[name] = value.to(device)
        elif isinstance(value, tuple) and value and isinstance(value[0], Tensor):
            result[name] = tuple(tensor.to(device) for tensor in value)
    return result


def _decode_in_cpp(
    decoder: PackedDecoder | DeviceDecoder, call: SearchCall, rules: TokenRules, ends: list[int]
) -> Any:
    """Search by token rules and end tokens only; steps do not return to Python."""
    config, settings, input_ids, memory = call.config, call.settings, call.input_ids, call.memory
    greedy, groups = config.num_beams == 1, config.num_beam_groups or 1
    dialect: SearchDialect = "scorer" if groups > 1 else "generate"
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
        # It is the input of beams that continue without a candidate; results are filled below.
        parameters.pad_tokens.clamp_(0, decoder.config.vocab_size - 1)
    if greedy:
        parameters.early_stopping.fill_(1)
    leave_out(state, call.padding)
    trie = trie_of_processors(call.processors, decoder.config.vocab_size)
    more: dict[str, Any] = {} if trie is None else {"tries": [trie] * len(state.done)}
    searches = new_searches(
        decoder,
        state,
        parameters,
        repeat_token_rules(rules, len(state.done)),
        memory.shape[1],
        num_groups=groups,
        num_candidates=max(2, 1 + len(ends)) * state.scores.shape[1],
        dialect=dialect,
        greedy=greedy,
        **more,
    )
    requests = torch.arange(settings.batch, device=decoder.device)
    searches.read_memory(memory, call.lengths, requests)
    if call.no_speech is not None:
        assert isinstance(searches, DecodingSearches)
        call.no_speech.read(searches)
    if isinstance(call.processors, FolderProcessors) and isinstance(searches, DecodingSearches):
        searches.choose_first()
    is_kept = isinstance(decoder, PackedDecoder)
    outputs = StepOutputs(config, is_kept=is_kept)
    outputs.run(searches)
    state = searches.state
    failed = state.status != 0
    if bool(failed.any()):
        # The failed step is counted.
        step = int(state.lengths[failed].min()) - settings.prompt_length - 1
        raise_for_prompts(state.status.view(settings.batch, groups).amax(dim=1), step)
    found = search_result(
        settings, searches.parameters, state, input_ids, num_groups=groups, dialect=dialect
    )
    if isinstance(searches, DecodingSearches):
        searches.release()
    if not config.return_dict_in_generate:
        return found.sequences
    result: dict[str, Any] = {"sequences": found.sequences}
    for name, kept in (("scores", outputs.scores), ("logits", outputs.logits)):
        result[name] = None if kept is None else tuple(kept)
    if greedy:
        return GenerateEncoderDecoderOutput(**result)
    result["sequences_scores"] = found.scores if config.output_scores else None
    result["beam_indices"] = found.beam_indices
    return GenerateBeamEncoderDecoderOutput(**result)


class StepOutputs:
    """Collects ``output_scores`` and ``output_logits`` over the steps.

    ``scores`` has, for each step, [rows, V] float32 as in transformers: processed logits in greedy
    search, processed log-probabilities with beams, and 0 in rows of ended searches. ``logits`` has
    the unprocessed logits of the decoder. Nothing is collected unless ``is_kept``.
    """

    def __init__(self, config: GenerationConfig, *, is_kept: bool) -> None:
        is_kept = is_kept and bool(config.return_dict_in_generate)
        has_groups = (config.num_beam_groups or 1) > 1  # their diversity penalty is not a processor
        self.scores: list[Tensor] | None = None
        self.logits: list[Tensor] | None = None
        if is_kept and config.output_scores and not has_groups:
            self.scores = []
        if is_kept and config.output_logits:
            self.logits = []

    def run(self, searches: DecodingSearches | DeviceSearches) -> None:
        """Do steps until all searches have ended."""
        if isinstance(searches, DeviceSearches) or (self.scores is None and self.logits is None):
            searches.run()
            return
        slots, beams, _ = searches.state.sequences.shape
        shape = (slots * beams, searches.decoder.config.vocab_size)
        shapes = shape if self.scores is None else (2, *shape)
        found = torch.zeros(shapes, dtype=torch.float32, device="cpu")
        while searches.run(1, logits=found):
            if self.logits is not None:
                self.logits.append((found if self.scores is None else found[0]).clone())
            if self.scores is not None:
                self.scores.append(found[1].clone())
            found.zero_()
