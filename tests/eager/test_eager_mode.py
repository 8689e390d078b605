"""``batch_invariant`` as a state of the process: entered, left, refused, and what it holds."""

import asyncio
import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmdecode import batch_invariant
from lmdecode.eager.mode import _kernels
from tests.eager.models import model, texts

OPERATORS = ("mm", "linear", "exp", "pow.Scalar", "scaled_dot_product_attention")


def dumps() -> list[str]:
    return [torch._C._dispatch_dump(f"aten::{name}") for name in OPERATORS]


@pytest.fixture(autouse=True)
def _left_as_it_was() -> Iterator[None]:
    list(_kernels())
    before = dumps(), torch.backends.mha.get_fastpath_enabled()
    yield
    assert not batch_invariant.is_enabled()
    assert batch_invariant.memory() == (0, 0)
    assert (dumps(), torch.backends.mha.get_fastpath_enabled()) == before


@pytest.fixture
def layer() -> nn.Linear:
    return nn.Linear(100, 30)


X = torch.linspace(-2, 2, 3300).sin().view(33, 100)


def is_invariant(layer: nn.Module, x: Tensor = X) -> bool:
    with torch.no_grad():
        return all(torch.equal(layer(x)[i : i + 1], layer(x[i : i + 1])) for i in (0, 5, 32))


def test_contexts_are_nested(layer: nn.Linear) -> None:
    assert not batch_invariant.is_enabled()
    outer = batch_invariant()
    with outer, outer:
        with batch_invariant(release=True), batch_invariant(strict=True):
            assert batch_invariant.is_enabled() and is_invariant(layer)
        assert batch_invariant.is_enabled() and is_invariant(layer)
        assert layer.weight.shape == (30, 100)


def test_it_is_a_decorator(layer: nn.Linear) -> None:
    @batch_invariant()
    def call(depth: int) -> bool:
        return is_invariant(layer) and (depth == 0 or call(depth - 1))

    assert call(2) and not batch_invariant.is_enabled()
    for late in (asyncio.sleep, (lambda: (yield))):
        with pytest.raises(TypeError, match=f"{late.__name__} is a generator or a coroutine"):
            batch_invariant()(late)


def test_it_is_enabled_until_it_is_disabled(layer: nn.Linear) -> None:
    batch_invariant.disable()
    batch_invariant.enable(release=True)
    batch_invariant.enable()
    with batch_invariant():
        pass
    assert batch_invariant.is_enabled() and is_invariant(layer)
    assert layer.weight.shape == (30, 100) and batch_invariant.memory().released == 0
    batch_invariant.disable()
    with pytest.raises(TypeError, match="strict is of type int; expected bool"):
        batch_invariant.enable(strict=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="release is of type NoneType; expected bool"):
        batch_invariant(release=None)  # type: ignore[arg-type]


def test_an_exception_leaves_it(layer: nn.Linear) -> None:
    weight = layer.weight.detach().clone()
    for options in ({}, {"strict": True}, {"release": True}, {"strict": True, "release": True}):
        with pytest.raises(ZeroDivisionError), batch_invariant(**options):
            assert is_invariant(layer)
            raise ZeroDivisionError
        assert torch.equal(layer.weight, weight) and not batch_invariant.is_enabled()


def test_threads_enter_and_leave_it(layer: nn.Linear) -> None:
    wrong: list[Any] = []

    def enter_often(options: dict[str, bool]) -> None:
        try:
            for _ in range(40):
                with batch_invariant(**options):
                    if not is_invariant(layer):
                        wrong.append(options)
        except Exception as error:
            wrong.append(error)

    weight = layer.weight.detach().clone()
    given: tuple[dict[str, bool], ...] = ({}, {"strict": True}, {"release": True})
    threads = [threading.Thread(target=enter_often, args=(options,)) for options in given]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert torch.equal(layer.weight, weight)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_thousand_entries_take_no_memory() -> None:
    layer = nn.Linear(1000, 300)
    x = torch.randn(2, 1000)
    before = 0
    for entry in range(1000):
        with batch_invariant(), torch.no_grad():
            layer(x)
            assert batch_invariant.memory().packed >= layer.weight.nbytes
        if entry == 200:
            before = resident()
    assert resident() - before < 10 << 20  # a copy each time is a gigabyte
    dies = weakref.ref(layer.weight)
    del layer
    gc.collect()
    assert dies() is None


