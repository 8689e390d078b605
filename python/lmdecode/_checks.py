"""Arguments of the public functions: checks of numbers, flags and tensors; errors.

Each check names the function, the argument, what came and what was expected.
"""

from __future__ import annotations

import difflib
import functools
import math
import numbers
import operator
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

__all__ = [
    "MAX_INT",
    "Error",
    "as_thrown",
    "check_bool",
    "check_choice",
    "check_count",
    "check_dense_tensor",
    "check_dense_tensors",
    "check_format",
    "check_int",
    "check_layout",
    "check_no_gradient",
    "check_number",
    "dtype_name",
    "install_hint",
    "is_int",
    "is_list",
    "is_real",
    "type_error",
    "unknown_parameter",
]


#: The largest int64, which an op takes.
MAX_INT = (1 << 63) - 1


class Error(Exception):
    """Base of the exceptions that lmdecode defines; each also derives from one of Python's.

    A wrong argument is a plain ValueError or TypeError.
    """


def type_error(op: str, name: str, value: object, expected: str) -> TypeError:
    """Return the error about an argument of a wrong type."""
    return TypeError(f"{op}: {name} is of type {type(value).__name__}; expected {expected}")


def unknown_parameter(
    op: str,
    name: str,
    known: Sequence[str],
    others: Iterable[str] = (),
    kind: str = "parameter",
) -> TypeError:
    """Return the error about a keyword that is not among the known ones.

    It names the nearest of these and of the ``others``, arguments that the function names itself.
    """
    opposite = {"min": "max", "max": "min"}.get(name[:3], "*")
    names = [other for other in (*others, *known) if not other.startswith(opposite)]
    nearest = difflib.get_close_matches(name, names, 1, 0.7)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    return TypeError(f"{op}: {name} is no {kind}; expected one of {', '.join(known)}{hint}")


def dtype_name(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype, as in an error."""
    return str(tensor.dtype).removeprefix("torch.")


def install_hint(extra: str) -> str:
    """Return the pip commands that install an extra of lmdecode, for an error message."""
    return f"pip install 'lmdecode[{extra}]', or in its source folder pip install '.[{extra}]'"


def is_int(value: object) -> bool:
    """Whether a value is an int, a symbolic int, or an object with ``__index__``.

    Bools and tensors of bools are not integers.
    """
    if isinstance(value, (int, torch.SymInt)):
        return not isinstance(value, bool)
    if isinstance(value, Tensor):
        is_inexact = value.dtype.is_floating_point or value.dtype.is_complex
        return value.dim() == 0 and value.dtype != torch.bool and not is_inexact
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:  # numpy's bools too
        return False
    return True


def is_real(value: object) -> bool:
    """Whether a value is a real number, numpy's included; a bool is not."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether a value is a list, a tuple, a range or another sequence; a text is not."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def check_int(
    op: str,
    name: str,
    value: Any,
    least: int = ~MAX_INT,
    most: int = MAX_INT,
    *,
    kind: str = "an int",
    limits: str | None = None,
) -> int:
    """Return an integer from ``least`` to ``most``; raise TypeError or ValueError otherwise.

    ``kind`` and ``limits`` are the expected type and range in the errors.
    """
    if type(value) is not int and not isinstance(value, torch.SymInt):
        if not is_int(value):
            raise type_error(op, name, value, kind)
        value = operator.index(value)
    if not least <= value <= most:
        if limits is None:
            limits = f"{least} to {most}"
            if most == MAX_INT:
                limits = f"at least {least}" if least > ~MAX_INT else "an int of 64 bits"
        raise ValueError(f"{op}: {name} is {value}; expected {limits}")
    return value


def check_count(op: str, name: str, value: Any, least: int = 1, *, kind: str = "an int") -> int:
    """Return a 64-bit integer, ``least`` or more; raise otherwise."""
    limits = f"an int of 64 bits, at least {least}"
    return check_int(op, name, value, least, kind=kind, limits=limits)


