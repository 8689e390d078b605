"""``batch_invariant``: eager models of torch on the CPU, with the same bits in any batch."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from contextlib import ContextDecorator, ExitStack
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from lmdecode._checks import check_no_gradient
from lmdecode.eager.kernels import KERNELS, WEIGHTS
from lmdecode.eager.packed_weights import Memory
from lmdecode.eager.strict import Strict

__all__ = ["Memory", "batch_invariant"]

_CPU = "CPU"


def overload(name: str) -> Any:
    """Return an operator of torch by its name, such as ``"sum.dim_IntList"``."""
    packet, _, of = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), of or "default")


def _refusing(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel that refuses tensors that require a gradient."""
    names = [argument.name for argument in overload(name)._schema.arguments]
    op = f"batch_invariant, {name}"

    def checked(*args: Any, **options: Any) -> Any:
        if torch.is_grad_enabled():
            check_no_gradient(op, **dict(zip(names, args, strict=False)), **options)
        return kernel(*args, **options)

    return checked


def _taking_numbers(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel of two tensors for what torch gives it: numbers, where users gave these."""

    def call(a: Any, b: Any, **options: Any) -> Any:
        dtype = torch.result_type(a, b)
        pair = [
            x if isinstance(x, Tensor) else torch.tensor(x, dtype=dtype, device="cpu")
            for x in (a, b)
        ]
        return kernel(*pair, **options)

    return call


def _writing(name: str, into: str, torchs: Callable[..., Any]) -> Callable[..., Any]:
    """Return the kernel of ``name`` whose result goes into the first argument, or into ``out``."""
    call = overload(name)

    def kernel(*args: Any, **options: Any) -> Tensor:
        given = options
        out = args[0] if into == "self" else (options := dict(options)).pop("out")
        result = call(*args, **options)
        if out.dtype is not result.dtype:
            torchs(*args, **given)  # which refuses some
        if into == "out" and out.shape != result.shape:
            out.resize_(result.shape)
        return out.copy_(result)

    return kernel


def _takes(schema: Any) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in schema.arguments if not a.is_out]


@cache
def _kernels() -> dict[str, Callable[..., Any]]:
    """Return the kernels by operator, those that write to a tensor of the caller among them."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    kernels: dict[str, Callable[..., Any]] = {}

    def of_torch(name: str) -> Callable[..., Any]:
        return partial(torch.library.get_kernel(f"aten::{name}", _CPU).call_boxed, keys)

    for name, kernel in KERNELS.items():
        torchs = of_torch(name)
        kernels[name] = _refusing(name, partial(kernel, torchs))
        packet = name.partition(".")[0]
        for other in (packet, f"{packet}_"):
            for of in getattr(getattr(torch.ops.aten, other, None), "overloads", list)():
                writer = other if of == "default" else f"{other}.{of}"
                schema = overload(writer)._schema
                into = "self" if other != packet else "out"
                # Torch sums into a tensor of its own for a mean.
                if into == "out" and (schema.arguments[-1].name != "out" or packet == "sum"):
                    continue
                if _takes(schema) == _takes(overload(name)._schema) and has_kernel(
                    f"aten::{writer}", _CPU
                ):
                    kernels[writer] = _writing(name, into, of_torch(writer))
    for name in kernels:
        if name.startswith(("pow", "xlogy")) and "Scalar" not in name:
            kernels[name] = _taking_numbers(kernels[name])
    return kernels


class _Process:
    """What stands in place of torch's kernels, while anybody asks for it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._entered = 0
        self._undo = ExitStack()

    @property
    def active(self) -> bool:
        return self._entered > 0

    def enter(self) -> None:
        with self._lock:
            if self._entered == 0:
                with ExitStack() as undo:
                    self._install(undo)
                    self._undo = undo.pop_all()
            self._entered += 1

    def leave(self) -> None:
        with self._lock:
            self._entered -= 1
            if self._entered == 0:
                self._undo.close()

    @staticmethod
    def _install(undo: ExitStack) -> None:
        undo.callback(WEIGHTS.clear)
        # Compiled code has loops of its own.
        undo.enter_context(torch.compiler.set_stance("force_eager"))
        # So do the fused layers of torch.nn.
        undo.callback(
            torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled()
        )
        torch.backends.mha.set_fastpath_enabled(False)
        library = torch.library.Library("aten", "IMPL")
        undo.callback(library._destroy)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that kernels of torch are replaced
            for name, kernel in _kernels().items():
                library.impl(name, kernel, _CPU)


_process = _Process()


class batch_invariant(ContextDecorator):
    """Run eager models of torch on the CPU with the same bits for a row in any batch.

    Inside, products of matrices, attention, softmax, norms, sums and activation functions give
    each row the bits that it has alone: in batches of any size, at any place in them, and on any
    number of threads. Weights (``torch.nn.Parameter``) are packed at their first product, and the
    packed copies are kept until the last context is left. Torch's kernels are replaced for the
    whole process, so that other threads compute so, too. Gradients are refused.

    As a context, a decorator, or for the process by :meth:`enable` and :meth:`disable`. Contexts
    may be nested.

    Parameters
    ----------
    strict : bool
        Raise NotImplementedError at the first call, in this thread, of an operator that is not
        known to have the same bits in any batch, such as a convolution.
    release : bool
        Let the memory of a parameter go when a linear layer has packed it, and bring it back, bit
        for bit, at the end of the context. Parameters that an embedding reads are left. Meanwhile
        a released parameter has no elements: do not save or change the model.

    Raises
    ------
    TypeError
        An argument that is no bool.
    ValueError
        Inside: an operator is called with a tensor that requires a gradient, outside of
        ``torch.no_grad()`` and ``torch.inference_mode()``.

    Examples
    --------
    >>> layer, x = torch.nn.Linear(100, 30), torch.randn(33, 100)
    >>> with lmdecode.batch_invariant(), torch.no_grad():
    ...     torch.equal(layer(x)[5:6], layer(x[5:6]))
    True
    """

    _enabled: ClassVar[batch_invariant | None] = None

    def __init__(self, *, strict: bool = False, release: bool = False) -> None:
        for name, value in (("strict", strict), ("release", release)):
            if not isinstance(value, bool):
                raise TypeError(
                    f"batch_invariant: {name} is of type {type(value).__name__}; expected bool"
                )
        self._strict, self._release = strict, release
        self._entered: list[ExitStack] = []

    def __enter__(self) -> batch_invariant:
        with ExitStack() as stack:
            _process.enter()
            stack.callback(_process.leave)
            if self._release:
                WEIGHTS.release()
                stack.callback(WEIGHTS.restore)
            if self._strict:
                stack.enter_context(Strict(_kernels()))
            self._entered.append(stack.pop_all())
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.pop().close()

    @classmethod
    def enable(cls, *, strict: bool = False, release: bool = False) -> None:
        """Enter a context for the rest of the process, or until :meth:`disable`.

        Parameters
        ----------
        strict, release : bool
            As for the class; ``strict`` is for the calling thread. A second call replaces the
            first one's.

        Raises
        ------
        TypeError
            An argument that is no bool.
        """
        context = cls(strict=strict, release=release)
        cls.disable()
        cls._enabled = context.__enter__()

    @classmethod
    def disable(cls) -> None:
        """Leave the context of :meth:`enable`, if there is one, in the thread that entered it."""
        context, cls._enabled = cls._enabled, None
        if context is not None:
            context.__exit__(None, None, None)

    @staticmethod
    def is_enabled() -> bool:
        """Return whether any context is entered, in any thread."""
        return _process.active

    @staticmethod
    def memory() -> Memory:
        """Return the bytes of the packed copies, and of the weights that were let go."""
        return WEIGHTS.memory()