def new_data(layer: nn.Linear, weight: Tensor) -> None:
    layer.weight.data = weight


def step(layer: nn.Linear, weight: Tensor, **options: bool) -> None:
    layer.weight.grad = layer.weight.detach() - weight
    torch.optim.SGD(layer.parameters(), lr=1.0, **options).step()
    layer.weight.grad = None


CHANGES: dict[str, Callable[[nn.Linear, Tensor], Any]] = {
    "copy": lambda layer, weight: layer.weight.copy_(weight), "step": step, "data": new_data,
    "fused step": lambda layer, weight: step(layer, weight, fused=True),
    "state dict": lambda layer, weight: layer.load_state_dict({"weight": weight}, strict=False),
    "assigned": lambda layer, weight: layer.load_state_dict(
        {"weight": weight}, strict=False, assign=True),
    "parameter": lambda layer, weight: setattr(layer, "weight", nn.Parameter(weight)),
    "element": lambda layer, weight: [layer.weight[i].copy_(weight[i]) for i in range(30)],
}  # fmt: skip


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_weight_is_seen(layer: nn.Linear, change: str, transposed: bool) -> None:
    weight = torch.randn(30, 100)
    with batch_invariant(), torch.no_grad():
        call = (lambda: X @ layer.weight.t()) if transposed else lambda: F.linear(X, layer.weight)
        before = call()
        for target in (weight, -weight):
            CHANGES[change](layer, target.clone())
            torch.testing.assert_close(call(), X @ layer.weight.detach().clone().t())
            assert not torch.equal(call(), before)


def test_memory_counts_what_lives() -> None:
    layers = [nn.Linear(100, 30), nn.Linear(100, 64, dtype=torch.bfloat16)]
    with batch_invariant(release=True), torch.no_grad():
        for layer in layers:
            layer(X.to(layer.weight.dtype))
        whole = batch_invariant.memory()
        assert whole.released == 30 * 100 * 4 + 64 * 100 * 2
        assert whole.packed >= whole.released
        layers.pop()
        del layer
        gc.collect()
        rest = batch_invariant.memory()
        assert rest.released == 30 * 100 * 4 and 30 * 100 * 4 <= rest.packed < whole.packed
    with batch_invariant(), torch.no_grad():
        layers[0](X)
        one = batch_invariant.memory().packed
        layers[0](X[:2])
        assert batch_invariant.memory() == (one, 0)
        X @ layers[0].weight.t()  # a copy of its own
        assert one < batch_invariant.memory().packed <= 2 * one
        F.linear(X, torch.randn(3, 100))  # no parameter
        assert batch_invariant.memory().packed <= 2 * one


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_released_weights_come_back(dtype: torch.dtype) -> None:
    layers = nn.Sequential(nn.Linear(100, 70), nn.GELU(), nn.Linear(70, 30)).to(dtype)
    with torch.no_grad():
        layers[0].weight[0, :4] = torch.tensor([0.0, -0.0, torch.inf, torch.nan])
        layers[2].weight[1, 1] = torch.finfo(dtype).tiny / 8
        layers[2].weight.data = layers[2].weight.t().contiguous().t()
    before = copy.deepcopy(layers.state_dict())
    strides = [value.stride() for value in layers.state_dict().values()]
    bits = torch.int32 if dtype is torch.float32 else torch.int16
    with pytest.raises(ZeroDivisionError), batch_invariant(release=True), torch.no_grad():
        expected = layers(X.to(dtype))
        assert layers[0].weight.numel() == 0 and layers[2].weight.numel() == 2100  # has strides
        again = layers(X.to(dtype))
        assert torch.equal(again.nan_to_num(), expected.nan_to_num())
        raise ZeroDivisionError
    for name, value in layers.state_dict().items():
        assert torch.equal(value.view(bits), before[name].view(bits)), name
    assert [value.stride() for value in layers.state_dict().values()] == strides
    assert all(parameter.requires_grad for parameter in layers.parameters())


