"""Every op is registered as torch wants it: schemas, fakes, opcheck, torch.compile, export."""

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

import lmdecode
import lmdecode.reference
from lmdecode.sampling_types import DIALECTS
from lmdecode.testing import SamplingCase, assert_same_bits, bits, sampling_cases

BATCH, VOCAB = 3, 40
BINDINGS = Path(__file__).resolve().parents[1] / "csrc" / "bindings"


def op_names() -> list[str]:
    """Return names with overloads, such as ``lmdecode::top_k_top_p_sample.out``."""
    names = torch._C._dispatch_get_all_op_names()
    return sorted(name for name in names if name.startswith("lmdecode::"))


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# --- Schemas --------------------------------------------------------------------------------------


def test_ops() -> None:
    """A new op belongs here, and into the opchecks below or in its area's folder."""
    assert op_names() == [
        "lmdecode::beam_finalize",
        "lmdecode::beam_step",
        "lmdecode::block_table_append_",
        "lmdecode::block_table_reorder_",
        "lmdecode::copy_blocks_",
        "lmdecode::cpu_capability",
        "lmdecode::decoder_activate_",
        "lmdecode::decoder_add_norm_",
        "lmdecode::decoder_cross_attention",
        "lmdecode::decoder_cross_cache_",
        "lmdecode::decoder_embed",
        "lmdecode::decoder_layer",
        "lmdecode::decoder_self_attention_",
        "lmdecode::decoding_read_memory_",
        "lmdecode::decoding_steps_",
        "lmdecode::decoding_workspace_bytes",
        "lmdecode::faster_transformer_decoding_",
        "lmdecode::gather_tree",
        "lmdecode::layer_norm",
        "lmdecode::log_softmax_top_k",
        "lmdecode::log_softmax_top_k.processed",
        "lmdecode::merge_attention_states",
        "lmdecode::pack_linear",
        "lmdecode::packed_linear",
        "lmdecode::packed_linear.out",
        "lmdecode::reorder_cache_",
        "lmdecode::ring_cache_append_",
        "lmdecode::rms_norm",
        "lmdecode::sliding_window_attention",
        "lmdecode::sliding_window_decode",
        "lmdecode::top_k_top_p_sample",
        "lmdecode::top_k_top_p_sample.out",
        "lmdecode::update_beam_indirection_",
    ]


@pytest.mark.parametrize("name", op_names())
def test_every_op_has_a_fake(name: str) -> None:
    assert torch._library.simple_registry.singleton.find(name).fake_impl.kernel is not None


# What has no CUDA kernel: the C++ loop of a decoder, packed weights and the norms between them. On
# devices the loop is one of ops and cuBLAS's products.
CPU_ONLY = {
    "lmdecode::decoder_layer",
    "lmdecode::decoding_read_memory_",
    "lmdecode::decoding_steps_",
    "lmdecode::faster_transformer_decoding_",
    "lmdecode::gather_tree",
    "lmdecode::layer_norm",
    "lmdecode::pack_linear",
    "lmdecode::packed_linear",
    "lmdecode::packed_linear.out",
    "lmdecode::rms_norm",
}


def has_kernel(name: str, device: str) -> bool:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return has(name, device) or has(name, "CompositeExplicitAutograd")


@pytest.mark.parametrize("name", op_names())
def test_every_op_has_its_kernels(name: str) -> None:
    assert has_kernel(name, "CPU")
    # Of those in CPU_ONLY it is one that throws (test_refused_tensors.py).
    if lmdecode.has_cuda():
        assert has_kernel(name, "CUDA")


