"""The state of a core with matrix units: quick or slow at loading tiles.

On a Sapphire Rapids a step of four loads of tiles from the first cache and four products takes 27
to 31 ns, or 97 to 125 ns; a state lasts from 50 ms to minutes, and its cause is not known. Products
alone take the same in both. So a share of their peak tells nothing where the state is not known.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import lmdecode
from benchmarks.attention.peak import TILE_CONFIG, has_tiles
from benchmarks.compiled import compiled

STATES = ("quick", "slow")
# Nanoseconds of a step, from the gap between the two in a histogram.
_QUICK_BELOW, _SLOW_ABOVE = 45.0, 70.0

# The better one of two times of 150 steps: an interrupt may fall into one of them.
_SOURCE = """
#include <time.h>
#define LOAD(tile, at) \\
  __asm__ volatile("tileloadd (%0,%1,1),%%tmm" #tile : : "r"(at), "r"(64L) : "memory")
#define MULTIPLY(sum, a, b) __asm__ volatile("tdpbf16ps %tmm" #b ",%tmm" #a ",%tmm" #sum)
static char memory[8 * 2048] __attribute__((aligned(4096)));
static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return time.tv_sec * 1e9 + time.tv_nsec;
}
double probe(void) {
  double best = 1e18;
  __asm__ volatile("ldtilecfg %0" : : "m"(config));
  for (int turn = 0; turn < 2; ++turn) {
    const double start = now();
    for (int step = 0; step < 150; ++step) {
      const char* const tiles = memory + step % 8 * 2048;
      LOAD(6, tiles); LOAD(4, tiles); MULTIPLY(0, 4, 6);
      LOAD(7, tiles + 1024); MULTIPLY(1, 4, 7);
      LOAD(5, tiles + 1024); MULTIPLY(2, 5, 6); MULTIPLY(3, 5, 7);
    }
    const double time = (now() - start) / 150;
    if (time < best) best = time;
  }
  __asm__ volatile("tilerelease");
  return best;
}
"""


_library = cache(compiled)


def probe() -> Callable[[], float] | None:
    """Return a function that times a step on the calling thread's core, in nanoseconds.

    None where kernels use no tiles, or emulated ones, and without a compiler.
    """
    if lmdecode.cpu_capability() != "amx" or not has_tiles():
        return None
    if (library := _library(TILE_CONFIG + _SOURCE)) is None:
        return None
    library.probe.restype = ctypes.c_double
    return library.probe


def state_of(before: float, after: float) -> str:
    """Return one of ``STATES``, or "mixed", by the steps before and after a sample."""
    if max(before, after) < _QUICK_BELOW:
        return "quick"
    return "slow" if min(before, after) > _SLOW_ABOVE else "mixed"
