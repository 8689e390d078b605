"""``lmdecode verify``: it finds the same bits; and of each line, that it sees what is broken."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import lmdecode
from lmdecode.__main__ import main
from lmdecode.cli import verify, verify_texts
from lmdecode.cli.verify import CONTEXT, Checks, random_model
from lmdecode.decoder.decoding import PackedDecoding
from lmdecode.decoder.engine.drafts import DraftAsk, LookupDrafts
from lmdecode.decoder.engine.rows import DrawnRows
from tests.cli.talking import ROOT, saved_model

G2P = ROOT / "examples" / "g2p" / "model"
LINES = ["alone", "in a batch of 64", "on one thread", "on two threads", "with drafts"]
EAGER = "eager torch, in any batch"
STORE = ["from the store after kill -9", "with a byte of the store flipped"]
LEVELS = verify.levels_here()


def verified(
    capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0
) -> dict[str, str]:
    """Run the command; return its lines by name, and the last one as ``end``."""
    assert main(["verify", *map(str, arguments)]) == status
    printed = capsys.readouterr()
    assert not printed.err
    _, _, end = printed.out.rpartition("\nmodel: ")
    model, *lines, last = end.splitlines()
    found = dict(re.split(r"  +", line, maxsplit=1) for line in lines)
    assert len(found) == len(lines)
    return {"model": model, **found, "end": last}


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Have the model of random weights verified, and of the lines those of some names alone."""
    monkeypatch.setattr(verify, "shipped_model", lambda: None)
    whole = Checks.lines

    def choose(*names: str) -> None:
        def lines(self: Checks) -> Iterator[Any]:
            return (line for line in whole(self) if line[0] in names)

        monkeypatch.setattr(Checks, "lines", lines)

    before = torch.get_num_threads()
    yield choose
    torch.set_num_threads(before)


