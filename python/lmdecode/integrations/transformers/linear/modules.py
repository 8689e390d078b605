"""A ``PackedLinear`` where a model has an ``nn.Linear``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lmdecode.linear import PackedLinear

__all__ = ["PackedLinearModule"]


class _WeightOfPacked(Tensor):
    """What ``weight`` of a packed layer tells. Whatever reads its numbers raises RuntimeError."""

    # As of tensors without numbers; the device is that of the layer.
    is_meta = property(lambda self: True)
    _is_hf_initialized = True  # transformers fills those that are not
    _name: str

    @staticmethod
    def of(module: PackedLinearModule) -> Tensor:
        """Return that of a layer."""
        size, dtype = (module.out_features, module.in_features), module.weight_dtype
        if torch.compiler.is_compiling():  # which refuses to compute with meta tensors and others
            return torch.empty(size, dtype=dtype, device="meta")
        cpu = torch.device("cpu")
        weight = Tensor._make_wrapper_subclass(_WeightOfPacked, size, dtype=dtype, device=cpu)
        weight._name = module.name or "a layer"
        return weight

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Return what there is to tell."""
        return f"<packed weight, {list(self.shape)}, {self.dtype}>"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Raise RuntimeError."""
        name = next(x._name for x in tree_leaves((args, kwargs)) if isinstance(x, cls))
        raise RuntimeError(
            f"PackedLinearModule: {func} reads the weight of {name}, which is packed; expected a "
            f"model that calls this layer alone, or {name} in skip"
        )


class PackedLinearModule(nn.Module):
    """A linear layer of a model, on packed weights, on the CPU.

    It computes in float32 and returns the dtype of its input. ``weight`` tells a shape, a dtype and
    a device, and holds nothing: what computes with it raises RuntimeError. ``to()`` leaves the
    packed weight as it is, in whatever dtype the model then is; another device is refused. Copies
    and pickles hold the packed weight, which fits the CPU capability of this process alone; a state
    dict cannot hold it.

    Parameters
    ----------
    layer : PackedLinear
        What computes.
    weight_dtype : torch.dtype
        What ``weight.dtype`` says.
    name : str
        That of the layer in its model, for errors.

    Attributes
    ----------
    layer : PackedLinear
        As given.
    packed : Tensor
        ``layer.packed``, a buffer: ``buffers()`` and ``get_memory_footprint()`` count it. It cannot
        be set.
    in_features, out_features : int
        Sizes.
    """

    def __init__(
        self, layer: PackedLinear, weight_dtype: torch.dtype = torch.float32, name: str = ""
    ) -> None:
        super().__init__()
        self.layer, self.weight_dtype, self.name = layer, weight_dtype, name
        self.in_features, self.out_features = layer.in_features, layer.out_features
        # A persistent one, although no state dict holds it: in the place of others transformers
        # puts empty tensors when it has loaded a model.
        self.register_buffer("packed", layer.packed)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x @ weight.T + bias``, ``[..., out_features]``, in the dtype of ``x``."""
        if self._parameters:
            self.take_bias()
        if x.dtype == torch.float32:
            return self.layer(x)
        return self.layer(x.float()).to(x.dtype)

    def take_bias(self) -> None:
        """Hand a parameter ``bias``, which a loader or a user has filled, to the layer."""
        if "bias" in self._parameters:
            bias = self._parameters.pop("bias")
            self.layer.bias = None if bias is None else bias.detach().float().clone()

    def __getattr__(self, name: str) -> Any:
        # What models ask a linear layer for, but for parameters that are there.
        if name in ("weight", "bias") and "layer" in self.__dict__:
            if name in self._parameters:
                return self._parameters[name]
            if name == "bias":  # in the dtype that it was given in
                bias = self.layer.bias
                return None if bias is None else bias.to(self.weight_dtype)
            return _WeightOfPacked.of(self)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "packed":
            raise ValueError("PackedLinearModule: packed cannot be set; it is that of the layer")
        if name in ("weight", "bias") and not isinstance(value, nn.Parameter):
            value = None if value is None else nn.Parameter(value, requires_grad=False)
            return self.register_parameter(name, value)
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a bias; the weight is refused."""
        if name == "weight":
            raise ValueError(
                "PackedLinearModule: its weight is packed, and cannot be replaced or tied; pack "
                "the model when it has its weights"
            )
        # Not through hasattr(): the bias is there already.
        self._parameters[name] = param

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLinearModule:
        device = fn(torch.empty(0, dtype=torch.float32, device="cpu")).device
        if device.type != "cpu":
            raise ValueError(
                f"PackedLinearModule: packed weights cannot be moved to {device}; expected the cpu"
            )
        super()._apply(fn, recurse)
        self._buffers["packed"] = self.layer.packed
        return self

    def _save_to_state_dict(self, *arguments: Any, **keywords: Any) -> None:
        raise ValueError(
            "PackedLinearModule: a state dict cannot hold packed weights, which fit this process "
            "alone; save the model before pack_linears_"
        )

    def _load_from_state_dict(self, *arguments: Any, **keywords: Any) -> None:
        raise ValueError(
            "PackedLinearModule: its weight is packed; load the state dict before pack_linears_"
        )

    def extra_repr(self) -> str:
        """Return the layer's part of ``repr``."""
        return repr(self.layer).removeprefix("PackedLinear(").removesuffix(")")