def test_a_tied_embedding_is_left() -> None:
    made = model("llama")
    assert made.lm_head.weight is made.model.embed_tokens.weight
    before = copy.deepcopy(made.state_dict())
    with batch_invariant(), torch.no_grad():
        expected = made(texts(3), use_cache=False).logits
    with batch_invariant(release=True), torch.no_grad():
        for _ in range(2):
            assert torch.equal(made(texts(3), use_cache=False).logits, expected)
        assert made.lm_head.weight.shape == (101, 36)
        assert made.model.layers[0].mlp.up_proj.weight.numel() == 0
    for name, value in made.state_dict().items():
        assert torch.equal(value, before[name]), name


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "linear: weight": lambda w: F.linear(X, w), "mm: mat2": lambda w: X @ w.t(),
    "addmm: mat1": lambda w: torch.addmm(X[:1, :30], w, X.t()[:, :30]),
    "silu: self": F.silu, "_softmax: self": lambda w: w.softmax(1),
    "sum.dim_IntList: self": lambda w: w.sum(1), "embedding: weight": lambda w: F.embedding(
        torch.tensor([1]), w),
    "scaled_dot_product_attention: key": lambda w: F.scaled_dot_product_attention(
        X[None], w[None], w[None]),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_gradients_are_refused(layer: nn.Linear, case: str) -> None:
    name, tensor = case.split(": ")
    with batch_invariant():
        with pytest.raises(
            ValueError, match=rf"^batch_invariant, {name}: {tensor} requires a grad"
        ):
            REFUSED[case](layer.weight)
        with torch.no_grad():
            REFUSED[case](layer.weight)
        REFUSED[case](layer.weight.detach())
    if not torch.is_inference_mode_enabled():
        REFUSED[case](layer.weight).sum().backward()
        assert layer.weight.grad is not None


def test_compiled_models_run_eagerly(layer: nn.Linear, fresh_compiler: None) -> None:
    block = nn.Sequential(layer, nn.SiLU())
    compiled = torch.compile(block, backend="eager")
    with batch_invariant(), torch.no_grad():
        assert torch.equal(compiled(X), block(X)) and is_invariant(compiled)
    compiled(X).sum().backward()
    assert layer.weight.grad is not None


@torch.inference_mode()
def test_parameters_made_in_inference_mode_can_be_changed() -> None:
    layer = nn.Linear(100, 30)
    with batch_invariant(release=True):
        assert is_invariant(layer)
        before = layer(X)
        layer.weight.mul_(2)
        torch.testing.assert_close(layer(X), 2 * before - layer.bias)
        assert layer.weight.shape == (30, 100)


def test_inference_mode_and_autocast(layer: nn.Linear) -> None:
    attention = nn.MultiheadAttention(100, 5, batch_first=True).eval()
    with batch_invariant(), torch.inference_mode():
        assert is_invariant(layer)
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(X).dtype is torch.bfloat16 and is_invariant(layer)
            x = X.view(33, 4, 25).repeat(1, 1, 4)
            assert torch.equal(attention(x, x, x)[0][7], attention(x[7:8], x[7:8], x[7:8])[0][0])


def test_vmap(layer: nn.Linear) -> None:
    with batch_invariant(), torch.no_grad():
        expected = layer(X)
        found = torch.func.vmap(lambda x: F.linear(x, layer.weight, layer.bias).tanh())(X)
        assert torch.equal(found, expected.tanh())
        found = torch.func.vmap(lambda x: x.softmax(-1).sum(-1))(X.view(3, 11, 100))
        assert torch.equal(found.view(-1), X.softmax(-1).sum(-1))


@torch.no_grad()
def test_layers_with_a_fast_path() -> None:
    layer = nn.TransformerEncoderLayer(50, 5, 70, batch_first=True).eval()
    encoder = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(17, 9, 50)
    hidden = torch.zeros(17, 9, dtype=torch.bool)
    hidden[3:, 6:] = True
    plain = encoder(x)
    with batch_invariant():
        torch.testing.assert_close(encoder(x), plain, rtol=1e-5, atol=1e-5)
        assert torch.equal(encoder(x)[4], encoder(x[4:5])[0])
        found = encoder(x, src_key_padding_mask=hidden)
        assert torch.equal(found[2], encoder(x[2:3])[0])
        assert torch.equal(found[4, :6], encoder(x[4:5, :6])[0])


