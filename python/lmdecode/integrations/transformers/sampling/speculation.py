"""Speculative decoding of a transformers model: a step reads draft tokens ahead."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from transformers import Cache, LogitsProcessorList
from transformers.generation import AssistedCandidateGenerator

from lmdecode._checks import check_count
from lmdecode.decoder.engine.drafts import ReadAhead, next_size
from lmdecode.integrations.transformers.generate_call import CACHE, check_reads_drafts, draft_inputs
from lmdecode.integrations.transformers.sampling.fusion import keeps_no_state
from lmdecode.sampling.drafts import prompt_lookup

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import GenerationConfig
    from transformers._typing import GenerativePreTrainedModel


__all__ = [
    "Lookup",
    "Speculation",
    "SpeculativeAssistant",
    "SpeculativeDrafts",
    "SpeculativeLookup",
    "check_speculation",
    "lookup_of",
]

_MOST = 1 << 24  # tokens of a draft
_MATCHING_NGRAM = 2  # the default of transformers


class Lookup(NamedTuple):
    """Settings of prompt lookup in ``generate()``; see ``prompt_lookup``."""

    num_tokens: int
    max_ngram: int


def lookup_of(config: GenerationConfig, op: str) -> tuple[GenerationConfig, Lookup | None]:
    """Return a config without prompt lookup, and its ``Lookup``; ``op`` is for errors."""
    num_tokens = getattr(config, "prompt_lookup_num_tokens", None)
    if num_tokens is None:
        return config, None
    num_tokens = check_count(op, "prompt_lookup_num_tokens", num_tokens)
    size = config.max_matching_ngram_size
    size = _MATCHING_NGRAM if size is None else size
    size = check_count(op, "max_matching_ngram_size", size)
    lookup = Lookup(min(num_tokens, config.max_length), size)
    config = copy.copy(config)
    config.prompt_lookup_num_tokens = None
    return config, lookup


class SpeculativeDrafts(Protocol):
    """Proposes tokens."""

    def propose(
        self, input_ids: torch.Tensor, most: int, model_kwargs: dict[str, Any]
    ) -> list[int]: ...

    def judge(self, input_ids: torch.Tensor, num_read: int, num_right: int) -> None: ...

    def close(self) -> None: ...


class SpeculativeLookup:
    """Draft tokens by prompt lookup: the tokens after an earlier occurrence of the last n-gram.

    It drafts fewer tokens after a rejection.
    """

    def __init__(self, lookup: Lookup, vocab: int) -> None:
        self._lookup, self._vocab, self._size = lookup, vocab, lookup.num_tokens

    def propose(
        self, input_ids: torch.Tensor, most: int, model_kwargs: dict[str, Any]
    ) -> list[int]:
        """Return at most ``most`` draft tokens that may follow ``input_ids``, [1, S] int64."""
        text, size = input_ids[0].cpu(), min(self._size, most)
        drafted: list[int] = []
        for token in prompt_lookup(text, size, self._lookup.max_ngram).tolist():
            if not 0 <= token < self._vocab:  # the end, or a placeholder of an image
                break
            drafted.append(token)
        return drafted

    def judge(self, input_ids: torch.Tensor, num_read: int, num_right: int) -> None:
        """Learn how many tokens of the last proposal were right."""
        self._size = next_size(self._lookup.num_tokens, num_right)

    def close(self) -> None:
        """Nothing is kept."""


def check_speculation(
    name: str,
    model: GenerativePreTrainedModel,
    input_ids: torch.Tensor,
    model_kwargs: dict[str, Any],
    synced_gpus: bool,
) -> None:
    """Raise ValueError if the loop cannot read draft tokens ahead.

    ``name`` is the argument that asks for drafts; ``model_kwargs`` are from before the prompt is
    read.
    """
    check_reads_drafts(name)
    if input_ids.shape[0] != 1:
        raise ValueError(
            f"{name}: expected one sequence, got {input_ids.shape[0]}: sequences would not stay of "
            "one length"
        )
    if synced_gpus:
        raise ValueError(
            f"{name}: expected None with synced_gpus, as each process takes other steps"
        )
    cache = model_kwargs.get(CACHE)
    if not model_kwargs.get("use_cache") or not isinstance(cache, Cache):
        raise ValueError(f"{name}: expected a cache of keys and values, got {type(cache).__name__}")
    # The layers of a DynamicCache are made with the prompt. Those that exist are checked now.
    if cache.is_compileable:
        _refuse_cache(name, cache)


def _refuse_cache(name: str, cache: Cache) -> None:
    raise ValueError(
        f"{name}: expected a cache that can let go of its last tokens, as DynamicCache and "
        f"DynamicRingCache do, got {type(cache).__name__}, which cannot"
    )


def _can_crop(cache: Any) -> bool:
    layers = getattr(cache, "self_attention_cache", cache).layers
    return all(layer.is_croppable and not hasattr(layer, "_quantize") for layer in layers)


def _position(outputs: Any, place: int, behind: int) -> Any:
    """Return a model's outputs at one of the tokens it read; ``behind`` tokens follow it."""
    if place == 0 and behind == 0:
        return outputs
    one = copy.copy(outputs)
    here = slice(place, place + 1)
    one.logits = outputs.logits[:, here]
    for name in ("hidden_states", "decoder_hidden_states"):
        if outputs.get(name) is not None:
            one[name] = tuple(states[:, here] for states in outputs[name])
    for name in ("attentions", "decoder_attentions"):
        if outputs.get(name) is not None:
            one[name] = tuple(
                None if weights is None else weights[..., here, : weights.shape[-1] - behind]
                for weights in outputs[name]
            )
    if outputs.get("cross_attentions") is not None:
        one["cross_attentions"] = tuple(w[..., here, :] for w in outputs["cross_attentions"])
    return one


