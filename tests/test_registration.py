"""Every op is registered as torch wants it: schemas, kernels and fakes; opchecks stand by area."""

import re
import subprocess
import sys

import pytest
import torch
from torch.library import opcheck

import lmdecode
import lmdecode.reference
from lmdecode.reference import decoder_step
from tests.support.op_schemas import CSRC, op_names, op_schemas

needs_sources = pytest.mark.skipif(not CSRC.is_dir(), reason="csrc is in source checkouts only")


@needs_sources
def test_every_schema_is_an_op() -> None:
    assert sorted(schema.name for schema in op_schemas()) == op_names()


@pytest.mark.parametrize("name", op_names())
def test_every_op_has_a_fake(name: str) -> None:
    assert torch._library.simple_registry.singleton.find(name).fake_impl.kernel is not None


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
    # Of those of the CPU alone it is one that throws (test_refused_tensors.py).
    if lmdecode.has_cuda():
        assert has_kernel(name, "CUDA")


@needs_sources
def test_ops_without_a_cuda_kernel() -> None:
    """As the sources have it, where there is no CUDA to ask."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    lists = (CSRC / "sources.cmake").read_text()
    in_cuda_library = {
        f"lmdecode::{name}"
        for sources in re.findall(r"set\((?:CUDA_)?BINDING_SOURCES([^)]*)\)", lists)
        for path in sources.split()
        for name in re.findall(r'm\.impl\("([^"]+)"', (CSRC / path).read_text())
    }
    everywhere = {name for name in op_names() if has(name, "CompositeExplicitAutograd")}
    assert set(op_names()) - in_cuda_library - everywhere == {
        schema.name for schema in op_schemas() if schema.is_cpu_only
    }


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


def test_opcheck_cpu_capabilities() -> None:
    op = torch.ops.lmdecode.cpu_capabilities.default
    opcheck(op, (), test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))
    built, usable = op()
    assert built & usable == usable and usable >> torch.ops.lmdecode.cpu_capability() & 1