@pytest.mark.skipif(not BINDINGS.is_dir(), reason="csrc is in source checkouts only")
def test_ops_without_a_cuda_kernel() -> None:
    """As the sources have it, where there is no CUDA to ask."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    in_sources = {
        f"lmdecode::{name}"
        for path in BINDINGS.glob("*_cuda.cpp")
        for name in re.findall(r'm\.impl\("([^"]+)"', path.read_text())
    }
    everywhere = {name for name in op_names() if has(name, "CompositeExplicitAutograd")}
    assert set(op_names()) - in_sources - everywhere == CPU_ONLY


@pytest.mark.parametrize("name", op_names())
def test_an_op_that_writes_returns_no_alias(name: str) -> None:
    """Functionalisation needs this of ops with `Tensor(a!)` arguments."""
    base, _, overload = name.partition(".")
    schema = torch._C._get_schema(base, overload)
    if any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments):
        assert all(r.alias_info is None for r in schema.returns)


# --- opcheck --------------------------------------------------------------------------------------


def row_parameters(kind: str) -> tuple[Any, ...]:
    """top_k ... temperature_rows: numbers for all rows, or tensors of one a row."""
    if kind == "numbers":
        return (5, None, 0.9, None, 0.01, None, 0.7, None)
    rows = (
        torch.tensor([0, 5, 40]),
        torch.tensor([1.0, 0.5, 0.9]),
        torch.tensor([0.0, 0.01, 0.5]),
        torch.tensor([1.0, 0.0, 1.3]),
    )
    if kind == "strided":
        rows = tuple(torch.stack((row, row), dim=1)[:, 0] for row in rows)
    return tuple(itertools.chain.from_iterable(zip((0, 1.0, 0.0, 1.0), rows, strict=True)))


def noise(kind: str) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """q, seed, position."""
    if kind == "q":
        generator = torch.Generator().manual_seed(1)
        return torch.empty(BATCH, VOCAB).exponential_(generator=generator), None, None
    if kind == "seed":
        return None, torch.tensor([1, -1, 3]), torch.tensor([0, 7, 2**40])
    return None, None, None


def logits(kind: str) -> torch.Tensor:
    x = torch.randn(BATCH, VOCAB, generator=torch.Generator().manual_seed(0))
    if kind == "columns":
        return x.t().contiguous().t()
    if kind == "steps":
        return torch.stack((x, x), dim=-1)[..., 0].bfloat16()
    return x.half() if kind == "half" else x


SAMPLES = [
    ("dense", "numbers", "none"),
    ("half", "tensors", "q"),
    ("columns", "strided", "seed"),
    ("steps", "tensors", "seed"),
    ("dense", "numbers", "q"),
]


@pytest.mark.parametrize("return_logprob", [False, True])
@pytest.mark.parametrize("return_logits", [False, True])
@pytest.mark.parametrize(("layout", "parameters", "source"), SAMPLES)
def test_opcheck_functional(
    layout: str, parameters: str, source: str, return_logits: bool, return_logprob: bool
) -> None:
    arguments = (logits(layout), *row_parameters(parameters), *noise(source), 1e-8)
    op = torch.ops.lmdecode.top_k_top_p_sample.default
    opcheck(op, (*arguments, return_logits, return_logprob, 0))
    out = op(*arguments, return_logits, return_logprob, 0)
    assert (out[1] is None) == (not return_logits)
    assert (out[2] is None) == (not return_logprob)


def outputs(with_logits: bool, with_logprob: bool) -> dict[str, torch.Tensor | None]:
    return {
        "index": torch.full((BATCH,), -7),
        "kept_logits": torch.full((BATCH, VOCAB), 99.0) if with_logits else None,
        "logprob": torch.full((BATCH,), 99.0) if with_logprob else None,
        "kept_count": torch.full((BATCH,), -7, dtype=torch.int32),
        "status": torch.full((BATCH,), 77, dtype=torch.uint8),
    }


@pytest.mark.parametrize("with_logprob", [False, True])
@pytest.mark.parametrize("with_logits", [False, True])
@pytest.mark.parametrize(("layout", "parameters", "source"), SAMPLES)
def test_opcheck_out(
    layout: str, parameters: str, source: str, with_logits: bool, with_logprob: bool
) -> None:
    arguments = (logits(layout), *row_parameters(parameters), *noise(source), 1e-8)
    op = torch.ops.lmdecode.top_k_top_p_sample.out
    opcheck(op, (*arguments, 0), outputs(with_logits, with_logprob))
    out = outputs(with_logits, with_logprob)
    assert op(*arguments, 0, **out) is None
    functional = torch.ops.lmdecode.top_k_top_p_sample.default
    expected = functional(*arguments, with_logits, with_logprob, 0)
    for got, want in zip(out.values(), expected, strict=True):
        assert got is want is None or torch.equal(bits(got), bits(want))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_opcheck_dialects(dialect: str) -> None:
    x = logits("dense").softmax(-1)
    arguments = (x, *row_parameters("tensors"), *noise("q"), 1e-8, True, True)
    opcheck(torch.ops.lmdecode.top_k_top_p_sample.default, (*arguments, DIALECTS.index(dialect)))


CACHES = {
    "[B, H, S, D]": ([(3, 2, 5, 4), (3, 2, 5, 4)], {"batch_dim": 0}),
    "a length": ([(3, 2, 5, 4), (3, 1, 6, 2)], {"batch_dim": 0, "length_dim": 2, "length": 3}),
    "[S, B, D]": ([(5, 3, 4)], {"batch_dim": 1, "length_dim": 0, "length": 5}),
    "none": ([], {"batch_dim": 0}),
}


def caches(shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("layout", CACHES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_opcheck_reorder_cache(layout: str, dtype: torch.dtype) -> None:
    shapes, options = CACHES[layout]
    arguments = {"length_dim": None, "length": None, **options}
    parents = torch.tensor([2, 0, 0], dtype=dtype)
    op = torch.ops.lmdecode.reorder_cache_.default
    opcheck(op, (caches(shapes), parents), arguments)
    got, want = caches(shapes), caches(shapes)
    assert op(got, parents, **arguments) is None
    lmdecode.reference.reorder_cache_(want, parents, **options)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("lengths", [None, torch.tensor([0, 2, 4], dtype=torch.int32)])
def test_opcheck_update_beam_indirection(lengths: torch.Tensor | None) -> None:
    op = torch.ops.lmdecode.update_beam_indirection_.default
    opcheck(
        op, (torch.arange(12, dtype=torch.int32).view(3, 4), torch.tensor([2, 0, 0]), 2, lengths)
    )


@pytest.mark.parametrize("rows", [None, torch.tensor([0, 6], dtype=torch.int32)])
def test_opcheck_ring_cache_append(rows: torch.Tensor | None) -> None:
    rings = caches([(2, 3, 5, 4), (2, 3, 5, 2)])
    chunk = caches([(2, 3, 7, 4), (2, 3, 7, 2)])
    opcheck(torch.ops.lmdecode.ring_cache_append_.default, (*rings, *chunk, 9, rows, 1))


def test_opcheck_copy_blocks() -> None:
    copies = torch.tensor([[0, 1, 5], [2, 3, 1]], dtype=torch.int32)
    opcheck(torch.ops.lmdecode.copy_blocks_.default, (caches([(4, 2, 5, 3), (4, 1, 5, 2)]), copies))


def block_table() -> tuple[torch.Tensor, ...]:
    """Two rows of a table of four that share a block, which is not full."""
    table = lmdecode.BlockTable(10, 4, 3, block_size=4)
    table.insert(5, 2)
    return table._table, table._lengths, table.ref_counts, table._free_blocks, table._counters


def test_opcheck_block_table() -> None:
    copies, tokens = torch.empty(4, 3, dtype=torch.int32), torch.tensor([1, 5, 0, 0])
    opcheck(torch.ops.lmdecode.block_table_append_.default, (*block_table(), copies, tokens, 4))
    parents = torch.tensor([1, 1, 0])
    opcheck(torch.ops.lmdecode.block_table_reorder_.default, (*block_table(), parents, 2, 4))


def test_opcheck_cpu_capability() -> None:
    """It returns no tensor, so there is nothing to dispatch ahead of time."""
    op = torch.ops.lmdecode.cpu_capability.default
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    opcheck(op, (), test_utils=utilities)
    assert isinstance(op(), int)


BEAM_SCORES = torch.tensor([0.0, -1.5, -0.5, -float("inf")])


def beam_logits(layout: str) -> torch.Tensor:
    return torch.cat((logits(layout), logits(layout)[:1]))


@pytest.mark.parametrize("layout", ["dense", "half", "columns", "steps"])
def test_opcheck_log_softmax_top_k(layout: str) -> None:
    op = torch.ops.lmdecode.log_softmax_top_k.default
    x = beam_logits(layout)
    opcheck(op, (x, BEAM_SCORES, 5, 2, None))
    opcheck(op, (x, BEAM_SCORES, 5, 1, torch.tensor([0, 1, 4])))
    opcheck(op, (x, torch.stack((BEAM_SCORES, BEAM_SCORES), dim=1)[:, 0], 100, 4, None))


def beam_search(**options: Any) -> tuple[lmdecode.BeamState, lmdecode.BeamParameters]:
    """Two searches in three slots of two and three beams."""
    state = lmdecode.new_beam_state(3, 3, 6, **options)
    state.lengths.fill_(2)
    parameters = lmdecode.beam_parameters(3, [2, 1, 3], end_tokens=[5], max_lengths=6)
    return state, parameters


def beam_step_arguments(kind: str) -> tuple[Any, ...]:
    """Everything behind state and parameters."""
    scores = torch.tensor([[-1.0, -2.0, -3.0, -4.0], [-0.5, -1.0, -1.5, -2.0]])
    tokens = torch.tensor([[5, 3, 4, 3], [1, 2, 5, 3]])
    beams = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0]])
    if kind == "plain":
        return (scores, tokens, beams, *[None] * 8, 0, -1)
    slots, offsets = torch.tensor([0, 2]), torch.tensor([0, 2, 5])
    sequences = torch.zeros(2, 3, 4, dtype=torch.int64) if kind == "sequences" else None
    status = torch.tensor([0, 1], dtype=torch.uint8)
    return (
        scores, tokens, beams, scores / 2, status, slots, offsets, torch.tensor([0, 2]), sequences,
        scores < -3, torch.ones(2, 3), 1, 5,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["plain", "all", "sequences"])
@pytest.mark.parametrize("keeps", [False, True])
def test_opcheck_beam_step(kind: str, keeps: bool) -> None:
    state, parameters = beam_search(keep_log_probs=keeps, keep_beam_indices=keeps)
    op = torch.ops.lmdecode.beam_step.default
    opcheck(op, (list(state), list(parameters), *beam_step_arguments(kind)))


@pytest.mark.parametrize("add_open", [False, True])
def test_opcheck_beam_finalize(add_open: bool) -> None:
    op = torch.ops.lmdecode.beam_finalize.default
    state, parameters = beam_search(keep_log_probs=True)
    opcheck(op, (list(state), list(parameters), 2, 3, None, None, None, add_open, 0))
    state, parameters = beam_search(keep_beam_indices=True)
    arguments = (torch.tensor([2, 0]), torch.ones(2, 3, 3, dtype=torch.int64), torch.ones(2, 3))
    opcheck(op, (list(state), list(parameters), 4, 1, *arguments, add_open, 1))


def test_fakes_of_a_beam_search_know_shapes() -> None:
    def on_meta(value: Any) -> Any:
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    state, parameters = beam_search(keep_log_probs=True)
    fake_state, fake_parameters = map(on_meta, state), map(on_meta, parameters)
    fakes_of = [lmdecode.BeamState(*fake_state), lmdecode.BeamParameters(*fake_parameters)]
    for kind in ("plain", "all"):
        arguments = beam_step_arguments(kind)
        names = (
            "log_probs", "status", "slots", "row_offsets", "parent_offsets", "sequences", "stopped",
            "bonus",
        )  # fmt: skip
        given = dict(zip(names, arguments[3:11], strict=True))
        if kind == "all":
            given["rows"] = 5
        got = lmdecode.beam_step(
            *fakes_of, *map(on_meta, arguments[:3]), **{k: on_meta(v) for k, v in given.items()}
        )
        want = lmdecode.beam_step(state, parameters, *arguments[:3], **given)
        for fake, real in zip(got, want, strict=True):
            assert fake.device.type == "meta"
            assert (fake.shape, fake.dtype, fake.stride()) == (
                real.shape, real.dtype, real.stride(),
            )  # fmt: skip
    for fake, real in zip(
        lmdecode.beam_finalize(*fakes_of, 4), lmdecode.beam_finalize(state, parameters, 4),
        strict=True,
    ):  # fmt: skip
        assert fake.device.type == "meta"
        assert (fake.shape, fake.dtype) == (real.shape, real.dtype)


def processors(requests: int) -> dict[str, Any]:
    """Of a call of log_softmax_top_k with 4 rows: numbers for all, tensors of one a request."""
    return {
        "sequences": torch.arange(24).view(4, 6) % 5,
        "lengths": torch.arange(requests) + 4,
        "repetition_penalty": torch.linspace(1.1, 2.0, requests),
        "no_repeat_ngram_size": 2,
        "end_tokens": torch.tensor([7, -1]),
        "min_lengths": torch.full((requests,), 5),
        "suppressed_tokens": torch.arange(requests * 3).view(requests, 3),
        "forced_tokens": torch.arange(4) - 3,
        "diversity_tokens": torch.full((requests, 2), 9),
        "diversity_penalty": 0.5,
        "bias": torch.linspace(-1, 1, 4 * VOCAB).view(4, VOCAB),
        "token_bitmask": torch.full((requests, 2), -3, dtype=torch.int32),
    }


@pytest.mark.parametrize("layout", ["dense", "half", "columns"])
def test_opcheck_log_softmax_top_k_processed(layout: str) -> None:
    op = torch.ops.lmdecode.log_softmax_top_k.processed
    x = beam_logits(layout)
    p = processors(2)
    numbers = (
        p["sequences"], None, 1.2, None, 3, None, p["end_tokens"], 5, None,
        *(None, None, None, 0.0, None, None, None),
    )  # fmt: skip
    tensors = (
        p["sequences"], p["lengths"], 1.0, p["repetition_penalty"], 0, torch.tensor([2, 0]),
        p["end_tokens"], 0, p["min_lengths"], p["suppressed_tokens"], p["forced_tokens"],
        p["diversity_tokens"], 0.0, torch.tensor([0.5, 1.0]), p["bias"], p["token_bitmask"],
    )  # fmt: skip
    opcheck(op, (x, BEAM_SCORES, 5, 2, None, *numbers))
    opcheck(op, (x, BEAM_SCORES, 100, 1, torch.tensor([0, 1, 4]), *tensors))


def test_fakes_know_shapes_dtypes_and_devices() -> None:
    """The meta device stands for any other."""
    x = torch.empty(5, 70, device="meta", dtype=torch.bfloat16)
    out = lmdecode.top_k_top_p_sample(x, 3, 0.9, seed=1, return_logits=True, return_logprob=True)
    real = lmdecode.top_k_top_p_sample(
        torch.zeros(5, 70, dtype=torch.bfloat16), 3, return_logits=True, return_logprob=True
    )
    for fake, want in zip(out, real, strict=True):
        assert fake is not None and want is not None
        assert fake.device.type == "meta"
        assert (fake.shape, fake.dtype, fake.stride()) == (want.shape, want.dtype, want.stride())
    for widths in (2, [1, 3], torch.tensor([3, 1])):
        x, scores = beam_logits("half"), BEAM_SCORES
        beams = widths.to("meta") if isinstance(widths, torch.Tensor) else widths
        fakes = lmdecode.log_softmax_top_k(x.to("meta"), scores.to("meta"), 7, num_beams=beams)
        reals = lmdecode.log_softmax_top_k(x, scores, 7, num_beams=widths)
        for fake, want in zip(fakes, reals, strict=True):
            assert fake.device.type == "meta"
            shape = (want.shape, want.dtype, want.stride())
            assert (fake.shape, fake.dtype, fake.stride()) == shape
    options = processors(2)
    on_meta = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    x, scores = beam_logits("half"), BEAM_SCORES
    fakes = lmdecode.log_softmax_top_k(x.to("meta"), scores.to("meta"), 7, num_beams=2, **on_meta)
    reals = lmdecode.log_softmax_top_k(x, scores, 7, num_beams=2, **options)
    for fake, want in zip(fakes, reals, strict=True):
        assert fake.device.type == "meta"
        assert (fake.shape, fake.dtype, fake.stride()) == (want.shape, want.dtype, want.stride())


# --- torch.compile --------------------------------------------------------------------------------


def check_compiled(function: Callable[..., Any], *calls: tuple, **options: Any) -> None:
    """Compile in one graph, then compare each call with the uncompiled one."""
    compiled = torch.compile(function, fullgraph=True, **options)
    for arguments in calls:
        got, want = compiled(*arguments), function(*arguments)
        assert type(got) is type(want)
        assert_same_bits(got, want)


@pytest.mark.parametrize("return_logprob", [False, True])
@pytest.mark.parametrize("return_logits", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_with_numbers(backend: str, return_logits: bool, return_logprob: bool) -> None:
    def sample(x: torch.Tensor) -> lmdecode.SampleOutput:
        return lmdecode.top_k_top_p_sample(
            x,
            5,
            0.9,
            min_p=0.01,
            temperature=0.7,
            seed=11,
            position=3,
            return_logits=return_logits,
            return_logprob=return_logprob,
        )

    check_compiled(sample, (logits("dense"),), (logits("columns"),), backend=backend)


def sample_with_tensors(
    x: torch.Tensor,
    k: torch.Tensor,
    p: torch.Tensor,
    min_p: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
) -> lmdecode.SampleOutput:
    return lmdecode.top_k_top_p_sample(
        x,
        k,
        p,
        min_p=min_p,
        temperature=temperature,
        seed=seed,
        position=position,
        return_logits=True,
        return_logprob=True,
    )


def tensors(batch: int, vocab: int = VOCAB) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(batch)
    return (
        torch.randn(batch, vocab, generator=generator),
        torch.randint(0, vocab, (batch,), generator=generator, dtype=torch.int32),
        torch.rand(batch, generator=generator).bfloat16(),
        torch.rand(batch, generator=generator) * 0.1,
        torch.rand(batch, generator=generator).half(),
        torch.randint(-5, 100, (batch,), generator=generator),
        torch.randint(0, 2**50, (batch,), generator=generator),
    )


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_with_tensors(backend: str) -> None:
    check_compiled(sample_with_tensors, tensors(3), backend=backend)


def test_compile_with_a_dynamic_batch() -> None:
    """One graph serves every batch of two rows and more, and every vocabulary."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(sample_with_tensors, fullgraph=True, dynamic=True, backend=counter)
    compiled(*tensors(3))
    graphs = counter.frame_count
    for arguments in (tensors(4), tensors(7, 50), tensors(64, 33)):
        assert_same_bits(compiled(*arguments), sample_with_tensors(*arguments))
    assert counter.frame_count == graphs
    for batch in (1, 0):
        assert_same_bits(compiled(*tensors(batch)), sample_with_tensors(*tensors(batch)))


