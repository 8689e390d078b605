"""Tokens and KV tensors as the library sees them: buffers, addresses and strides."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from lmdecode._checks import is_int, type_error
from lmdecode.store._native import Plane
from lmdecode.store.fingerprint import Fingerprint

_MAX_TOKEN = 2**31 - 1
_TOKEN_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _wrong_token(tokens: object, what: str) -> Exception:
    """Return the error about the first of some tokens that is none, or about what holds them."""
    if isinstance(tokens, Sequence) and not isinstance(tokens, (str, bytes)):
        for i, token in enumerate(tokens):
            if not is_int(token):
                return type_error(what, f"tokens[{i}]", token, "token ids, which are ints")
            if not 0 <= token <= _MAX_TOKEN:
                expected = f"a token id, 0 to {_MAX_TOKEN}"
                return ValueError(f"{what}: tokens[{i}] is {token}; expected {expected}")
    return type_error(what, "tokens", tokens, "token ids, as a sequence of ints or a tensor")


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
            raise _wrong_token(flat.tolist(), what)
        ids = flat.detach().to("cpu", torch.int32).contiguous()
        copy = array("i")
        copy.frombytes(ctypes.string_at(ids.data_ptr(), ids.nbytes))
        return memoryview(copy)
    if isinstance(tokens, array) and tokens.typecode == "i":
        return memoryview(tokens)
    try:
        return memoryview(array("i", tokens))
    except (OverflowError, TypeError):
        raise _wrong_token(tokens, what) from None


def _plane(tensor: Tensor) -> Plane:
    size, address = tensor.element_size(), tensor.data_ptr()
    if not address and tensor.numel():  # a fake tensor, or one whose memory was given back
        raise ValueError(
            f"keys or values of shape {list(tensor.shape)} have no memory; expected tensors that "
            "hold their elements"
        )
    head, token, element = tensor.stride()
    return Plane(address, head * size, token * size, element * size, tensor.shape[1])


class Planes(list[Plane]):
    """Keys and values of some layers, for reading or writing, and the tensors that they are in."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__(map(_plane, tensors))
        self.tensors = tensors

    @staticmethod
    def checked(kv: Sequence[tuple[Tensor, ...]], fingerprint: Fingerprint, what: str) -> Planes:
        """Take a cache from a caller; the number of tokens is checked by the library."""
        layers = checked_cache(kv, fingerprint, what)
        states = [layers.pop()[0]] if fingerprint.state_size else []
        if fingerprint.scale_dtype is None:
            return Planes([tensor for layer in layers for tensor in layer] + states)
        planes = [
            _packed(plane, scales)
            for layer in layers
            for plane, scales in zip(layer[:2], layer[2:], strict=True)
        ]
        return Planes(planes + states)

    @property
    def counts(self) -> list[int]:
        """Tokens of each plane."""
        return [tensor.shape[1] for tensor in self.tensors]

    @property
    def max_tokens(self) -> int:
        """Number of tokens of the longest layer."""
        return max(self.counts)


_NAMES = ("K", "V", "K's scales", "V's scales")


def checked_cache(
    kv: Sequence[tuple[Tensor, ...]],
    fingerprint: Fingerprint,
    what: str,
    writable: bool = False,
) -> list[list[Tensor]]:
    """Check a caller's cache; return K, V and any scales of each layer.

    The state, where there is one, comes last as a plane of bytes, [1, 1, state_bytes]. Errors are
    ValueError or TypeError and name the layer and the tensor, what came and what was expected.
    """
    if not isinstance(kv, Sequence):
        raise TypeError(
            f"{what}: kv is {type(kv).__name__}; expected a sequence of (K, V), one a layer"
        )
    if len(kv) != fingerprint.num_entries:
        state = ", and the state behind them" if fingerprint.state_size else ""
        raise ValueError(
            f"{what}: kv has {len(kv)} layers; expected {fingerprint.num_layers}{state}"
        )
    names = _NAMES[:2] if fingerprint.scale_dtype is None else _NAMES
    layers = []
    for layer, tensors in enumerate(kv[: fingerprint.num_layers]):
        if not isinstance(tensors, Sequence) or len(tensors) != len(names):
            came = type(tensors).__name__
            if isinstance(tensors, Sequence):
                came += f" of {len(tensors)}"
            expected = "K and V" if len(names) == 2 else "K, V and the scales of both"
            raise ValueError(f"{what}: kv[{layer}] is {came}; expected {expected}")
        checked = [
            _checked_tensor(tensor, name, fingerprint, f"{what}: {name} of layer {layer}", writable)
            for name, tensor in zip(names, tensors, strict=True)
        ]
        for plane, scales, name in zip(checked, checked[2:], names[2:], strict=False):
            if scales.shape[1] != plane.shape[1]:
                raise ValueError(
                    f"{what}: {name} of layer {layer} are of {scales.shape[1]} tokens; expected "
                    f"{plane.shape[1]}"
                )
        layers.append(checked)
    if fingerprint.state_size:
        layers.append([_checked_state(kv[-1], fingerprint, what)])
    return layers


