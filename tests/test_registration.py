"""Every op is registered as torch wants it: schemas, kernels and fakes; opchecks stand by area."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.library import opcheck

import lmdecode
import lmdecode.reference
from lmdecode.reference import decoder_step

BINDINGS = Path(__file__).resolve().parents[1] / "csrc" / "bindings"


def op_names() -> list[str]:
    """Return names with overloads, such as ``lmdecode::top_k_top_p_sample.out``."""
    names = torch._C._dispatch_get_all_op_names()
    return sorted(name for name in names if name.startswith("lmdecode::"))


def test_ops() -> None:
    """A new op belongs here, and into the opchecks below or in its area's folder."""
    assert op_names() == [
        "lmdecode::beam_finalize",
        "lmdecode::beam_search_step_",
        "lmdecode::beam_step",
        "lmdecode::block_table_append_",
        "lmdecode::block_table_reorder_",
        "lmdecode::causal_caches_reorder_",
        "lmdecode::causal_caches_start_",
        "lmdecode::causal_caches_truncate_",
        "lmdecode::causal_forward_",
        "lmdecode::causal_workspace_bytes",
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
        "lmdecode::dequantize_gguf",
        "lmdecode::encoder_forward",
        "lmdecode::faster_transformer_decoding_",
        "lmdecode::gather_tree",
        "lmdecode::layer_norm",
        "lmdecode::log_softmax_top_k",
        "lmdecode::log_softmax_top_k.processed",
        "lmdecode::log_softmax_top_k.trie",
        "lmdecode::merge_attention_states",
        "lmdecode::pack_gguf_linear",
        "lmdecode::pack_gguf_linear.out",
        "lmdecode::pack_linear",
        "lmdecode::pack_linear.out",
        "lmdecode::pack_quantized_linear",
        "lmdecode::packed_linear",
        "lmdecode::packed_linear.out",
        "lmdecode::prompt_lookup",
        "lmdecode::reorder_cache_",
        "lmdecode::repack_linear",
        "lmdecode::ring_cache_append_",
        "lmdecode::rms_norm",
        "lmdecode::sampler_accept_",
        "lmdecode::sampler_copy_",
        "lmdecode::sampler_insert_",
        "lmdecode::sampler_rewind_",
        "lmdecode::sampler_row_bytes",
        "lmdecode::sampler_step_",
        "lmdecode::sampler_verify_",
        "lmdecode::sliding_window_attention",
        "lmdecode::sliding_window_decode",
        "lmdecode::top_k_top_p_sample",
        "lmdecode::top_k_top_p_sample.out",
        "lmdecode::trie_build",
        "lmdecode::trie_step",
        "lmdecode::update_beam_indirection_",
    ]


@pytest.mark.parametrize("name", op_names())
def test_every_op_has_a_fake(name: str) -> None:
    assert torch._library.simple_registry.singleton.find(name).fake_impl.kernel is not None


# What has no CUDA kernel: the C++ loop of a decoder, a step of a decoder-only model, packed weights
# and the norms between them, drafts, the building of tries. On devices the loop is one of ops and
# cuBLAS's products.
CPU_ONLY = {
    "lmdecode::beam_search_step_",
    "lmdecode::causal_caches_reorder_",
    "lmdecode::causal_caches_start_",
    "lmdecode::causal_caches_truncate_",
    "lmdecode::causal_forward_",
    "lmdecode::decoder_layer",
    "lmdecode::decoding_read_memory_",
    "lmdecode::decoding_steps_",
    "lmdecode::dequantize_gguf",
    "lmdecode::encoder_forward",
    "lmdecode::faster_transformer_decoding_",
    "lmdecode::gather_tree",
    "lmdecode::layer_norm",
    "lmdecode::pack_gguf_linear",
    "lmdecode::pack_gguf_linear.out",
    "lmdecode::pack_linear",
    "lmdecode::pack_linear.out",
    "lmdecode::pack_quantized_linear",
    "lmdecode::packed_linear",
    "lmdecode::packed_linear.out",
    "lmdecode::prompt_lookup",
    "lmdecode::repack_linear",
    "lmdecode::rms_norm",
    "lmdecode::sampler_accept_",
    "lmdecode::sampler_copy_",
    "lmdecode::sampler_insert_",
    "lmdecode::sampler_rewind_",
    "lmdecode::trie_build",
}


def has_kernel(name: str, device: str) -> bool:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return has(name, device) or has(name, "CompositeExplicitAutograd")


# What has no CPU kernel: the kernels between the products of a step of a device's loop.
DEVICE_ONLY = {f"lmdecode::{name}" for name in decoder_step.__all__}
MISSING_ON_THE_CPU = """
import torch, lmdecode
has, names = torch._C._dispatch_has_kernel_for_dispatch_key, torch._C._dispatch_get_all_op_names()
ours = [name for name in names if name.startswith("lmdecode::")]
print(*(n for n in ours if not has(n, "CPU") and not has(n, "CompositeExplicitAutograd")))
"""


def test_ops_without_a_cpu_kernel() -> None:
    """As a user's process has it: tests of the device's loop add oracles to theirs."""
    command = [sys.executable, "-c", MISSING_ON_THE_CPU]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == DEVICE_ONLY


@pytest.mark.parametrize("name", op_names())
def test_every_op_has_its_kernels(name: str) -> None:
    assert has_kernel(name, "CPU") or name in DEVICE_ONLY
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


def test_opcheck_cpu_capability() -> None:
    """It returns no tensor, so there is nothing to dispatch ahead of time."""
    op = torch.ops.lmdecode.cpu_capability.default
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    opcheck(op, (), test_utils=utilities)
    assert isinstance(op(), int)
