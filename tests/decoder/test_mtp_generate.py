"""Decoding.generate(assistant_model="mtp"): the text, and the bits, of calls without it."""

from pathlib import Path
from typing import Any

import pytest
from transformers import LogitsProcessorList

import lmdecode
from tests.decoder.test_causal_assistant import Odd, inputs
from tests.engine.test_engine_drafts import MTP, MTP_CASES, SURE, loaded
from tests.support.causal_models import random_tokens
from tests.support.drafts import counted


@pytest.mark.parametrize("kind", ["greedy", "drawn", "penalties", "processor", "logits"])
@pytest.mark.parametrize("case", MTP_CASES, ids=", ".join)
def test_every_way_to_choose(
    case: tuple[str, str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, decoding = loaded(case, 0.02)
    rows = 3 if kind in ("greedy", "processor") else 1
    options: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": None, **inputs(rows)}
    if kind not in ("greedy", "logits"):
        options |= {"do_sample": True, "top_k": 9, "temperature": 0.6, "seed": 5}
    if kind == "penalties":
        options |= {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 9}
    elif kind == "processor":
        options["logits_processor"] = LogitsProcessorList([Odd()])  # type: ignore[list-item]
    elif kind == "logits":
        options |= {"return_dict_in_generate": True, "output_logits": True}
    expected = decoding.generate(**options)
    steps = counted(monkeypatch, decoding.decoder)
    got = decoding.generate(**options, **MTP, **SURE)
    if kind == "logits":
        assert all(a.equal(b) for a, b in zip(got.logits, expected.logits, strict=True))
        got, expected = got.sequences, expected.sequences
    assert got.equal(expected)
    assert max(steps[1:]) > rows and (rows > 1 or len(steps) < 40)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
def test_other_formats_and_a_saved_model(dtype: str, tmp_path: Path) -> None:
    from tests.support.mtp_models import agreeing_model, write_folder

    write_folder(agreeing_model(*MTP_CASES[0], 0.05), tmp_path / "of")
    decoding = lmdecode.Decoding.from_pretrained(
        tmp_path / "of", dtype, cache_dtype="int8", mtp=True, keep_model=False
    )
    decoding.save(tmp_path / "saved")
    options: dict[str, Any] = {
        "max_new_tokens": 40, "do_sample": True, "top_k": 5, "seed": 1, "eos_token_id": None,
    }  # fmt: skip
    expected = decoding.generate(**inputs(2), **options)
    for each in (decoding, lmdecode.Decoding.load(tmp_path / "saved")):
        assert each.generate(**inputs(2), **options, **MTP, **SURE).equal(expected)


def test_with_a_store(tmp_path: Path) -> None:
    store_of = pytest.importorskip("lmdecode.store")
    _, decoding = loaded(MTP_CASES[0], 0.05)
    ids, options = random_tokens(60)[None], {"max_new_tokens": 40, "eos_token_id": None}
    expected = decoding.generate(ids, **options)
    fingerprint = decoding.fingerprint()
    with store_of.KVStore(tmp_path, fingerprint=fingerprint, capacity_bytes=1 << 26) as store:
        for _ in range(2):
            of_session: dict[str, Any] = {"store": store, "session": "a", "rewind": True}
            assert decoding.generate(ids, **options, **of_session, **MTP, **SURE).equal(expected)
        engine = decoding.engine(max_requests=1, capacity=120, store=store, **MTP, **SURE)
        tokens = engine.submit(ids[0], max_new_tokens=40, eos_token_id=()).result().tokens
        assert tokens == expected[0, 60:].tolist()
        assert engine.stats.cached_tokens > 0 < engine.stats.accepted_tokens


def test_beams_have_no_drafts() -> None:
    _, decoding = loaded(MTP_CASES[0])
    with pytest.raises(ValueError, match=r"^assistant_model: expected None with beams"):
        decoding.generate(**inputs(), max_new_tokens=4, num_beams=2, **MTP)
