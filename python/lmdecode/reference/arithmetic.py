"""The arithmetic that results are defined by, bit for bit: weights, integer masses, noise.

Every function is a fixed sequence of correctly rounded operations, fused multiply-adds where it
says so and nowhere else, so that all processors agree.
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction

import torch

_INF = math.inf
_MASK32 = 0xFFFFFFFF


# --- Weights and masses ---------------------------------------------------------------------------

# 2^f on [-0.5, 0.5] = 1 + f * (c1 + f * (c2 + ...)), coefficients c5 to c1.
_EXP2_COEFFICIENTS = tuple(
    float.fromhex(c)
    for c in ("0x1.5bba14p-10", "0x1.3cea88p-7", "0x1.c6b752p-5", "0x1.ebf9bcp-3", "0x1.62e42ap-1")
)
_MIN_EXPONENT = -125.0  # a weight is never zero nor subnormal
_ROUND_MAGIC = 12582912.0  # 1.5 * 2^23: adding and subtracting it rounds to an integer
_LOG2_E = 1.4426950408889634074
_MAX_FLOAT = float.fromhex("0x1.fffffep127")


def round_to_f32(value: float) -> float:
    """Round a number to f32 (an overflow gives infinity)."""
    return torch.tensor(value, dtype=torch.float64).to(torch.float32).item()


def exponent_factor(temperature: float) -> float:
    """Return the factor from logits to exponents of two, log2(e) / temperature in f32, finite."""
    factor = _LOG2_E / temperature if temperature > 0 else _INF
    return round_to_f32(factor) if factor < _MAX_FLOAT else _MAX_FLOAT


def fused_multiply_add(a: torch.Tensor, b: torch.Tensor, c: float | torch.Tensor) -> torch.Tensor:
    """Return a * b + c in float32, rounded once."""
    return _odd_multiply_add(a, b, c).float()


def flushed_multiply_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Return a * b + c in float32, rounded once; subnormal numbers are 0 before and after.

    A result counts as subnormal if it is one after it is rounded to 24 bits.
    """
    a, b, c = (torch.where(x.abs() < 2.0**-126, x * 0.0, x) for x in (a, b, c))
    total = _odd_multiply_add(a, b, c)
    return torch.where(total.abs() < 2.0**-126 - 2.0**-151, total * 0.0, total).float()


def _odd_multiply_add(a: torch.Tensor, b: torch.Tensor, c: float | torch.Tensor) -> torch.Tensor:
    """Return a * b + c in float64.

    The product of two float32 is exact there. The sum is rounded to odd, so that the second
    rounding, to float32, is as if it had been the only one.
    """
    c = c.double() if isinstance(c, torch.Tensor) else c
    product = a.double() * b.double()
    total = product + c
    # What the sum lost, exactly (Knuth's two-sum).
    other = total - product
    lost = (product - (total - other)) + (c - other)
    bits = total.view(torch.int64)
    away = (lost > 0) == (total > 0)  # the exact sum lies further from zero than the rounded one
    odd = torch.where(away, bits + 1, bits - 1)
    is_rounded = (lost != 0) & (bits & 1 == 0) & total.isfinite()  # inf is what it is
    return torch.where(is_rounded, odd, bits).view(torch.float64)


def scaled_weight(x: torch.Tensor, x_max: float, factor: float, scale: int) -> torch.Tensor:
    """Return exp((x - x_max) / temperature) * 2^scale, the fixed sequence of f32 operations.

    ``x`` is finite, at most ``x_max``, ``factor`` is ``exponent_factor(temperature)``, and
    ``scale`` is 0 to 63.
    """
    exponent = (x - x_max) * factor
    exponent = torch.where(exponent > _MIN_EXPONENT, exponent, _MIN_EXPONENT)
    whole = (exponent + _ROUND_MAGIC) - _ROUND_MAGIC
    f = exponent - whole
    c5, *others = _EXP2_COEFFICIENTS
    p = torch.full_like(f, c5)
    for coefficient in (*others, 1.0):
        p = fused_multiply_add(p, f, coefficient)
    # Multiply by 2^(whole + scale) by adding to the exponent field.
    return (p.view(torch.int32) + ((whole.to(torch.int32) + scale) << 23)).view(torch.float32)


