"""Each operator of ``batch_invariant``: a row alone has the bits that it has in company."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmdecode import batch_invariant
from lmdecode.eager.kernels import KERNELS
from lmdecode.eager.mode import overload

aten = torch.ops.aten
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def _no_gradients(threads: None) -> Iterator[None]:
    with torch.no_grad():
        yield


def values(*shape: int, dtype: torch.dtype = torch.float32, low: float = -2.0) -> Tensor:
    return torch.empty(shape).uniform_(low, 2.0).to(dtype)


# A call for the rows of x [rows, 37], whose first dimension is the batch.
W, SQUARE = values(37, 29), values(29, 37)
Rows = Callable[[Tensor], Tensor]


def weight(x: Tensor) -> Tensor:
    return W.to(x.dtype)


ROWS: dict[str, Rows] = {
    "linear": lambda x: aten.linear(x, SQUARE.to(x.dtype), SQUARE[:, 0].to(x.dtype)),
    "mm": lambda x: aten.mm(x, weight(x)),
    "addmm": lambda x: aten.addmm(weight(x)[0], x, weight(x), beta=0.5, alpha=3),
    "bmm": lambda x: aten.bmm(x[:, None], weight(x).expand(len(x), -1, -1)),
    "baddbmm": lambda x: aten.baddbmm(
        x[:, :1, None], x[:, None], weight(x).expand(len(x), -1, -1), beta=2, alpha=0.3
    ),
    "mv": lambda x: aten.mv(x, weight(x)[:, 3]),
    "dot": lambda x: torch.stack([aten.dot(row, weight(x)[:, 5]) for row in x]),
    "vdot": lambda x: torch.stack([aten.vdot(row, weight(x)[:, 5]) for row in x]),
    "_grouped_mm": lambda x: aten._grouped_mm(
        F.pad(x, (0, 3)), weight(x).new_ones(1, 40, 24), torch.tensor([len(x)], dtype=torch.int32)
    ),
    "scaled_dot_product_attention": lambda x: aten.scaled_dot_product_attention(
        x[:, None, None, :36],
        x[:, None, :36].reshape(len(x), 1, 1, 36).expand(-1, 1, 5, -1),
        x[:, None, None, :36].expand(-1, 1, 5, -1),
    ),
    "sum.dim_IntList": lambda x: aten.sum.dim_IntList(x, [1]),
    "mean.dim": lambda x: aten.mean.dim(x, [-1], True),
    "logsumexp": lambda x: aten.logsumexp(x, [1]),
    "var.correction": lambda x: aten.var.correction(x, [1], correction=0),
    "std.correction": lambda x: aten.std.correction(x, [1], keepdim=True),
    "linalg_vector_norm": lambda x: aten.linalg_vector_norm(x, 2, [1]),
    "sum": lambda x: torch.stack([aten.sum(row) for row in x]),
    "mean": lambda x: torch.stack([aten.mean(row) for row in x]),
    "_softmax": lambda x: aten._softmax(x, 1, False),
    "_log_softmax": lambda x: aten._log_softmax(x, -1, False),
    "pow.Scalar": lambda x: aten.pow.Scalar(1.7, x),
    "pow.Tensor_Scalar": lambda x: aten.pow.Tensor_Scalar(x.abs(), 0.3),
    "embedding": lambda x: aten.embedding(SQUARE.to(x.dtype), (x[:, :5].abs() * 10).long()),
    "acosh": lambda x: aten.acosh(x.abs() + 1),
}


def rows_of(name: str) -> Rows:
    return ROWS.get(name) or overload(name)


@pytest.mark.parametrize("name", KERNELS)
def test_a_row_alone_has_the_bits_that_it_has_in_company(name: str) -> None:
    call = rows_of(name)
    for dtype in FLOATS:
        x = values(2000, 37, dtype=dtype)
        plain = call(x[:40])
        with batch_invariant():
            torch.set_num_threads(2)
            whole = call(x[:40])
            for row, count, threads in ((0, 1, 1), (7, 3, 2), (39, 11, 3)):
                torch.set_num_threads(threads)
                place = row % count
                company = x[40 : 40 + count].clone()
                company[place] = x[row]
                strided = torch.empty(count, 74, dtype=dtype)[:, ::2].copy_(company)
                columns = torch.empty(37, count, dtype=dtype).t().copy_(company)
                for given in (company, strided, columns):
                    torch.testing.assert_close(
                        call(given)[place], whole[row], rtol=0, atol=0, equal_nan=True
                    )
            torch.set_num_threads(2)
            many = call(x)[:40] if len(plain.shape) and name not in ("dot", "vdot") else whole
            torch.testing.assert_close(many, whole, rtol=0, atol=0, equal_nan=True)
        tolerance = 2e-5 if dtype is torch.float32 else 0.02
        torch.testing.assert_close(whole, plain, rtol=tolerance, atol=tolerance, equal_nan=True)
        assert whole.dtype is plain.dtype
        assert whole.stride() == plain.stride()


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (RuntimeError, IndexError, ValueError, NotImplementedError) as error:
        return type(error), str(error)


X, INTS = values(4, 6), torch.arange(24).view(4, 6)
WRONG: dict[str, Callable[[], Any]] = {
    "linear, sizes": lambda: F.linear(X, W), "linear, dtypes": lambda: F.linear(X, X.bfloat16()),
    "linear, bias": lambda: F.linear(X, X, X[0]), "linear, 0-d": lambda: F.linear(X[0, 0], X),
    "mm, sizes": lambda: X @ X, "mm, dtypes": lambda: torch.mm(X, X.t().double()),
    "mm, rank": lambda: torch.mm(X[0], X),
    "bmm, batches": lambda: torch.bmm(X[None], X[:2, :, None]),
    "bmm, rank": lambda: torch.bmm(X, X.t()), "mv": lambda: torch.mv(X, X[:, 0]),
    "addmm": lambda: torch.addmm(values(3, 3), X, X.t()),
    "addmm, dtype": lambda: torch.addmm(INTS[:, :4], X, X.t()),
    "baddbmm": lambda: torch.baddbmm(values(2, 3, 3), X[None], X.t()[None]),
    "softmax, ints": lambda: torch.softmax(INTS, 1), "softmax, dim": lambda: X.softmax(2),
    "sum, dim": lambda: X.sum(2), "sum, twice": lambda: X.sum((1, -1)),
    "mean, ints": lambda: INTS.mean(), "glu, odd": lambda: F.glu(X[:, :5]),
    "glu, dim": lambda: F.glu(X, 5), "silu, ints": lambda: F.silu(INTS),
    "atan2, sizes": lambda: torch.atan2(X, X[:, :5]), "embedding": lambda: F.embedding(X.long(), X),
    "attention": lambda: F.scaled_dot_product_attention(X[None], X[None], X.bfloat16()[None]),
    "attention, mask and causal": lambda: F.scaled_dot_product_attention(
        X[None], X[None], X[None], torch.ones(4, 4, dtype=torch.bool), is_causal=True),
    "attention, dtype of the mask": lambda: F.scaled_dot_product_attention(
        X[None], X[None], X[None], torch.ones(4, 4, dtype=torch.float64)),
    "attention, sizes": lambda: F.scaled_dot_product_attention(X[None], X[None, :, :5], X[None]),
}  # fmt: skip
# What is computed by torch itself, or has no elements.
PLAIN: dict[str, Callable[[], Any]] = {
    "float64": lambda: X.double() @ X.double().t(), "ints": lambda: INTS @ INTS.t(),
    "sum of ints": lambda: INTS.sum(1), "sum of bools": lambda: (INTS > 3).sum(),
    "number to powers": lambda: torch.stack([2.5**X, torch.pow(2, X)]),
    "number to ints": lambda: 2**INTS,
    "number to an int": lambda: 0.5 ** INTS,
    "powers of numbers": lambda: torch.pow(1.7, X.bfloat16()),
    "exp of ints": lambda: INTS.exp(), "exp of float64": lambda: X.double().exp(),
    "complex": lambda: torch.complex(X, X).exp().sum(),
    "0-d": lambda: X[0, 0].sum() + X[0, 0].mean(),
    "no rows": lambda: X[:0] @ X.t(), "no inner": lambda: X[:, :0] @ X[:, :0].t(),
    "no columns": lambda: X @ X[:0].t(), "no bias": lambda: F.linear(X[:0], X),
    "empty inner, bias": lambda: F.linear(X[:, :0], X[:, :0], X[:, 0]),
    "empty sum": lambda: X[:, :0].sum(1), "empty mean": lambda: X[:, :0].mean(1),
    "empty exp": lambda: X[:0].exp(), "empty softmax": lambda: X[:, :0].softmax(1),
    "empty bmm": lambda: torch.bmm(X[:0, :, None], X[:0, None]), "no dims": lambda: X.sum(()),
    "inf": lambda: torch.stack([X * torch.inf, X * torch.nan]).amax(),
    "softmax of -inf": lambda: torch.full((2, 5), -torch.inf).softmax(1),
    "softmax of 0-d": lambda: X[0, 0].softmax(0), "softmax of dim 0": lambda: X[:1].softmax(0),
    "silu of inf": lambda: F.silu(torch.tensor([torch.inf, torch.nan, 0.0])),
    "nan, beta 0": lambda: torch.addmm(X[:, :4] * torch.nan, X * 0, X.t(), beta=0),
    "nan, product": lambda: torch.full((2, 3), torch.nan) @ X[:3],
    "inf, product": lambda: torch.full((2, 4), torch.inf) @ X.abs(),
    "no keys": lambda: F.scaled_dot_product_attention(X[None], X[None, :0], X[None, :0]),
    "no queries": lambda: F.scaled_dot_product_attention(X[None, :0], X[None], X[None]),
    "var of one": lambda: X[:1].var(0), "std of one": lambda: X[:, 0].std(correction=0) * 0,
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_errors_are_those_of_torch(case: str) -> None:
    expected = outcome(WRONG[case])
    assert isinstance(expected, tuple)
    with batch_invariant():
        assert outcome(WRONG[case]) == expected


@pytest.mark.parametrize("case", PLAIN)
def test_values_at_the_edges_are_those_of_torch(case: str) -> None:
    expected = outcome(PLAIN[case])
    with batch_invariant():
        found = outcome(PLAIN[case])
    torch.testing.assert_close(found, expected, equal_nan=True)


HEADS = {"one": (6, 6, False), "groups": (6, 2, True)}
MASKS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "none": lambda q, k: {}, "causal": lambda q, k: {"is_causal": True},
    "bool": lambda q, k: {"attn_mask": torch.rand(q, k) < 0.7},
    "row hidden": lambda q, k: {"attn_mask": torch.arange(q)[:, None].expand(q, k) > 0},
    "float": lambda q, k: {"attn_mask": torch.randn(2, 1, q, k)},
    "of heads": lambda q, k: {"attn_mask": torch.randn(1, 6, q, k)},
    "scale": lambda q, k: {"scale": 0.3}, "scale 0": lambda q, k: {"scale": 0.0},
}  # fmt: skip


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("heads", HEADS)
def test_attention_is_that_of_torch(heads: str, mask: str) -> None:
    query_heads, key_heads, gqa = HEADS[heads]
    for queries, keys in ((5, 5), (3, 9), (9, 3), (1, 70)):
        for shape in ((2,), (2, 1)):
            if len(shape) == 2 and (gqa or mask in ("float", "of heads")):
                continue
            q = values(*shape, query_heads, queries, 20)
            k, v = values(*shape, key_heads, keys, 20), values(*shape, key_heads, keys, 12)
            options = MASKS[mask](queries, keys)
            expected = F.scaled_dot_product_attention(q, k, v, **options, enable_gqa=gqa)
            with batch_invariant():
                found = F.scaled_dot_product_attention(q, k, v, **options, enable_gqa=gqa)
                alone = {
                    name: value[1:] if name == "attn_mask" and value.dim() > 2 and len(value) > 1
                    else value for name, value in options.items()
                }  # fmt: skip
                row = F.scaled_dot_product_attention(q[1:], k[1:], v[1:], **alone, enable_gqa=gqa)
            torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5, equal_nan=True)
            torch.testing.assert_close(row, found[1:], rtol=0, atol=0, equal_nan=True)


def test_attention_has_one_result_with_and_without_a_mask() -> None:
    """Torch's callers leave a mask away where it hides nothing, or is causal, in all rows."""
    for size, dtype in itertools.product((6, 20, 64, 128), FLOATS[:2]):
        q, k, v = (values(2, 2, 9, size, dtype=dtype) for _ in range(3))
        causal = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
        padded = causal.clone()
        padded[1, :, :, :3] = False
        with batch_invariant():
            expected = F.scaled_dot_product_attention(q[:1], k[:1], v[:1], is_causal=True)
            for mask in (causal, padded, torch.where(padded, 0.0, -torch.inf).to(dtype)):
                found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
                assert torch.equal(found[:1], expected)


def test_a_long_sum_alone_does_not_depend_on_threads() -> None:
    x = values(3, 40001)
    with batch_invariant():
        for call in (torch.sum, torch.mean, torch.linalg.vector_norm, torch.var, torch.logsumexp):
            options = {"dim": 1} if call is torch.logsumexp else {}
            found = []
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                found.append(call(x[1:2], **options))
                assert torch.equal(call(x, dim=1)[1], found[0].view(()))
            assert all(torch.equal(other, found[0]) for other in found)


def test_strides_of_a_result_are_those_of_torch() -> None:
    x = values(3, 5, 7)
    for given in (x, x.transpose(1, 2), x.permute(2, 0, 1), x[:, ::2], x[:, :1].expand(3, 5, 7)):
        for call in (torch.exp, F.silu, lambda t: t.softmax(0), lambda t: t.softmax(-1)):
            expected = call(given)
            with batch_invariant():
                assert call(given).stride() == expected.stride()