def test_compile_with_changing_numbers() -> None:
    """Each new top_k is compiled anew, which is right but slow: a tensor is not."""

    def sample(x: torch.Tensor, k: int, p: float, seed: int) -> lmdecode.SampleOutput:
        return lmdecode.top_k_top_p_sample(x, k, p, seed=seed, return_logprob=True)

    x = logits("dense")
    calls = [(x, 5, 0.9, 1), (x, 6, 0.8, 2), (x, 7, 0.7, 2**62), (x, 8, 0.6, 4)]
    check_compiled(sample, *calls, backend="aot_eager")


def test_compile_with_noise_of_the_caller() -> None:
    def sample(x: torch.Tensor, q: torch.Tensor) -> lmdecode.SampleOutput:
        return lmdecode.top_k_top_p_sample(x, 5, q=q, dialect="ascend_v2")

    check_compiled(sample, (logits("dense"), noise("q")[0]), backend="aot_eager")


def test_compile_random_cases() -> None:
    """The whole of the arguments, without a backend: what dynamo has to trace."""
    for case in sampling_cases(5, 12, vocab_sizes=(1, 17, 40), extremes=False):
        torch._dynamo.reset()

        def sample(x: torch.Tensor, case: SamplingCase = case) -> lmdecode.SampleOutput:
            return lmdecode.top_k_top_p_sample(x, **case.arguments)

        check_compiled(sample, (case.logits,), backend="eager")


