"""``batch_invariant``: eager models of torch on the CPU, with the same bits in any batch."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Iterator
from contextlib import ContextDecorator, ExitStack, contextmanager
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from lmdecode._checks import check_bool, check_no_gradient
from lmdecode.eager.kernels import KERNELS, WEIGHTS, Kernel
from lmdecode.eager.packed_weights import Memory
from lmdecode.eager.strict import Strict

__all__ = ["batch_invariant"]


def overload(name: str) -> Any:
    """Return an operator of torch by its name, such as ``"sum.dim_IntList"``."""
    packet, _, of = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), of or "default")


def _refusing(name: str, kernel: Kernel, torchs: Kernel) -> Kernel:
    """Return a kernel that refuses tensors that require a gradient."""
    names = [argument.name for argument in overload(name)._schema.arguments]
    op = f"batch_invariant, {name}"

    def checked(*args: Any, **options: Any) -> Any:
        if torch.is_grad_enabled():
            check_no_gradient(op, **dict(zip(names, args, strict=False)), **options)
        if WEIGHTS.releasing and name != "linear":
            for tensor in args:
                WEIGHTS.keep(tensor)
        return kernel(torchs, *args, **options)

    return checked


@cache
def _kernels() -> dict[str, Kernel]:
    """Return the kernels by operator, each with that of torch at hand."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    found = {}
    for name, kernel in KERNELS.items():
        torchs = torch.library.get_kernel(f"aten::{name}", "CPU")
        found[name] = _refusing(name, kernel, partial(torchs.call_boxed, keys))
    return found


def _count_changes(optimizer: Optimizer, *_: Any) -> None:
    """Fused optimizers change parameters, which torch does not count."""
    for group in optimizer.param_groups:
        torch.autograd.graph.increment_version(p for p in group["params"] if not p.is_inference())


@contextmanager
def _replaced() -> Iterator[None]:
    """Have the kernels in the place of torch's."""
    fused = torch.backends.mha.get_fastpath_enabled()
    library = torch.library.Library("aten", "IMPL")
    counting = register_optimizer_step_post_hook(_count_changes)
    # Compiled code and the fused layers of torch.nn have loops of their own.
    with torch.compiler.set_stance("force_eager"):
        try:
            torch.backends.mha.set_fastpath_enabled(False)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that kernels of torch are replaced
                for name, kernel in _kernels().items():
                    library.impl(name, kernel, "CPU")
            yield
        finally:
            library._destroy()
            counting.remove()
            torch.backends.mha.set_fastpath_enabled(fused)
            WEIGHTS.clear()


class _Process:
    """Has the kernels replaced while anybody asks for it."""

    def __init__(self) -> None:
        self._lock, self._stack, self.entered = threading.RLock(), ExitStack(), 0

    def __enter__(self) -> None:
        with self._lock:
            if self.entered == 0:
                self._stack.enter_context(_replaced())
            self.entered += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self.entered -= 1
            if self.entered == 0:
                self._stack.close()


_process = _Process()


class batch_invariant(ContextDecorator):
    """Run eager models of torch on the CPU with the same bits for a row in any batch.

    Inside, products of matrices, attention, softmax, norms, sums and activation functions give
    each row the bits that it has alone: in batches of any size, at any place in them, and on any
    number of threads. Weights (``torch.nn.Parameter``) are packed at their first product, and the
    packed copies are kept until the last context is left. Torch's kernels are replaced for the
    whole process, so that other threads compute so, too. Gradients are refused.

    A context, which may be nested, or a decorator; :meth:`enable` is for the whole process.

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
        An argument that is no bool, or a decorated generator or coroutine.
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
        self._strict = check_bool("batch_invariant", "strict", strict, kind="bool")
        self._release = check_bool("batch_invariant", "release", release, kind="bool")
        self._entered: list[ExitStack] = []

    def __call__(self, function: Any) -> Any:
        """Return the function, called within a context."""
        kinds = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction
        if any(kind(function) for kind in kinds):
            raise TypeError(
                f"batch_invariant: {function.__name__} is a generator or a coroutine, which runs "
                "after its call; expected a function that runs in it"
            )
        return super().__call__(function)

    def _recreate_cm(self) -> batch_invariant:
        # Each call of a decorated function has a context of its own.
        return type(self)(strict=self._strict, release=self._release)

    def __enter__(self) -> batch_invariant:
        with ExitStack() as stack:
            stack.enter_context(_process)
            if self._release:
                WEIGHTS.release()
                stack.callback(WEIGHTS.restore)
            if self._strict:
                stack.enter_context(Strict())
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
        return _process.entered > 0

    @staticmethod
    def memory() -> Memory:
        """Return the bytes of the packed copies, and of the weights that were let go."""
        return WEIGHTS.memory()