@pytest.mark.slow
def test_every_line_of_the_shipped_model(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    store = pytest.importorskip("lmdecode.store") and STORE
    found = verified(capsys)
    assert found["model"] == "examples/kjv_mistral/model; weights float32, caches float32"
    own, *others = reversed(LEVELS)
    at_levels = [f"{name} at {level}" for level in others for name in ("ops", "alone = in a batch")]
    assert list(found) == ["model", *LINES, EAGER, f"ops at {own}", *at_levels, *store, "end"]
    alone, ops = found["alone"], found[f"ops at {own}"]
    assert re.fullmatch("[0-9a-f]{16}", alone) and re.fullmatch("[0-9a-f]{16}", ops)
    for name in (*LINES[1:], *store):
        assert found[name].startswith(f"{alone}  same"), name
    assert "  same (plain torch: " in found[EAGER]
    assert all(found[f"ops at {level}"] == f"{ops}  same" for level in others)
    assert all(found[f"alone = in a batch at {level}"].endswith("  same") for level in others)
    counts = [int(count) for count in re.findall(r" (\d+)\b", found["with drafts"])]
    assert 20 < counts[0] < counts[1] - 20 and 20 < counts[2] == counts[3]
    kept = re.search(r"(\d+) of (\d+) prompt tokens loaded", found[STORE[0]])
    assert kept and int(kept[1]) > int(kept[2]) // 2
    assert "refused: 0 of 599 prompt tokens loaded" in found[STORE[1]]
    count = len(found) - 4
    assert found["end"] == f"{count} of {count} comparisons found the same bits"


def test_rows_of_plain_torch_differ(
    only: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    only(EAGER)
    monkeypatch.setattr(lmdecode, "batch_invariant", nullcontext)
    found = verified(capsys, status=1)
    assert "  DIFFERS: row " in found[EAGER]


def test_formats_are_those_that_are_given(only: Any, capsys: pytest.CaptureFixture[str]) -> None:
    only("alone", "in a batch of 64", "with drafts")
    found = verified(capsys, "--dtype", "int8", "--cache-dtype", "bfloat16")
    assert found["model"].endswith("; weights int8, caches bfloat16")
    assert found["end"] == "2 of 2 comparisons found the same bits"


@pytest.mark.slow
def test_a_saved_model_is_used_where_it_lies(
    tmp_path: Path, only: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("lmdecode.store")
    folder = saved_model(tmp_path)
    monkeypatch.delattr(PackedDecoding, "save")
    only("alone", STORE[0])
    found = verified(capsys, folder)
    assert found["model"] == f"{folder}; weights int8, caches float32"
    assert found["end"] == "1 of 1 comparisons found the same bits"


def test_bits_are_those_of_the_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another token, or a log-probability that differs in its last bit, is another digest."""
    decoding = random_model("float32")
    texts = verify_texts.Texts([5, 6, 7], CONTEXT)
    greedy, alone = texts.compared[0], texts.compared[4]
    assert greedy.arguments["logprobs"] and "logprobs" not in alone.arguments
    found = {verify_texts.write_alone(decoding, [greedy]).bits}
    for change in ({"max_new_tokens": 23}, {"logprobs": 15}, {"suppress_tokens": [0]}):
        other = greedy._replace(arguments={**greedy.arguments, **change})
        found.add(verify_texts.write_alone(decoding, [other]).bits)
    assert len(found) == (3 if 0 not in _tokens(decoding, greedy) else 4)
    step = DrawnRows.step
    monkeypatch.setattr(DrawnRows, "step", lambda self, x, d=(): step(self, _nudged(x), d))
    assert _tokens(decoding, greedy) == _tokens(decoding, greedy)
    found.add(verify_texts.write_alone(decoding, [greedy]).bits)
    assert len(found) >= 4


def _tokens(decoding: Any, asked: Any) -> list[int]:
    engine = decoding.engine(max_requests=1, capacity=100)
    return list(engine.submit(asked.prompt, max_new_tokens=24).result().tokens)


def _nudged(logits: torch.Tensor) -> torch.Tensor:
    """Logits whose last bit differs in some places."""
    return torch.nextafter(logits, logits.new_tensor(torch.inf))


def test_without_packages_or_a_source_tree_it_takes_random_weights(
    only: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    only(*LINES[:2])
    found = verified(capsys)
    assert found["model"].startswith("random weights (give MODEL for one of yours); weights float")
    assert found["end"] == "1 of 1 comparisons found the same bits"
    monkeypatch.setattr(verify, "shipped_model", lambda: ROOT / "examples/kjv_mistral/model")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    found = verified(capsys)
    assert found["model"].startswith("random weights (examples/kjv_mistral/model is not used: ")
    assert "tokenizers" in found["model"]


def test_without_the_store_it_says_so(
    only: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lmdecode.store", None)
    only("alone", "in a batch of 64", *STORE)
    found = verified(capsys)
    assert all(found[name].startswith("not checked: ") for name in STORE)
    assert found["end"] == "1 of 1 comparisons found the same bits; 2 not checked"


@pytest.mark.parametrize("own", ["default", "avx2", "avx512"])
def test_levels_are_those_of_machine_and_build(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where this process was told to use a lower one."""
    monkeypatch.setattr(lmdecode, "cpu_capabilities", lambda: ("default", "avx2", "avx512"))
    monkeypatch.setattr(lmdecode, "cpu_capability", lambda: own)
    found = verify.levels_here()
    assert sorted(found) == ["avx2", "avx512", "default"] and found[-1] == own


def test_an_encoder_decoder_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert main(["verify", str(G2P)]) == 1
    assert "expected a decoder-only one" in capsys.readouterr().err


def in_batches(self: DrawnRows, logits: torch.Tensor, drafts: Any = ()) -> Any:
    """The logits of a row depend on how many there are."""
    return STEP(self, _nudged(logits) if len(logits) > 8 else logits, drafts)


def on_one_thread(self: DrawnRows, logits: torch.Tensor, drafts: Any = ()) -> Any:
    """They depend on the number of threads."""
    return STEP(self, _nudged(logits) if torch.get_num_threads() == 1 else logits, drafts)


def on_two_threads(self: DrawnRows, logits: torch.Tensor, drafts: Any = ()) -> Any:
    return STEP(self, _nudged(logits) if torch.get_num_threads() == 2 else logits, drafts)


def any_draft(self: DrawnRows, logits: torch.Tensor, drafts: Any = ()) -> Any:
    """The first token of a draft is accepted, right or wrong."""
    begin, forced = 0, logits.clone()
    for row in range(len(self.running)):
        draft = drafts[row] if row < len(drafts) else []
        if draft:
            forced[begin, draft[0]] = 1e4
        begin += 1 + len(draft)
    return STEP(self, forced, drafts)


STEP = DrawnRows.step


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("in a batch of 64", in_batches),
        ("on one thread", on_one_thread),
        ("on two threads", on_two_threads),
        ("with drafts", any_draft),
    ],
)
def test_texts_that_depend_on_how_they_are_computed(
    line: str, step: Any, only: Any, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    torch.set_num_threads(3)
    monkeypatch.setattr(DrawnRows, "step", step)
    only("alone", line)
    found = verified(capsys, status=1)
    assert found[line].split("  ")[0] != found["alone"]
    assert "  DIFFERS: greedy" in found[line]
    assert found["end"] == "0 of 1 comparisons found the same bits"


def test_drafts_that_are_never_accepted(
    only: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is the same then, and nothing is shown."""
    from lmdecode.decoder.engine.model_drafts import AssistantDrafts

    def nothing(self: Any, asks: list[DraftAsk]) -> list[list[int]]:
        return [[] for _ in asks]

    for source in (AssistantDrafts, LookupDrafts):
        monkeypatch.setattr(source, "propose", nothing)
    only("alone", "with drafts")
    assert "WRONG: a model's own drafts" in verified(capsys, status=1)["with drafts"]


def test_ops_that_depend_on_threads(
    only: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bits = verify.bits_of_ops

    def on_threads() -> tuple[str, ...]:
        first, *others = bits()
        return (f"{first}{torch.get_num_threads()}", *others)

    torch.set_num_threads(2)
    monkeypatch.setattr(verify, "bits_of_ops", on_threads)
    only("on one thread", "on two threads")
    found = verified(capsys, status=1)
    assert "  same; WRONG: ops differ: top_k_top_p_sample" in found["on one thread"]
    assert found["on two threads"].endswith("  same")


def test_a_step_that_fails(
    only: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: DrawnRows, logits: torch.Tensor, drafts: Any = ()) -> Any:
        return STEP(self, logits * torch.nan if len(logits) > 8 else logits, drafts)

    monkeypatch.setattr(DrawnRows, "step", broken)
    only("alone", "in a batch of 64")
    found = verified(capsys, status=1)
    assert found["in a batch of 64"].startswith("FAILED: Engine: no token can be chosen")


# What processes of the command do as they start.
FAULTS = {
    "ops": """
from lmdecode.cli import verify_texts
sample = verify_texts.top_k_top_p_sample
verify_texts.top_k_top_p_sample = lambda x, *a, **o: sample(x * (1 + 2**-20), *a, **o)
""",
    "texts": """
import torch
from lmdecode.decoder.engine.rows import DrawnRows
step = DrawnRows.step
def nudged(self, x, drafts=()):
    return step(self, torch.nextafter(x, x.new_tensor(torch.inf)) if len(x) > 8 else x, drafts)
DrawnRows.step = nudged
""",
    "lost": """
from lmdecode.decoder.engine.prompts import StoredPrompts
StoredPrompts.load = lambda self, place, prompt, longer_than: 0
""",
    "other values": """
from lmdecode.store import KVStore
load = KVStore.load
def scaled(self, hit, out=None, **options):
    found = load(self, hit, out=out, **options)
    for pair in found or ():
        pair[1].mul_(1 + 2**-12)
    return found
KVStore.load = scaled
""",
    "damaged values": """
from lmdecode.store import KVStore
checked = KVStore.load
def unchecked(self, hit, out=None, **options):
    if checked(self, hit, out=out, **options) is None:
        for pair in out:
            for tensor in pair:
                tensor.zero_()
    return out
KVStore.load = unchecked
""",
    "crash": "import os; os._exit(7)",
}


@pytest.fixture
def fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have processes of a task, perhaps at a level, begin with faults."""

    def plant(*names: str, task: str, level: str = "") -> None:
        code = "".join(FAULTS[name] for name in names)
        (tmp_path / "sitecustomize.py").write_text(
            "import os, sys\n"
            f"is_task = {task!r} in sys.orig_argv\n"
            f"is_level = os.environ.get('LMDECODE_CPU_CAPABILITY', '') == {level!r}\n"
            f"if is_task and is_level:\n    exec({code!r}, {{}})\n"
        )
        paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
        monkeypatch.delenv("LMDECODE_CPU_CAPABILITY", raising=False)

    return plant


@pytest.mark.skipif(len(LEVELS) == 1, reason="this machine has one CPU level")
@pytest.mark.slow
def test_a_level_with_other_bits(only: Any, fault: Any, capsys: pytest.CaptureFixture[str]) -> None:
    level = LEVELS[0]
    ops, texts = f"ops at {level}", f"alone = in a batch at {level}"
    fault("ops", "texts", task="level", level=level)
    only(ops, texts)
    found = verified(capsys, status=1)
    assert found[ops].endswith("  DIFFERS: top_k_top_p_sample")
    assert "  DIFFERS: greedy; sampled" in found[texts] and "beams" not in found[texts]
    assert found["end"] == "0 of 2 comparisons found the same bits"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("faults", "task", "told"),
    [
        (["other values", "damaged values"], "read",
         ["DIFFERS: sampled", "WRONG: damaged keys were loaded"]),
        (["lost"], "read", ["tokens are lost whose write was acknowledged", "not checked: "]),
        (["crash"], "read", ["FAILED: a process ended with status 7"] * 2),
        (["crash"], "write", ["FAILED: a process ended with status 7"] * 2),
    ],
)  # fmt: skip
def test_a_store_that_breaks_its_word(
    faults: list[str], task: str, told: list[str], only: Any, fault: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    pytest.importorskip("lmdecode.store")
    fault(*faults, task=task)
    only("alone", *STORE)
    found = verified(capsys, status=1)
    assert all(text in found[line] for line, text in zip(STORE, told, strict=True)), found
    missing = sum(text == "not checked: " for text in told)
    end = f"0 of {2 - missing} comparisons found the same bits"
    assert found["end"] == (f"{end}; {missing} not checked" if missing else end)
