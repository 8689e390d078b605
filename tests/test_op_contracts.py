"""What every op keeps: opcheck, fakes, one graph, and bits that depend on a row alone."""

import importlib
import inspect
import itertools
import re
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.library import opcheck
from torch.utils._pytree import tree_leaves

import lmdecode
from lmdecode.compat import ascend
from lmdecode.reference import decoder_step
from tests.support.contracts import LAYOUTS, Call, Contract, raw, rows_of
from tests.support.digests import digest_of
from tests.support.op_contract import assert_same_bits, on_threads
from tests.support.op_schemas import op_schemas
from tests.support.random_tensors import randn
from tests.support.wrong_arguments import PARTS, TAKES, ranges, taken, wrong_calls_of

AREAS = ("attention", "beam", "decoder", "kv_cache", "linear", "sampling")


def contracts(area: str) -> list[Contract]:
    return list(importlib.import_module(f"tests.{area}.contracts").CONTRACTS)


CONTRACTS = {contract.op: contract for area in AREAS for contract in contracts(area)}
# No tensors go in or come out, or they run on devices alone (tests/decoder/test_decoding_cuda.py).
WITHOUT = {
    "cpu_capabilities", "cpu_capability", "gguf_type", "sampler_layout", "sampler_row_bytes",
    "decoding_workspace_bytes", "causal_workspace_bytes", *decoder_step.__all__,
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def of_contracts(
    name: str, with_calls: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Parametrise a test over the contracts that have something, and perhaps their calls."""
    chosen = [contract for contract in CONTRACTS.values() if getattr(contract, name)]
    pairs = [(c, call) for c in chosen for call in (c.calls if with_calls else (None,))]
    rows = [
        pytest.param(
            *((contract, call) if with_calls else (contract,)),
            id=f"{contract.op}-{call}" if with_calls else contract.op,
            marks=[pytest.mark.slow] if contract.is_slow else [],
        )
        for contract, call in pairs
    ]
    return pytest.mark.parametrize(("contract", "name") if with_calls else "contract", rows)


def test_every_op_has_a_contract() -> None:
    names = {schema.name.removeprefix("lmdecode::").removesuffix(".out") for schema in op_schemas()}
    assert names - WITHOUT == set(CONTRACTS)


@of_contracts("calls", with_calls=True)
def test_opcheck(contract: Contract, name: str) -> None:
    """Of the op, and of its overload that writes to what it is given."""
    called = contract.calls[name]().op_calls()
    mine = [call for call in called if call[0].name() == f"lmdecode::{contract.op}"]
    assert mine, [op.name() for op, *_ in called]
    for op, arguments, options in mine:
        opcheck(op, arguments, options)
        if "out" in op.overloadpacket.overloads():
            check_out(op, arguments, options)


def check_out(op: Any, given: tuple[Any, ...], options: dict[str, Any]) -> None:
    writes, found = op.overloadpacket.out, op(*given, **options)
    want = found if isinstance(found, tuple) else (found,)
    arguments = dict(zip((a.name for a in op._schema.arguments), given, strict=False)) | options
    taken = writes._schema.arguments
    inputs = [arguments.get(a.name, a.default_value) for a in taken[: -len(want)]]
    outputs = [None if tensor is None else torch.full_like(tensor, 77) for tensor in want]
    named = dict(zip((a.name for a in taken[-len(want) :]), outputs, strict=True))
    opcheck(writes, tuple(inputs), named)
    assert writes(*inputs, **named) is None
    assert_same_bits(outputs, want)


@of_contracts("calls")
def test_sparse_tensors_get_an_error_that_names_the_argument(contract: Contract) -> None:
    """Of the public function; tests/test_refused_tensors.py asks the ops themselves."""
    for make in contract.calls.values():
        check_sparse(make())


def check_sparse(call: Call) -> None:
    if isinstance(call.function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return
    positions = list(inspect.signature(call.function).parameters)
    for name, value in call.arguments.items():
        argument = positions[name] if isinstance(name, int) else name
        if isinstance(value, torch.Tensor):
            bad: Any = value.to_sparse()
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
            first = value[0].to_sparse()
            bad = [first, *value[1:]] if isinstance(value, list) else type(value)(first, *value[1:])
            argument = rf"{argument}(\[0\]|\.{getattr(value, '_fields', ['-'])[0]})"
        else:
            continue
        wrong = Call(call.function)
        wrong.arguments = {**call.copy().arguments, name: bad}
        with pytest.raises(ValueError, match=rf"\b{argument} has layout torch.sparse_coo"):
            wrong()


def test_sparse_tensors_elsewhere() -> None:
    layer = lmdecode.PackedLinear(randn(4, 3))
    check_sparse(Call(layer.__call__, randn(2, 3), multiplier=randn(2, 4), residual=randn(2, 4)))
    check_sparse(Call(lmdecode.PackedLinear, randn(4, 3), randn(4)))
    rows = {"topK": torch.tensor([1, 2]), "topP": randn(2).abs(), "q": randn(2, 9).abs()}
    check_sparse(Call(ascend.top_k_top_p_sample, randn(2, 9), **rows))


@of_contracts("calls")
def test_a_wrong_argument_is_refused_by_its_name(contract: Contract) -> None:
    """In every way of its type that is not in TAKES, before anything is written."""
    ways: dict[str, dict[str, set[bool]]] = defaultdict(lambda: defaultdict(set))
    for call in of_other_types(contract):
        want = call.run().returned
        for wrong in wrong_calls_of(call, PARTS.get(contract.op, {})):
            memories = [raw(tensor) for tensor in wrong.call.tensors() if not tensor.is_meta]
            before = [memory.clone() for memory in memories]
            try:
                got = wrong.call()
            except (ValueError, TypeError) as error:
                message = str(error)
                assert re.search(wrong.pattern, message), (*wrong[:2], message)
                assert_same_bits(memories, before)
                if nearest := wrong.nearest(message):
                    with pytest.raises(ValueError, match=rf" is {nearest[0]}(\.0)?; expected "):
                        nearest[1]()
            else:
                message = ""
                if wrong.way == "steps":
                    assert_same_bits([got], [want])
            ways[wrong.argument][wrong.way].add(not message)
    assert (taken(ways), ranges(ways)) == TAKES[contract.op]


def of_other_types(contract: Contract) -> list[Call]:
    """Return the calls of a contract, one of each choice of arguments and their types."""
    found: dict[str, Call] = {}
    for make in contract.calls.values():
        call = make()
        given = {n: x for n, x in call.arguments.items() if not isinstance(x, bool)}
        found.setdefault(str({n: getattr(x, "dtype", type(x)) for n, x in given.items()}), call)
    return list(found.values())


@of_contracts("has_fakes", with_calls=True)
def test_fakes_know_shapes_dtypes_and_devices(contract: Contract, name: str) -> None:
    """The meta device stands for any other."""
    call = contract.calls[name]()
    fakes = tree_leaves(call.change(lambda tensor: tensor.to("meta"))())
    for fake, real in zip(fakes, tree_leaves(call()), strict=True):
        if not isinstance(real, torch.Tensor):
            assert fake == real
            continue
        assert fake.device.type == "meta"
        assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


@of_contracts("compiles", with_calls=True)
def test_compiled_in_one_graph(contract: Contract, name: str) -> None:
    call = contract.calls[name]()
    function = call.function

    def of_python(*arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options)

    backend = "inductor" if name == list(contract.calls)[-1] else "aot_eager"
    compiled = torch.compile(of_python, fullgraph=True, backend=backend)
    got, want = call.run(compiled), call.run()
    assert type(got.returned) is type(want.returned)
    assert_same_bits(got, want)


@of_contracts("strided", with_calls=True)
def test_strides_are_not_in_the_bits(contract: Contract, name: str) -> None:
    call = contract.calls[name]()
    want = call.run()[:2]
    for layout in LAYOUTS.values():  # all arguments at once, then each by itself
        for names in (contract.strided, *((name,) for name in contract.strided)):
            assert_same_bits(call.change(layout, names).run()[:2], want)


@of_contracts("reference", with_calls=True)
def test_bits_of_the_reference(contract: Contract, name: str) -> None:
    call = contract.calls[name]()
    assert_same_bits(call.run(), call.run(contract.reference))


@of_contracts("many")
def test_threads(contract: Contract) -> None:
    assert contract.many is not None
    for call in contract.many():
        got = on_threads(call.run, (1, 2, 3, 8))
        if contract.reference is not None:
            assert_same_bits(got, call.run(contract.reference))


@of_contracts("rows")
def test_rows_alone_and_in_any_batch(contract: Contract) -> None:
    """One by one, in another order, and each twice."""
    chosen = (n for n in contract.calls if not n.startswith(contract.without_rows))
    small = [contract.calls[name]() for name in chosen]
    for call in itertools.chain(small, contract.many() if contract.many else ()):
        whole = call()
        batch = len(call.arguments[contract.rows[0]])
        order = torch.randperm(batch, generator=torch.Generator().manual_seed(batch)).tolist()
        for rows in (*([row] for row in order[:9]), order, [*order, *order]):
            cut = call.change(partial(_cut, rows=rows, batch=batch), contract.rows)
            assert_same_bits(cut(), rows_of(whole, rows))


def _cut(tensor: torch.Tensor, rows: list[int], batch: int) -> torch.Tensor:
    return tensor[rows] if tensor.dim() and len(tensor) == batch else tensor


# --- CPU capabilities -----------------------------------------------------------------------------


def digest(op: str) -> str:
    """Digest every output bit of many calls."""
    everywhere = CONTRACTS[op].everywhere
    assert everywhere is not None
    return digest_of(call() for call in everywhere())


@pytest.fixture(scope="module")
def digests() -> dict[str, str]:
    return {}


@pytest.mark.slow
@of_contracts("everywhere")
def test_cpu_capability(
    contract: Contract, run_at_capability: Callable[[str], list[str]], digests: dict[str, str]
) -> None:
    op = contract.op
    if op not in digests:
        digests[op] = digest(op)
    code = f"from tests.test_op_contracts import digest; print(digest({op!r}))"
    assert run_at_capability(code) == [digests[op]]
