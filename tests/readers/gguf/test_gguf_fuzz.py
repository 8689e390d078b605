"""Hostile GGUF files: any of them is read, or refused with a ValueError, within little memory."""

import os
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf")
from tests.readers.gguf.raw_gguf import ARRAY, STRING, entry, file_of, string
from tests.support.gguf_files import write_model

ROOT = Path(__file__).resolve().parents[3]
RUNS = int(os.environ.get("LMDECODE_FUZZ_RUNS", "300"))

# Types of models and their variants of tests.support.causal_models.
MODELS = {
    "falcon_h1": "multipliers", "gemma2": "plain", "gemma4_text": "all experts", "gpt2": "plain",
    "gpt_oss": "plain", "granitemoehybrid": "experts, multipliers", "lfm2_moe": "plain",
    "llama": "yarn", "phi3": "partial, window", "qwen3_5_moe_text": "plain",
    "qwen3_next": "experts and dense layers", "smollm3": "layers without positions",
}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 64},
    "qwen3_next": {"mlp_only_layers": []},
    "smollm3": {"intermediate_size": 64},
}
BLOCKS = {"llama": "Q8_0", "smollm3": "Q4_0"}

# Each run is a file in a process with little memory: what is read, refused, and how.
PROGRAM = """
import random, resource, sys, time
import torch
torch.set_num_threads(1)
from collections import Counter
from pathlib import Path
from lmdecode.formats.gguf import GgufFile, load_tokenizer, tokenizer_files
from lmdecode.readers.gguf.model import load_parts
from tests.readers.gguf.test_gguf_fuzz import mutated

def used():
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()

def took(read):
    try:
        read()
    except ValueError as error:
        assert str(path) in str(error), error
        assert "allocate" not in str(error) and "memory" not in str(error), error
        return False
    return True

def layers_of(keeps_blocks):
    _, config, weights = load_parts(path, keeps_blocks=keeps_blocks)
    for i in range(config.num_layers):
        layer = weights.layers[i]
        for matrices in (layer.experts_gate, layer.experts_up, layer.experts_down):
            matrices and matrices[-1]

def tensors_of():
    file = GgufFile(path)
    for name, info in file.tensors.items():
        assert 0 < info.begin <= info.end <= path.stat().st_size
        (file.matrix(name, 0) if len(info.shape) == 3 else file.tensor(name))

folder, begin, end = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
good = {path.stem: path.read_bytes() for path in sorted(folder.glob("*.gguf"))}
for path in sorted(folder.glob("*.gguf")):
    tensors_of(), layers_of(False), layers_of(True), load_tokenizer(path)("w1 w2")
path, outcomes, slowest = folder / "bad.file", Counter(), (0.0, 0)
resource.setrlimit(resource.RLIMIT_AS, (used() + (256 << 20),) * 2)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for run in range(begin, end):
    data, kind = mutated(good, run)
    path.write_bytes(data)
    since = time.monotonic()
    try:
        outcome = "no file"
        if took(tensors_of):
            outcome = "a model" if took(lambda: layers_of(False)) else "no model"
            assert took(lambda: layers_of(True)) == (outcome == "a model")
            took(lambda: load_tokenizer(path)("w1 w2"))
            took(lambda: tokenizer_files(path))
    except BaseException as error:
        outcome = "an error"
        print(f"run {run}, {kind}: {type(error).__name__}: {error}", file=sys.stderr)
    slowest = max(slowest, (time.monotonic() - since, run))
    outcomes[kind, outcome] += 1
more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
for (kind, outcome), count in sorted(outcomes.items()):
    print(kind, outcome, count, sep=": ")
print("slowest", *slowest, "more KiB", more)
"""


