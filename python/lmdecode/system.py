"""Properties of this installation and its machine."""

from __future__ import annotations

from lmdecode import _ops

_CAPABILITIES = ("default", "avx2", "avx512", "amx")


def _named(bits: int) -> tuple[str, ...]:
    return tuple(name for number, name in enumerate(_CAPABILITIES) if bits >> number & 1)


def cpu_capability() -> str:
    """The build of the CPU kernels in use: "default", "avx2", "avx512" or "amx".

    The best that the machine has. "amx" is "avx512" with Intel's matrix units, where the system
    permits their use to this process. The environment variable ``LMDECODE_CPU_CAPABILITY``, read
    once, chooses a lower one. Sampling, beams and caches have the same bits at each; products of
    floats, and so attention and decoding, do not.

    Raises
    ------
    ValueError
        The variable holds another word, or a level that the machine or the build lacks.
    """
    return _CAPABILITIES[_ops.ops.cpu_capability()]


def cpu_capabilities() -> tuple[str, ...]:
    """The CPU capabilities that ``LMDECODE_CPU_CAPABILITY`` can choose here, the best one last.

    Those that this machine runs and this build has: a wheel has all, a build in the source tree
    may have those of its own machine alone (see :func:`built_cpu_capabilities`).
    """
    return _named(_ops.ops.cpu_capabilities()[1])


def built_cpu_capabilities() -> tuple[str, ...]:
    """The CPU capabilities that this build has: all, or, with ``LMDECODE_LEVELS=native``, fewer."""
    return _named(_ops.ops.cpu_capabilities()[0])


def has_cuda() -> bool:
    """Whether the CUDA kernels are loaded: they were built, and this torch has CUDA."""
    return _ops.has_cuda
