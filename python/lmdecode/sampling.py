"""Fused top-k / top-p / min-p / temperature sampling: rows of logits to token ids."""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor

from lmdecode import _fakes  # noqa: F401  registers the fakes
from lmdecode._library import ops
from lmdecode._tensor_checks import check_layout
from lmdecode.sampling_types import DIALECTS, SampleOutput

__all__ = ["DIALECTS", "SampleOutput", "top_k_top_p_sample"]

_OP = "top_k_top_p_sample"
_sample = ops.top_k_top_p_sample.default
_DIALECT_NUMBERS = {name: number for number, name in enumerate(DIALECTS)}
# Row seeds of an int seed are this far apart, modulo 2^63. As a signed 64-bit integer.
_SEED_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_MAX_SEED = (1 << 63) - 1


def _type_error(name: str, value: object, expected: str) -> TypeError:
    return TypeError(f"{_OP}: {name} is of type {type(value).__name__}; expected {expected}")


def _split(
    name: str, value: Any, off: float | int, dtype: torch.dtype
) -> tuple[float | int, Tensor | None]:
    """A parameter as (number for all rows, tensor of one number a row)."""
    if value is None:
        return off, None
    if isinstance(value, Tensor):
        check_layout(_OP, name, value)
        if value.dtype is dtype:
            return off, value
        is_float = dtype.is_floating_point
        allowed = (torch.float16, torch.bfloat16) if is_float else (torch.int32,)
        if value.dtype not in allowed:
            expected = "float32, float16 or bfloat16" if is_float else "int64 or int32"
            dtype_name = str(value.dtype).removeprefix("torch.")
            raise ValueError(f"{_OP}: {name} has dtype {dtype_name}; expected {expected}")
        return off, value.to(dtype)
    if dtype.is_floating_point:
        if type(value) is not float:
            value = _to_float(name, value)
    elif type(value) is not int:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise _type_error(name, value, "an int, a tensor or None")
        value = int(value)
    return value, None


def _to_float(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):  # numpy's numbers too
        raise _type_error(name, value, "a number, a tensor or None")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{_OP}: {name} is too large; expected a number of float64") from None


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise _type_error(name, value, "a bool")


def _check_number(name: str, value: float, low: float, text: str) -> None:
    if not value >= low:
        raise ValueError(f"{_OP}: {name} is {value}; expected {text}")


def _row_seeds(seed: int | Tensor, batch: int, device: torch.device) -> Tensor | None:
    if isinstance(seed, Tensor):
        if seed.dtype is torch.int32:
            seed = seed.to(torch.int64)
        return seed
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(
            f"{_OP}: seed is of type {type(seed).__name__}; expected an int or a tensor"
        )
    if seed < 0:
        return None
    if seed > _MAX_SEED:
        raise ValueError(f"{_OP}: seed is {seed}; expected an int below 2^63")
    return (torch.arange(batch, device=device) * _SEED_STEP + seed) & _MAX_SEED