class _Parts:
    """A good file in parts: where its numbers are, its entries, its tensors, and their bytes."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 8
        self.numbers = [[(4, 4), (8, 8), (16, 8)]]  # places and sizes, by entry and tensor
        num_tensors, num_entries = struct.unpack_from("<QQ", data, 8)
        self.at = 24
        self.entries = [self._cut(self._entry) for _ in range(num_entries)]
        self.tensors = [self._cut(self._tensor) for _ in range(num_tensors)]
        self.head, self.body = self.at, data[-(-self.at // 32) * 32 :]

    def _cut(self, read: Callable[[], None]) -> bytes:
        begin = self.at
        self.numbers.append([])
        read()
        return self.data[begin : self.at]

    def _number(self, size: int) -> int:
        self.numbers[-1].append((self.at, size))
        self.at += size
        return int.from_bytes(self.data[self.at - size : self.at], "little")

    def _string(self) -> None:
        size = self._number(8)
        self.at += size

    def _entry(self) -> None:
        self._string()
        self._value(self._number(4))

    def _value(self, kind: int) -> None:
        if kind == STRING:
            self._string()
        elif kind == ARRAY:
            of, count = self._number(4), self._number(8)
            for _ in range(count):
                self._value(of)
        else:
            self._number({0: 1, 1: 1, 2: 2, 3: 2, 7: 1, 10: 8, 11: 8, 12: 8}.get(kind, 4))

    def _tensor(self) -> None:
        self._string()
        for _ in range(self._number(4)):
            self._number(8)
        self._number(4)
        self._number(8)


def _some_number(generator: random.Random, size: int) -> bytes:
    bits = 8 * size
    near = (0, 1, 2, 3, 5, 8, 12, 31, 64, 255)
    most = generator.choice((1 << bits, 1 << bits - 1, 1 << max(1, bits // 2), *near))
    number = most + generator.choice((-1, 0, 1)) if generator.randrange(3) else generator.choice(
        (1 << generator.randrange(bits), generator.randrange(1 << bits), 40)
    )  # fmt: skip
    return (number % (1 << bits)).to_bytes(size, "little")


def _flip(parts: _Parts, generator: random.Random) -> bytes:
    data = bytearray(parts.data)
    for _ in range(generator.choice((1, 1, 2, 5))):
        data[generator.randrange(parts.head)] ^= 1 << generator.randrange(8)
    return bytes(data)


def _number(parts: _Parts, generator: random.Random) -> bytes:
    data = bytearray(parts.data)
    for _ in range(generator.choice((1, 1, 1, 2, 3))):
        at, size = generator.choice(generator.choice(parts.numbers))
        data[at : at + size] = _some_number(generator, size)
    return bytes(data)


def _cut(parts: _Parts, generator: random.Random) -> bytes:
    if generator.randrange(2):
        return parts.data[: generator.randrange(len(parts.data))]
    at = generator.randrange(parts.head)
    return parts.data[:at] + parts.data[at + generator.randrange(1, 64) :]


def _twice(parts: _Parts, generator: random.Random) -> bytes:
    entries, tensors = list(parts.entries), list(parts.tensors)
    of = generator.choice((entries, tensors))
    of.insert(generator.randrange(len(of) + 1), generator.choice(of))
    return file_of(entries, tensors, parts.body)


def _missing(parts: _Parts, generator: random.Random) -> bytes:
    entries, tensors = list(parts.entries), list(parts.tensors)
    of = generator.choice((entries, tensors))
    del of[generator.randrange(len(of))]
    return file_of(entries, tensors, parts.body)


def _exchanged(parts: _Parts, generator: random.Random) -> bytes:
    """Give an entry the value of another, or a tensor another's place and shape."""
    entries, tensors = list(parts.entries), list(parts.tensors)
    of = generator.choice((entries, tensors))
    i, other = generator.randrange(len(of)), generator.choice(of)
    names = [8 + int.from_bytes(one[:8], "little") for one in (of[i], other)]
    of[i] = of[i][: names[0]] + other[names[1] :]
    return file_of(entries, tensors, parts.body)


