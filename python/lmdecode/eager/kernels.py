"""The operators of torch whose rows would differ between batches, computed so that they do not."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lmdecode._ops import ops
from lmdecode.eager.packed_weights import FORMATS, PackedWeight, PackedWeights, owner_of

__all__ = ["ELEMENTWISE", "KERNELS", "PRODUCTS", "WEIGHTS", "Kernel"]

WEIGHTS = PackedWeights()
# A kernel of torch, and one that takes its place: the first argument is the kernel of torch.
Kernel = Callable[..., Any]
_packed_linear_rows = ops.packed_linear_rows.default
_batched_matmul = ops.batched_matmul.default
_sliding_window_attention = ops.sliding_window_attention.default


def _taken(first: Tensor, *others: Tensor | None) -> bool:
    """Whether all have one dtype, of those that products take."""
    dtype = first.dtype
    return dtype in FORMATS and all(x is None or x.dtype is dtype for x in others)


# --- Products -------------------------------------------------------------------------------------


def _rows_by(found: PackedWeight, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``, ``[..., out_features]``, for x ``[..., in_features]``."""
    return _packed_linear_rows(x, found.packed, found.out_features, found.format, bias)


def _linear(torchs: Kernel, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    found = WEIGHTS.known(weight)
    if found is None:
        if not _taken(x, weight, bias) or weight.dim() != 2:
            return torchs(x, weight, bias)
        found = WEIGHTS.of(weight, owner_of(weight))
    if (
        x.dtype is not found.dtype or x.dim() == 0 or x.shape[-1] != found.in_features
        or (bias is not None and (bias.dtype is not x.dtype or bias.shape != (found.out_features,)))
    ):  # fmt: skip
        WEIGHTS.keep(weight)
        return torchs(x, weight, bias)
    return _rows_by(found, x, bias)


def _product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``a @ b + bias`` of matrices, and ``a @ b`` of batches of them, which is float32."""
    if a.dim() == 3:
        return _batched_matmul(a.float(), b.float(), FORMATS[b.dtype])
    return _rows_by(WEIGHTS.of(b.t(), owner_of(b)), a, bias)


def _fits(rank: int, a: Tensor, b: Tensor) -> bool:
    """Whether two matrices, or two batches of them, can be multiplied."""
    return (
        _taken(a, b) and a.dim() == b.dim() == rank
        and a.shape[:-2] == b.shape[:-2] and a.shape[-1] == b.shape[-2]
    )  # fmt: skip


def _mm(rank: int, torchs: Kernel, a: Tensor, b: Tensor) -> Tensor:
    return _product(a, b).to(a.dtype) if _fits(rank, a, b) else torchs(a, b)


def _addmm(
    rank: int, torchs: Kernel, to: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Tensor:
    shape = (*a.shape[:-1], b.shape[-1]) if _fits(rank, a, b) and to.dtype is a.dtype else ()
    wides = zip(to.shape[::-1], shape[::-1], strict=False)
    if not to.dim() <= len(shape) == rank or any(size not in (1, wide) for size, wide in wides):
        return torchs(to, a, b, beta=beta, alpha=alpha)
    if rank == 2 and beta == 1 and alpha == 1 and to.shape == b.shape[1:]:
        return _product(a, b, to)
    product = _product(a.float(), b) * alpha  # rounded once, at the end
    return (product if beta == 0 else product + to.float() * beta).to(to.dtype)


def _vector(rank: int, torchs: Kernel, a: Tensor, b: Tensor) -> Tensor:
    """Vectors are matrices of a column."""
    if a.dim() != rank or b.dim() != 1 or not _fits(2, torch.atleast_2d(a), b[:, None]):
        return torchs(a, b)
    return _product(torch.atleast_2d(a), b[:, None]).view(a.shape[:-1])


def _grouped_mm(
    torchs: Kernel, a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    if (
        not _taken(a, b, bias) or (a.dim(), b.dim()) != (2, 3)
        or offs is None or out_dtype not in (None, a.dtype)
    ):  # fmt: skip
        return torchs(a, b, offs, bias, out_dtype)
    owner, begin = owner_of(b), 0
    out = a.new_zeros(a.shape[0], b.shape[2])
    for group, end in enumerate(offs.tolist()):
        if end > begin:
            of_group = None if bias is None else bias[group]
            found = WEIGHTS.of(b[group].t(), owner)
            out[begin:end] = _rows_by(found, a[begin:end], of_group)
        begin = end
    return out


# --- Attention ------------------------------------------------------------------------------------


def _attention(
    torchs: Kernel, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: Any = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    of_q, of_k, of_v = q.shape, k.shape, v.shape
    heads = -3 if enable_gqa and len(of_q) > 2 else -2
    if (
        not _taken(q, k, v) or dropout_p > 0 or (is_causal and attn_mask is not None)
        or not len(of_q) == len(of_k) >= 2 or not 0 < of_q[-1] == of_k[-1] <= 1024
        or of_k[:-1] != of_v[:-1] or of_v[-1] > 1024 or of_k[-2] == 0
        or of_q[:heads] != of_k[:heads] or (heads == -3 and of_q[-3] % of_k[-3] != 0)
        or (attn_mask is not None and attn_mask.dtype not in (torch.bool, torch.float32, q.dtype))
    ):  # fmt: skip
        given = q, k, v, attn_mask, dropout_p, is_causal
        return torchs(*given, scale=scale, enable_gqa=enable_gqa)
    mask = slopes = positions = None
    if attn_mask is not None:
        if q.dim() > 4:
            attn_mask = attn_mask.expand(*of_q[:-1], of_k[-2]).flatten(0, -4)
        mask = attn_mask.reshape((1,) * (4 - attn_mask.dim()) + attn_mask.shape)
        mask = mask.expand(-1, -1, of_q[-2], of_k[-2])
    if len(of_q) != 4:
        # Without heads, what stands before [tokens, size] is taken for them.
        batch = math.prod(of_q[:-3])
        q, k, v = (
            x.reshape(batch, x.shape[-3] if x.dim() > 2 else 1, *x.shape[-2:]) for x in (q, k, v)
        )
    if is_causal and of_q[-2] != of_k[-2]:
        # The first query sees the first key alone.
        positions = torch.arange(of_q[-2], device="cpu").expand(q.shape[0], -1)
    if scale is None:
        scale = 1.0 / math.sqrt(of_q[-1])
    if abs(math.frexp(scale)[0]) != 0.5:
        # A scale that rounds is multiplied as without a mask where all rows of a batch have the
        # mask of a window, and apart from the rest elsewhere: slopes of 0 are elsewhere.
        slopes = torch.zeros(q.shape[1], dtype=torch.float32, device="cpu")
    right = -1 if mask is None and not is_causal else 0
    out, _ = _sliding_window_attention(
        q, k, v, -1, right, scale, 0.0, None, slopes, positions, None, None, None, mask, True,
        None, None, None, False,
    )  # fmt: skip
    return out if len(of_q) == 4 else out.view(*of_q[:-1], of_v[-1])


# --- Rows of a reduction --------------------------------------------------------------------------

# TensorIterator gives a thread this many elements or more, and cuts a single sum of more in parts.
_GRAIN = 32768


def _by_rows(torchs: Kernel, x: Tensor, given: dict[str, Any]) -> Any:
    """Reduce rows that lie side by side, and never a long one alone."""
    dims = given.get("dim")
    asked = [dims] if isinstance(dims, int) else list(dims or range(x.dim()))
    wanted = sorted(d % max(x.dim(), 1) for d in asked)
    if (
        not x.is_floating_point() or x.numel() == 0 or len(set(wanted)) != len(wanted)
        or not all(-x.dim() <= d < x.dim() for d in asked)
    ):  # fmt: skip
        return torchs(x, **given)
    size = math.prod(x.shape[d] for d in wanted)
    rows = x.numel() // size
    alone = rows == 1 and size > _GRAIN
    if wanted == list(range(x.dim() - len(wanted), x.dim())) and x.is_contiguous() and not alone:
        return torchs(x, **given)
    kept = [d for d in range(x.dim()) if d not in wanted]
    y = x.permute(*kept, *wanted).reshape(rows, size)
    y = (y.expand(2, size) if alone else y).contiguous()
    out = torchs(y, **(given | {"dim": [1], "keepdim": False}))[:rows]
    keep = given.get("keepdim", False)
    return out.view([1 if d in wanted else n for d, n in enumerate(x.shape) if keep or d in kept])


def _reduction(names: list[str], torchs: Kernel, x: Tensor, *args: Any, **options: Any) -> Any:
    if args[:1] == ([-1],) and x.dim() > 0 and x.shape[-1] <= _GRAIN and x.is_contiguous():
        return torchs(x, *args, **options)
    return _by_rows(torchs, x, dict(zip(names, args, strict=False)) | options)


def _of_all(call: Kernel, torchs: Kernel, x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return call(x, dim=list(range(x.dim())), dtype=dtype) if x.dim() else torchs(x, dtype=dtype)


def _softmax(torchs: Kernel, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Torch computes rows side by side each by itself, and has other sums for short ones."""
    if not x.is_floating_point() or x.numel() == 0 or not -x.dim() <= dim < x.dim():
        return torchs(x, dim, half_to_float)
    size = x.shape[dim]
    rest = max(16 - size, 0) if x.dtype.itemsize > 2 else -size % _VECTORS
    rows = x.movedim(dim, -1)
    if rest > 0:
        rows = torch.nn.functional.pad(rows, (0, rest), value=-math.inf)
    return torchs(rows.contiguous(), -1, half_to_float)[..., :size].movedim(-1, dim).contiguous()


# --- Elements -------------------------------------------------------------------------------------

# A thread's loop takes two vectors at a time, and the rest one by one, where exp and its kin have
# other bits: of 64 elements, and of a multiple of 64 a thread, there is no rest.
_VECTORS = 64


def _elementwise(torchs: Kernel, x: Tensor, *args: Any, **options: Any) -> Tensor:
    size = x.numel()
    rest = -size % (_VECTORS * min(torch.get_num_threads(), max(-(-size // _GRAIN), 1)))
    if not x.is_floating_point() or (rest == 0 and x.is_contiguous()):
        return torchs(x, *args, **options)
    padded = torch.cat([x.reshape(size), x.new_ones(rest)])
    out = torchs(padded, *args, **options)[:size].view(x.shape)
    return out if x.is_contiguous() else torch.empty_like(x, dtype=out.dtype).copy_(out)


def _rsqrt(torchs: Kernel, x: Tensor) -> Tensor:
    """Of float32 the root and the quotient are each rounded once in any loop."""
    return torchs(x) if x.dtype is torch.float32 else _elementwise(torchs, x)


def _power(torchs: Kernel, x: Tensor, exponent: Any) -> Tensor:
    """Squares and cubes are products."""
    return torchs(x, exponent) if exponent in (2, 3) else _elementwise(torchs, x, exponent)


def _power_of(torchs: Kernel, base: Any, x: Tensor) -> Tensor:
    return _elementwise(partial(torchs, base), x)


# By the name of the operator, such as "sum.dim_IntList".
#: Kernels that take one dtype of :data:`FORMATS`.
PRODUCTS: dict[str, Kernel] = {
    "linear": _linear, "mm": partial(_mm, 2), "addmm": partial(_addmm, 2),
    "bmm": partial(_mm, 3), "baddbmm": partial(_addmm, 3), "mv": partial(_vector, 2),
    "dot": partial(_vector, 1), "vdot": partial(_vector, 1), "_grouped_mm": _grouped_mm,
    "scaled_dot_product_attention": _attention,
}  # fmt: skip
#: Kernels that take floats alone.
ELEMENTWISE: dict[str, Kernel] = {
    "rsqrt": _rsqrt, "pow.Tensor_Scalar": _power, "pow.Scalar": _power_of,
    **dict.fromkeys("""
acos acosh asin asinh atan atanh celu cos cosh digamma elu erf erfc erfinv exp exp2 expm1 gelu
hardsigmoid hardswish lgamma log log10 log1p log2 log_sigmoid logit mish selu sigmoid silu sin sinc
sinh softplus tan tanh
""".split(), _elementwise),
}  # fmt: skip
KERNELS: dict[str, Kernel] = {
    **PRODUCTS, **ELEMENTWISE, "_softmax": _softmax, "_log_softmax": _softmax,
    "sum": partial(_of_all, torch.sum), "mean": partial(_of_all, torch.mean),
    "sum.dim_IntList": partial(_reduction, ["dim", "keepdim"]),
    "mean.dim": partial(_reduction, ["dim", "keepdim"]),
    "logsumexp": partial(_reduction, ["dim", "keepdim"]),
    "var.correction": partial(_reduction, ["dim"]), "std.correction": partial(_reduction, ["dim"]),
    "linalg_vector_norm": partial(_reduction, ["ord", "dim", "keepdim"]),
    # Torch's: it is here as a weight that it reads is not let go.
    "embedding": lambda torchs, *args, **options: torchs(*args, **options),
}  # fmt: skip