def test_compile_with_inductor() -> None:
    """The default backend, a step of a decoding loop around the op."""

    def step(x: torch.Tensor, seed: torch.Tensor, position: torch.Tensor) -> lmdecode.SampleOutput:
        out = lmdecode.top_k_top_p_sample(
            x * 2.0 + 1.0, 5, 0.9, seed=seed, position=position, return_logits=True
        )
        return out._replace(index=out.index + 0)

    x, seeds = logits("dense"), torch.tensor([1, 2, 3])
    check_compiled(step, (x, seeds, torch.tensor([0, 0, 0])), (x, seeds, torch.tensor([1, 2, 3])))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile_log_softmax_top_k(backend: str) -> None:
    """A step of beam search around the op; widths as a number, a list and a tensor."""
    for widths in (2, [1, 3], torch.tensor([3, 1])):
        torch._dynamo.reset()

        def step(
            x: torch.Tensor, scores: torch.Tensor, widths: Any = widths
        ) -> lmdecode.BeamCandidates:
            out = lmdecode.log_softmax_top_k(x * 2.0, scores, 5, num_beams=widths)
            return out._replace(tokens=out.tokens + 1)

        calls = [(beam_logits("dense"), BEAM_SCORES), (beam_logits("columns"), BEAM_SCORES - 1)]
        check_compiled(step, *calls, backend=backend)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile_log_softmax_top_k_with_processors(backend: str) -> None:
    options = processors(2)
    names = list(options)

    def step(x: torch.Tensor, *values: Any) -> lmdecode.BeamCandidates:
        chosen = dict(zip(names, values, strict=True))
        return lmdecode.log_softmax_top_k(x, BEAM_SCORES, 5, num_beams=2, **chosen)

    longer = {**options, "lengths": options["lengths"] + 1, "bias": options["bias"] * 2}
    calls = [(beam_logits("dense"), *chosen.values()) for chosen in (options, longer)]
    check_compiled(step, *calls, backend=backend)


