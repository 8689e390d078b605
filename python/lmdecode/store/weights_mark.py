"""A cheap mark of a model's weights: another model of the same shape has another one."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_PLACES = 4
_PLACE_BYTES = 64


def _weights(model: Any) -> Iterator[Tensor]:
    """Parameters and saved buffers, each once, except adapters (PEFT)."""
    seen: set[int] = set()
    coming = [model]
    while coming:  # modules() takes twice the time
        module = coming.pop()
        adapters = module.__dict__.get("adapter_layer_names") or getattr(
            type(module), "adapter_layer_names", ()
        )
        for name, part in module._modules.items():
            if part is not None and name not in adapters and id(part) not in seen:
                seen.add(id(part))
                coming.append(part)
        own = [*module._parameters.values()]
        if module._buffers:
            unsaved = module._non_persistent_buffers_set
            own += [tensor for name, tensor in module._buffers.items() if name not in unsaved]
        for tensor in own:
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor


def _sample(tensor: Tensor) -> bytes:
    """Bytes at fixed places; all of them where these are few."""
    size, item = tensor.nbytes, tensor.element_size()
    if size <= _PLACES * _PLACE_BYTES:
        flat = tensor.detach().reshape(-1).contiguous().cpu()
        return ctypes.string_at(flat.data_ptr(), size) if size else b""
    step = (size - _PLACE_BYTES) // (_PLACES - 1)
    step = step // item * item
    places = range(0, _PLACES * step, step)
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        begin = tensor.data_ptr()
        return b"".join(ctypes.string_at(begin + place, _PLACE_BYTES) for place in places)
    width = _PLACE_BYTES // item
    begins = torch.tensor([place // item for place in places], device="cpu")
    index = begins[:, None] + torch.arange(width, device="cpu")
    chosen = tensor.detach().reshape(-1)[index.view(-1).to(tensor.device)].cpu().contiguous()
    return ctypes.string_at(chosen.data_ptr(), chosen.nbytes)


def weights_mark(model: Any) -> str:
    """Hash values at fixed places of every weight of a model.

    It costs a few milliseconds, whatever the size, and so can be looked at in every call. It tells
    models apart, and a model from itself after training or after weights were added to its own. It
    does not see a change of single numbers between the places, or of an adapter.

    Parameters
    ----------
    model
        A ``torch.nn.Module``.

    Returns
    -------
    str
        32 hexadecimal digits; the same on every device.
    """
    digest = hashlib.sha256(b"lmdecode.weights_mark.1")
    for tensor in _weights(model):
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        if tensor.device.type != "meta":
            digest.update(_sample(tensor))
    return digest.hexdigest()[:32]