def _checked_state(entry: object, fingerprint: Fingerprint, what: str) -> Tensor:
    """Take (state,), [state_size] float32, or [0] after no tokens; return its bytes."""
    size = fingerprint.state_size
    if not isinstance(entry, Sequence) or len(entry) != 1:
        raise ValueError(f"{what}: kv[-1] is {type(entry).__name__}; expected (state,)")
    state = entry[0]
    if not isinstance(state, Tensor):
        raise TypeError(f"{what}: the state is {type(state).__name__}; expected a tensor")
    if list(state.shape) not in ([size], [0]) or state.dtype != torch.float32:
        raise ValueError(
            f"{what}: the state is {state.dtype} of shape {list(state.shape)}; expected float32 "
            f"of shape [{size}]"
        )
    if state.layout != torch.strided or state.device.type != "cpu" or not state.is_contiguous():
        raise ValueError(
            f"{what}: the state is a {state.layout} tensor on {state.device}; expected one on the "
            "CPU whose elements lie side by side"
        )
    return state_plane(state)


def state_plane(state: Tensor) -> Tensor:
    """Return the bytes of a state, [1, 1, state_bytes]; of an empty one, [1, 0, 0]."""
    return state.detach().view(torch.uint8).view(1, min(1, len(state)), -1 if len(state) else 0)


def _checked_tensor(
    tensor: object, name: str, fingerprint: Fingerprint, where: str, writable: bool
) -> Tensor:
    """[num_kv_heads, tokens, head_size], or without the last of scales, in main memory."""
    heads, size, dtype = fingerprint.num_kv_heads, fingerprint.head_size, fingerprint.torch_dtype
    shape = f"[{heads}, tokens, {size}]"
    if are_scales := name in _NAMES[2:]:
        assert fingerprint.scale_torch_dtype is not None
        size, dtype = 1, fingerprint.scale_torch_dtype
        shape = f"[{heads}, tokens] or [{heads}, tokens, 1]"
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{where} is {type(tensor).__name__}; expected a tensor")
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise ValueError(
            f"{where} is a {tensor.layout} tensor on {tensor.device}; expected one whose elements "
            "lie in memory"
        )
    plane = tensor.detach()
    if are_scales and (plane.dim() == 2 or (plane.dim() == 3 and plane.shape[2] != 1)):
        plane = plane.unsqueeze(-1)
    if plane.dim() == 4 and plane.shape[0] == 1:
        plane = plane[0]
    if plane.dim() != 3 or plane.shape[0] != heads or plane.shape[2] != size:
        raise ValueError(f"{where} has shape {list(tensor.shape)}; expected {shape}")
    if plane.dtype != dtype:
        raise ValueError(f"{where} is {plane.dtype}; expected {dtype}")
    overlaps = any(
        size > 1 and stride == 0 for size, stride in zip(plane.shape, plane.stride(), strict=True)
    )
    if writable and (plane.device.type != "cpu" or overlaps or plane.is_neg()):
        raise ValueError(
            f"{where} cannot be written in place; expected a tensor on the CPU that does not "
            "overlap itself"
        )
    plane = plane.cpu().resolve_neg()
    return plane[..., 0] if are_scales else plane


def _packed(plane: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers, with the bytes of the scale appended to each token and head."""
    behind = scales.contiguous().unsqueeze(-1).view(torch.uint8)
    return torch.cat((plane.view(torch.uint8), behind), dim=2)


def unpacked(
    cache: Sequence[tuple[Tensor, ...]], fingerprint: Fingerprint
) -> list[tuple[Tensor, ...]]:
    """Return (K, V), or (K, V, K's scales, V's scales), of planes as they are stored; or (state,).

    K and V are views of them; scales are not.
    """
    return [_unpacked_entry(planes, fingerprint) for planes in cache]


def _unpacked_entry(planes: tuple[Tensor, ...], fingerprint: Fingerprint) -> tuple[Tensor, ...]:
    scale_dtype, size = fingerprint.scale_torch_dtype, fingerprint.head_size
    if len(planes) == 1:
        return (planes[0].view(-1).view(torch.float32),)
    if scale_dtype is None:
        return planes
    numbers = [plane[..., :size].view(fingerprint.torch_dtype) for plane in planes]
    scales = [plane[..., size:].contiguous().view(scale_dtype)[..., 0] for plane in planes]
    return (*numbers, *scales)


def empty_cache(
    fingerprint: Fingerprint, layers: range, num_tokens: int, by_column: bool
) -> list[tuple[Tensor, ...]]:
    """Return uninitialised tensors for planes of a prefix, as they are stored.

    A layer with a window has its last window - 1 tokens. Behind the last layer stands the state.
    """
    heads, (dtype, size) = fingerprint.num_kv_heads, fingerprint.stored_row
    cache: list[tuple[Tensor, ...]] = []
    for layer in layers:
        if layer == fingerprint.num_layers:
            state = torch.empty(1, 1, fingerprint.state_bytes, dtype=torch.uint8, device="cpu")
            cache.append((state,))
            continue
        window = fingerprint.windows[layer] if fingerprint.windows else None
        count = num_tokens if window is None else min(num_tokens, window - 1)
        keys = torch.empty(heads, count, size, dtype=dtype, device="cpu")
        if by_column:
            values = torch.empty(heads, size, count, dtype=dtype, device="cpu").transpose(1, 2)
        else:
            values = torch.empty(heads, count, size, dtype=dtype, device="cpu")
        cache.append((keys, values))
    return cache
