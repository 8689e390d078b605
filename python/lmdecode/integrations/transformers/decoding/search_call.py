"""Arguments of the loops of encoder-decoder models, as ``generate()`` prepares them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from lmdecode.integrations.transformers.beam.settings import SearchSettings
from lmdecode.integrations.transformers.decoding.no_speech import NoSpeech

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

__all__ = ["SearchCall"]


class SearchCall(NamedTuple):
    """Arguments of one call of the loop by ``generate()``; only the memory may be on a device.

    ``input_ids`` and ``padding`` (bool, True for padding) are [batch * num_beams, length].
    ``memory`` is [batch, S, M] float32 with ``lengths`` [batch] int64. The config belongs to this
    call. ``no_speech`` runs on the prompts.
    """

    model: Any
    settings: SearchSettings
    input_ids: Tensor
    padding: Tensor | None
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    memory: Tensor
    lengths: Tensor
    no_speech: NoSpeech | None
