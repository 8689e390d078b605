"""The physical limit of prefill: multiplications and additions in registers, nothing else.

Compiled from C when it is asked for: no library offers it, and ``torch.mm`` stays 20-40% below it.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path

import lmdecode
from benchmarks.compiled import compiled

# With which of its dtypes multiply_add() does the products of a weight format.
INSTRUCTIONS = {"float32": "f32", "bfloat16": "bf16", "int8": "int8", "int4": "int8"}

_SOURCE = """
void run(long rounds) {{
  __asm__ volatile(
      "vxorps %%{a},%%{a},%%{a}\\n vxorps %%{b},%%{b},%%{b}\\n 1:\\n {body} dec %0\\n jnz 1b\\n"
      : "+r"(rounds) : : {clobbered});
}}
"""
#: Eight tiles of 16 rows, 64 bytes each; loading their configuration makes them zeros.
TILE_CONFIG = """
static const struct {
  unsigned char palette, start_row, reserved[14];
  unsigned short row_bytes[16];
  unsigned char rows[16];
} config = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
"""
_SOURCE_OF_TILES = """
void run(long rounds) {{
  __asm__ volatile(
      "ldtilecfg %1\\n 1:\\n {body} dec %0\\n jnz 1b\\n tilerelease\\n"
      : "+r"(rounds) : "m"(config));
}}
"""
_SUMS = {"ymm": 12, "zmm": 20, "tmm": 6}  # that do not wait for each other


def _instruction(dtype: str) -> tuple[str, str, int] | None:
    """Instruction, register and operations of one, as ``lmdecode`` uses them for a dtype."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return None
    level = lmdecode.cpu_capability()
    if level in ("avx512", "amx"):
        file = Path("/proc/cpuinfo")
        flags = file.read_text() if file.exists() else ""
        if level == "amx" and dtype in ("bf16", "int8"):
            if not has_tiles():
                return None
            return ("tdpbf16ps", "tmm", 16384) if dtype == "bf16" else ("tdpbssd", "tmm", 32768)
        if dtype == "bf16" and " avx512_bf16 " in flags:
            return "vdpbf16ps", "zmm", 64
        if dtype == "int8":
            return ("vpdpbusd", "zmm", 128) if " avx512_vnni " in flags else None
        return "vfmadd231ps", "zmm", 32
    return ("vfmadd231ps", "ymm", 16) if level == "avx2" and dtype != "int8" else None


def _tiles_are_permitted() -> bool:
    """Ask Linux for tiles, as lmdecode does where it does not emulate them."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


def has_tiles() -> bool:
    """Whether the processor has tiles, and Linux permits them; not where they are emulated."""
    file = Path("/proc/cpuinfo")
    return file.exists() and " amx_tile " in file.read_text() and _tiles_are_permitted()


@cache
def _library(instruction: str, register: str) -> ctypes.CDLL | None:
    count = _SUMS[register]
    a, b = (f"{register}{count + i}" for i in range(2))
    source = (_SOURCE_OF_TILES if register == "tmm" else _SOURCE).format(
        a=a,
        b=b,
        body="".join(f"{instruction} %%{a},%%{b},%%{register}{i}\\n " for i in range(count)),
        clobbered=", ".join(f'"xmm{i}"' for i in range(count + 2)),
    )
    flags = ["-mavx2"] if register == "ymm" else ["-mavx512f", "-mavx512vl"]
    return compiled((TILE_CONFIG if register == "tmm" else "") + source, *flags)


def multiply_add(operations: float, dtype: str) -> Callable[[], object] | None:
    """Return a function of so many floating-point operations by one thread; None: not here.

    Parameters
    ----------
    operations
        Multiplications and additions, counted apart.
    dtype
        "f32", "bf16" or "int8": with the instruction that the kernels use for it.
    """
    instruction = _instruction(dtype)
    if instruction is None:
        return None
    name, register, of_one = instruction
    library = _library(name, register)
    if library is None:
        return None
    library.run.argtypes = [ctypes.c_long]
    library.run.restype = None
    rounds = max(1, round(operations / of_one / _SUMS[register]))
    return lambda: library.run(rounds)