def token_weight(x: torch.Tensor, x_max: float, factor: float) -> torch.Tensor:
    """Return the weight exp((x - x_max) / temperature) in f32; see ``scaled_weight``."""
    return scaled_weight(x, x_max, factor, 0)


def mass_fraction_bits(vocab_size: int) -> int:
    """Return the fraction bits of a mass: 43 up to a vocabulary of 2^20, then fewer.

    The masses of all tokens sum to at most 2^63.
    """
    return max(1, 43 - max(0, (vocab_size - 1).bit_length() - 20))


def token_mass(x: torch.Tensor, x_max: float, factor: float, fraction_bits: int) -> torch.Tensor:
    """Return floor(weight * 2^fraction_bits) as int64; see ``scaled_weight``."""
    return scaled_weight(x, x_max, factor, fraction_bits).to(torch.int64)


def probability_mass(probability: torch.Tensor, fraction_bits: int) -> torch.Tensor:
    """Return floor(clamp(probability, 0, 1) * 2^fraction_bits) as int64."""
    return (probability.clamp(0.0, 1.0) * 2.0**fraction_bits).to(torch.int64)


def sum_masses(mass: torch.Tensor) -> int:
    """Sum masses: at most 2^63, which is one more than an int64 sum can hold."""
    return int(mass.sum()) % 2**64


def mass_threshold(p: float, total: int, strict: bool) -> int:
    """Return the mass at which a top-p prefix is full, exactly.

    Parameters
    ----------
    p
        An f32 value, 0 < p < 1.
    total
        The mass that counts as 1.
    strict
        False: the smallest mass >= p * total. True: the smallest mass > p * total.

    Returns
    -------
    int
        At least 1.
    """
    exact = Fraction(p) * total
    return max(1, math.floor(exact) + 1 if strict else math.ceil(exact))


# --- Logarithm ------------------------------------------------------------------------------------

_LN2_HIGH = float.fromhex("0x1.62e42fefa3800p-1")
_LN2_LOW = float.fromhex("0x1.ef35793c76730p-45")


def _two_atanh(s: torch.Tensor) -> torch.Tensor:
    """Return 2 * atanh(s) for |s| <= 0.18, f64."""
    t = s * s
    total = torch.full_like(s, 1.0 / 23.0)
    for odd in (21.0, 19.0, 17.0, 15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0):
        total = total * t + 1.0 / odd
    return 2.0 * s + 2.0 * s * (t * total)


