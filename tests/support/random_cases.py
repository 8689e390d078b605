"""Random calls of the ops, seeded and reproducible: shared by tests and benchmarks."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from lmdecode.sampling.types import DIALECTS
from tests.support.cases import BeamCase, SamplingCase

SMALL_VOCAB_SIZES: tuple[int, ...] = (*range(1, 71), 100, 127, 128, 129, 255, 256, 257)
MEDIUM_VOCAB_SIZES: tuple[int, ...] = (1000, 1023, 1024, 1025, 4096, 5003, 32000)
LARGE_VOCAB_SIZES: tuple[int, ...] = (50257, 128256, 151936, 2**20)

_MAX_FLOAT = 3.4028234663852886e38


def sampling_cases(
    seed: int,
    count: int,
    *,
    vocab_sizes: Sequence[int] = SMALL_VOCAB_SIZES,
    max_batch: int = 4,
    dialects: Sequence[str] = DIALECTS,
    extremes: bool = True,
) -> Iterator[SamplingCase]:
    """Yield random calls of ``top_k_top_p_sample``; extremes: also NaN, infinities, subnormals."""
    for number in range(count):
        maker = _CaseMaker(random.Random(f"{seed}/{number}"), extremes)
        name = f"sampling_cases(seed={seed}, extremes={extremes}) case {number}"
        batch = maker.choice.randint(1, max_batch)
        vocab = maker.choice.choice(vocab_sizes)
        yield maker.case(name, batch, vocab, maker.choice.choice(dialects))


def beam_cases(
    seed: int,
    count: int,
    *,
    vocab_sizes: Sequence[int] = SMALL_VOCAB_SIZES,
    extremes: bool = True,
    processors: bool = False,
) -> Iterator[BeamCase]:
    """Yield random calls of ``log_softmax_top_k`` on the CPU; see ``sampling_cases``."""
    for number in range(count):
        maker = _CaseMaker(random.Random(f"beam/{seed}/{number}"), extremes)
        name = f"beam_cases(seed={seed}, extremes={extremes}) case {number}"
        case = maker.beam_case(name, maker.choice.choice(vocab_sizes))
        yield replace(case, processors=maker.processors(case)) if processors else case


class _CaseMaker:
    """Makes one case from one source of randomness."""

    def __init__(self, choice: random.Random, extremes: bool) -> None:
        self.choice = choice
        self.extremes = extremes
        self.generator = torch.Generator().manual_seed(choice.getrandbits(62))

    def chance(self, probability: float) -> bool:
        return self.choice.random() < probability

    # --- Values of a row --------------------------------------------------------------------------

    def normal(self, vocab: int) -> torch.Tensor:
        return torch.randn(vocab, generator=self.generator)

    def values(self, vocab: int) -> torch.Tensor:
        """[V] f32 logits of a random kind."""
        kinds: list[Callable[[int], torch.Tensor]] = [
            lambda n: self.normal(n) * self.choice.choice((0.1, 1.0, 3.0, 10.0, 40.0)),
            lambda n: self.normal(n).sort().values,
            lambda n: self.normal(n).sort(descending=True).values * 4.0,
            lambda n: self.levels(n, self.choice.choice((2, 3, 5, 20))),
            lambda n: torch.full((n,), self.choice.choice((0.0, -1.5, 7.25, 1e4))),
            lambda n: self.peaked(n, self.choice.choice((4.0, 12.0, 30.0, 200.0))),
            lambda n: -self.choice.choice((0.6, 1.1, 2.0)) * torch.arange(1, n + 1).log(),
            lambda n: self.shuffled(-1.1 * torch.arange(1, n + 1).log()),
            lambda n: self.normal(n) * 1e-3 + 20.0,  # many equal after rounding to bf16
            self.periodic,
            self.clustered,
        ]
        if self.extremes:
            kinds += [
                lambda n: self.normal(n) * 1e-40,
                lambda n: self.normal(n).clamp(-3.0, 3.0) * 1e38,
                lambda n: self.peaked(n, self.choice.choice((1e30, _MAX_FLOAT))),
                lambda n: torch.full((n,), self.choice.choice((-math.inf, math.inf, math.nan))),
                lambda n: self.levels(n, 4) * 2.0**-149 + 2.0**-126,  # neighbours in f32
            ]
        row = self.choice.choice(kinds)(vocab)
        return self.sprinkled(row) if self.extremes and self.chance(0.3) else row

    def levels(self, vocab: int, count: int) -> torch.Tensor:
        levels = torch.randint(0, count, (vocab,), generator=self.generator)
        return levels.to(torch.float32) * self.choice.choice((0.25, 1.0, 1.7))

    def peaked(self, vocab: int, height: float) -> torch.Tensor:
        row = self.normal(vocab)
        row[self.choice.randrange(vocab)] = height
        return row

    def periodic(self, vocab: int) -> torch.Tensor:
        """Large values at every m-th place only: a strided sample of the row misleads."""
        period = self.choice.choice((2, 4, 8, 16, 32, 64, 256))
        row = self.normal(vocab)
        row[self.choice.randrange(period) :: period] += 8.0
        return row

    def clustered(self, vocab: int) -> torch.Tensor:
        """Large values next to one another."""
        row = self.normal(vocab)
        start = self.choice.choice((0, self.choice.randrange(vocab), vocab - 1 - vocab // 20))
        row[start : start + 1 + vocab // 20] += 12.0
        return row

    def shuffled(self, row: torch.Tensor) -> torch.Tensor:
        return row[torch.randperm(len(row), generator=self.generator)]

    def sprinkled(self, row: torch.Tensor) -> torch.Tensor:
        """Put a few special values at random places."""
        specials = (-math.inf, math.inf, math.nan, 0.0, -0.0, _MAX_FLOAT, -_MAX_FLOAT, 1e-45)
        share = self.choice.choice((1.0 / len(row), 0.1, 0.5, 0.9))
        for special in self.choice.sample(specials, self.choice.choice((1, 1, 2))):
            places = torch.rand(len(row), generator=self.generator) < share
            row = torch.where(places, special, row)
        return row

    # --- Tensors ----------------------------------------------------------------------------------

    def matrix(self, rows: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """[B, V] of a random memory layout; some layouts repeat the first row or value."""
        dense = torch.stack(rows).to(dtype)
        batch, vocab = dense.shape
        layout = self.choice.choice(("dense",) * 4 + ("wide", "columns", "steps", "row", "value"))
        if layout == "row":
            return dense[:1].expand(batch, vocab)
        if layout == "value":
            return dense[:, :1].expand(batch, vocab)
        if layout == "columns":
            return dense.t().contiguous().t()
        if layout == "wide":  # a slice: an offset, and rows further apart than V
            left = self.choice.randrange(4)
            storage = torch.full((batch + 1, left + vocab + self.choice.randrange(4)), 99.0).to(
                dtype
            )
            view = storage[1:, left : left + vocab]
            return view.copy_(dense)
        if layout == "steps":
            step = self.choice.choice((2, 3))
            view = torch.full((batch, vocab * step + 1), 99.0).to(dtype)[:, 1::step]
            return view.copy_(dense)
        return dense

    def row_tensor(self, values: list[Any], dtype: torch.dtype) -> torch.Tensor:
        """[B] of a random stride."""
        tensor = torch.tensor(values, dtype=torch.float64 if dtype.is_floating_point else dtype)
        tensor = tensor.to(dtype)
        layout = self.choice.choice(("dense", "dense", "steps", "value"))
        if layout == "steps":
            return torch.stack((tensor, tensor + 1), dim=-1)[:, 0]
        return tensor[:1].expand(len(values)) if layout == "value" else tensor

    def parameter(self, batch: int, pick: Callable[[], Any], dtypes: Sequence[torch.dtype]) -> Any:
        """None, a number for all rows, or a number for each of them."""
        kind = self.choice.choice(("none", "number", "tensor"))
        if kind == "none":
            return None
        if kind == "number":
            value = pick()
            return None if value != value or value == -math.inf else value
        return self.row_tensor([pick() for _ in range(batch)], self.choice.choice(dtypes))

    # --- Arguments --------------------------------------------------------------------------------

    def top_k(self, vocab: int) -> int:
        special = (-1, 0, 1, 2, 3, 50, 1000, 1024, 1025, vocab - 1, vocab, vocab + 5)
        return self.choice.choice((*special, *[self.choice.randint(1, vocab)] * 8))

    def top_p(self) -> float:
        special = (-1.0, 0.0, 1e-30, 1e-6, 0.1, 0.5, 0.5, 0.75, 0.9, 0.99, 0.999999, 1 - 2**-24)
        if self.extremes and self.chance(0.02):
            return math.nan
        return self.choice.choice((*special, 1.0, 2.0, *[self.choice.random()] * 8))

    def min_p(self) -> float:
        if self.extremes and self.chance(0.04):
            return self.choice.choice((math.nan, 1e-45))
        special = (-1.0, 0.0, 1e-30, 0.01, 0.05, 0.5, 0.999999, 1.0, 2.0)
        return self.choice.choice((*special, *[self.choice.random()] * 4))

    def temperature(self) -> float:
        if self.extremes and self.chance(0.2):
            extreme = (math.nan, -1.0, -math.inf, -0.0, 1e-45, 1e-38, 1e-30, 1e30, 3e38, math.inf)
            return self.choice.choice(extreme)
        return self.choice.choice((0.0, 1.0, 1.0, 0.3, 0.7, 1.3, 3.0, 10.0))

    def noise(self, batch: int, vocab: int) -> dict[str, Any]:
        """No noise, external noise, a seed or a seed for each row."""
        kind = self.choice.choice(("none", "q", "q", "seed", "seeds"))
        if kind == "none":
            return {"greedy": True}
        if kind == "q":
            q = torch.empty(batch, vocab).exponential_(generator=self.generator)
            eps = 1e-8
            if self.extremes and self.chance(0.3):
                eps = self.choice.choice((0.0, 1e-45, 1e-3, 1.0, 3e38))
                for special in self.choice.sample((0.0, -0.0, -1.5, math.nan, math.inf, 1e-40), 2):
                    places = torch.rand(batch, vocab, generator=self.generator) < 0.1
                    q = torch.where(places, special, q)
            return {"q": self.matrix(list(q), torch.float32), "eps": eps}
        positions = (0, 1, 77, 2**32 - 1, 2**32 + 5, 2**62, -1)
        position = self.parameter(batch, lambda: self.choice.choice(positions), (torch.int64,))
        if kind == "seed":
            seed: Any = self.choice.choice((-1, 0, 1, 1234, 2**63 - 1))
        else:
            seeds = [self.choice.choice((-1, 0, self.choice.getrandbits(62))) for _ in range(batch)]
            seed = self.row_tensor(seeds, torch.int64)
        return {"seed": seed, "position": position}

    def case(self, name: str, batch: int, vocab: int, dialect: str) -> SamplingCase:
        rows = [self.values(vocab) for _ in range(batch)]
        if dialect == "ascend_v2_probabilities" and not (self.extremes and self.chance(0.3)):
            rows = [row.nan_to_num(0.0, 50.0, -50.0).softmax(0) for row in rows]
        dtype = self.choice.choice((torch.float32, torch.float32, torch.float16, torch.bfloat16))
        floats = (torch.float32, torch.float16, torch.bfloat16)
        temperature = self.parameter(batch, self.temperature, floats)
        if isinstance(temperature, float):
            temperature = abs(temperature)  # below 0 is an error for all rows, a status for one
        logits = self.matrix(rows, dtype)
        top_k = self.parameter(batch, lambda: self.top_k(vocab), (torch.int32, torch.int64))
        top_p = self.parameter(batch, self.top_p, floats)
        if isinstance(top_p, float) and not dialect.startswith("ascend"):
            top_p = min(top_p, 1.0)  # above 1 is an error for all rows, off for one
        return SamplingCase(
            name,
            logits,
            {
                "top_k": top_k,
                "top_p": top_p,
                "min_p": self.parameter(batch, self.min_p, floats) if self.chance(0.5) else None,
                "temperature": temperature,
                **self.noise(batch, vocab),
                "return_logits": self.chance(0.7),
                "return_logprob": self.chance(0.7),
                "dialect": dialect,
            },
        )

    def beam_case(self, name: str, vocab: int) -> BeamCase:
        choice = self.choice
        widths = [choice.randint(1, 5) for _ in range(choice.randint(1, 3))]
        kind = choice.choice(("int", "list", "tensor"))
        beams: int | list[int] | torch.Tensor = widths
        if kind == "int":
            widths = [widths[0]] * len(widths)
            beams = widths[0]
        elif kind == "tensor":
            beams = torch.tensor(widths, dtype=choice.choice((torch.int32, torch.int64)))
        scores = [-10.0 * choice.random() for _ in range(sum(widths))]
        if self.chance(0.3):  # as at the first step of transformers
            scores = [choice.choice((0.0, -1e9)) for _ in scores]
        if self.extremes and self.chance(0.3):
            special = (-math.inf, -math.inf, math.inf, math.nan, -_MAX_FLOAT, 1e6, -0.0)
            scores = [choice.choice(special) if self.chance(0.3) else s for s in scores]
        dtypes = (torch.float32, torch.float32, torch.float16, torch.bfloat16)
        logits = self.matrix([self.values(vocab) for _ in scores], choice.choice(dtypes))
        sizes = (1, 2, 2 * widths[0], choice.randint(1, 80), vocab, min(5 * vocab + 3, 400))
        return BeamCase(
            name, logits, self.row_tensor(scores, torch.float32), choice.choice(sizes), beams
        )

    # --- Processors of log_softmax_top_k ----------------------------------------------------------

    def processors(self, case: BeamCase) -> dict[str, Any]:
        """Each with its own chance; numbers that are no token among the tokens."""
        choice, (rows, vocab) = self.choice, case.logits.shape
        beams = case.num_beams
        requests = rows // beams if isinstance(beams, int) else len(beams)
        makers = (
            self.history, self.end_tokens, self.suppressed, self.forced, self.diversity, self.bias,
            self.bitmask,
        )  # fmt: skip
        often = choice.choice((0.2, 0.5, 0.9))
        chosen: dict[str, Any] = {}
        for maker in makers:
            if self.chance(often if maker != self.forced else 0.15):
                chosen |= maker(rows, requests, vocab)
        if "end_tokens" in chosen and "sequences" not in chosen:
            lengths = [choice.randint(0, 12) for _ in range(requests)]
            chosen["lengths"] = self.row_tensor(lengths, torch.int64)
        return chosen

    def token_matrix(self, rows: int, columns: int, vocab: int) -> torch.Tensor:
        """[rows, columns] of tokens, some of them often, and of a few numbers that are none."""
        values = [
            [self.choice.randrange(-2, vocab + 2) for _ in range(min(vocab + 4, 6))]
            for _ in range(rows)
        ]
        dense = torch.tensor(
            [
                [
                    self.choice.choice(often)
                    if self.chance(0.6)
                    else self.choice.randrange(-2, vocab + 2)
                    for _ in range(columns)
                ]
                for often in values
            ],
            dtype=torch.int64,
        ).reshape(rows, columns)
        if self.chance(0.3):  # a slice, steps
            wide = torch.full((rows, 2 * columns + 3), 1, dtype=torch.int64)
            return wide[:, 1 : 1 + 2 * columns : 2].copy_(dense)
        return dense

    def history(self, rows: int, requests: int, vocab: int) -> dict[str, Any]:
        choice, capacity = self.choice, self.choice.choice((0, 1, 3, 10, 40, 150))
        chosen: dict[str, Any] = {"sequences": self.token_matrix(rows, capacity, vocab)}
        if self.chance(0.7):
            lengths = [choice.randint(0, capacity) for _ in range(requests)]
            chosen["lengths"] = self.row_tensor(lengths, torch.int64)
        penalties = (1.0, 1.2, 0.7, 3.0, 1.0 + 2**-23, *((1e-30, 1e30) if self.extremes else ()))
        penalty = self.parameter(requests, lambda: choice.choice(penalties), (torch.float32,))
        sizes = self.parameter(requests, lambda: choice.choice((0, 1, 2, 2, 3, 7)), (torch.int64,))
        chosen |= {} if penalty is None else {"repetition_penalty": penalty}
        return chosen | ({} if sizes is None else {"no_repeat_ngram_size": sizes})

    def token_lists(self, requests: int, vocab: int) -> torch.Tensor:
        size = self.choice.choice((0, 1, 2, 5, vocab // 2))
        lists = self.token_matrix(requests, min(size, 300), vocab)
        return lists[0] if requests and self.chance(0.5) else lists

    def end_tokens(self, rows: int, requests: int, vocab: int) -> dict[str, Any]:
        least = self.choice.randint(0, 20)
        lengths = [self.choice.randint(0, 20) for _ in range(requests)]
        min_lengths = least if self.chance(0.5) else self.row_tensor(lengths, torch.int64)
        return {"end_tokens": self.token_lists(requests, vocab), "min_lengths": min_lengths}

    def suppressed(self, rows: int, requests: int, vocab: int) -> dict[str, Any]:
        return {"suppressed_tokens": self.token_lists(requests, vocab)}

    def forced(self, rows: int, requests: int, vocab: int) -> dict[str, Any]:
        count = self.choice.choice((rows, requests))
        tokens = [self.choice.randrange(vocab) if self.chance(0.5) else -1 for _ in range(count)]
        return {"forced_tokens": self.row_tensor(tokens, torch.int64)}

    def diversity(self, rows: int, requests: int, vocab: int) -> dict[str, Any]:
        penalties = (0.0, 0.5, 0.3, 1.7, -2.0, *((1e38, -1e38) if self.extremes else ()))
        penalty = self.parameter(requests, lambda: self.choice.choice(penalties), (torch.float32,))
        columns = self.choice.choice((0, 1, 4, 9))
        return {
            "diversity_tokens": self.token_matrix(requests, columns, vocab),
            "diversity_penalty": 0.5 if penalty is None else penalty,
        }

    def bias(self, rows: int, requests: int, vocab: int) -> dict[str, Any]:
        count = self.choice.choice((rows, requests, 0))
        scale = self.choice.choice((0.0, 0.1, 3.0, 30.0))
        values = [self.normal(vocab) * scale for _ in range(count or 1)]
        if self.chance(0.3):
            special = (-math.inf, 1e30, *((math.inf, math.nan) if self.extremes else ()))
            share = self.choice.choice((1.0 / vocab, 0.3))
            for value in values:
                places = torch.rand(vocab, generator=self.generator) < share
                value[places] = self.choice.choice(special)
        bias = self.matrix(values, torch.float32)
        return {"bias": bias if count else bias[0]}

    def bitmask(self, rows: int, requests: int, vocab: int) -> dict[str, Any]:
        share = self.choice.choice((0.0, 0.05, 0.5, 0.99))
        count = self.choice.choice((rows, requests))
        bits = torch.rand(count, (vocab + 31) // 32 * 32, generator=self.generator) < share
        words = (bits.view(count, -1, 32).long() << torch.arange(32)).sum(-1)
        words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
        return {"token_bitmask": words.t().contiguous().t() if self.chance(0.3) else words}
