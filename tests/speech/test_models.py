"""What a ``Transcriber`` is made of: saved models without transformers, tokenizers, refusals."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lmdecode
from lmdecode.speech.languages import LANGUAGES, code_of_language
from lmdecode.speech.tokenizer import load_tokenizer
from tests.decoder.decoder_models import make_model
from tests.decoder.whisper_models import SECONDS, whisper_pair
from tests.speech.models import EASY, sound, tokenizer, transcriber

WITHOUT_TRANSFORMERS = """
import json, sys
sys.modules["transformers"] = None
sys.modules["numpy"] = None
import torch, lmdecode
samples = torch.load(sys.argv[2])
ours = lmdecode.Transcriber(sys.argv[1])
segments, info = ours.transcribe(samples, word_timestamps=True, **json.loads(sys.argv[3]))
print(json.dumps([[s.tokens, s.text, [w.start for w in s.words]] for s in segments]))
assert info.all_language_probs
"""


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.slow
def test_a_saved_model_needs_no_transformers(dtype: str, tmp_path: Path) -> None:
    import torch

    model, _ = whisper_pair(1)
    decoding = lmdecode.Decoding.from_pretrained(model, dtype)
    decoding.save(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"saved has no tokenizer\.json; expected one beside"):
        lmdecode.Transcriber(tmp_path / "saved")
    tokenizer().save(str(tmp_path / "saved" / "tokenizer.json"))
    torch.save(sound(5.2), tmp_path / "sound.pt")
    command = [sys.executable, "-c", WITHOUT_TRANSFORMERS, str(tmp_path / "saved")]
    done = subprocess.run(
        [*command, str(tmp_path / "sound.pt"), json.dumps(EASY)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ours = lmdecode.Transcriber(decoding, tokenizer=tokenizer())
    segments, _ = ours.transcribe(sound(5.2), word_timestamps=True, **EASY)
    expected = [[s.tokens, s.text, [w.start for w in s.words or ()]] for s in segments]
    assert expected and json.loads(done.stdout) == expected


def test_a_folder_of_transformers(tmp_path: Path) -> None:
    model, decoding = whisper_pair(1)
    model.save_pretrained(tmp_path)
    generation = copy.deepcopy(model.generation_config)
    generation._from_model_config = False  # or transformers leaves out what is Whisper's
    generation.save_pretrained(tmp_path)
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    same = lmdecode.Transcriber(decoding, tokenizer=tmp_path)
    expected = list(same.transcribe(sound(SECONDS), **EASY)[0])
    ours = lmdecode.Transcriber(tmp_path, "float32")
    assert list(ours.transcribe(sound(SECONDS), **EASY)[0]) == expected
    assert sorted(ours.supported_languages) == ["de", "en", "fr"] and ours.is_multilingual


def test_a_vocabulary_of_two_files(tmp_path: Path) -> None:
    letters = {"a": 0, "b": 1, "\u0120": 2, "ab": 3, "\u0120ab": 4, "<|endoftext|>": 5}
    (tmp_path / "vocab.json").write_text(json.dumps(letters))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n\u0120 ab\n")
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|de|>": 7, "<|en|>": 6}))
    found = load_tokenizer(tmp_path)
    assert found.encode(" abb").ids == [4, 1] and found.decode([4, 1]) == " abb"
    assert found.token_to_id("<|en|>") == 6 and found.token_to_id("<|de|>") == 7
    assert load_tokenizer(tmp_path / "nothing") is None
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        load_tokenizer(tmp_path)


def test_models_of_other_kinds(tmp_path: Path) -> None:
    other = lmdecode.Decoding.from_pretrained(make_model("marian"))
    with pytest.raises(ValueError, match="model is of type 'marian'; expected a Whisper model"):
        lmdecode.Transcriber(other)
    other.save(tmp_path)
    with pytest.raises(ValueError, match="has no Whisper model"):
        lmdecode.Transcriber(tmp_path)
    with pytest.raises(TypeError, match="tokenizer is of type int"):
        lmdecode.Transcriber(whisper_pair(0)[1], tokenizer=3)
    with pytest.raises(ValueError, match=r"the model has no tokenizer\.json"):
        lmdecode.Transcriber(whisper_pair(0)[1])


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    import tokenizers

    other: Any = tokenizers.Tokenizer(tokenizers.models.BPE())
    model, decoding = whisper_pair(0)
    generation = model.generation_config
    kept, generation.no_timestamps_token_id = generation.no_timestamps_token_id, None
    try:
        with pytest.raises(ValueError, match=r"has no <\|notimestamps\|>"):
            lmdecode.Transcriber(decoding, tokenizer=other)
    finally:
        generation.no_timestamps_token_id = kept


def test_languages() -> None:
    from transformers.models.whisper import tokenization_whisper

    assert list(LANGUAGES.items()) == list(tokenization_whisper.LANGUAGES.items())
    for name, code in tokenization_whisper.TO_LANGUAGE_CODE.items():
        assert code_of_language(f" {name.title()} ") == code
    assert code_of_language("EN") == "en"
    assert transcriber().supported_languages == ["en", "de", "fr"]