def _value(parts: _Parts, generator: random.Random) -> bytes:
    """Give an entry a well-formed value, mostly of another type."""
    entries = list(parts.entries)
    i, text = generator.randrange(len(entries)), generator.choice(("", "llama", "\u2581w", "none"))
    key = entries[i][8 : 8 + int.from_bytes(entries[i][:8], "little")]
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    kind = generator.choice((*sizes, 4, 4, 6, STRING, ARRAY, ARRAY))
    if kind == STRING:
        value = string(text)
    elif kind == ARRAY:
        of, count = generator.choice((*sizes, STRING)), generator.choice((0, 1, 2, 3, 101, 1000))
        one = string(text) if of == STRING else _some_number(generator, sizes[of])
        value = struct.pack("<IQ", of, count) + count * one
    else:
        value = _some_number(generator, sizes[kind])
    entries[i] = entry(key, kind, value)
    return file_of(entries, parts.tensors, parts.body)


def _shape(parts: _Parts, generator: random.Random) -> bytes:
    """Give a tensor another shape of as many elements, another type, or another place."""
    tensors = list(parts.tensors)
    i = generator.randrange(len(tensors))
    name = 8 + int.from_bytes(tensors[i][:8], "little")
    (count,) = struct.unpack_from("<I", tensors[i], name)
    dims = list(struct.unpack_from(f"<{count}Q", tensors[i], name + 4))
    kind, offset = struct.unpack_from("<IQ", tensors[i], name + 4 + 8 * count)
    how = generator.randrange(4)
    if how == 0:
        generator.shuffle(dims)
    elif how == 1:
        dims = generator.choice(([*dims, 1], [1, *dims], [dims[0], 1 << generator.randrange(64)],
                                 [max(1, dims[0] // 2), *dims[1:], 2]))  # fmt: skip
    elif how == 2:
        kind = generator.choice((0, 1, 2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 20, 23, 30, 39, 41, 99))
    else:
        offset = (offset + 32 * generator.randrange(-9, 9)) % (1 << 64)
    rest = struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    tensors[i] = tensors[i][:name] + rest
    return file_of(parts.entries, tensors, parts.body)


MUTATIONS = (_flip, _number, _number, _number, _cut, _twice, _missing, _exchanged, _value, _value,
             _value, _shape, _shape)  # fmt: skip
_parts: dict[bytes, _Parts] = {}


def mutated(good: dict[str, bytes], seed: int) -> tuple[bytes, str]:
    """Return one of these files with a fault, and the name of the fault."""
    generator = random.Random(seed)
    data = good[generator.choice(sorted(good))]
    mutation = generator.choice(MUTATIONS)
    if data not in _parts:
        _parts[data] = _Parts(data)
    return mutation(_parts[data], generator), mutation.__name__[1:]


def _write_good(folder: Path) -> None:
    from tests.support.causal_models import model_of, random_config

    def add_tokens(writer: Any) -> None:
        model = writer.arch
        is_bytes = model in ("gpt2", "gpt-oss", "qwen3next", "qwen35moe")
        writer.add_tokenizer_model("gpt2" if is_bytes else "llama")
        tokens = ["<unk>", "<s>", "</s>", "w", "1", "2", "w1", "w2", "\u2581", "\u2581w"]
        tokens += [f"t{i}" for i in range(101 - len(tokens))]
        writer.add_token_list(tokens)
        writer.add_token_types([2, 3, 3] + [1] * 98)
        if is_bytes:
            writer.add_tokenizer_pre("gpt-2")
            writer.add_token_merges(["w 1", "w 2"])
        else:
            writer.add_token_scores([-float(i) for i in range(101)])

    for kind, variant in MODELS.items():
        model = model_of(random_config(kind, variant, **MORE.get(kind, {})))
        blocks = BLOCKS.get(kind)
        write_model(folder / f"{kind}.gguf", model, add_tokens, kinds=lambda name, of=blocks: of)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")
def test_mutations_are_read_or_refused(tmp_path: Path) -> None:
    _write_good(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), "0", str(RUNS)],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    outcomes = {line.split(": ")[1] for line in done.stdout.splitlines()[:-1]}
    assert outcomes == {"a model", "no file", "no model"}, done.stderr[-3000:]
