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

    Attributes
    ----------
    model, config
        Of transformers. The config belongs to this call.
    settings, input_ids
        Of the search, and its prompts, [batch * num_beams, length] int64.
    padding : Tensor or None
        [batch * num_beams, length] bool: True for padding of the prompts.
    processors, criteria
        Any.
    memory, lengths : Tensor
        [batch, S, M] float32 and [batch] int64.
    no_speech
        The ``NoSpeech`` to run on the prompts, or None.
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