def check_number(
    op: str,
    name: str,
    value: Any,
    *,
    kind: str = "a number",
    is_finite: bool = False,
    limits: str | None = None,
) -> float:
    """Return a number as a float, a symbolic one unchanged; raise otherwise.

    With ``is_finite``, NaN and infinities are a ValueError. ``kind`` and ``limits`` are the
    expected type and range in the errors.
    """
    if type(value) is not float and type(value) is not int:
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            return value  # type: ignore[return-value]
        if not is_real(value):
            raise type_error(op, name, value, kind)
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{op}: {name} is too large; expected a number of float64") from None
    # Not math.isfinite, which graphs of torch.compile do not have for numbers that change.
    if is_finite and not -math.inf < number < math.inf:
        raise ValueError(f"{op}: {name} is {value}; expected {limits or 'a finite number'}")
    return number


#: What formats of weights are called beside torch's names.
_SPELLINGS = {
    "fp32": "float32",
    "float": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
}


def check_format(
    op: str, dtype: object, formats: Collection[str], where: str = "", *, name: str = "dtype"
) -> str:
    """Return the name of a weight format given by name or ``torch.dtype``, such as "bf16".

    Raises TypeError or ValueError for anything but the names in ``formats``; ``where`` follows
    these in the error.
    """
    if not isinstance(dtype, (str, torch.dtype)):
        raise type_error(op, name, dtype, "a str or a torch.dtype")
    found = str(dtype).removeprefix("torch.")
    found = _SPELLINGS.get(found, found)
    if found not in formats:
        expected = ", ".join(formats)
        raise ValueError(f"{op}: {name} is {dtype!r}; expected one of {expected}{where}")
    return found


def check_bool(op: str, name: str, value: object, *, kind: str = "a bool") -> bool:
    """Return a bool; raise TypeError otherwise."""
    if not isinstance(value, bool):
        raise type_error(op, name, value, kind)
    return value


def check_choice(op: str, name: str, value: object, choices: Collection[str]) -> None:
    """Raise ValueError for a value that is not one of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(
            f"{op}: {name} is {value!r}; expected one of {', '.join(choices)}"
        ) from None


def check_layout(op: str, name: str, tensor: Tensor) -> None:
    """Raise ValueError for a tensor that is not dense.

    The ops check this, too (csrc/bindings/refused_tensors.cpp). This is for tensors that Python
    code computes with before the op, or that have another name in the op.
    """
    if tensor.layout is not torch.strided:
        raise ValueError(f"{op}: {name} has layout {tensor.layout}; expected a dense tensor")


def check_dense_tensor(op: str, name: str, value: object) -> None:
    """Raise TypeError for a value that is not a tensor, ValueError for a tensor not dense."""
    if not isinstance(value, Tensor):
        raise type_error(op, name, value, "a tensor")
    if value.layout is not torch.strided:
        check_layout(op, name, value)


def check_dense_tensors(op: str, **values: object) -> None:
    """Check several values as ``check_dense_tensor`` does, by their names."""
    for name, value in values.items():
        check_dense_tensor(op, name, value)


def check_no_gradient(op: str, **tensors: object) -> None:
    """Raise ValueError for tensors that need a gradient, as these ops have no autograd."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            raise ValueError(
                f"{op}: {name} requires a gradient, and there is none; call it under "
                "torch.no_grad()"
            )


# Beginnings of the messages of ops: for a refused argument, and for a failure.
_REFUSED = re.compile(r"LMDECODE_CPU_CAPABILITY is |[\w.]+: ")
_FAILED = re.compile(
    r"lmdecode: |[\w.]+: (no memory for |launch: |cuda[A-Z]|"
    r"caches\.(pool of cache |slots has room for |states has \d+ free ))"
)


def as_thrown(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the call of an op with the errors that C++ throws.

    Up to 2.14 torch raises ValueError for std::invalid_argument and MemoryError for std::bad_alloc;
    from 2.15 on it raises RuntimeError for both.
    """

    @functools.wraps(call)
    def op(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except RuntimeError as error:
            text = str(error)
            if type(error) is RuntimeError:
                if text == "std::bad_alloc":
                    raise MemoryError(text) from None
                if _REFUSED.match(text) and not _FAILED.match(text):
                    raise ValueError(text) from None
            raise

    return op
