"""Fused top-k / top-p / min-p / temperature sampling: rows of logits to token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from lmdecode._checks import (
    MAX_INT,
    check_bool,
    check_int,
    check_layout,
    check_number,
    dtype_name,
    is_list,
    type_error,
)
from lmdecode._ops import ops
from lmdecode._upload import sent, uploaded
from lmdecode.sampling.types import DIALECTS, SampleOutput

__all__ = ["DIALECTS", "SampleOutput", "row_seed", "row_tensor", "top_k_top_p_sample"]

_OP = "top_k_top_p_sample"
_sample = ops.top_k_top_p_sample.default
_DIALECT_NUMBERS = {name: number for number, name in enumerate(DIALECTS)}
# Row seeds of an int seed are this far apart, modulo 2^63. As a signed 64-bit integer.
_SEED_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_LOWEST = float("-inf")


_Ints = TypeVar("_Ints", int, Tensor)


def row_seed(seed: _Ints, row: _Ints) -> _Ints:
    """Return the seed, at least 0, of a row, derived from one seed for the batch."""
    return (row * _SEED_STEP + seed) & MAX_INT


def row_tensor(
    name: str,
    values: Sequence[Any],
    dtype: torch.dtype,
    device: torch.device,
    dialect: str = "lmdecode",
) -> Tensor:
    """Return numbers, one for each row, as a parameter of ``top_k_top_p_sample``, float32 or int64.

    The dialect determines the range of ``top_p``. Errors name the invalid number, as ``top_p[2]``.
    """
    rows = []
    for place, value in enumerate(values):
        where = f"{name}[{place}]"
        if dtype.is_floating_point:
            value = check_number(_OP, where, value)
            _check_range(name, value, dialect, where)
        else:
            value = check_int(_OP, where, value)
        rows.append(value)
    return uploaded(rows, dtype, device)


def _rows_of(name: str, value: Tensor, dtype: torch.dtype, logits: Tensor) -> Tensor:
    """Return a parameter's tensor in the op's dtype; a scalar tensor is expanded to all rows."""
    if value.dtype is not dtype:
        is_float = dtype.is_floating_point
        allowed = (torch.float64, torch.float16, torch.bfloat16) if is_float else (torch.int32,)
        if value.dtype not in allowed:
            expected = "float64, float32, float16 or bfloat16" if is_float else "int64 or int32"
            raise ValueError(f"{_OP}: {name} has dtype {dtype_name(value)}; expected {expected}")
        value = value.to(dtype)
    return value if value.dim() else value.to(logits.device).expand(logits.size(0))


def _split(
    name: str, value: Any, off: float | int, dtype: torch.dtype, logits: Tensor, dialect: str
) -> tuple[float | int, Tensor | None]:
    """Return a parameter as (number for all rows, tensor of one number for each row)."""
    if value is None:
        return off, None
    if type(value) is type(off):
        return value, None
    if isinstance(value, Tensor):
        check_layout(_OP, name, value)
        return off, _rows_of(name, value, dtype, logits)
    if is_list(value):
        return off, row_tensor(name, value, dtype, logits.device, dialect)
    if dtype.is_floating_point:
        return check_number(_OP, name, value, kind="a number, a tensor, a list or None"), None
    return check_int(_OP, name, value, kind="an int, a tensor, a list or None"), None


def _check_range(name: str, value: float, dialect: str, where: str | None = None) -> None:
    """Raise ValueError for an invalid value of a parameter, including NaN."""
    if name == "temperature":
        is_valid, expected = value >= 0.0, "a number >= 0"
    elif name == "top_p" and not dialect.startswith("ascend"):  # where more than 1 is off
        is_valid, expected = value <= 1.0, "a number from 0 to 1"
    else:
        is_valid, expected = value >= _LOWEST, "a number"
    if not is_valid:
        raise ValueError(f"{_OP}: {where or name} is {value}; expected {expected}")


def _seeds(seed: Any, logits: Tensor) -> tuple[int, Tensor | None]:
    """Return a seed as (number for all rows, < 0 for none; tensor of one seed for each row)."""
    number, rows = _split("seed", seed, -1, torch.int64, logits, "")
    if rows is None:
        return check_int(_OP, "seed", number, limits="an int below 2^63"), None
    if isinstance(seed, Tensor) and not seed.dim():
        seeds = row_seed(rows, torch.arange(logits.size(0), device=logits.device))
        rows = torch.where(rows < 0, rows, seeds)
    return -1, rows


def _draw(generator: torch.Generator, rows: int) -> Tensor:
    """Return [rows] int64 seeds."""
    return torch.randint(0, MAX_INT, (rows,), generator=generator, device=generator.device)


def top_k_top_p_sample(
    logits: Tensor,
    top_k: int | Sequence[int] | Tensor | None = None,
    top_p: float | Sequence[float] | Tensor | None = None,
    q: Tensor | None = None,
    *,
    min_p: float | Sequence[float] | Tensor | None = None,
    temperature: float | Sequence[float] | Tensor | None = None,
    seed: int | Sequence[int] | Tensor | None = None,
    position: int | Sequence[int] | Tensor | None = None,
    generator: torch.Generator | None = None,
    greedy: bool = False,
    eps: float = 1e-8,
    return_logits: bool = False,
    return_logprob: bool = False,
    dialect: str = "lmdecode",
) -> SampleOutput:
    """Sample one token a row from filtered logits, exactly and reproducibly.

    A row is divided by its temperature; top-k, top-p and min-p each keep a prefix of the order
    "value descending, then index ascending"; of what is kept one token is drawn. The result of a
    row depends on nothing but the row and its parameters, its seed among them: not on the batch,
    the thread count or the CPU's vector width (CUDA: the same by design, emulated, not yet run on a
    GPU).

    Parameters
    ----------
    logits : Tensor
        ``[batch, vocab]`` float32, float16 or bfloat16, any strides; batch >= 0, vocab >= 1.
        NaN counts as -inf.
    top_k : int, list of int or Tensor, optional
        Tokens to keep; a list or a tensor, int64 or int32, has one a row, as for the parameters
        below; a tensor without dimensions is one number for all rows. ``<= 0`` or ``>= vocab``:
        off.
    top_p : float, list of float or Tensor, optional
        Keep the smallest prefix with mass >= top_p of the softmax over what top-k left.
        1: off, ``<= 0``: one token. A number above 1 is an error, but for the dialects of Ascend;
        the values of a tensor, of any dtype of floats, are not looked at: above 1 is off.
    q : Tensor, optional
        ``[batch, vocab]`` float32 noise, standard exponential for true sampling: the token with the
        largest ``probability / (abs(q) + eps)`` is taken.
    min_p : float, list of float or Tensor, optional
        Keep tokens with a probability of at least min_p times the largest. ``<= 0``: off,
        ``>= 1``: one token.
    temperature : float, list of float or Tensor, optional
        Divides the logits before everything else. 0: the largest logit of the row, without noise.
    seed : int, list of int or Tensor, optional
        The noise is a function of (seed, position, token id) alone. Without a seed, ``q`` and
        ``greedy``, each row draws one from torch's default generator of the logits' device. A list
        or a tensor has one a row, < 0: no noise in that row. One number gives row ``i`` the seed
        ``(seed + i * 0x9E3779B97F4A7C15) mod 2^63``.
    position : int, list of int or Tensor, optional
        int64, the second part of the noise counter, 0 by default: count it up from token to token.
    generator : torch.Generator, optional
        Draws the seeds in place of torch's default generator.
    greedy : bool
        No noise: the most probable kept token of each row is taken.
    eps : float
        See ``q``; >= 0.
    return_logits, return_logprob : bool
        Whether ``kept_logits`` and ``logprob`` are wanted.
    dialect : str
        One of ``lmdecode.DIALECTS``: whose rules hold at ties and boundaries, see
        docs/reference/sampling.md.

    Returns
    -------
    SampleOutput
        ``index`` [batch] int64; ``kept_logits`` [batch, vocab] float32, logits / temperature where
        kept and -inf elsewhere, or None; ``logprob`` [batch] float32 of the chosen token under the
        filtered distribution, or None; ``kept_count`` [batch] int32; ``status`` [batch] uint8:
        bit 0 the row had NaN, bit 1 it had no logit above -inf (index 0), bit 2 a parameter of the
        row was NaN or the temperature negative.

    Raises
    ------
    ValueError, TypeError
        Names the argument, what came and what was expected; nothing has been written.
    """
    if not isinstance(logits, Tensor):
        raise type_error(_OP, "logits", logits, "a tensor")
    if logits.requires_grad:
        logits = logits.detach()
    if logits.layout is not torch.strided:
        check_layout(_OP, "logits", logits)
    if logits.dim() != 2:
        raise ValueError(
            f"{_OP}: logits has shape {list(logits.shape)}; expected 2 dimensions, [batch, vocab]"
        )
    dialect_number = _DIALECT_NUMBERS.get(dialect) if isinstance(dialect, str) else None
    if dialect_number is None:
        raise ValueError(f"{_OP}: dialect is {dialect!r}; expected one of {', '.join(DIALECTS)}")
    k, k_rows = _split("top_k", top_k, 0, torch.int64, logits, dialect)
    p, p_rows = _split("top_p", top_p, 1.0, torch.float32, logits, dialect)
    m, m_rows = _split("min_p", min_p, 0.0, torch.float32, logits, dialect)
    t, t_rows = _split("temperature", temperature, 1.0, torch.float32, logits, dialect)
    if not (p <= 1.0 and m >= _LOWEST and t >= 0.0):
        _check_range("top_p", p, dialect)
        _check_range("min_p", m, dialect)
        _check_range("temperature", t, dialect)
    if not ~MAX_INT <= k <= MAX_INT:
        raise ValueError(f"{_OP}: top_k is {k}; expected an int of 64 bits")
    if q is not None:
        if not isinstance(q, Tensor):
            raise type_error(_OP, "q", q, "a tensor or None")
        if seed is not None or generator is not None:
            other = "seed" if seed is not None else "generator"
            raise ValueError(f"{_OP}: q and {other} were both given; expected one source of noise")
    if type(eps) is not float:
        eps = check_number(_OP, "eps", eps)
    check_bool(_OP, "greedy", greedy)
    check_bool(_OP, "return_logits", return_logits)
    check_bool(_OP, "return_logprob", return_logprob)
    if generator is not None:
        if seed is not None:
            raise ValueError(
                f"{_OP}: seed and generator were both given; expected one source of noise"
            )
        if not isinstance(generator, torch.Generator):
            raise type_error(_OP, "generator", generator, "a torch.Generator")
    if greedy:
        for name, value in (("q", q), ("seed", seed), ("generator", generator)):
            if value is not None:
                raise ValueError(
                    f"{_OP}: greedy is True and {name} was given; expected no source of noise"
                )
    place, places = 0, None
    if position is not None:
        number, places = _split("position", position, 0, torch.int64, logits, "")
        place = check_int(_OP, "position", number)

    def call(number: int, seeds: Tensor | None) -> SampleOutput:
        return SampleOutput(
            *_sample(
                logits, k, k_rows, p, p_rows, m, m_rows, t, t_rows, q, seeds, places, eps,
                return_logits, return_logprob, dialect_number, number, place,
            )
        )  # fmt: skip

    if seed is not None:
        return call(*_seeds(seed, logits))
    if generator is None:
        if greedy or q is not None or (t_rows is None and t == 0.0):
            return call(-1, None)
        if not logits.is_cpu or torch.compiler.is_compiling():
            # On the device, without a wait: a CUDA graph draws anew at each replay.
            return call(-1, torch.randint(0, MAX_INT, (logits.size(0),), device=logits.device))
    drawing = torch.default_generator if generator is None else generator
    before, seeds = drawing.get_state(), _draw(drawing, logits.size(0))
    try:
        return call(-1, sent(seeds, logits.device))
    except Exception:
        # A call that fails draws nothing. What another thread has drawn meanwhile stays drawn.
        again = torch.Generator(drawing.device).set_state(before)
        _draw(again, len(logits))
        if torch.equal(again.get_state(), drawing.get_state()):
            drawing.set_state(before)
        raise