def top_k_top_p_sample(
    logits: Tensor,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    q: Tensor | None = None,
    *,
    min_p: float | Tensor | None = None,
    temperature: float | Tensor | None = None,
    seed: int | Tensor | None = None,
    position: int | Tensor | None = None,
    generator: torch.Generator | None = None,
    eps: float = 1e-8,
    return_logits: bool = False,
    return_logprob: bool = False,
    dialect: str = "lmdecode",
) -> SampleOutput:
    """Sample one token a row from filtered logits, exactly and reproducibly.

    A row is divided by its temperature; top-k, top-p and min-p each keep a prefix of the order
    "value descending, then index ascending"; of what is kept one token is drawn, or, without noise,
    the first is taken. The result of a row depends on nothing but the row and its parameters:
    not on the batch, the thread count or the CPU's vector width (CUDA: the same by design,
    emulated, not yet run on a GPU).

    Parameters
    ----------
    logits : Tensor
        ``[batch, vocab]`` float32, float16 or bfloat16, any strides; batch >= 0, vocab >= 1.
        NaN counts as -inf.
    top_k : int or Tensor, optional
        Tokens to keep; a tensor has one int64 or int32 a row, as for the parameters below.
        ``<= 0`` or ``>= vocab``: off.
    top_p : float or Tensor, optional
        Keep the smallest prefix with mass >= top_p of the softmax over what top-k left.
        ``>= 1``: off, ``<= 0``: one token.
    q : Tensor, optional
        ``[batch, vocab]`` float32 noise, standard exponential for true sampling: the token with the
        largest ``probability / (abs(q) + eps)`` is taken.
    min_p : float or Tensor, optional
        Keep tokens with a probability of at least min_p times the largest. ``<= 0``: off,
        ``>= 1``: one token.
    temperature : float or Tensor, optional
        Divides the logits before everything else. 0: the largest logit of the row, without noise.
    seed : int or Tensor, optional
        Switches on internal noise, a function of (seed, position, token id) alone; without it, q
        and generator there is none, and the most probable kept token is taken. A tensor has one
        int64 a row, < 0: no noise in that row. An int gives row ``i`` the seed
        ``(seed + i * 0x9E3779B97F4A7C15) mod 2^63``.
    position : int or Tensor, optional
        int64, the second part of the noise counter, 0 by default: count it up from token to token.
    generator : torch.Generator, optional
        Draws a seed for each row, in place of ``seed``.
    eps : float
        See ``q``; >= 0.
    return_logits, return_logprob : bool
        Whether ``kept_logits`` and ``logprob`` are wanted.
    dialect : str
        One of ``lmdecode.DIALECTS``: whose rules hold at ties and boundaries, see docs/sampling.md.

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
        raise _type_error("logits", logits, "a tensor")
    if logits.requires_grad:
        logits = logits.detach()
    check_layout(_OP, "logits", logits)
    dialect_number = _DIALECT_NUMBERS.get(dialect) if isinstance(dialect, str) else None
    if dialect_number is None:
        raise ValueError(f"{_OP}: dialect is {dialect!r}; expected one of {', '.join(DIALECTS)}")
    k, k_rows = _split("top_k", top_k, 0, torch.int64)
    p, p_rows = _split("top_p", top_p, 1.0, torch.float32)
    m, m_rows = _split("min_p", min_p, 0.0, torch.float32)
    t, t_rows = _split("temperature", temperature, 1.0, torch.float32)
    _check_number("top_p", p, float("-inf"), "a number")
    _check_number("min_p", m, float("-inf"), "a number")
    _check_number("temperature", t, 0.0, "a number >= 0")
    if not -_MAX_SEED - 1 <= k <= _MAX_SEED:
        raise ValueError(f"{_OP}: top_k is {k}; expected an int of 64 bits")
    if q is not None:
        if not isinstance(q, Tensor):
            raise _type_error("q", q, "a tensor or None")
        if seed is not None or generator is not None:
            other = "seed" if seed is not None else "generator"
            raise ValueError(f"{_OP}: q and {other} were both given; expected one source of noise")
    if type(eps) is not float:
        eps = _to_float("eps", eps)
    _check_flag("return_logits", return_logits)
    _check_flag("return_logprob", return_logprob)
    if generator is not None:
        if seed is not None:
            raise ValueError(
                f"{_OP}: seed and generator were both given; expected one source of noise"
            )
        if not isinstance(generator, torch.Generator):
            raise _type_error("generator", generator, "a torch.Generator")
    if logits.dim() != 2:
        raise ValueError(
            f"{_OP}: logits has shape {list(logits.shape)}; expected 2 dimensions, [batch, vocab]"
        )
    if position is not None and not isinstance(position, Tensor):
        if isinstance(position, bool) or not isinstance(position, int):
            raise _type_error("position", position, "an int or a tensor")
        if not -_MAX_SEED - 1 <= position <= _MAX_SEED:
            raise ValueError(f"{_OP}: position is {position}; expected an int of 64 bits")
        position = torch.full((logits.size(0),), position, device=logits.device)
    elif isinstance(position, Tensor) and position.dtype is torch.int32:
        position = position.to(torch.int64)

    def call(seeds: Tensor | None) -> SampleOutput:
        return SampleOutput(
            *_sample(
                logits, k, k_rows, p, p_rows, m, m_rows, t, t_rows, q, seeds, position, eps,
                return_logits, return_logprob, dialect_number,
            )
        )  # fmt: skip

    if generator is None:
        return call(None if seed is None else _row_seeds(seed, logits.size(0), logits.device))
    state = generator.get_state()
    try:
        seeds = torch.randint(
            0, _MAX_SEED, (logits.size(0),), generator=generator, device=generator.device
        )
        return call(seeds.to(logits.device))
    except Exception:
        generator.set_state(state)  # a call that fails draws nothing
        raise