def test_compile_log_softmax_top_k_with_dynamic_shapes() -> None:
    def step(x: torch.Tensor, scores: torch.Tensor) -> lmdecode.BeamCandidates:
        return lmdecode.log_softmax_top_k(x, scores, 5, num_beams=scores.shape[1])

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    for requests, beams, vocab in ((2, 3, 40), (3, 2, 33), (5, 4, 70)):
        generator = torch.Generator().manual_seed(vocab)
        x = torch.randn(requests * beams, vocab, generator=generator)
        scores = torch.randn(requests, beams, generator=generator)
        assert_same_bits(compiled(x, scores), step(x, scores))
    assert counter.frame_count == 1


def test_compile_with_a_generator_is_not_possible() -> None:
    """torch.compile takes no Generator; a tensor of seeds, drawn outside, does the same."""

    def sample(x: torch.Tensor, generator: torch.Generator) -> lmdecode.SampleOutput:
        return lmdecode.top_k_top_p_sample(x, 5, generator=generator)

    compiled = torch.compile(sample, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(logits("dense"), torch.Generator())


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile_reorder_cache(backend: str) -> None:
    """In place through functionalisation, around it what a step computes."""

    def step(keys: torch.Tensor, values: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        keys.add_(1.0)
        lmdecode.reorder_cache_([keys, values], parents, length_dim=2, length=3)
        return keys.sum() + values[0].sum()

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for parents in (torch.tensor([2, 0, 0]), torch.tensor([0, 1, 2]), torch.tensor([1, 0, 2])):
        got, want = caches([(3, 2, 5, 4), (3, 2, 5, 4)]), caches([(3, 2, 5, 4), (3, 2, 5, 4)])
        torch.testing.assert_close(compiled(*got, parents), step(*want, parents))
        for one, other in zip(got, want, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile_update_beam_indirection(backend: str) -> None:
    """A step whose lengths are a tensor, so that it is compiled once."""

    def step(table: torch.Tensor, parents: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        lengths.add_(1)
        lmdecode.update_beam_indirection_(table, parents, lengths)
        return table.sum()

    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    got, want = (
        (torch.arange(60, dtype=torch.int32).view(3, 20), torch.tensor([2, 4, 4])) for _ in range(2)
    )
    for parents in (torch.tensor([2, 0, 0]), torch.tensor([0, 1, 2]), torch.tensor([1, 0, 2])):
        assert compiled(got[0], parents, got[1]) == step(want[0], parents, want[1])
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile_ring_cache_append(backend: str) -> None:
    """A step whose positions are a tensor, so that it is compiled once."""

    def step(
        keys: torch.Tensor, values: torch.Tensor, chunk: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        lmdecode.ring_cache_append_(
            keys, values, chunk * 2.0, chunk[..., :2], positions, num_sink_tokens=1
        )
        positions.add_(1)
        return keys.sum() + values[0].sum()

    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    got, want = ((*caches([(2, 3, 5, 4), (2, 3, 5, 2)]), torch.tensor([0, 3])) for _ in range(2))
    for _ in range(12):
        (chunk,) = caches([(2, 3, 1, 4)])
        one = compiled(got[0], got[1], chunk, got[2])
        torch.testing.assert_close(one, step(want[0], want[1], chunk, want[2]))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert counter.frame_count == 1


def test_compile_reorder_cache_with_a_growing_length() -> None:
    """A length that changes from step to step is compiled once more, then never again."""

    def step(cache: torch.Tensor, parents: torch.Tensor, length: int) -> None:
        lmdecode.reorder_cache_([cache], parents, length_dim=1, length=length)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    parents = torch.tensor([1, 2, 0])
    for length in range(2, 12):
        got, want = caches([(3, 40)]), caches([(3, 40)])
        compiled(*got, parents, length)
        step(*want, parents, length)
        assert torch.equal(got[0], want[0])
    assert counter.frame_count <= 2


# --- torch.export ---------------------------------------------------------------------------------


class Sampler(torch.nn.Module):
    def forward(
        self, x: torch.Tensor, k: torch.Tensor, seed: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        out = lmdecode.top_k_top_p_sample(x, k, 0.9, seed=seed, return_logprob=True)
        assert out.logprob is not None
        return out.index, out.logprob, out.kept_count


def test_export() -> None:
    batch = torch.export.Dim("batch", min=2, max=1000)
    arguments = (logits("dense"), torch.tensor([3, 4, 5]), torch.tensor([1, 2, 3]))
    program = torch.export.export(
        Sampler(), arguments, dynamic_shapes=({0: batch}, {0: batch}, {0: batch})
    )
    assert "lmdecode.top_k_top_p_sample.default" in str(program.graph)
    for size in (3, 8):
        x = torch.randn(size, VOCAB, generator=torch.Generator().manual_seed(size))
        call = (x, torch.arange(1, size + 1), torch.arange(size))
        for got, want in zip(program.module()(*call), Sampler()(*call), strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("ragged", [False, True])
def test_compile_a_step_of_beam_search(backend: str, ragged: bool) -> None:
    """From logits to next beams in one graph, the state changed in place."""
    widths = [2, 1, 3]

    def step(
        x: torch.Tensor, scores: torch.Tensor, offsets: torch.Tensor, *search: torch.Tensor
    ) -> tuple[lmdecode.BeamStep, lmdecode.BeamFinal]:
        state = lmdecode.BeamState(*search[:14])
        parameters = lmdecode.BeamParameters(*search[14:])
        beams = widths if ragged else 3
        best = lmdecode.log_softmax_top_k(x, scores, 6, num_beams=beams)
        out = lmdecode.beam_step(
            state, parameters, best.scores, best.tokens, best.beams, status=best.status,
            row_offsets=offsets if ragged else None, rows=sum(widths) if ragged else None,
        )  # fmt: skip
        return out, lmdecode.beam_finalize(state, parameters, 2, add_open=True)

    rows = sum(widths) if ragged else 9
    generator = torch.Generator().manual_seed(0)
    offsets = torch.tensor([0, 2, 3, 6])
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    states = []
    for function in (compiled, step):
        state, parameters = beam_search(keep_log_probs=True)
        generator.manual_seed(1)
        outputs, scores = [], torch.zeros(rows)
        if not ragged:  # rows of no beam
            scores[[2, 4, 5]] = -float("inf")
        for _ in range(3):
            x = torch.randn(rows, 9, generator=generator)
            out, final = function(x, scores, offsets, *state, *parameters)
            scores = out.scores
            outputs += [*out, *final]
        states.append((outputs, state))
    for got, want in zip(states[0][0], states[1][0], strict=True):
        assert torch.equal(bits(got), bits(want))
    assert_same_bits(states[0][1], states[1][1])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_with_rows_that_are_in_the_tensor(backend: str) -> None:
    """How many rows come out is not known before the op has run."""

    def step(offsets: torch.Tensor, *tensors: torch.Tensor) -> lmdecode.BeamStep:
        state = lmdecode.BeamState(*tensors[:14])
        parameters = lmdecode.BeamParameters(*tensors[14:22])
        return lmdecode.beam_step(state, parameters, *tensors[22:], row_offsets=offsets)

    arguments = beam_step_arguments("plain")[:3]
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    state, parameters = beam_search()
    got = compiled(torch.tensor([0, 2, 3]), *state, *parameters, *arguments)
    state, parameters = beam_search()
    assert_same_bits(got, step(torch.tensor([0, 2, 3]), *state, *parameters, *arguments))
