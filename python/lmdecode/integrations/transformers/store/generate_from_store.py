"""``generate()`` with a persistent KV store: a conversation goes on where it was left."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, EncoderDecoderCache, StoppingCriteria, StoppingCriteriaList

from lmdecode.integrations.transformers.caches.kv_layers import check_layers
from lmdecode.integrations.transformers.generate_call import CACHE, given_cache
from lmdecode.integrations.transformers.store.cache import (
    cache_to_kv,
    clear,
    empty_cache_for,
    is_empty,
    load_cache,
    repeat_rows,
)
from lmdecode.integrations.transformers.store.conversation import Conversation, self_attention
from lmdecode.integrations.transformers.store.request import (
    StoredEncoderInput,
    StoredRequest,
    appended,
    check_positive,
    check_store,
    read_request,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers._typing import GenerativePreTrainedModel

    from lmdecode.store import KVStore


__all__ = ["generate_with_store", "prefill"]

_OP = "generate_with_store"


@torch.no_grad()
def prefill(
    model: GenerativePreTrainedModel,
    cache: Any,
    input_ids: Tensor,
    *,
    chunk_size: int | None = 128,
    on_chunk: Callable[[int], object] | None = None,
    **model_inputs: Any,
) -> None:
    """Compute the keys and values that a cache lacks of a sequence, in chunks.

    Chunks end at multiples of ``chunk_size``, wherever they begin, so that what follows is computed
    by the same forward passes, to the last bit, however much the cache held.

    Parameters
    ----------
    model
        With the weights that the cache is of.
    cache
        Holds the first tokens, or none.
    input_ids
        [1, n] int64: all tokens, of the decoder.
    chunk_size
        None: one forward pass.
    on_chunk
        Called with the number of tokens in the cache after each chunk.
    **model_inputs
        Further arguments of the forward pass: ``encoder_outputs`` and the encoder's
        ``attention_mask``.

    Raises
    ------
    ValueError
        ``chunk_size`` is below 1.
    """
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"prefill: chunk_size is {chunk_size}; expected 1 or more")
    name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    if model._supports_logits_to_keep():
        model_inputs["logits_to_keep"] = 1
    start, end = int(cache.get_seq_length()), input_ids.shape[1]
    while start < end:
        size = chunk_size or end
        stop = min(end, (start // size + 1) * size)
        chunk = {name: input_ids[:, start:stop]}
        model(**chunk, **{CACHE: cache}, use_cache=True, **model_inputs)
        start = stop
        if on_chunk is not None:
            on_chunk(start)


class _Recording(StoppingCriteria):
    """Stops nothing: sees each token of the answer, and lets it be stored now and then."""

    def __init__(self, conversation: Conversation, cache: Any) -> None:
        self._conversation = conversation
        self._cache = cache
        self._ids: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        self._ids = input_ids
        if self._conversation.is_due(input_ids.shape[1]):
            self.note()
            self._conversation.commit(self._cache, background=True)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def note(self) -> None:
        """Tell the conversation of the tokens that it has not seen."""
        if self._ids is not None:
            self._conversation.append(self._ids[0, self._conversation.num_tokens :].tolist())


def _ready_cache(
    model: Any,
    store: KVStore,
    request: StoredRequest,
    conversation: Conversation,
    named: tuple[str, Any],
    if_faster: bool,
) -> Any:
    """Return a cache that holds as much of the prompt as there is."""
    name, given = named
    if given is not None and not isinstance(given, Cache):
        raise TypeError(f"generate_with_store: {name} is {type(given).__name__}; expected a Cache")
    if given is not None and isinstance(given, EncoderDecoderCache) != (
        request.encoder is not None
    ):
        raise ValueError(
            f"generate_with_store: {name} is a {type(given).__name__}; expected an "
            "EncoderDecoderCache for an encoder-decoder model, and for no other"
        )
    if given is not None and not is_empty(given) and not conversation.left(given):
        raise ValueError(
            f"generate_with_store: {name} holds {int(given.get_seq_length())} tokens; "
            "expected an empty cache, or the one of this session's last call"
        )
    cache = conversation.begin(model, given)
    if cache is None:
        cache = given
        if cache is None:
            cache = empty_cache_for(model.config, request.capacity)
        elif not is_empty(cache):
            clear(cache)
        check_layers(self_attention(cache), "generate_with_store")
        conversation.load(lambda hit: load_cache(store, hit, cache, device=model.device), if_faster)
    return cache


class _Encoded(NamedTuple):
    """Encoder inputs of the decoder, and whether they came from the store."""

    inputs: dict[str, Any]
    was_stored: bool


def _encoded(
    model: Any, store: KVStore, request: StoredRequest, conversation: Conversation, cache: Any
) -> _Encoded:
    """Load the cross-attention, or run the encoder; nothing for a decoder alone."""
    encoder = request.encoder
    if encoder is None:
        return _Encoded({}, True)
    was_stored = int(cache.cross_attention_cache.get_seq_length()) > 0 or conversation.attempt(
        lambda: load_cross_attention(store, request.context, encoder, cache, model.device), False
    )
    if was_stored and not request.outputs:
        outputs = stand_in_outputs(model, encoder)
    else:
        with torch.no_grad():
            outputs = run_encoder(model, encoder, request.outputs)
    return _Encoded({"encoder_outputs": outputs, "attention_mask": encoder.mask}, was_stored)


def _compute_prompt(
    model: Any,
    store: KVStore,
    request: StoredRequest,
    conversation: Conversation,
    cache: Any,
    inputs: dict[str, Any],
) -> None:
    """Compute the prompt but for its last token, and begin to store it."""
    prompt = request.input_ids[:, :-1]
    before = int(cache.get_seq_length())
    if prompt.shape[1] <= before:
        return
    began = time.perf_counter()
    prefill(
        model, cache, prompt, chunk_size=request.chunk_size,
        on_chunk=lambda count: conversation.keep_prompt(cache, count), **inputs,
    )  # fmt: skip
    if model.device.type != "cpu":
        torch.accelerator.synchronize(model.device)
    store.record_prefill(prompt.shape[1] - before, time.perf_counter() - began)
    conversation.commit(cache, background=True)


def _generate(
    model: Any, request: StoredRequest, cache: Any, inputs: dict[str, Any], recording: _Recording
) -> Any:
    """Call ``generate()`` on a cache that lacks the last token of the prompt."""
    arguments = {**request.arguments, **inputs}
    ids, mask = request.input_ids, torch.ones_like(request.input_ids)
    if request.encoder is None:
        arguments["attention_mask"] = mask
    else:
        arguments.update(decoder_input_ids=ids, decoder_attention_mask=mask)
        ids = request.encoder.ids
    if request.num_beams > 1:
        repeat_rows(cache, request.num_beams)
    else:
        criteria = [*(arguments.get("stopping_criteria") or ()), recording]
        arguments["stopping_criteria"] = StoppingCriteriaList(criteria)
    return model.generate(ids, **{CACHE: cache}, **arguments)


def generate_with_store(
    model: GenerativePreTrainedModel,
    store: KVStore,
    session_id: str,
    input_ids: Tensor,
    *,
    context: bytes = b"",
    commit_every: int | None = 32,
    if_faster: bool = False,
    ttl: float | None = None,
    pin: bool = False,
    append: bool = False,
    rewind: bool = False,
    **generate_arguments: Any,
) -> Any:
    """Go on with a conversation: ``model.generate()``, computing only what is not stored.

    The tokens are looked up, the keys and values of the longest stored prefix loaded, those of the
    rest computed, and all of them, with the answer, stored for the next call, in this process or
    another. Where the session is continued directly, its cache is still there and nothing is looked
    up. The last token of the prompt is always computed alone, like every token of the answer.

    What the store cannot do, a damaged slot, a full disk, a file that cannot be read, is a miss or
    is not stored; a ``RuntimeWarning`` at most, and the same tokens.

    Parameters
    ----------
    model
        Any model with a language modelling head whose cache is keys and values, decoder-only or
        encoder-decoder.
    store
        Opened with the model's fingerprint.
    session_id
        Name of the conversation. Another one that begins with the same tokens is found too.
    input_ids
        [1, n] int64: all tokens of the conversation so far; of an encoder-decoder model those of
        the encoder, and the session is that of ``decoder_input_ids``.
    context
        What the keys and values depend on besides, such as the name of an adapter. Input of the
        encoder is covered already.
    commit_every
        Tokens of an answer after which it is stored in the background, to be there should the
        process end; None: when it is complete.
    if_faster
        Load only where ``KVStore.should_load`` expects that to be faster than computing.
    ttl, pin
        As for ``KVStore.put``.
    append
        ``input_ids``, and ``attention_mask`` where it is given, are of the new tokens alone: those
        of the session come before them. Of a decoder alone.
    rewind
        Where the tokens do not continue the session's, rewind it to what both have in common.
    **generate_arguments
        Of ``generate()``: ``attention_mask``, ``custom_generate=sample`` and the like.
        ``past_key_values``, which transformers 5.24 calls ``cache``: an empty cache to use, such as
        a ``DynamicRingCache``; None: a ``BeamDynamicCache``. ``prefill_chunk_size``: tokens of a
        forward pass of the prompt, 128 by default; None: all in one.

    Returns
    -------
    torch.Tensor or ModelOutput
        What ``generate()`` returns.

    Raises
    ------
    ValueError
        More than one row, padding, model inputs other than token ids, several returned sequences
        without beams, assisted generation, a cache that holds other tokens or cannot be stored,
        tokens that do not continue the session, or a store of another shape, dtype or weights than
        the model.
    StoreError, OSError
        With ``append=True``, where the session cannot be read.
    TypeError
        ``input_ids`` is no tensor of token ids, ``store`` no ``KVStore``, ``session_id`` no str or
        ``past_key_values`` no cache.

    See Also
    --------
    prefill, load_cache, cache_from_kv, cache_to_kv : the parts.
    """
    check_positive(_OP, "commit_every", commit_every)
    check_store(_OP, model, store)
    if append:
        input_ids, generate_arguments = appended(
            _OP, model, store.session(session_id, context=context), input_ids, generate_arguments
        )
    request = read_request(_OP, model, input_ids, context, generate_arguments)
    conversation = Conversation(
        store, session_id, request.tokens, request.context, chunk_size=request.chunk_size,
        commit_every=commit_every, ttl=ttl, pin=pin, rewind=rewind,
    )  # fmt: skip
    given = given_cache(generate_arguments)
    cache = _ready_cache(model, store, request, conversation, given, if_faster)
    encoded = _encoded(model, store, request, conversation, cache)
    recording = _Recording(conversation, cache)
    num_prompt = request.input_ids.shape[1] - 1
    prompt_kv = []
    try:
        _compute_prompt(model, store, request, conversation, cache, encoded.inputs)
        if request.num_beams > 1 and num_prompt > 0:
            prompt_kv = cache_to_kv(cache, num_prompt)
        result = _generate(model, request, cache, encoded.inputs, recording)
    except BaseException:
        if request.num_beams == 1:
            recording.note()
            conversation.interrupted(cache)
        raise
    sequences = result if isinstance(result, Tensor) else result.sequences
    conversation.append(sequences[0, conversation.num_tokens :].tolist())
    if not encoded.was_stored:
        conversation.attempt(
            lambda: store_cross_attention(store, request.context, cache, ttl=ttl, pin=pin), False
        )
    if request.num_beams > 1:
        # The rows of the cache are beams that went on; the answer is computed with what follows it.
        conversation.commit_kv(prompt_kv, num_prompt)
    else:
        conversation.commit(cache)
        conversation.leave(model, cache)
    return result


_CROSS = b"lmdecode.cross_attention.1:"


def load_cross_attention(
    store: KVStore, context: bytes, encoder: StoredEncoderInput, cache: Any, device: torch.device
) -> bool:
    """Fill the cross-attention of an ``EncoderDecoderCache``, if all of it is stored.

    ``context`` names the encoder's input as a whole: its keys and values depend on all of it, so a
    prefix is of no use.
    """
    if store.fingerprint.windows is not None:  # of self-attention; a store has but one shape
        return False
    length = encoder.ids.shape[1]
    hit = store.lookup(range(length), context=_CROSS + context)
    try:
        part = cache.cross_attention_cache
        if hit.num_tokens < length or not load_cache(store, hit, part, device=device):
            return False
    finally:
        hit.release()
    cache.is_updated = dict.fromkeys(range(len(part.layers)), True)
    return True


def store_cross_attention(
    store: KVStore, context: bytes, cache: Any, *, ttl: float | None, pin: bool
) -> bool:
    """Store the cross-attention, once there is one; False: it is not computed yet, or unfit."""
    part = cache.cross_attention_cache
    length = int(part.get_seq_length())
    shape = (store.fingerprint.num_kv_heads, store.fingerprint.head_size)
    if length == 0 or store.readonly or store.fingerprint.windows is not None:
        return False
    kv = cache_to_kv(part)
    if any((states.shape[0], states.shape[2]) != shape for pair in kv for states in pair):
        return False  # heads of another size than those of self-attention
    store.put(range(length), kv, context=_CROSS + context, ttl=ttl, pin=pin)
    return True


def run_encoder(model: Any, encoder: StoredEncoderInput, outputs: dict[str, bool]) -> Any:
    """Return the encoder's outputs."""
    return model.get_encoder()(
        input_ids=encoder.ids, attention_mask=encoder.mask, return_dict=True, **outputs
    )


def stand_in_outputs(model: Any, encoder: StoredEncoderInput) -> Any:
    """Return placeholder encoder outputs, for a cache that already has the cross-attention.

    Their length matters. Their values are never read.
    """
    from transformers.modeling_outputs import BaseModelOutput

    size = model.config.get_text_config(encoder=True).hidden_size
    states = torch.zeros((), dtype=model.dtype, device=model.device)
    return BaseModelOutput(last_hidden_state=states.expand(1, encoder.ids.shape[1], size))
