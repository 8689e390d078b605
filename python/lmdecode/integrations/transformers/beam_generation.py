"""The decoding loop of ``generate()`` for beam search."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from lmdecode.integrations.transformers._beam_loop import decode
from lmdecode.integrations.transformers._generate_call import (
    arguments_of_generate,
    needs_synced_gpus,
    refuse_assistance,
)
from lmdecode.integrations.transformers._plain_search import PlainSearch
from lmdecode.integrations.transformers._recorder import Recorder

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
    from transformers._typing import GenerativePreTrainedModel
    from transformers.generation.streamers import BaseStreamer
    from transformers.generation.utils import (
        GenerateBeamDecoderOnlyOutput,
        GenerateBeamEncoderDecoderOutput,
    )


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
    caller = arguments_of_generate(sys._getframe(1))
    refuse_assistance(generation_config, caller, "this is beam search")
    if synced_gpus is None:
        synced_gpus = caller.synced_gpus
    if synced_gpus is None:
        synced_gpus = needs_synced_gpus(model)
    recorder = Recorder(model, generation_config, model_kwargs)
    search = PlainSearch(
        input_ids, generation_config, logits_processor, stopping_criteria, recorder
    )
    input_ids, model_kwargs = decode(
        model, search, input_ids, generation_config, synced_gpus, model_kwargs
    )
    return recorder.beam_result(search.finish(input_ids), model_kwargs)
