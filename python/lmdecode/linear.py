"""Linear layers whose weights are packed once, and the norms between them, on the CPU."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lmdecode._checks import (
    check_dense_tensors,
    check_format,
    check_no_gradient,
    check_number,
    type_error,
)
from lmdecode._ops import ops

__all__ = ["PackedLinear", "layer_norm", "rms_norm"]

_pack_linear = ops.pack_linear.default
_packed_linear = ops.packed_linear.default
_packed_linear_out = ops.packed_linear.out
_layer_norm = ops.layer_norm.default
_rms_norm = ops.rms_norm.default
_FORMATS = {"float32": 0, "bfloat16": 1, "int8": 2}
_ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}


def _choice(op: str, name: str, value: object, choices: dict) -> int:
    if value is not None and not isinstance(value, str):
        raise type_error(op, name, value, "a str")
    if value not in choices:
        expected = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{op}: {name} is {value!r}; expected one of {expected}")
    return choices[value]


def _rows(op: str, name: str, value: object, size: int) -> Tensor:
    """``[..., size]`` as ``[rows, size]``."""
    check_dense_tensors(op, **{name: value})
    assert isinstance(value, Tensor)
    if value.dim() == 0 or value.shape[-1] != size:
        raise ValueError(f"{op}: {name} has shape {list(value.shape)}; expected [..., {size}]")
    return value.reshape(math.prod(value.shape[:-1]), size)


class PackedLinear:
    """A linear layer, ``activation(x @ weight.T + bias) * multiplier + residual``, packed once.

    Every row of the result depends on its row of ``x`` alone: it has the same bits in every batch
    and on any number of threads. Sums are in one order for one row and for thousands. There are no
    gradients.

    Parameters
    ----------
    weight : Tensor
        ``[out_features, in_features]``, float32, bfloat16 or float16, on the CPU, any strides:
        ``kernel.T`` for a kernel ``[in_features, out_features]``. It is copied.
    bias : Tensor, optional
        ``[out_features]``, of the same dtypes. It is copied.
    dtype : {"float32", "bfloat16", "int8"}
        What the weight is held in; ``torch.bfloat16`` and "bf16" are taken, too. ``"float32"``:
        products and sums in float32. ``"bfloat16"``: ``x`` and the weight are rounded to bfloat16,
        sums are in float32. ``"int8"``: each output's weights and each row of ``x`` are rounded to
        whole multiples of a 127th of their largest magnitude, and their products are summed
        exactly; ``in_features`` up to 131072.

    Attributes
    ----------
    in_features, out_features : int
        Sizes.
    dtype : str
        One of these names.
    packed : Tensor
        The weight, uint8 ``[bytes]``, in an order that depends on ``lmdecode.cpu_capability()``: it
        is of no use to another process.
    bias : Tensor or None
        float32 ``[out_features]``.

    Raises
    ------
    TypeError
        An argument of another type.
    ValueError
        An argument of another dtype, shape, device or value than expected.

    Examples
    --------
    >>> layer = PackedLinear(torch.eye(3), torch.ones(3))
    >>> layer(torch.tensor([[1.0, -2.0, 3.0]]), activation="relu")
    tensor([[2., 0., 4.]])
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, dtype: str | torch.dtype = "float32"
    ) -> None:
        op = "PackedLinear"
        check_dense_tensors(op, weight=weight)
        self.dtype = check_format(op, dtype, _FORMATS)
        self._format = _FORMATS[self.dtype]
        self._check_weight(op, "weight", weight, 2, "[out_features, in_features]")
        self.out_features, self.in_features = weight.shape
        if bias is not None:
            check_dense_tensors(op, bias=bias)
            self._check_weight(op, "bias", bias, 1, f"[{self.out_features}]")
            if bias.shape[0] != self.out_features:
                raise ValueError(
                    f"{op}: bias has shape {list(bias.shape)}; expected [{self.out_features}]"
                )
            bias = bias.detach().to(torch.float32, copy=True).contiguous()
        self.bias = bias
        self.packed = _pack_linear(weight.detach().float(), self._format)

    @staticmethod
    def _check_weight(op: str, name: str, tensor: Tensor, rank: int, shape: str) -> None:
        if tensor.dim() != rank:
            raise ValueError(f"{op}: {name} has shape {list(tensor.shape)}; expected {shape}")
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                f"{op}: {name} has dtype {str(tensor.dtype).removeprefix('torch.')}; "
                "expected float32, bfloat16 or float16"
            )
        if tensor.device.type != "cpu":
            raise ValueError(f"{op}: {name} is on {tensor.device}; expected a tensor on cpu")

    def __call__(
        self,
        x: Tensor,
        *,
        activation: str | None = None,
        multiplier: Tensor | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Apply the layer.

        Parameters
        ----------
        x : Tensor
            float32 ``[..., in_features]``, any strides.
        activation : {"relu", "gelu", "gelu_tanh", "silu"}, optional
            Of the sums and the bias.
        multiplier : Tensor, optional
            float32 ``[..., out_features]``: the other half of a gated layer.
        residual : Tensor, optional
            float32 ``[..., out_features]``, added last.
        out : Tensor, optional
            float32 ``[..., out_features]``, contiguous, to be written. It shares no memory with the
            other arguments.

        Returns
        -------
        Tensor
            float32 ``[..., out_features]``; ``out`` where given.

        Raises
        ------
        TypeError
            An argument of another type.
        ValueError
            An argument of another dtype, shape, device or value than expected, or that requires a
            gradient.
        """
        op = "PackedLinear"
        rows = _rows(op, "x", x, self.in_features)
        check_no_gradient(op, x=x, multiplier=multiplier, residual=residual, out=out)
        shape = (*x.shape[:-1], self.out_features)
        arguments = (
            rows,
            self.packed,
            self.out_features,
            self._format,
            self.bias,
            _choice(op, "activation", activation, _ACTIVATIONS),
            None if multiplier is None else self._like_y("multiplier", multiplier, shape),
            None if residual is None else self._like_y("residual", residual, shape),
        )
        if out is None:
            return _packed_linear(*arguments).view(shape)
        out_rows = self._like_y("out", out, shape)
        if out.is_neg():
            raise ValueError(f"{op}: out is a negated view, which cannot be written in place")
        if not out.is_contiguous():
            raise ValueError(
                f"{op}: out has strides {list(out.stride())}; expected a contiguous tensor"
            )
        _packed_linear_out(*arguments, out=out_rows)
        return out

    def _like_y(self, name: str, value: object, shape: tuple[int, ...]) -> Tensor:
        rows = _rows("PackedLinear", name, value, self.out_features)
        assert isinstance(value, Tensor)
        if value.shape != shape:
            raise ValueError(
                f"PackedLinear: {name} has shape {list(value.shape)}; expected {list(shape)}"
            )
        return rows

    def __repr__(self) -> str:
        return (
            f"PackedLinear(in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, dtype={self.dtype!r})"
        )


def _norm_rows(op: str, x: Tensor, *, eps: float, **others: Tensor | None) -> tuple[Tensor, float]:
    """``x`` as [rows, size], and ``eps`` as a float."""
    check_dense_tensors(op, x=x)
    for name, other in others.items():
        if other is not None:
            check_dense_tensors(op, **{name: other})
    check_no_gradient(op, x=x, **others)
    eps = check_number(op, "eps", eps)
    if x.dim() == 0:
        raise ValueError(f"{op}: x has shape []; expected [..., size]")
    return _rows(op, "x", x, x.shape[-1]), eps


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    """Normalise rows to mean 0 and variance 1, on the CPU.

    ``(x - mean) / sqrt(variance + eps) * weight + bias``, the variance biased. A row's result has
    the same bits in every batch and on any number of threads.

    Parameters
    ----------
    x : Tensor
        float32 ``[..., size]``, any strides.
    weight, bias : Tensor, optional
        float32 ``[size]``.
    eps : float
        At least 0.

    Returns
    -------
    Tensor
        float32, the shape of ``x``.

    Raises
    ------
    TypeError
        An argument that is no tensor.
    ValueError
        An argument of another dtype, shape, device or value than expected, or that requires a
        gradient.
    """
    rows, eps = _norm_rows("layer_norm", x, weight=weight, bias=bias, eps=eps)
    return _layer_norm(rows, weight, bias, eps).view(x.shape)


def rms_norm(x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6) -> Tensor:
    """Divide rows by the root of their mean square, on the CPU.

    ``x / sqrt(mean(x^2) + eps) * weight``. A row's result has the same bits in every batch and on
    any number of threads.

    Parameters
    ----------
    x : Tensor
        float32 ``[..., size]``, any strides.
    weight : Tensor, optional
        float32 ``[size]``.
    eps : float
        At least 0.

    Returns
    -------
    Tensor
        float32, the shape of ``x``.

    Raises
    ------
    TypeError
        An argument that is no tensor.
    ValueError
        An argument of another dtype, shape, device or value than expected, or that requires a
        gradient.
    """
    rows, eps = _norm_rows("rms_norm", x, weight=weight, eps=eps)
    return _rms_norm(rows, weight, eps).view(x.shape)
