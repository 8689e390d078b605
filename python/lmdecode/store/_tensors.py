"""Tokens and KV tensors as the library sees them: buffers, addresses and strides."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from lmdecode.store._native import Plane
from lmdecode.store.fingerprint import Fingerprint

_MAX_TOKEN = 2**31 - 1
_TOKEN_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def token_ids(tokens: Sequence[int] | Tensor, what: str) -> memoryview:
    """Return token ids side by side as int32; of an ``array("i")`` a view of its own memory."""
    if isinstance(tokens, Tensor):
        flat = tokens.reshape(-1) if tokens.dim() == 2 and tokens.shape[0] == 1 else tokens
        is_plain = flat.layout == torch.strided and flat.device.type != "meta"
        if flat.dim() != 1 or flat.dtype not in _TOKEN_DTYPES or not is_plain:
            raise ValueError(
                f"{what}: tokens is a {tokens.dtype} tensor of shape {list(tokens.shape)}; "
                "expected integers of shape [n] or [1, n]"
            )
        if flat.numel() and (int(flat.min()) < 0 or int(flat.max()) > _MAX_TOKEN):
            raise ValueError(f"{what}: a token id is not in 0 to {_MAX_TOKEN}")
        ids = flat.detach().to("cpu", torch.int32).contiguous()
        copy = array("i")
        copy.frombytes(ctypes.string_at(ids.data_ptr(), ids.nbytes))
        return memoryview(copy)
    if isinstance(tokens, array) and tokens.typecode == "i":
        return memoryview(tokens)
    try:
        return memoryview(array("i", tokens))
    except OverflowError:
        raise ValueError(f"{what}: a token id is not in 0 to {_MAX_TOKEN}") from None
    except TypeError:
        raise TypeError(
            f"{what}: tokens is {type(tokens).__name__}; expected token ids, as a sequence of "
            "ints or a tensor"
        ) from None


def _plane(tensor: Tensor) -> Plane:
    size, address = tensor.element_size(), tensor.data_ptr()
    if not address and tensor.numel():  # a fake tensor, or one whose memory was given back
        raise ValueError(
            f"keys or values of shape {list(tensor.shape)} have no memory; expected tensors that "
            "hold their elements"
        )
    head, token, element = tensor.stride()
    return Plane(address, head * size, token * size, element * size, tensor.shape[1])


class Planes:
    """Keys and values of some layers, for reading or writing."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.planes = [_plane(tensor) for tensor in tensors]

    @staticmethod
    def checked(
        kv: Sequence[tuple[Tensor, Tensor]],
        fingerprint: Fingerprint,
        what: str,
        writable: bool = False,
    ) -> Planes:
        """Take a cache from a caller; the number of tokens is checked by the library."""
        if not isinstance(kv, Sequence):
            raise TypeError(
                f"{what}: kv is {type(kv).__name__}; expected a sequence of (K, V), one a layer"
            )
        if len(kv) != fingerprint.num_layers:
            raise ValueError(f"{what}: kv has {len(kv)} layers; expected {fingerprint.num_layers}")
        heads, size = fingerprint.num_kv_heads, fingerprint.head_size
        tensors = []
        for layer, pair in enumerate(kv):
            if not isinstance(pair, Sequence) or len(pair) != 2:
                raise ValueError(f"{what}: kv[{layer}] is {type(pair).__name__}; expected K and V")
            for name, tensor in zip("KV", pair, strict=True):
                if not isinstance(tensor, Tensor):
                    raise TypeError(
                        f"{what}: {name} of layer {layer} is {type(tensor).__name__}; expected a "
                        "tensor"
                    )
                if tensor.layout != torch.strided or tensor.device.type == "meta":
                    raise ValueError(
                        f"{what}: {name} of layer {layer} is a {tensor.layout} tensor on "
                        f"{tensor.device}; expected one whose elements lie in memory"
                    )
                plane = tensor.detach()
                if plane.dim() == 4 and plane.shape[0] == 1:
                    plane = plane[0]
                if plane.dim() != 3 or plane.shape[0] != heads or plane.shape[2] != size:
                    raise ValueError(
                        f"{what}: {name} of layer {layer} has shape {list(tensor.shape)}; expected "
                        f"[{heads}, tokens, {size}]"
                    )
                if plane.dtype != fingerprint.torch_dtype:
                    raise ValueError(
                        f"{what}: {name} of layer {layer} is {plane.dtype}; expected "
                        f"{fingerprint.torch_dtype}"
                    )
                overlaps = any(
                    size > 1 and stride == 0
                    for size, stride in zip(plane.shape, plane.stride(), strict=True)
                )
                if writable and (plane.device.type != "cpu" or overlaps or plane.is_neg()):
                    raise ValueError(
                        f"{what}: {name} of layer {layer} cannot be written in place; expected a "
                        "tensor on the CPU that does not overlap itself"
                    )
                tensors.append(plane.cpu().resolve_neg())
        return Planes(tensors)

    @property
    def counts(self) -> list[int]:
        """Tokens of each plane."""
        return [tensor.shape[1] for tensor in self.tensors]

    @property
    def max_tokens(self) -> int:
        """Of the layer that has most."""
        return max(self.counts)


def empty_cache(
    fingerprint: Fingerprint, layers: range, num_tokens: int, by_column: bool
) -> list[tuple[Tensor, Tensor]]:
    """Return uninitialised tensors for a prefix; V lies as it is stored.

    A layer with a window has its last window - 1 tokens.
    """
    heads, size, dtype = fingerprint.num_kv_heads, fingerprint.head_size, fingerprint.torch_dtype
    cache = []
    for layer in layers:
        window = fingerprint.windows[layer] if fingerprint.windows else None
        count = num_tokens if window is None else min(num_tokens, window - 1)
        keys = torch.empty(heads, count, size, dtype=dtype)
        if by_column:
            values = torch.empty(heads, size, count, dtype=dtype).transpose(1, 2)
        else:
            values = torch.empty(heads, count, size, dtype=dtype)
        cache.append((keys, values))
    return cache
