"""Fingerprint of a model: all that its keys and values depend on besides the tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from lmdecode._checks import check_int, is_int, type_error
from lmdecode._memory import bytes_of
from lmdecode.store.weights_mark import weights_mark

_DTYPES = {
    "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2,
    "int8": torch.int8, "uint8": torch.uint8,
}  # fmt: skip
_SCALE_DTYPES = ("float32", "float16", "bfloat16")
# Fields that older stores lack, and their values there.
_LATER = {"scale_dtype": None, "state_size": 0}
# Entries of a configuration with names of places and versions, with facts of saving a model, and
# with outputs of a forward pass. None of these changes a key or a value; the dtypes of the weights
# are hashed with the weights.
_IRRELEVANT = {
    "_name_or_path", "name_or_path", "transformers_version", "_commit_hash", "architectures",
    "dtype", "torch_dtype", "use_cache", "output_attentions", "output_hidden_states", "return_dict",
}  # fmt: skip
# Kinds of layers with a window, and the configuration's entry for its size.
_WINDOWS = {
    "sliding_attention": "sliding_window", "hybrid_sliding": "sliding_window",
    "reference_sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size",
}  # fmt: skip


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str)


def _without_irrelevant(config: Any) -> Any:
    """A configuration's dictionary, those within it too, as far as it changes numbers."""
    if not isinstance(config, dict):
        return config
    return {k: _without_irrelevant(v) for k, v in config.items() if k not in _IRRELEVANT}


def cache_shape(config: Any) -> dict[str, Any]:
    """Read num_layers, num_kv_heads, head_size and window from a transformers config.

    An encoder-decoder model's decoder is read.
    """
    config = config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    windows: int | tuple[int | None, ...] | None = window
    if kinds is not None:
        windows = tuple(
            getattr(config, _WINDOWS[kind], None) if kind in _WINDOWS else None for kind in kinds
        )
        if len(set(windows)) == 1:
            windows = windows[0]
    elif window is None:
        windows = getattr(config, "attention_chunk_size", None)
    return {
        "num_layers": getattr(config, "num_decoder_layers", None) or config.num_hidden_layers,
        "num_kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_size": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "window": windows,
    }


def hash_config(digest: Any, config: Any) -> None:
    """Add a configuration of transformers to a digest of ``hashlib``, as far as it counts."""
    digest.update(_json(_without_irrelevant(config.to_dict())).encode())


def hash_tensor(digest: Any, tensor: torch.Tensor) -> None:
    """Add the bytes of a tensor to a digest of ``hashlib``."""
    digest.update(bytes_of(tensor.detach().cpu().contiguous()))


def hash_vocabulary(tokenizer: Any) -> str | None:
    """Return the ``tokenizer_hash`` of a fingerprint; None without a tokenizer."""
    if tokenizer is None:
        return None
    return hashlib.sha256(_json(tokenizer.get_vocab()).encode()).hexdigest()


