"""The arguments of ``generate_with_store``: what is looked up, what goes on to ``generate()``."""

from __future__ import annotations

import hashlib
import inspect
from array import array
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lmdecode.integrations.transformers.generate_call import CACHE

if TYPE_CHECKING:
    from transformers import GenerationConfig
    from transformers._typing import GenerativePreTrainedModel

    from lmdecode.store import KVStore, Session

_DEFAULT_CHUNK = 128
_OUTPUTS = ("output_attentions", "output_hidden_states")
# Arguments of forward passes that change no key or value of the tokens, or that are looked at here.
_KNOWN_INPUTS = {
    "input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask", CACHE,
    "past_key_values", "use_cache", "logits_to_keep", *_OUTPUTS, "return_dict",
}  # fmt: skip


class StoredEncoderInput(NamedTuple):
    """Input of a model's encoder: token ids [1, S], and a mask [1, S] or None."""

    ids: Tensor
    mask: Tensor | None


class StoredRequest(NamedTuple):
    """One call, read and checked.

    Attributes
    ----------
    input_ids, tokens
        The tokens to go on from, of the decoder, [1, P] and side by side.
    context
        What the keys and values depend on besides.
    encoder
        None for a decoder alone.
    num_beams
        1: none.
    chunk_size
        Tokens of a forward pass of the prompt; None: all in one.
    capacity
        Tokens that the sequence will have at most, as far as this is known.
    outputs
        Attentions and hidden states of the encoder that are asked for.
    arguments
        Of ``generate()``, without tokens, masks and cache.
    """

    input_ids: Tensor
    tokens: array[int]
    context: bytes
    encoder: StoredEncoderInput | None
    num_beams: int
    chunk_size: int | None
    capacity: int
    outputs: dict[str, bool]
    arguments: dict[str, Any]


def check_is_store(op: str, store: Any) -> None:
    """Raise TypeError where it is none."""
    from lmdecode.store import KVStore

    if not isinstance(store, KVStore):
        raise TypeError(f"{op}: store is {type(store).__name__}; expected a KVStore")


def check_store(op: str, model: GenerativePreTrainedModel, store: KVStore) -> None:
    """Raise where it is no store, or was opened for other weights, or another shape or dtype."""
    from lmdecode.store.fingerprint import cache_shape

    check_is_store(op, store)
    theirs = store.fingerprint
    shape = cache_shape(model.config)
    window = shape.pop("window")
    windows = (window,) * shape["num_layers"] if isinstance(window, int) else window
    expected = {
        **shape,
        "windows": windows if windows and any(windows) else None,
        "dtype": str(model.dtype).removeprefix("torch."),
    }
    for name, value in expected.items():
        if getattr(theirs, name) != value:
            raise ValueError(
                f"{op}: {name} of the store's fingerprint is {getattr(theirs, name)}; expected "
                f"{value}, that of the model: see Fingerprint.from_model"
            )
    store.check_model(model)
    devices = set((getattr(model, "hf_device_map", None) or {}).values())
    if len(devices) > 1:
        raise ValueError(f"{op}: the model lies on {len(devices)} devices; expected one")


def check_positive(op: str, name: str, value: int | None) -> None:
    """Raise ValueError where a number of tokens is neither None nor 1 or more."""
    if value is not None and (not isinstance(value, int) or value < 1):
        raise ValueError(f"{op}: {name} is {value}; expected 1 or more, or None")


def _one_row(op: str, ids: Any, name: str) -> Tensor:
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dtype == torch.bool:
        kind = f"a {ids.dtype} tensor" if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"{op}: {name} is {kind}; expected a tensor of token ids")
    if ids.dim() != 2 or ids.shape[0] != 1 or ids.shape[1] < 1:
        raise ValueError(
            f"{op}: {name} has shape {list(ids.shape)}; expected [1, n]: a session is one row, so "
            "call it once for each"
        )
    return ids


def _check_padding(
    op: str, config: GenerationConfig, name: str, ids: Tensor, mask: Tensor | None, pads: bool
) -> None:
    if mask is not None:
        if mask.shape != ids.shape or not bool((mask != 0).all()):
            raise ValueError(
                f"{op}: {name} has zeros or another shape than the tokens; expected [1, "
                f"{ids.shape[1]}] of ones: one row needs no padding"
            )
    elif pads and config.pad_token_id is not None:
        ends = config.eos_token_id
        ends = ends if isinstance(ends, (list, tuple)) else [ends]
        # generate() takes these for padding, which depends on where they stand.
        if config.pad_token_id not in ends and bool((ids == config.pad_token_id).any()):
            raise ValueError(
                f"{op}: the tokens have the padding token {config.pad_token_id}; expected none: "
                "one row needs no padding. Where it is a token like others, as in an answer, give "
                f"a mask of ones: {name}=torch.ones_like(ids)"
            )


def _decoder_ids(op: str, config: GenerationConfig, given: Tensor | None, like: Tensor) -> Tensor:
    """Return the decoder's tokens as ``generate()`` begins them."""
    start = config.decoder_start_token_id
    start = config.bos_token_id if start is None else start
    if isinstance(start, (list, tuple)):
        start = start[0] if len(start) == 1 else None
    if start is None:
        raise ValueError(f"{op}: decoder_start_token_id is not known; expected an int")
    first = like.new_full((1, 1), int(start))
    if given is None:
        return first
    ids = _one_row(op, given, "decoder_input_ids").to(like.device)
    return ids if int(ids[0, 0]) == int(start) else torch.cat([first, ids], dim=1)


