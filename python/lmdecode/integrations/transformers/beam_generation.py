"""The decoding loop of ``generate()`` for beam search, of groups and with constraints too."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from lmdecode.integrations.transformers._beam_loop import Search, decode
from lmdecode.integrations.transformers._generate_call import (
    arguments_of_generate,
    needs_synced_gpus,
    refuse_assistance,
)
from lmdecode.integrations.transformers._group_search import GroupSearch, with_diversity
from lmdecode.integrations.transformers._plain_search import PlainSearch
from lmdecode.integrations.transformers._recorder import Recorder
from lmdecode.integrations.transformers._search_settings import SearchSettings

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
    from transformers._typing import GenerativePreTrainedModel
    from transformers.generation.streamers import BaseStreamer
    from transformers.generation.utils import (
        GenerateBeamDecoderOnlyOutput,
        GenerateBeamEncoderDecoderOutput,
    )


def _check_beams(config: GenerationConfig, rows: int) -> None:
    """Raise ValueError where the numbers of beams and results do not fit."""
    num_beams, results = config.num_beams or 1, config.num_return_sequences
    if num_beams < 2:
        raise ValueError(f"num_beams: expected at least 2 for beam search, got {num_beams}")
    if results > num_beams:
        raise ValueError(
            f"num_return_sequences: expected at most num_beams = {num_beams}, got {results}"
        )
    if rows % num_beams:
        raise ValueError(
            f"input_ids: expected num_beams = {num_beams} rows for each prompt, got {rows} rows"
        )
    if config.low_memory:
        raise ValueError(
            "low_memory: expected None, as in transformers since 4.50 all beams are run at once, "
            f"got {config.low_memory!r}"
        )


def _check_groups(config: GenerationConfig) -> int:
    """Return the number of groups; raise ValueError where the options do not fit."""
    groups, penalty = config.num_beam_groups or 1, config.diversity_penalty or 0.0
    if groups == 1:
        if penalty:
            raise ValueError(
                "num_beam_groups: expected at least 2 with a diversity_penalty, got 1"
            )
        return 1
    if groups < 1 or config.num_beams % groups:
        raise ValueError(
            f"num_beam_groups: expected a divisor of num_beams = {config.num_beams}, got {groups}"
        )
    if not penalty > 0:
        raise ValueError(
            "diversity_penalty: expected a number > 0, else all groups would be the same, "
            f"got {penalty}"
        )
    if config.do_sample:
        raise ValueError("do_sample: expected False for groups of beams, got True")
    if config.guidance_scale is not None and config.guidance_scale != 1:
        raise ValueError(
            "guidance_scale: expected None, its processor would run the model once a group, "
            f"got {config.guidance_scale}"
        )
    return groups


def beam_search(
    model: GenerativePreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool | None = None,
    streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> torch.Tensor | GenerateBeamDecoderOnlyOutput | GenerateBeamEncoderDecoderOutput:
    """Decode with beams: ``model.generate(..., num_beams=4, custom_generate=beam_search)``.
    """
    caller = arguments_of_generate(sys._getframe(1))
    refuse_assistance(generation_config, caller, "this is beam search")
    if streamer is not None or caller.streamer is not None:
        raise ValueError("streamer: expected None for beam search, whose tokens are not final")
    if synced_gpus is None:
        synced_gpus = caller.synced_gpus
    if synced_gpus is None:
        synced_gpus = needs_synced_gpus(model)
    _check_beams(generation_config, input_ids.shape[0])
    num_groups = _check_groups(generation_config)

    settings = SearchSettings.of(generation_config, input_ids)
    recorder = Recorder(model, generation_config, model_kwargs)
    search: Search
    if num_groups > 1:
        processors = with_diversity(
            logits_processor,
            generation_config.diversity_penalty,
            settings.num_beams,
            num_groups,
        )
        search = GroupSearch(
            settings, num_groups, input_ids, processors, stopping_criteria, recorder
        )
    else:
        search = PlainSearch(
            settings,
            input_ids,
            bool(generation_config.do_sample),
            logits_processor,
            stopping_criteria,
            recorder,
        )
    input_ids, model_kwargs = decode(
        model, search, input_ids, generation_config, synced_gpus, model_kwargs
    )
    return recorder.beam_result(search.finish(input_ids), model_kwargs)
