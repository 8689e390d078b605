"""Damaged GGUF files: any of them is read, or refused with a ValueError, within little memory."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("gguf")
ROOT = Path(__file__).resolve().parents[3]
RUNS = int(os.environ.get("LMDECODE_FUZZ_RUNS", "400"))

# What a file may be taken for, beside a damaged one: a ValueError that names it.
PROGRAM = """
import random, resource, sys
import torch
torch.set_num_threads(1)
from pathlib import Path
from lmdecode.formats.gguf import GgufFile, load_tokenizer
from lmdecode.readers.gguf.model import load_parts
from tests.readers.gguf.test_gguf_fuzz import mutated

folder, runs = Path(sys.argv[1]), int(sys.argv[2])
good = (folder / "good.gguf").read_bytes()
for read in (load_parts, load_tokenizer):
    read(folder / "good.gguf")
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), used + (256 << 20)))
path, refused, taken = folder / "bad.gguf", 0, 0
for run in range(runs):
    path.write_bytes(mutated(good, run))
    try:
        file = GgufFile(path)
        for name in file:
            file.tensor(name)
    except ValueError as error:
        assert str(path) in str(error), (run, error)
        refused += 1
        continue
    for keeps_blocks in (False, True):
        try:
            _, config, weights = load_parts(path, keeps_blocks=keeps_blocks)
            layers = [weights.layers[i] for i in range(config.num_layers)]
            taken += 1
        except ValueError as error:
            assert str(path) in str(error), (run, error)
    try:
        load_tokenizer(path)("w1 w2")
    except ValueError as error:
        assert str(path) in str(error), (run, error)
print(refused, taken)
"""


def mutated(good: bytes, seed: int) -> bytes:
    """Return a file with a few other bytes, numbers, cuts, or parts put elsewhere."""
    generator, data = random.Random(seed), bytearray(good)
    for _ in range(generator.choice((1, 1, 1, 2, 5))):
        end = min(len(data), 3000)  # the metadata and the table, where a change means something
        if not end:
            break
        at, kind = generator.randrange(end), generator.randrange(6)
        if kind == 0:
            data[at] = generator.randrange(256)
        elif kind == 1:
            data[at] ^= 1 << generator.randrange(8)
        elif kind == 2:
            number = generator.choice((0, 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1, 2**40))
            data[at : at + 8] = number.to_bytes(8, "little")
        elif kind == 3:
            del data[at : at + generator.randrange(1, 64)]
        elif kind == 4:
            other = generator.randrange(end)
            data[at : at + 16] = data[other : other + 16]
        else:
            del data[generator.randrange(len(data)) :]
    return bytes(data)


def _write_good(path: Path) -> None:
    from tests.support.causal_models import model_of, random_config
    from tests.support.gguf_files import write_model

    def add_tokens(writer: object) -> None:
        writer.add_tokenizer_model("llama")  # type: ignore[attr-defined]
        tokens = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(20)), "w", "\u2581"]
        writer.add_token_list(tokens)  # type: ignore[attr-defined]
        writer.add_token_scores([-float(i) for i in range(25)])  # type: ignore[attr-defined]
        writer.add_token_types([2, 3, 3] + [1] * 22)  # type: ignore[attr-defined]

    config = random_config("qwen3", "plain", vocab_size=25, hidden_size=32, intermediate_size=32,
                           head_dim=8, num_hidden_layers=1)  # fmt: skip
    write_model(path, model_of(config), add_tokens, kinds=lambda name: "Q8_0")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")
def test_mutations_are_read_or_refused(tmp_path: Path) -> None:
    _write_good(tmp_path / "good.gguf")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), str(RUNS)],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    refused, _taken = map(int, done.stdout.split()[-2:])
    assert refused > RUNS // 4  # they do damage