def appended(
    op: str, model: Any, session: Session, input_ids: Any, arguments: dict[str, Any]
) -> tuple[Tensor, dict[str, Any]]:
    """Return the session's tokens with the new ones, and the arguments with a mask of both."""
    if model.config.is_encoder_decoder:
        raise ValueError(f"{op}: append is True; expected False for an encoder-decoder model")
    new = _one_row(op, input_ids, "input_ids")
    known = session.input_ids
    if known is None:
        return new, arguments
    mask = arguments.get("attention_mask")
    if mask is None:
        _check_padding(op, model.generation_config, "attention_mask", new, None, pads=True)
        mask = torch.ones_like(new)
    elif not isinstance(mask, Tensor) or mask.shape != new.shape:
        raise ValueError(
            f"{op}: attention_mask has another shape than the new tokens; expected [1, "
            f"{new.shape[1]}] with append=True"
        )
    known = known.to(new.device, new.dtype)
    mask = torch.cat([torch.ones_like(known, dtype=mask.dtype), mask.to(new.device)], dim=1)
    return torch.cat([known, new], dim=1), {**arguments, "attention_mask": mask}


def _field(name: bytes, data: bytes) -> bytes:
    return len(name).to_bytes(8, "little") + name + len(data).to_bytes(8, "little") + data


def encoder_context(
    input_ids: Tensor, attention_mask: Tensor | None = None, context: bytes = b""
) -> bytes:
    """Return the context of what an encoder-decoder model computes of an input.

    ``generate_with_store`` passes it to the store: ``store.session(id, context=...)`` with it is
    the session of that name.

    Parameters
    ----------
    input_ids, attention_mask
        Of the encoder, [1, n]; a mask of ones is the same as none.
    context
        That of ``generate_with_store``.

    Returns
    -------
    bytes
        32 bytes, a SHA-256.
    """
    digest = hashlib.sha256(_field(b"lmdecode.encoder.1", context))
    ids = input_ids[0].tolist()
    mask = [1] * len(ids)
    if attention_mask is not None:
        mask = (attention_mask[0] != 0).long().tolist()
    digest.update(_field(b"ids", array("q", ids).tobytes()))
    digest.update(_field(b"mask", array("q", mask).tobytes()))
    return digest.digest()


def read_request(
    op: str,
    model: GenerativePreTrainedModel,
    input_ids: Any,
    context: bytes,
    arguments: dict[str, Any],
) -> StoredRequest:
    """Read the arguments; raise ValueError or TypeError for what a session cannot do."""
    ids = _one_row(op, input_ids, "input_ids").to(model.device)
    options = dict(arguments)
    kind: Any = type(model)  # its own: the model's may have been replaced by Decoding's
    own = set(inspect.signature(kind.generate).parameters)
    config, inputs = model._prepare_generation_config(
        options.get("generation_config"), **{k: v for k, v in options.items() if k not in own}
    )
    forward = set(inspect.signature(model.forward).parameters)
    for name, value in inputs.items():
        if value is not None and name in forward and name not in _KNOWN_INPUTS:
            raise ValueError(
                f"{op}: {name} is given; expected token ids and their masks alone, as these are "
                "what a session is found by"
            )
    if config.use_cache is False:
        raise ValueError(f"{op}: use_cache is False; expected a cache to store")
    for name in ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit"):
        if options.get(name) is not None or getattr(config, name, None) is not None:
            raise ValueError(f"{op}: {name} is given; expected no assisted generation")
    num_beams, rows = config.num_beams or 1, config.num_return_sequences or 1
    if rows > 1 and num_beams == 1:
        raise ValueError(
            f"{op}: num_return_sequences is {rows}; expected 1 without beams: a session is one "
            "sequence"
        )
    for name in (CACHE, "past_key_values", "attention_mask", "decoder_input_ids",
                 "decoder_attention_mask", "prefill_chunk_size"):  # fmt: skip
        options.pop(name, None)
    mask = inputs.get("attention_mask")
    encoder = None
    if model.config.is_encoder_decoder:
        encoder = StoredEncoderInput(ids, None if mask is None else mask.to(model.device))
        context = encoder_context(ids, encoder.mask, context)
        given = inputs.get("decoder_input_ids")
        ids = _decoder_ids(op, config, given, ids)
        mask = inputs.get("decoder_attention_mask")
        if mask is not None:
            of = ids if given is None else given
            _check_padding(op, config, "decoder_attention_mask", of, mask, pads=False)
    else:
        _check_padding(op, config, "attention_mask", ids, mask, pads=True)
    # None, and only where the caller said so: all in one.
    chunk_size = config.prefill_chunk_size
    if chunk_size is None and "prefill_chunk_size" not in arguments:
        chunk_size = _DEFAULT_CHUNK
    check_positive(op, "prefill_chunk_size", chunk_size)
    tokens = array("i", ids[0].tolist())
    new = config.max_new_tokens or max(0, (config.max_length or 0) - len(tokens)) or 20
    outputs = {name: True for name in _OUTPUTS if getattr(config, name, None)}
    return StoredRequest(
        ids, tokens, context, encoder, num_beams, chunk_size, len(tokens) + new, outputs, options
    )