@torch.no_grad()
def test_strict_refuses_what_is_not_covered(layer: nn.Linear) -> None:
    lstm, y = nn.LSTM(100, 20), X.clone()
    models = model("qwen2"), model("gpt2", torch.bfloat16)
    refused: dict[str, Callable[[], Any]] = {
        "aten::convolution": lambda: F.conv1d(X[None], torch.ones(2, 33, 3)),
        "aten::lstm|aten::mkldnn_rnn_layer": lambda: lstm(X[:, None]),
        "aten::cumprod": lambda: X.cumprod(1), "aten::add.Tensor is not covered with an alpha":
        lambda: torch.add(X, X, alpha=0.3), "aten::addcmul|aten::prod": lambda: X.prod(1),
    }  # fmt: skip
    for name, call in refused.items():
        expected = call()
        with batch_invariant(strict=True):
            with pytest.raises(NotImplementedError, match=f"^batch_invariant: ({name})"):
                call()
            assert is_invariant(layer)
        with batch_invariant():
            torch.testing.assert_close(call(), expected)
    with batch_invariant(strict=True):
        torch.einsum("ab,cb->ac", X, layer.weight)
        y.addcmul_(X, X).relu_().cumsum(1)
        for each in models:
            each(texts(2), use_cache=False)
        X.double().exp().sum(1)


@torch.no_grad()
def test_a_weight_that_follows_another_in_its_place_is_its_own() -> None:
    """Of models that come and go, new parameters have the address and the id of old ones."""
    x = torch.tensor([1, 2])
    with batch_invariant(release=True):
        for _ in range(60):
            embedding, head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
            head.weight = embedding.weight
            found = head(embedding(x))
            expected = embedding.weight[x].double() @ embedding.weight.double().t()
            torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
            del embedding, head
        gc.collect()
        assert batch_invariant.memory().packed == 0


@torch.no_grad()
def test_a_released_weight_that_others_read_comes_back() -> None:
    weight = nn.Parameter(torch.randn(20, 30))
    expected = weight.norm(), weight.sum(-1), weight.exp()
    for number in range(3):
        with batch_invariant(release=True):
            F.linear(X[:, :30], weight)
            assert weight.numel() == 0
            found = (weight.norm, lambda: weight.sum(-1), weight.exp)[number]()
            assert torch.equal(found, expected[number]) and weight.shape == (20, 30)
            F.linear(X[:, :30], weight)
            assert weight.shape == (20, 30)


@torch.no_grad()
def test_views_of_a_parameter_are_bounded() -> None:
    table = nn.Parameter(torch.randn(300, 64))
    with batch_invariant():
        for length in range(1, 301):
            assert torch.equal(
                (X[:2, :64] @ table[:length].t())[:1], X[:1, :64] @ table[:length].t()
            )
        assert batch_invariant.memory().packed < 16 * table.nbytes


@torch.no_grad()
def test_strict_looks_at_dtypes() -> None:
    whole, imaginary = torch.arange(1, 11), torch.complex(X, X)
    refused: dict[str, Callable[[], Any]] = {
        "linear is not covered for torch.float64": lambda: F.linear(X.double(), X.double()),
        "mul.Tensor is not covered for complex": lambda: imaginary * 2,
        "pow.Tensor_Scalar is not covered for torch.int64": lambda: whole**0.3,
        "index_put is not covered where it accumulates": lambda: torch.zeros(5).index_put(
            (whole % 5,), whole.float(), accumulate=True),
    }  # fmt: skip
    for error, call in refused.items():
        with batch_invariant(strict=True), pytest.raises(NotImplementedError, match=error):
            call()
    with batch_invariant(strict=True):
        torch.zeros(5).index_put((whole[:4],), X[0, :4])
        assert whole.sum() == 55 and (whole * 2).max() == 20
