"""``PackedLinear``, and the norms that stand between such layers, on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from lmdecode._checks import (
    check_dense_tensor,
    check_dense_tensors,
    check_int,
    check_no_gradient,
    check_number,
    type_error,
)
from lmdecode._ops import ops
from lmdecode.linear.formats import (
    FORMATS_WITH_ZEROS,
    INT4_WITH_MIDDLE,
    check_linear_format,
    format_of_packed,
)
from lmdecode.linear.quantized_weight import KINDS, QuantizedWeight

__all__ = ["PackedLinear", "layer_norm", "rms_norm"]

_pack_linear = ops.pack_linear.default
_pack_quantized_linear = ops.pack_quantized_linear.default
_pack_gguf_linear = ops.pack_gguf_linear.default
_packed_linear = ops.packed_linear.default
_packed_linear_out = ops.packed_linear.out
_layer_norm = ops.layer_norm.default
_rms_norm = ops.rms_norm.default
ACTIVATIONS: dict[str, int] = {"relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}


def _activation(op: str, name: object) -> int:
    if name is None:
        return 0
    if not isinstance(name, str):
        raise type_error(op, "activation", name, "a str")
    if name not in ACTIVATIONS:
        expected = ", ".join(map(repr, (None, *ACTIVATIONS)))
        raise ValueError(f"{op}: activation is {name!r}; expected one of {expected}")
    return ACTIVATIONS[name]


def _check_rows(op: str, name: str, value: object, size: int) -> None:
    """Raise for anything but ``[..., size]``."""
    check_dense_tensor(op, name, value)
    assert isinstance(value, Tensor)
    if value.dim() == 0 or value.shape[-1] != size:
        raise ValueError(f"{op}: {name} has shape {list(value.shape)}; expected [..., {size}]")


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
    dtype : {"float32", "bfloat16", "int8", "int4"}
        What the weight is held in; ``torch.bfloat16`` and "bf16" are taken, too. ``"float32"``:
        products and sums in float32. ``"bfloat16"``: ``x`` and the weight are rounded to bfloat16,
        sums are in float32. ``"int8"``: each output's weights and each row of ``x`` are rounded to
        whole multiples of a 127th of their largest magnitude, and their products are summed
        exactly; ``in_features`` up to 131072. ``"int4"``: the weights of an output are
        ``scale * q + minimum``, ``q`` from 0 to 15, in groups of 32 along the inputs with a float16
        scale and a float16 minimum each, those with the least squared error of some that are tried;
        each row of ``x`` is rounded to int8 in the same groups, and the products of a group are
        summed exactly.
    group_size : {32, 64, 128}, optional
        Of ``"int4"``, 32 by default.
    rotate : bool, optional
        Of ``"int8"`` and ``"int4"``, True by default: the weight and each row of ``x`` are
        multiplied by blocks of Hadamard matrices before they are rounded, which leaves the product
        as it is. Features that stand out, as trained models have them, are spread so that little is
        lost.

    Attributes
    ----------
    in_features, out_features : int
        Sizes.
    dtype : str
        One of these names, or a type of GGUF, where ``from_gguf`` made the layer.
    group_size : int or None
        Weights that share a scale, where not all of an output's do.
    input_order : Tensor or None
        int64 ``[in_features]``: the elements of ``x`` in the order of the weight's columns, where
        :meth:`from_quantized` was given one.
    packed : Tensor
        The weight, uint8 ``[bytes]``, in an order that depends on ``lmdecode.cpu_capability()``: a
        process of another one refuses it.
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

    input_order: Tensor | None = None

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        dtype: str | torch.dtype = "float32",
        group_size: int | None = None,
        rotate: bool | None = None,
    ) -> None:
        op = "PackedLinear"
        check_dense_tensors(op, weight=weight)
        self.dtype, self._format, self.group_size = check_linear_format(
            op, dtype, group_size, rotate
        )
        self._check_weight(op, "weight", weight, 2, "[out_features, in_features]")
        self.out_features, self.in_features = weight.shape
        self.bias = self._checked_bias(op, bias)
        self.packed = _pack_linear(weight.detach().float(), self._format)

    @classmethod
    def from_quantized(
        cls,
        weight: Tensor,
        scales: Tensor,
        zeros: Tensor | None = None,
        bias: Tensor | None = None,
        *,
        input_order: Tensor | None = None,
    ) -> PackedLinear:
        """Pack weights of four bits as they are: ``scale * (q - zero)``, without loss.

        Parameters
        ----------
        weight : Tensor
            uint8 ``[out_features, in_features]``: ``q``, from 0 to 15.
        scales : Tensor
            float16 ``[out_features, groups]``. ``in_features`` must consist of groups of the same
            size, a multiple of 32.
        zeros : Tensor, optional
            uint8 ``[out_features, groups]``, from 0 to 16. Without them: 8.
        bias : Tensor, optional
            ``[out_features]``, float32, bfloat16 or float16. It is copied.
        input_order : Tensor, optional
            int64 ``[in_features]``, a permutation: column i of ``weight`` belongs to element
            ``input_order[i]`` of ``x``.

        Returns
        -------
        PackedLinear
            With the dtype ``"int4"``.

        Raises
        ------
        TypeError
            An argument of another type.
        ValueError
            An argument of another dtype, shape, device or value than expected.
        """
        op = "PackedLinear.from_quantized"
        check_dense_tensors(op, weight=weight, scales=scales)
        for name, value in (("weight", weight), ("scales", scales)):
            if value.dim() != 2:
                raise ValueError(
                    f"{op}: {name} has shape {list(value.shape)}; expected two dimensions"
                )
            if value.device.type != "cpu":
                raise ValueError(f"{op}: {name} is on {value.device}; expected a tensor on cpu")
        layer = cls.__new__(cls)
        layer.dtype = "int4"
        layer.out_features, layer.in_features = weight.shape
        groups = scales.shape[1]
        size, rest = divmod(layer.in_features, groups) if groups > 0 else (0, layer.in_features)
        if rest != 0 or size % 32 != 0:
            raise ValueError(
                f"{op}: weight has {layer.in_features} input features and scales has {groups} "
                "groups; expected groups of a multiple of 32"
            )
        # Larger groups are several of one scale.
        layer.group_size = next((s for s in (128, 64, 32) if size % s == 0 and size > 0), 32)
        times = size // layer.group_size
        if times > 1:
            scales = scales.repeat_interleave(times, 1)
            zeros = None if zeros is None else zeros.repeat_interleave(times, 1)
        layer._format = FORMATS_WITH_ZEROS[layer.group_size]
        if zeros is None and layer.group_size == 32:
            layer._format = INT4_WITH_MIDDLE
        layer.bias = layer._checked_bias(op, bias)
        if input_order is not None:
            layer.input_order = cls._checked_order(op, input_order, layer.in_features)
        layer.packed = _pack_quantized_linear(weight, scales, zeros)
        return layer

    @classmethod
    def from_gguf(cls, weight: QuantizedWeight, bias: Tensor | None = None) -> PackedLinear:
        """Pack blocks of a GGUF file as they are, without loss.

        Each row of ``x`` is rounded to int8 in groups of as many elements as share a scale in the
        blocks, and the products of a group are summed exactly.

        Parameters
        ----------
        weight : QuantizedWeight
            Its ``kind`` is the layer's ``dtype``.
        bias : Tensor, optional
            ``[out_features]``, float32, bfloat16 or float16. It is copied.

        Returns
        -------
        PackedLinear
            ``layer.dtype`` is the kind, such as ``"Q4_K"``.

        Raises
        ------
        TypeError
            An argument of another type.
        ValueError
            A bias of another dtype, shape or device than expected.
        """
        op = "PackedLinear.from_gguf"
        if not isinstance(weight, QuantizedWeight):
            raise type_error(op, "weight", weight, "a QuantizedWeight")
        layer = cls.__new__(cls)
        kind = KINDS[weight.kind]
        layer.dtype, layer._format, layer.group_size = weight.kind, kind.format, kind.group_size
        layer.out_features, layer.in_features = weight.shape
        layer.bias = layer._checked_bias(op, bias)
        layer.packed = _pack_gguf_linear(weight.data, kind.number)
        return layer

    @classmethod
    def from_packed(
        cls,
        packed: Tensor,
        bias: Tensor | None = None,
        *,
        in_features: int,
        out_features: int,
        dtype: str | torch.dtype = "float32",
    ) -> PackedLinear:
        """Take a weight that has been packed before, which is kept as it is: it may be mapped.

        Parameters
        ----------
        packed : Tensor
            uint8 ``[bytes]``: ``packed`` of a layer whose ``input_order`` is None.
        bias : Tensor, optional
            ``[out_features]``, float32, bfloat16 or float16. It is copied.
        in_features, out_features, dtype
            Of that layer.

        Returns
        -------
        PackedLinear
            The same layer.

        Raises
        ------
        TypeError
            An argument of another type.
        ValueError
            An argument of another dtype, shape, device or value than expected; or ``packed`` is of
            another CPU capability.
        """
        op = "PackedLinear.from_packed"
        check_dense_tensors(op, packed=packed)
        layer = cls.__new__(cls)
        if isinstance(dtype, str) and dtype in KINDS:
            layer.dtype = dtype
        else:
            layer.dtype, _, _ = check_linear_format(op, dtype)
        layer._format, layer.group_size = format_of_packed(packed, layer.dtype)
        layer.in_features = check_int(op, "in_features", in_features, 0, limits="at least 0")
        layer.out_features = check_int(op, "out_features", out_features, 0, limits="at least 0")
        layer.bias, layer.packed = layer._checked_bias(op, bias), packed
        # The op sees whether they fit.
        layer(torch.empty(0, layer.in_features, dtype=torch.float32, device="cpu"))
        return layer

    @staticmethod
    def _checked_order(op: str, order: object, size: int) -> Tensor:
        check_dense_tensors(op, input_order=order)
        assert isinstance(order, Tensor)
        if order.shape != (size,) or order.dtype != torch.int64 or order.device.type != "cpu":
            raise ValueError(
                f"{op}: input_order is {str(order.dtype).removeprefix('torch.')} "
                f"{list(order.shape)} on {order.device}; expected int64 [{size}] on cpu"
            )
        if not torch.equal(order.sort().values, torch.arange(size, device="cpu")):
            raise ValueError(f"{op}: input_order is no permutation of 0 to {size - 1}")
        return order.clone()

    def _checked_bias(self, op: str, bias: Tensor | None) -> Tensor | None:
        if bias is not None:
            check_dense_tensors(op, bias=bias)
            self._check_weight(op, "bias", bias, 1, f"[{self.out_features}]")
            if bias.shape[0] != self.out_features:
                raise ValueError(
                    f"{op}: bias has shape {list(bias.shape)}; expected [{self.out_features}]"
                )
            bias = bias.detach().to(torch.float32, copy=True).contiguous()
        return bias

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
        _check_rows(op, "x", x, self.in_features)
        check_no_gradient(op, x=x, multiplier=multiplier, residual=residual, out=out)
        number = _activation(op, activation)
        for name, value in (("multiplier", multiplier), ("residual", residual), ("out", out)):
            if value is not None:
                self._check_like_y(name, value, x)
        arguments = (
            x if self.input_order is None else x.index_select(-1, self.input_order),
            self.packed,
            self.out_features,
            self._format,
            self.bias,
            number,
            multiplier,
            residual,
        )
        if out is None:
            return _packed_linear(*arguments)
        if out.is_neg():
            raise ValueError(f"{op}: out is a negated view, which cannot be written in place")
        if not out.is_contiguous():
            raise ValueError(
                f"{op}: out has strides {list(out.stride())}; expected a contiguous tensor"
            )
        _packed_linear_out(*arguments, out=out)
        return out

    def _check_like_y(self, name: str, value: object, x: Tensor) -> None:
        _check_rows("PackedLinear", name, value, self.out_features)
        assert isinstance(value, Tensor)
        shape = (*x.shape[:-1], self.out_features)
        if value.shape != shape:
            raise ValueError(
                f"PackedLinear: {name} has shape {list(value.shape)}; expected {list(shape)}"
            )

    def __repr__(self) -> str:
        return (
            f"PackedLinear(in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, dtype={self.dtype!r}"
            + (f", group_size={self.group_size})" if self.group_size is not None else ")")
        )


def _checked_eps(
    op: str, x: Tensor, eps: float, weight: Tensor | None, bias: Tensor | None = None
) -> float:
    """``eps`` as a float, once the tensors are seen to be dense and without a gradient."""
    check_dense_tensor(op, "x", x)
    if weight is not None:
        check_dense_tensor(op, "weight", weight)
    if bias is not None:
        check_dense_tensor(op, "bias", bias)
    check_no_gradient(op, x=x, weight=weight, bias=bias)
    eps = check_number(op, "eps", eps)
    if x.dim() == 0:
        raise ValueError(f"{op}: x has shape []; expected [..., size]")
    return eps


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
    return _layer_norm(x, weight, bias, _checked_eps("layer_norm", x, eps, weight, bias))


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
    return _rms_norm(x, weight, _checked_eps("rms_norm", x, eps, weight))