class Speculation:
    """The outputs of a model at the last token of a text, some computed ahead.

    A step reads the last token and the draft tokens after it. While the chosen tokens equal the
    drafts, the next outputs are already computed. So each token is chosen from its logits as
    without drafts. Rejected tokens are removed from the cache.

    ``name`` is the argument of ``generate()`` that asks for it, ``forward`` runs the model, and
    ``model_kwargs`` are from before the prompt is read.
    """

    def __init__(
        self,
        name: str,
        model: GenerativePreTrainedModel,
        forward: Any,
        drafts: SpeculativeDrafts,
        model_kwargs: dict[str, Any],
        max_length: int | None,
    ) -> None:
        self._name, self._model, self._forward, self._drafts = name, model, forward, drafts
        self._max_length = max_length
        self._cache: Any = model_kwargs[CACHE]
        self._cache.activate_past_recording()
        self._ahead = ReadAhead()
        self._outputs: Any = None

    def outputs(self, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> Any:
        """Return the model's outputs at the last token of [1, S]."""
        if not self._ahead.takes(int(input_ids[0, -1])):
            self._read(input_ids, model_kwargs)
        ahead = self._ahead
        return _position(self._outputs, ahead.num_right, len(ahead.left))

    def close(self) -> None:
        """Remove tokens from the cache that are not in the text."""
        self._take_back()
        self._drafts.close()

    def _read(self, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> None:
        if not _can_crop(self._cache):
            _refuse_cache(self._name, self._cache)
        ahead = self._ahead
        if ahead.num_read:
            self._drafts.judge(input_ids, ahead.num_read, ahead.num_right)
        self._take_back()
        drafted = self._propose(input_ids, model_kwargs)
        inputs = draft_inputs(self._model, input_ids, drafted, model_kwargs)
        self._outputs = self._forward(**inputs, return_dict=True)
        ahead.begin(drafted)

    def _propose(self, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> list[int]:
        room = _MOST
        if self._max_length is not None:
            room = min(room, self._max_length - input_ids.shape[1] - 1)  # the last one is not read
        return self._drafts.propose(input_ids, room, model_kwargs) if room > 0 else []

    def _take_back(self) -> None:
        # Sliding layers keep more than their window until then, even if nothing is removed.
        self._cache.crop(-len(self._ahead.left))
        self._ahead.begin([])
        self._outputs = None


# --- Drafts of an assistant -----------------------------------------------------------------------


def _vocab_size(model: Any) -> int:
    return int(model.config.get_text_config().vocab_size)


class SpeculativeAssistant:
    """Draft tokens of an assistant model.

    transformers' ``AssistedCandidateGenerator`` runs the assistant, keeps its cache, and decides
    how many tokens it drafts. Stateful processors are not called for drafts. ``inputs_tensor`` is
    the input of ``generate()``: the tokens, or the input of the encoder; None: not known. ``draw``
    is the assistant's decoding loop, for its ``generate(custom_generate=...)``. Raises ValueError
    if the vocabularies differ, the prompt is embeddings, or the input of an encoder is unknown.
    """

    def __init__(
        self,
        model: GenerativePreTrainedModel,
        assistant: Any,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
        model_kwargs: dict[str, Any],
        inputs_tensor: torch.Tensor | None,
        draw: Callable[..., Any],
    ) -> None:
        sizes = _vocab_size(model), _vocab_size(assistant)
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"assistant_model: expected the vocabulary of the model, {sizes[0]} tokens, got "
                f"{sizes[1]}"
            )
        if model_kwargs.get("inputs_embeds") is not None:
            raise ValueError(
                "assistant_model: expected None for inputs_embeds, which are of the model alone"
            )
        if assistant.config.is_encoder_decoder and inputs_tensor is None:
            raise ValueError(
                "assistant_model: expected it as an argument of generate(), which hands on the "
                "input of the encoder"
            )
        self._assistant, self._config, self._draw = assistant, generation_config, draw
        self._processors = LogitsProcessorList(filter(keeps_no_state, logits_processor))
        self._inputs_tensor = inputs_tensor
        self._generator: Any = None

    def propose(
        self, input_ids: torch.Tensor, most: int, model_kwargs: dict[str, Any]
    ) -> list[int]:
        """Return at most ``most`` draft tokens that may follow ``input_ids``, [1, S] int64."""
        if self._generator is None:  # It expects the arguments of its first text.
            self._generator = AssistedCandidateGenerator(
                input_ids,  # type: ignore[arg-type]
                self._assistant,
                self._config,
                model_kwargs,
                self._inputs_tensor,
                self._processors,
            )
            self._generator.assistant_kwargs["custom_generate"] = self._draw
        candidates = self._generator.get_candidates(input_ids)[0]
        drafted: list[int] = candidates[0, input_ids.shape[1] :].tolist()
        return drafted[:most]

    def judge(self, input_ids: torch.Tensor, num_read: int, num_right: int) -> None:
        """Learn how many tokens of the last proposal were right."""
        # Only its length is read.
        counted = torch.empty(1, num_read + 1, 0, dtype=torch.float32, device="cpu")
        self._generator.update_candidate_strategy(input_ids, counted, num_right)

    def close(self) -> None:
        """Store the learned settings in the assistant's config, if the config says so."""
        config = self._assistant.generation_config
        if self._generator is not None and config.num_assistant_tokens_schedule == "heuristic":
            config.num_assistant_tokens = self._generator.num_assistant_tokens