def log_f64(value: torch.Tensor) -> torch.Tensor:
    """Return the natural logarithm of positive, normal f64 values: one fixed sequence of steps."""
    bits = value.view(torch.int64)
    fraction = bits & 0xFFFFFFFFFFFFF
    above = (fraction >= 0x6A09E667F3BCD).to(torch.int64)  # mantissa above sqrt(2): halve it
    exponent = ((bits >> 52) - 1023 + above).to(torch.float64)
    mantissa = (((1023 - above) << 52) | fraction).view(torch.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    return exponent * _LN2_HIGH + (_two_atanh(s) + exponent * _LN2_LOW)


@functools.lru_cache(maxsize=1 << 12)
def log_scalar(value: float) -> float:
    """Return ``log_f64`` of one number."""
    return log_f64(torch.tensor([value], dtype=torch.float64)).item()


# --- Powers ---------------------------------------------------------------------------------------


def exp_scalar(x: float) -> float:
    """Return e^x, f64, for |x| <= 700: one fixed sequence of steps."""
    magic = 6755399441055744.0  # 1.5 * 2^52: adding and subtracting it rounds to an integer
    whole = (x * _LOG2_E + magic) - magic
    r = (x - whole * _LN2_HIGH) - whole * _LN2_LOW
    total = 1.0
    for i in range(13, 0, -1):
        total = total * (r / i) + 1.0
    return math.ldexp(total, int(whole))


def power_of_share(base: float, exponent: float) -> float:
    """Return base^exponent, f64, for 0 <= base <= 1, at most e^700; 0^0 is 1."""
    if exponent == 0:
        return 1.0
    if exponent == 1:
        return base
    if base <= 0:
        return 0.0 if exponent > 0 else exp_scalar(700.0)
    log = exponent * log_scalar(base)
    return 0.0 if log < -700 else exp_scalar(min(log, 700.0))


def integer_power(base: float, n: int) -> float:
    """Return base^n, f64, by repeated squaring."""
    power = 1.0
    while n > 0:
        if n & 1:
            power *= base
        base *= base
        n >>= 1
    return power


# --- Noise ----------------------------------------------------------------------------------------


def philox(
    c0: torch.Tensor,
    c1: int | torch.Tensor,
    c2: int | torch.Tensor,
    c3: int | torch.Tensor,
    key: int,
) -> torch.Tensor:
    """Philox 4x32-10: four random words from a counter of four words and a 64-bit key.

    Parameters
    ----------
    c0, c1, c2, c3
        The counter, words in 0 .. 2^32 - 1 as int64 (``c0`` a tensor, the others broadcast to it).
    key
        0 .. 2^64 - 1.

    Returns
    -------
    torch.Tensor
        [*c0.shape, 4] int64, words in 0 .. 2^32 - 1.
    """
    words = [torch.as_tensor(c, dtype=torch.int64).expand(c0.shape) for c in (c0, c1, c2, c3)]
    k0, k1 = key & _MASK32, key >> 32
    for _ in range(10):
        # The product wraps modulo 2^64, the masks take its two words.
        product0, product1 = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [
            (product1 >> 32 & _MASK32) ^ words[1] ^ k0,
            product1 & _MASK32,
            (product0 >> 32 & _MASK32) ^ words[3] ^ k1,
            product0 & _MASK32,
        ]
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return torch.stack(words, dim=-1)


def unit_fraction(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return (high * 2^32 + low + 1/2) / 2^64 of two random words, float64 in (0, 1]."""
    return ((high.to(torch.float64) * 2.0**32 + low.to(torch.float64)) + 0.5) * 2.0**-64


def exponential_noise(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return the standard exponential of 64 random bits.

    It is -log(1 - v), v = (high * 2^32 + low + 1/2) / 2^64.

    Parameters
    ----------
    high, low
        int64, words in 0 .. 2^32 - 1.

    Returns
    -------
    torch.Tensor
        float64, > 0, increasing in (high, low); resolved to 2^-65 near zero, where rare tokens win.
    """
    v = unit_fraction(high, low)
    small = _two_atanh(v / (2.0 - v))
    large = -log_f64(unit_fraction(high ^ _MASK32, low ^ _MASK32))
    return torch.where(high < 0x40000000, small, large)


def position_words(position: int) -> tuple[int, int]:
    """Return the low and the high word of a position, where Philox takes them."""
    return position & _MASK32, position >> 32 & _MASK32


def token_noise(seed: int, position: int, token: torch.Tensor, stream: int = 0) -> torch.Tensor:
    """Return the internal noise of tokens, a function of (seed, position, token id) alone.

    The word ``token % 4`` of the Philox blocks (token / 4, position, stream) and (token / 4,
    position, stream + 1) are the high and the low half of its random bits; the key is the seed.

    Parameters
    ----------
    seed, position
        int64 values; the seed is not negative.
    token
        [N] int64 token ids.
    stream
        An even number: draws of other streams are independent of these.

    Returns
    -------
    torch.Tensor
        [N] float64, see ``exponential_noise``.
    """
    block, block_of_token = torch.unique(token >> 2, return_inverse=True)
    high, low = (
        philox(block, *position_words(position), stream + half, seed)[block_of_token, token & 3]
        for half in (0, 1)
    )
    return exponential_noise(high, low)
