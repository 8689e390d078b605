"""Packed copies of the weights of an eager model, for as long as the weights live."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from lmdecode._ops import ops

__all__ = ["FORMATS", "Memory", "PackedWeight", "PackedWeights", "owner_of"]

# The format of csrc/linear/packed_linear.h that holds the weights of a dtype without loss.
FORMATS = {torch.float32: 0, torch.float16: 0, torch.bfloat16: 1}


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight ``[out_features, in_features]`` as ``packed_linear`` takes it."""

    packed: Tensor  # uint8 [bytes]
    format: int
    out_features: int
    in_features: int
    dtype: torch.dtype
    # Of the parameter, when it was packed.
    version: int = -1
    address: int = 0


def owner_of(weight: Tensor) -> Parameter | None:
    """Return the parameter that a tensor is or is a view of, if changes of it can be told."""
    owner = weight if isinstance(weight, Parameter) else weight._base
    return owner if isinstance(owner, Parameter) and not owner.is_inference() else None


def _pack(weight: Tensor, version: int = -1, address: int = 0) -> PackedWeight:
    format, (outputs, inputs) = FORMATS[weight.dtype], weight.shape
    packed = ops.pack_linear.default(weight.detach().float(), format)
    return PackedWeight(packed, format, outputs, inputs, weight.dtype, version, address)


_LEAST_VIEWS = 1 << 16  # bytes of views of one parameter that are kept in any case


@dataclass(slots=True)
class _Copies:
    """What is kept of a parameter."""

    owner: weakref.ref[Parameter]
    whole: PackedWeight | None = None
    # By offset, shape, strides and dtype.
    views: dict[tuple[Any, ...], PackedWeight] = field(default_factory=dict)
    # Whether its own memory was let go, or must stay as others read it.
    released: bool = False
    kept: bool = False


class Memory(NamedTuple):
    """Bytes that :class:`lmdecode.batch_invariant` holds."""

    #: Of packed copies of weights.
    packed: int
    #: Of the weights themselves that were let go.
    released: int


class PackedWeights:
    """The packed copies of weights, by their parameters."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._copies: dict[int, _Copies] = {}
        self.releasing = 0  # contexts that let the originals go

    def known(self, weight: Tensor) -> PackedWeight | None:
        """Return the packed copy of a whole parameter, where it has one that still holds."""
        copies = self._copies.get(id(weight))
        if copies is None or (found := copies.whole) is None:
            return None
        if copies.released and weight.numel() == 0:
            return found
        same = found.version == weight._version and found.address == weight.data_ptr()
        return found if same and found.dtype is weight.dtype else None

    def _copies_of(self, owner: Parameter) -> _Copies:
        key = id(owner)
        copies = self._copies.get(key)
        if copies is None:
            gone = weakref.ref(owner, lambda _: self._copies.pop(key, None))
            copies = self._copies[key] = _Copies(gone)
        return copies

    def of(self, weight: Tensor, owner: Parameter | None) -> PackedWeight:
        """Return the packed copy of ``[out_features, in_features]``, of a parameter or a view."""
        if owner is None:
            return _pack(weight)
        with self._lock:
            copies = self._copies_of(owner)
            version, address = owner._version, owner.data_ptr()
            if weight is not owner:
                place = (weight.storage_offset(), weight.shape, weight.stride(), weight.dtype)
                found = copies.views.get(place)
                if found is None or (found.version, found.address) != (version, address):
                    found = _pack(weight, version, address)
                    held = sum(view.packed.nbytes for view in copies.views.values())
                    if held > 8 * owner.nbytes + _LEAST_VIEWS:  # a table that is cut ever otherwise
                        copies.views.clear()
                    copies.views[place] = found
                return found
            if (found := self.known(weight)) is None:
                found = copies.whole = _pack(weight, version, address)
                copies.released = False
            if self.releasing and not (copies.kept or copies.released) and weight.is_contiguous():
                copies.released = True
                self._set(owner, torch.empty(0, dtype=owner.dtype, device="cpu"))
            return found

    def keep(self, weight: object) -> None:
        """Give a parameter that others read its memory back, and do not let it go again."""
        if not self.releasing or not isinstance(weight, Tensor):
            return
        if (owner := owner_of(weight)) is not None:
            with self._lock:
                copies = self._copies_of(owner)
                copies.kept = True
                self._restore(copies)

    def memory(self) -> Memory:
        """Return the bytes of the packed copies, and of the originals that were let go."""
        packed = released = 0
        with self._lock:
            for copies in list(self._copies.values()):
                packed += sum(view.packed.nbytes for view in copies.views.values())
                if (whole := copies.whole) is not None:
                    packed += whole.packed.nbytes
                    size = whole.out_features * whole.in_features * whole.dtype.itemsize
                    released += size * copies.released
        return Memory(packed, released)

    def release(self) -> None:
        """Let parameters go as they are packed, until as many calls of :meth:`restore`."""
        with self._lock:
            self.releasing += 1

    def restore(self) -> None:
        """Give every parameter its memory back, unless others let them go, too."""
        with self._lock:
            self.releasing -= 1
            for copies in list(self._copies.values()) if self.releasing == 0 else ():
                self._restore(copies)
                copies.kept = False

    def clear(self) -> None:
        """Drop the packed copies."""
        with self._lock:
            self._copies.clear()

    def _restore(self, copies: _Copies) -> None:
        owner, found = copies.owner(), copies.whole
        # A parameter that has other data by now keeps them.
        if copies.released and owner is not None and found is not None and owner.numel() == 0:
            sizes = found.out_features, found.in_features
            weight = ops.unpack_linear.default(found.packed, *sizes, found.format)
            self._set(owner, weight.to(found.dtype))
        copies.released = False

    @staticmethod
    def _set(owner: Parameter, data: Tensor) -> None:
        with torch.inference_mode(False), torch.no_grad():
            owner.data = data.clone()