def _at_least_1(name: str, value: object) -> int:
    try:
        return check_int("Fingerprint", name, value, 1)
    except TypeError as error:
        raise ValueError(str(error)) from None


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """The configuration of a model, as far as its keys and values depend on it.

    Attributes
    ----------
    model_id
        Name of the model.
    weights_hash
        Names the weights: another revision has another one.
    dtype
        Of keys and values: "float32", "float16", "bfloat16", "int8", "float8_e4m3fn",
        "float8_e5m2" or the torch dtype; "uint8" where they are bytes of another format, which
        ``layout`` names.
    num_layers, num_kv_heads, head_size
        Shape of the cache: K and V of a layer are [num_kv_heads, tokens, head_size].
    rope
        Position embedding: anything that JSON can say; None where there is none.
    window
        None where every token sees all before it; the number of tokens seen, itself included, by
        every layer; or one such number or None for each layer.
    layout
        A name for anything else about the order of the numbers.
    tensor_parallel_rank
        Which part of the heads this is.
    tokenizer_hash
        Names the tokenizer, where token ids alone do not say what was computed.
    state_size
        Float32 numbers of the state after a prefix, of layers that keep one beside those with
        keys and values. What is stored of a prefix ends with (state,), [state_size] float32, and
        a prefix is found where a state was stored. 0: there is none.
    mark
        ``weights_mark`` of the model, by which a store notices another model of the same shape;
        None: that of the first model that uses the store. Like the next two it is no part of what
        is compared, and of ``name``.
    scale_dtype
        Of a quantised cache's scales, a number for each key and each value of a head: "float32",
        "float16" or "bfloat16". A layer is then (K, V, K's scales, V's scales), and scales are
        [num_kv_heads, tokens]. None: a layer is (K, V); scales that are the same for all tokens
        belong to ``weights_hash`` or ``layout``.
    model_name, revision
        For people: where the model was loaded from.

    Raises
    ------
    ValueError
        A number that is no int or too small, an unknown dtype, windows that are not one a layer, or
        a ``scale_dtype`` beside a dtype that has no scales.
    """

    model_id: str
    weights_hash: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_size: int
    rope: Any = None
    window: int | tuple[int | None, ...] | None = None
    layout: str = "default"
    tensor_parallel_rank: int = 0
    tokenizer_hash: str | None = None
    scale_dtype: str | None = None
    state_size: int = 0
    mark: str | None = field(default=None, compare=False)
    model_name: str | None = field(default=None, compare=False)
    revision: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        dtype = str(self.dtype).removeprefix("torch.")
        object.__setattr__(self, "dtype", dtype)
        if dtype not in _DTYPES:
            raise ValueError(f"Fingerprint: dtype is {dtype}; expected one of {sorted(_DTYPES)}")
        if self.scale_dtype is not None:
            scale = str(self.scale_dtype).removeprefix("torch.")
            object.__setattr__(self, "scale_dtype", scale)
            if scale not in _SCALE_DTYPES:
                raise ValueError(
                    f"Fingerprint: scale_dtype is {scale}; expected one of {sorted(_SCALE_DTYPES)}"
                )
            if self.torch_dtype.itemsize != 1:
                raise ValueError(
                    f"Fingerprint: scale_dtype is {scale} and dtype is {dtype}; expected int8 or a "
                    "float8 beside scales"
                )
        for name in ("num_layers", "num_kv_heads", "head_size"):
            object.__setattr__(self, name, _at_least_1(name, getattr(self, name)))
        if not is_int(self.state_size) or self.state_size < 0:
            raise ValueError(
                f"Fingerprint: state_size is {self.state_size!r}; expected an int, at least 0"
            )
        window = self.window
        if isinstance(window, Iterable):
            window = tuple(None if one is None else _at_least_1("window", one) for one in window)
        elif window is not None:
            window = _at_least_1("window", window)
        object.__setattr__(self, "window", window)
        if self.windows is not None and len(self.windows) != self.num_layers:
            raise ValueError(
                f"Fingerprint: window has {len(self.windows)} numbers; expected one for each of "
                f"{self.num_layers} layers"
            )

    @property
    def windows(self) -> tuple[int | None, ...] | None:
        """One number or None a layer; None where no layer has a window."""
        if self.window is None:
            return None
        if isinstance(self.window, int):
            return (self.window,) * self.num_layers
        return self.window if any(self.window) else None

    @property
    def num_entries(self) -> int:
        """Entries of a cache: its layers and, if there is one, the state."""
        return self.num_layers + (self.state_size > 0)

    @property
    def has_checkpoints(self) -> bool:
        """Whether a prefix is found only where something that was stored ends."""
        return self.windows is not None or self.state_size > 0

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype of keys and values."""
        return _DTYPES[self.dtype]

    @property
    def scale_torch_dtype(self) -> torch.dtype | None:
        """Dtype of scales; None: there are none."""
        return None if self.scale_dtype is None else _DTYPES[self.scale_dtype]

    @property
    def stored_row(self) -> tuple[torch.dtype, int]:
        """How a head's key or value of one token lies in a slot: its elements, and how many.

        Behind a quantised one stand the bytes of its scale.
        """
        if self.scale_dtype is None:
            return self.torch_dtype, self.head_size
        return torch.uint8, self.head_size + _DTYPES[self.scale_dtype].itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys (equally, of the values) of one token in one layer."""
        dtype, size = self.stored_row
        return self.num_kv_heads * size * dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """Bytes of a state; 0: there is none."""
        return self.state_size * torch.float32.itemsize

    def encoded(self) -> bytes:
        """Return the fields as canonical JSON: equal for equal fingerprints alone."""
        content = self._compared()
        for name, left_out in _LATER.items():  # stores keep their names
            if content[name] == left_out:
                del content[name]
        return _json(content).encode()

    def _compared(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.compare}

    @staticmethod
    def decoded(data: bytes) -> Fingerprint:
        """Read what ``encoded`` wrote.

        Raises
        ------
        ValueError
            It is not that.
        """
        content = json.loads(data)
        names = {f.name for f in fields(Fingerprint) if f.compare}
        if isinstance(content, dict):
            names -= {
                name for name, left_out in _LATER.items() if content.get(name, left_out) == left_out
            }
        if not isinstance(content, dict) or set(content) != names:
            raise ValueError("Fingerprint: not the fields of one")
        return Fingerprint(**content)

    @property
    def title(self) -> str:
        """Display name of the model."""
        revision = f" at {self.revision}" if self.revision else ""
        return f"{self.model_name or self.model_id}{revision}"

    @property
    def name(self) -> str:
        """Name of the directory: the start of a SHA-256 of the fields."""
        return hashlib.sha256(self.encoded()).hexdigest()[:24]

    def difference(self, other: Fingerprint) -> str:
        """Both side by side, a line a field; fields that differ are marked."""
        mine, theirs = self._compared(), other._compared()
        width = max(len(_json(value)) for value in mine.values())
        return "\n".join(
            f"{'  ' if mine[name] == theirs[name] else '* '}{name:<21}"
            f" {_json(mine[name]):<{width}}  {_json(theirs[name])}"
            for name in mine
        )

    @staticmethod
    def from_model(model: Any, tokenizer: Any = None) -> Fingerprint:
        """Describe a transformers model.

        Every weight is hashed (SHA-256, about 2 GB/s), with the configuration: build the
        fingerprint once, or give your own ``weights_hash`` to the constructor.

        Parameters
        ----------
        model
            A decoder, or an encoder with its decoder, with ``config`` and ``state_dict()``. What
            is switched on and off without changing these, such as an adapter, belongs into the
            ``context`` of what is stored.
        tokenizer
            Its vocabulary is hashed, where one is given.
        """
        if not hasattr(model, "config") or not hasattr(model, "state_dict"):
            raise type_error("Fingerprint.from_model", "model", model, "a model of transformers")
        config = model.config.get_text_config(decoder=True)
        digest = hashlib.sha256()
        hash_config(digest, model.config)
        for name, tensor in sorted(model.state_dict().items()):
            shape = f"{name}:{tensor.dtype}:{tuple(tensor.shape)};"
            digest.update(shape.encode())
            hash_tensor(digest, tensor)
        rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
        return Fingerprint(
            model_id=type(model).__name__,
            weights_hash=digest.hexdigest(),
            dtype=str(model.dtype).removeprefix("torch."),
            **cache_shape(model.config),
            rope=json.loads(_json({"theta": getattr(config, "rope_theta", None), "scaling": rope})),
            tokenizer_hash=hash_vocabulary(tokenizer),
            mark=weights_mark(model),
            model_name=str(getattr(model.config, "_name_or_path", "") or "") or None,
            revision=getattr(model.config, "_commit_hash", None),
        )
