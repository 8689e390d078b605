"""``python -m benchmarks digests``: what a digest tells apart, and what a comparison finds."""

import json
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lmdecode
from tests.support.benchmark_runs import needs_benchmarks, run_benchmarks

pytest.importorskip("gguf")
pytest.importorskip("transformers")
digest = pytest.importorskip(
    "benchmarks.digests.digest", reason="benchmarks are in source checkouts only"
)
kinds = pytest.importorskip("benchmarks.digests.kinds")
pytestmark = needs_benchmarks

NAN = torch.tensor([1.0, torch.nan])
# The same with the sign of NaN.
OTHER_NAN = torch.tensor([0x3F800000, -0x400000], dtype=torch.int32).view(torch.float32)
DIFFERENT: list[Any] = [
    torch.zeros(2), -torch.zeros(2), torch.zeros(2).half(), torch.zeros(2).bfloat16(),
    torch.zeros(2, 1), torch.zeros(1, 2), torch.zeros(3), torch.zeros(2).int(), NAN, OTHER_NAN,
    None, 0, 0.0, -0.0, "0", [], [torch.zeros(1), torch.zeros(1)], (torch.zeros(1),),
    {"a": torch.zeros(2)}, {"b": torch.zeros(2)}, torch.tensor(0.0), torch.tensor(False),
]  # fmt: skip


def test_what_a_digest_tells_apart() -> None:
    digests = [digest.digest_of([value]) for value in DIFFERENT]
    assert len(set(digests)) == len(DIFFERENT)
    assert digests == [digest.digest_of([value]) for value in DIFFERENT]
    strided = torch.stack((NAN, torch.ones(2)), 1)[:, 0]
    assert digest.digest_of([strided]) == digest.digest_of([NAN])
    with pytest.raises(TypeError, match="a case gave a <class 'object'>; expected tensors"):
        digest.digest_of([object()])


def test_a_part_is_digested_before_the_next_is_computed() -> None:
    """Results may lie in memory that the next call writes."""
    x = torch.zeros(3)

    def parts() -> Iterator[torch.Tensor]:
        for value in (1.0, 2.0):
            yield x.fill_(value)

    assert digest.digest_of(parts()) == digest.digest_of([torch.ones(3), torch.full((3,), 2.0)])


def test_ranges_name_the_cases_that_differ() -> None:
    plain, nan, other_nan = (digest.digest_of([x]) for x in (torch.zeros(1), NAN, OTHER_NAN))
    before = [plain] * 120
    before[70] = before[119] = nan
    now = [*before[:118], nan, other_nan, plain]
    now[3] = nan
    kind = {number: digest.kind_of("kv_cache", number) for number in (3, 118, 119)}
    assert digest.differences("kv_cache", "avx2", before, now) == [
        f"kv_cache, avx2, cases 0 to 49: 3 ({kind[3]})",
        f"kv_cache, avx2, cases 100 to 119: 118 ({kind[118]}), 119 ({kind[119]}; NaN alone)",
    ]
    assert digest.differences("kv_cache", "avx2", before[:3], now) == []


@pytest.mark.parametrize(
    "area",
    [
        pytest.param(a, marks=[pytest.mark.slow] * (a in ("attention", "decoder")))
        for a in kinds.AREAS
    ],
)
def test_every_kind_gives_the_same_twice(area: str, threads: None) -> None:
    """In any order, and on any number of threads; and every kind gives something."""
    numbers: dict[str, int] = {}
    for number in range(2000):
        numbers.setdefault(digest.kind_of(area, number), number)
    assert numbers.keys() == kinds.kinds_of(area).keys()
    chosen = sorted(numbers.values())
    first = [digest.case_digest(area, number) for number in chosen]
    assert len(set(first)) == len(first)
    torch.set_num_threads(3)
    random.Random(0).shuffle(chosen)
    again = {number: digest.case_digest(area, number) for number in chosen}
    assert [again[number] for number in sorted(chosen)] == first


def test_an_error_names_its_case(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(choice: random.Random, number: int) -> Iterator[torch.Tensor]:
        yield torch.zeros(1)
        raise ValueError("wrong")

    of_area, kind = kinds.kinds_of("kv_cache"), digest.kind_of("kv_cache", 7)
    monkeypatch.setitem(of_area, kind, (of_area[kind][0], fail))
    with pytest.raises(ValueError, match="wrong") as raised:
        digest.case_digest("kv_cache", 7)
    assert raised.value.__notes__ == [f"in case 7 of kv_cache: {kind}"]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    options = ("--areas", "sampling,kv_cache", "--levels", "default", "--cases", "6")
    return run_benchmarks("digests", *options, *arguments)


@pytest.mark.slow
def test_a_planted_difference_is_found(tmp_path: Path) -> None:
    file, again = tmp_path / "before.json", tmp_path / "again.json"
    done = run("--json", file)
    assert done.returncode == 0, done.stderr
    done = run("--json", again, "--against", file, "--threads", 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"12 cases: the same bits as in {file}"
    assert again.read_text() == file.read_text()

    record = json.loads(file.read_text())
    digests = record["digests"]["kv_cache"]["default"]
    assert digests == [digest.case_digest("kv_cache", number) for number in range(6)]
    digests[4] = digests[3]
    file.write_text(json.dumps(record))
    done = run("--against", file)
    assert done.returncode == 1
    kind = digest.kind_of("kv_cache", 4)
    assert done.stdout.splitlines()[-1] == f"kv_cache, default, cases 0 to 5: 4 ({kind})"


@pytest.mark.slow
def test_files_that_cannot_be_compared(tmp_path: Path) -> None:
    file = tmp_path / "before.json"
    assert run("--json", file).returncode == 0
    record = json.loads(file.read_text())
    file.write_text(json.dumps({**record, "digests": {"beam": {"default": ["0"]}}}))
    done = run("--against", file)
    assert done.returncode == 2
    assert f"{file} has no cases of these areas and levels" in done.stderr
    record["made with"]["torch"] = "1.0"
    file.write_text(json.dumps(record))
    done = run("--against", file)
    assert done.returncode == 2 and "its inputs are others" in done.stderr


@pytest.mark.slow
def test_a_level_that_is_not_there_is_left_out() -> None:
    if lmdecode.cpu_capability() == "amx":
        pytest.skip("this machine has every level")
    done = run("--levels", "amx,default")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("amx is left out: LMDECODE_CPU_CAPABILITY is amx, but ")
    assert [line.split()[:2] for line in lines[1:]] == [
        ["default", "sampling"], ["default", "kv_cache"],
    ]  # fmt: skip


@pytest.mark.slow
def test_wrong_words() -> None:
    done = run("--areas", "sampling,beams")
    assert done.returncode == 2
    assert "argument --areas: has 'beams'; expected sampling, beam, kv_cache" in done.stderr
