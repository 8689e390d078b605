"""Folders of CTranslate2: configs, vocabularies and tokenizers; and folders that are wrong."""

import copy
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lmdecode
from lmdecode.formats.ctranslate2 import (
    is_ctranslate2,
    load_feature_extractor,
    load_tokenizer,
    load_vocabulary,
    open_folder,
)
from tests.decoder.decoder_models import make_inputs
from tests.decoder.whisper_tokenizer import whisper_tokenizer
from tests.readers.ctranslate2.converted_models import (
    CAUSAL,
    QUANTIZATIONS,
    SEQ2SEQ,
    converted,
    original,
    rewritten,
    whisper_words,
    words_of,
)
from tests.support.causal_models import random_tokens

Variables = dict[str, torch.Tensor]


def settings_changed(folder: Path, new: Path, **settings: Any) -> Path:
    shutil.copytree(folder, new)
    path = new / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return new


def test_whispers_generation_config_is_that_of_its_original(root: Path) -> None:
    got = lmdecode.Decoding.from_pretrained(converted("whisper", root)).model
    want = original("whisper")
    for name in (
        "alignment_heads", "begin_suppress_tokens", "decoder_start_token_id", "eos_token_id",
        "is_multilingual", "lang_to_id", "max_initial_timestamp_index", "max_length",
        "no_timestamps_token_id", "pad_token_id", "prev_sot_token_id", "suppress_tokens",
        "task_to_id",
    ):  # fmt: skip
        mine, theirs = (getattr(m.generation_config, name, None) for m in (got, want))
        # A model that was made here has no special tokens but in its config.
        assert mine == (theirs if theirs is not None else getattr(want.config, name)), name
    for name in (
        "d_model", "decoder_attention_heads", "decoder_ffn_dim", "decoder_layers",
        "encoder_attention_heads", "encoder_ffn_dim", "encoder_layers", "max_source_positions",
        "max_target_positions", "num_mel_bins", "vocab_size",
    ):  # fmt: skip
        assert getattr(got.config, name) == getattr(want.config, name), name


def test_a_whisper_without_settings_has_defaults(root: Path, tmp_path: Path) -> None:
    folder = settings_changed(
        converted("whisper", root), tmp_path / "new", alignment_heads=None, lang_ids=None,
        suppress_ids=[], suppress_ids_begin=None,
    )  # fmt: skip
    generation = open_folder(folder).generation
    assert generation["alignment_heads"] == [[1, 0], [1, 1]]  # of the later half of the layers
    assert generation["lang_to_id"] == original("whisper").generation_config.lang_to_id
    assert generation["suppress_tokens"] is generation["begin_suppress_tokens"] is None


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"suppress_ids": "all"}, "has all for suppress_ids; expected a list of tokens below"),
        ({"suppress_ids": [1, 51_865]}, "for suppress_ids"),
        ({"suppress_ids_begin": [True]}, "for suppress_ids_begin"),
        ({"lang_ids": [1.5]}, "for lang_ids"),
        ({"alignment_heads": [[2, 0]]}, "a layer below 2 and a head below 2"),
        ({"alignment_heads": [[0, 0, 0]]}, "for alignment_heads"),
        ({"alignment_heads": 7}, "for alignment_heads"),
        ({"layer_norm_epsilon": "small"}, "has 'small' for layer_norm_epsilon"),
        ({"quantization_type": 1}, "has weights of AWQ"),
    ],
)
def test_settings_that_are_wrong(
    settings: dict[str, Any], what: str, root: Path, tmp_path: Path
) -> None:
    folder = settings_changed(converted("whisper", root), tmp_path / "new", **settings)
    with pytest.raises(ValueError, match=what) as error:
        lmdecode.Decoding.from_pretrained(folder)
    assert str(folder) in str(error.value)


@pytest.mark.parametrize("data", [b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_config_that_is_no_json(data: bytes, root: Path, tmp_path: Path) -> None:
    folder = settings_changed(converted("marian", root), tmp_path / "new")
    (folder / "config.json").write_bytes(data)
    with pytest.raises(ValueError, match=r"config\.json (is no JSON|has a list)"):
        lmdecode.Decoding.from_pretrained(folder)


def test_special_tokens_are_those_that_the_config_names(root: Path, tmp_path: Path) -> None:
    generation = open_folder(converted("marian", root)).generation
    assert generation == {
        "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 63, "decoder_start_token_id": 63,
        "max_length": 97,
    }  # fmt: skip
    folder = settings_changed(
        converted("bart", root), tmp_path / "new", eos_token="w9", decoder_start_token="w7"
    )
    generation = open_folder(folder).generation
    assert (generation["eos_token_id"], generation["decoder_start_token_id"]) == (9, 7)
    assert open_folder(converted("mbart", root)).generation["decoder_start_token_id"] is None


def test_epsilons_of_the_config(root: Path, tmp_path: Path) -> None:
    for kind in ("pegasus", "t5", "gpt2"):
        folder = settings_changed(
            converted(kind, root), tmp_path / kind, layer_norm_epsilon=0.015625
        )
        decoding = lmdecode.Decoding.from_pretrained(folder)
        assert decoding.config.norm_epsilon == 0.015625
        if decoding.encoder is not None:
            assert decoding.encoder.parts["encoder"].config.norm_epsilon == 0.015625


def test_vocabularies(root: Path, tmp_path: Path) -> None:
    words = words_of(original("t5"))
    assert load_vocabulary(converted("t5", root)) == words
    (tmp_path / "source_vocabulary.txt").write_text("a\nb c\n", encoding="utf-8")
    (tmp_path / "target_vocabulary.json").write_text('["x", "y"]')
    assert load_vocabulary(tmp_path, "source") == ["a", "b c"]
    assert load_vocabulary(tmp_path) == ["x", "y"]
    (tmp_path / "target_vocabulary.json").write_text('["x", 1]')
    with pytest.raises(ValueError, match=r"target_vocabulary\.json is no vocabulary; expected a l"):
        load_vocabulary(tmp_path)
    with pytest.raises(ValueError, match="side is 'both'; expected one of source, target"):
        load_vocabulary(tmp_path, "both")
    with pytest.raises(FileNotFoundError, match="has no vocabulary; expected one of shared_voc"):
        load_vocabulary(root)


def test_the_tokenizer_of_a_whisper(root: Path, tmp_path: Path) -> None:
    folder = settings_changed(converted("whisper", root), tmp_path / "new")
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer\.json; expected one, or load_v"):
        load_tokenizer(folder)
    whisper_tokenizer().save_pretrained(tmp_path / "tokenizer")
    shutil.copy(tmp_path / "tokenizer" / "tokenizer.json", folder)
    tokenizer = load_tokenizer(folder)
    assert type(tokenizer) is type(whisper_tokenizer())
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 50257
    tokenizer.set_prefix_tokens(language="de", task="translate", predict_timestamps=False)
    assert tokenizer.prefix_tokens == [50258, 50261, 50358, 50363]
    ids = [50258, 50261, 50359, 50364, 200, 201, 50374, 50257]
    assert "<|0.20|>" in tokenizer.decode(ids, decode_with_timestamps=True)


def test_the_tokenizer_of_another_model(root: Path, tmp_path: Path) -> None:
    folder = settings_changed(converted("llama", root), tmp_path / "new")
    shutil.copy(root / "llama" / "tokenizer.json", folder)
    tokenizer = load_tokenizer(folder)
    assert tokenizer("w7 w9")["input_ids"] == [7, 9]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_features_have_the_models_mel_bins(root: Path, tmp_path: Path) -> None:
    folder = settings_changed(converted("whisper", root), tmp_path / "new")
    extractor = load_feature_extractor(folder)
    assert (extractor.feature_size, extractor.chunk_length) == (80, 2)
    features = extractor(torch.randn(16_000).numpy(), sampling_rate=16_000, return_tensors="pt")
    assert features.input_features.shape == (1, 80, 200)
    extractor.hop_length = 80
    extractor.save_pretrained(folder)
    assert load_feature_extractor(folder).hop_length == 80
    with pytest.raises(ValueError, match="is a 'TransformerSpec'; expected 'WhisperSpec'"):
        load_feature_extractor(converted("marian", root))


@pytest.mark.parametrize("kind", ["marian", "whisper", "llama"])
def test_a_model_is_saved_and_loaded(kind: str, root: Path, tmp_path: Path) -> None:
    decoding = lmdecode.Decoding.from_pretrained(converted(kind, root), "int8", keep_model=False)
    assert all(set(p.stride()) == {0} for p in decoding.model.parameters() if p.dim())
    inputs: dict[str, Any]
    if kind == "whisper":
        inputs = {"input_features": torch.randn(1, 80, 200), "language": "de"}
    elif kind == "marian":
        inputs = make_inputs(kind)
    else:
        inputs = {"inputs": random_tokens(5)[None]}
    options: dict[str, Any] = {"num_beams": 2, "max_new_tokens": 8}
    want = decoding.generate(**inputs, **options)
    decoding.save(tmp_path / "saved")
    loaded = lmdecode.Decoding.load(tmp_path / "saved")
    assert torch.equal(loaded.generate(**inputs, **options), want)
    name = "vocabulary.json" if kind != "marian" else "shared_vocabulary.json"
    assert (tmp_path / "saved" / name).is_file()


def test_sources_of_tokens_are_translated(root: Path) -> None:
    decoding = lmdecode.Decoding.from_pretrained(converted("marian", root))
    inputs = make_inputs("marian")
    found = decoding.translate(
        inputs["input_ids"], attention_mask=inputs["attention_mask"], num_beams=3, max_new_tokens=9
    )
    want = decoding.generate(**inputs, num_beams=3, max_new_tokens=9)
    for result, row in zip(found, want.tolist(), strict=True):
        assert result.sequences[0].tolist() == row[: result.sequences.shape[1]]


def test_a_folder_with_safetensors_is_transformers(root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "both"
    original("llama").save_pretrained(folder)
    assert not is_ctranslate2(folder)
    shutil.copy(converted("llama", root) / "model.bin", folder)
    assert not is_ctranslate2(folder)
    assert is_ctranslate2(converted("llama", root))


def test_embeddings_of_two_vocabularies(root: Path, tmp_path: Path) -> None:
    """As OpenNMT's models have them, whose norms stand first, and Marian's own."""
    for kind in ("pegasus", "marian"):

        def change(variables: Variables, aliases: dict[str, str]) -> None:
            aliases.pop("encoder/embeddings_0/weight")
            whole = variables["decoder/embeddings/weight"]
            variables["encoder/embeddings_0/weight"] = whole[:40] + 0.1

        folder = rewritten(converted(kind, root), tmp_path / kind, change)
        decoding = lmdecode.Decoding.from_pretrained(folder)
        rows = decoding.model.get_encoder().embed_tokens.weight
        more = int(kind == "marian")
        assert rows.shape[0] == 40 + more
        assert torch.equal(rows[:40], original(kind).get_input_embeddings().weight[:40] + 0.1)
        ids = torch.randint(3, 40, (1, 6), generator=torch.Generator().manual_seed(2))
        got = decoding.generate(ids, num_beams=2, max_new_tokens=8)
        want = decoding.model.generate(ids, num_beams=2, max_new_tokens=8)
        assert torch.equal(got, want)


def test_a_t5_whose_head_is_its_own(root: Path, tmp_path: Path) -> None:
    """Such a one, of version 1.1, has outputs that are not scaled."""

    def change(variables: Variables, aliases: dict[str, str]) -> None:
        variables.pop("decoder/scale_outputs")

    folder = rewritten(converted("t5_gated", root), tmp_path / "new", change)
    model, inputs = original("t5_gated"), make_inputs("t5_gated")
    assert not model.config.scale_decoder_outputs
    options: dict[str, Any] = {"num_beams": 4, "max_new_tokens": 12}
    got = lmdecode.Decoding.from_pretrained(folder).generate(**inputs, **options)
    assert got.tolist() == model.generate(**inputs, **options).tolist()


def test_phi3_is_a_llama(root: Path, tmp_path: Path) -> None:
    """CTranslate2 splits its gate; it says for how many positions it was made."""

    def change(variables: Variables, aliases: dict[str, str]) -> None:
        for i in range(2):
            scope = f"decoder/layer_{i}/self_attention"
            variables[f"{scope}/original_max_position_embeddings"] = torch.tensor(64).int()
            variables[f"{scope}/max_position_embeddings"] = torch.tensor(64).int()

    folder = rewritten(converted("llama", root), tmp_path / "new", change)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    ids = random_tokens(5)[None]
    got = lmdecode.Decoding.from_pretrained(folder).generate(ids, **options)
    assert torch.equal(got, original("llama").generate(ids, **options))


def test_llama3s_positions_need_their_factor(root: Path, tmp_path: Path) -> None:
    def scaled(has_factor: bool) -> Callable[[Variables, dict[str, str]], None]:
        def change(variables: Variables, aliases: dict[str, str]) -> None:
            for i in range(2):
                scope = f"decoder/layer_{i}/self_attention/"
                variables[f"{scope}rotary_scaling_type"] = torch.tensor(2).to(torch.int8)
                variables[f"{scope}rotary_low_freq_factor"] = torch.tensor(1.0)
                variables[f"{scope}rotary_high_freq_factor"] = torch.tensor(4.0)
                if has_factor:
                    variables[f"{scope}rotary_scaling_factor"] = torch.tensor(8.0)
                    variables[f"{scope}original_max_position_embeddings"] = torch.tensor(32).int()

        return change

    folder = rewritten(converted("llama", root), tmp_path / "without", scaled(False))
    with pytest.raises(ValueError, match="type 'llama3' without their factor and original length"):
        lmdecode.Decoding.from_pretrained(folder)
    folder = rewritten(converted("llama", root), tmp_path / "with", scaled(True))
    rope = open_folder(folder).config["rope_parameters"]
    assert rope == {
        "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    }  # fmt: skip


def put(name: str, value: torch.Tensor) -> Callable[[Variables, dict[str, str]], None]:
    def change(variables: Variables, aliases: dict[str, str]) -> None:
        aliases.pop(name, None)
        variables[name] = value

    return change


def flag(value: int) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int8)


@pytest.mark.parametrize(
    ("kind", "name", "value", "what"),
    [
        ("marian", "decoder/activation", flag(5), "has activation 5; of CTranslate2's there are"),
        ("marian", "decoder/alibi", flag(1), "has 1 for 'decoder/alibi', which is not computed"),
        ("marian", "encoder/num_heads", flag(0), "has 0 heads for rows of 32"),
        ("marian", "encoder/num_heads", flag(5), "has 5 heads for rows of 32"),
        ("marian", "encoder/pre_norm", flag(1), r"has \[0, 1\] for 'encoder/pre_norm'"),
        ("marian", "decoder/scale_embeddings", torch.tensor(3.5), "multiplies embeddings"),
        ("marian", "encoder/embeddings_1/weight", torch.ones(3, 4), "has several embeddings"),
        ("marian", "decoder/layer_7/ffn/layer_norm/beta", torch.ones(4), "has layers"),
        ("marian", "decoder/a_new_thing", torch.ones(4), "'decoder/a_new_thing', which is not r"),
        ("marian", "decoder/layer_0/ffn/linear_0_noact/weight", torch.ones(4, 4), "is not read"),
        ("marian", "decoder/layer_0/ffn/layer_norm/beta", torch.ones(31), r"has shape \[31\] for"),
        (
            "marian", "decoder/layer_0/self_attention/linear_0/weight", torch.ones(95, 32),
            r"of 95 rows, not \[32, 32, 32\] together",
        ),
        ("t5", "decoder/scale_outputs", torch.tensor(0.5), "multiplies the outputs of a t5 by 0.5"),
        ("t5", "encoder/num_heads", flag(5), "for 'encoder/num_heads' and its like"),
        ("whisper", "decoder/scale_embeddings", flag(1), "multiplies its embedding"),
        ("whisper", "encoder/conv1/weight", torch.ones(32, 80), "with other than 3 axes"),
        ("llama", "decoder/num_heads", flag(3), "has 3 heads of 10"),
        ("llama", "decoder/layer_0/self_attention/rotary_interleave", flag(1), r"has \[0, 1\] for"),
        ("llama", "decoder/layer_0/self_attention/rotary_base", torch.tensor(torch.nan), "has nan"),
        ("llama", "decoder/final_logit_softcapping", torch.tensor(3.0), "which is not computed"),
        ("gpt2", "decoder/pre_norm", flag(0), "has norms behind its layers"),
        ("gpt2", "decoder/project_in/weight", torch.ones(3, 3), "which is not read"),
    ],
)  # fmt: skip
def test_what_a_model_may_not_have(
    kind: str, name: str, value: torch.Tensor, what: str, root: Path, tmp_path: Path
) -> None:
    folder = rewritten(converted(kind, root), tmp_path / "new", put(name, value))
    with pytest.raises(ValueError, match=what) as error:
        lmdecode.Decoding.from_pretrained(folder)
    assert str(folder / "model.bin") in str(error.value)


def test_a_model_of_another_kind(root: Path, tmp_path: Path) -> None:
    from tests.readers.ctranslate2.model_files import model_file

    (tmp_path / "model.bin").write_bytes(model_file({"a": torch.ones(1)}, spec="Wav2Vec2Spec"))
    with pytest.raises(ValueError, match=r"is a 'Wav2Vec2Spec'; expected one of WhisperSpec, Tr"):
        lmdecode.Decoding.from_pretrained(tmp_path)


def test_a_vocabulary_that_is_too_large(root: Path, tmp_path: Path) -> None:
    folder = settings_changed(converted("whisper", root), tmp_path / "new")
    path = folder / "vocabulary.json"
    path.write_text(json.dumps([*whisper_words(), "more"]))
    with pytest.raises(ValueError, match="a vocabulary of 51866 tokens for 51865 rows"):
        lmdecode.Decoding.from_pretrained(folder)
    path.write_text(json.dumps(whisper_words()[:50258]))
    with pytest.raises(ValueError, match=r"a vocabulary without '<\|startoftranscript\|>'"):
        lmdecode.Decoding.from_pretrained(folder)


@pytest.mark.parametrize("kind", ["marian", "t5", "umt5", "llama", "gemma3", "gpt2"])
def test_variables_that_are_missing_or_otherwise(kind: str, root: Path, tmp_path: Path) -> None:
    """Every model that is not refused by name is one that computes."""
    randomness, folder, refused = random.Random(3), converted(kind, root), 0
    names = [*open_folder(folder).file.variables]
    for i in range(60):
        name = randomness.choice(names)
        change = randomness.choice(("drop", "add a row", "cut a column", "other", "alias"))

        def changed(
            variables: Variables, aliases: dict[str, str], name: str = name, how: str = change
        ) -> None:
            value = variables.pop(name)
            for alias in [alias for alias, of in aliases.items() if of == name]:
                aliases.pop(alias) if how == "drop" else None
            if how == "add a row" and value.dim():
                variables[name] = torch.cat([value, value[:1]])
            elif how == "cut a column" and value.dim():
                variables[name] = value[..., 1:].contiguous()
            elif how == "other":
                number = randomness.choice((-1, 0, 1, 2, 3, 77))
                variables[name] = torch.full_like(value, number)
            elif how == "alias" or not value.dim():
                variables[name] = randomness.choice([*variables.values()])

        new = rewritten(folder, tmp_path / str(i), changed)
        try:
            decoding = lmdecode.Decoding.from_pretrained(new)
        except ValueError:
            refused += 1
        else:
            decoding.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False)
        shutil.rmtree(new)
    assert refused > 15


@pytest.mark.parametrize("kind", ["marian", "m2m_100", "t5"])
def test_the_tokens_around_sources_are_put_there(kind: str, root: Path, tmp_path: Path) -> None:
    """CTranslate2 4.8.5 has ``add_source_bos`` and ``add_source_eos``; of each row of a batch."""
    names = {"add_source_bos": True, "add_source_eos": True}
    with_both = settings_changed(converted(kind, root), tmp_path / "new", **names)
    decoding = lmdecode.Decoding.from_pretrained(with_both)
    plain = lmdecode.Decoding.from_pretrained(converted(kind, root))
    sources = [[9, 8, 7], [12, 13, 14, 15, 16]]
    begin, end = (
        open_folder(with_both).config[f"{name}_token_id"] for name in ("bos", "eos")
    )  # fmt: skip
    whole = [[begin, *source, end] for source in sources]
    assert decoding.model.config.ctranslate2["before"] == [begin]

    def padded(rows: list[list[int]], on_left: bool = False) -> dict[str, torch.Tensor]:
        ids, mask = torch.full((2, 7), 11), torch.zeros(2, 7).long()
        for i, row in enumerate(rows):
            where = slice(7 - len(row), 7) if on_left else slice(len(row))
            ids[i, where], mask[i, where] = torch.tensor(row), 1
        return {"input_ids": ids, "attention_mask": mask}

    want = plain.generate(**padded(whole), max_new_tokens=9)
    for on_left in (False, True):
        assert torch.equal(decoding.generate(**padded(sources, on_left), max_new_tokens=9), want)
    one = torch.tensor([sources[1]])
    assert decoding.generate(one, max_new_tokens=9)[0].tolist() == want[1].tolist()
    found = decoding.translate(sources, max_new_tokens=9)
    assert [result.sequences[0].tolist() for result in found] == [
        row[: result.sequences.shape[1]] for result, row in zip(found, want.tolist(), strict=True)
    ]
    engine = decoding.engine(max_requests=1, capacity=16, source=16, num_beams=1)
    request = engine.submit(input_ids=sources[0], max_new_tokens=9)
    while engine.step():
        pass
    one = torch.tensor(whole[:1])  # its first token may be that of padding, too
    greedy = plain.generate(one, attention_mask=torch.ones_like(one), max_new_tokens=9, num_beams=1)
    assert [*request.result().tokens] == greedy[0, 1:].tolist()[: len(request.result().tokens)]
    saved = tmp_path / "saved"
    decoding.save(saved)
    assert torch.equal(
        lmdecode.Decoding.load(saved).generate(**padded(sources), max_new_tokens=9), want
    )


def test_settings_of_sources_that_are_wrong(root: Path, tmp_path: Path) -> None:
    for i, (settings, what) in enumerate((
        ({"add_source_eos": "yes"}, "has 'yes' for add_source_eos; expected true or false"),
        ({"add_source_bos": True, "bos_token": "<b>"}, "and '<b>' in the source vocabulary"),
        ({"a_new_thing": [1]}, r"has '\[1\]' for a_new_thing; expected entries among add_source_b"),
    )):  # fmt: skip
        folder = settings_changed(converted("marian", root), tmp_path / str(i), **settings)
        with pytest.raises(ValueError, match=what) as error:
            lmdecode.Decoding.from_pretrained(folder)
        assert str(folder / "config.json") in str(error.value)


def test_translate_has_the_tokens_of_generate_and_refuses_other_rules(root: Path) -> None:
    decoding = lmdecode.Decoding.from_pretrained(converted("bart", root))
    inputs = make_inputs("bart", batch=6)
    found = decoding.translate(inputs["input_ids"], attention_mask=inputs["attention_mask"])
    for result, row in zip(found, decoding.generate(**inputs).tolist(), strict=True):
        assert result.sequences[0].tolist() == row[: result.sequences.shape[1]]
    # Where a first token that is probable is an end, which no text may begin with.
    ends = {int(result.sequences[0, result.prompt_length]) for result in found}
    for result in decoding.translate(inputs["input_ids"], eos_token_id=sorted(ends)):
        assert int(result.sequences[0, result.prompt_length]) not in ends
        means = result.log_probs.sum(dim=1) / (result.lengths - result.prompt_length)
        assert torch.allclose(means.double(), result.scores, atol=1e-5)
    for options in ({"repetition_penalty": 1.2}, {"suppress_tokens": [5]}, {"min_new_tokens": 3}):
        with pytest.raises(ValueError, match="a penalty, n-grams, or bans behind the first to"):
            decoding.translate([[5, 6]], **options)
        decoding.translate([[5, 6]], **options, renormalize_logits=False)


def test_a_t5_with_a_head_of_its_own_is_not_scaled(root: Path, tmp_path: Path) -> None:
    """The converter of CTranslate2 4.8.5 scales all T5 that transformers 5 loads."""

    def change(variables: Variables, aliases: dict[str, str]) -> None:
        aliases.pop("decoder/projection/weight")
        variables["decoder/projection/weight"] = variables["decoder/embeddings/weight"] + 0.01

    folder = rewritten(converted("t5_gated", root), tmp_path / "new", change)
    with pytest.warns(UserWarning, match=r"model\.bin divides its logits by the root of 24, which"):
        source = open_folder(folder)
    assert source.config["tie_word_embeddings"] is False


# The rows before the first position, which transformers has for no token.
UNUSED_ROWS = {"bart": 2, "m2m_100": 2, "mbart": 2}


def quantized(value: torch.Tensor, kind: str) -> torch.Tensor:
    """Return weights [rows, ...] through CTranslate2's int8 or int16, by numpy alone."""
    weights = value.numpy().astype(np.float32)
    rows = weights.reshape(len(weights), -1)
    if kind == "int16":
        scale = np.float32(2**10 / np.abs(rows).max())
        return torch.from_numpy(np.rint(weights * scale) * (np.float32(1) / scale))
    most = np.abs(rows).max(axis=1)
    most[most == 0] = 127
    scale = (np.float32(127) / most)[:, None]
    return torch.from_numpy((np.rint(rows * scale) * (np.float32(1) / scale)).reshape(value.shape))


def expected(name: str, value: torch.Tensor, kind: str, is_quantized: bool) -> torch.Tensor:
    if is_quantized and kind.startswith("int"):
        return quantized(value, kind)
    floats = {"float16": torch.float16, "bfloat16": torch.bfloat16}
    return value.to(floats.get(kind.removeprefix("int8_"), torch.float32))


def named(model: Any) -> dict[str, torch.Tensor]:
    found = dict(model.named_parameters(remove_duplicate=False))
    return found | {n: b for n, b in model.named_buffers() if n.endswith("embed_positions.weights")}


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("kind", [*SEQ2SEQ, "whisper", *CAUSAL])
def test_weights(kind: str, quantization: str, root: Path) -> None:
    """Matrices of integers are those of linear layers, embeddings and convolutions."""
    source = open_folder(converted(kind, root, quantization))
    names = named(original(kind))
    assert names.keys() == source.parts.keys() - {"final_logits_bias"}
    fused = ("q_proj", "k_proj", "v_proj", ".q.", ".k.", ".v.", "c_attn", "qkv")
    for name, value in names.items():
        got, value = source.read(name), value.detach()
        is_matrix = value.dim() > 1 and "positions" not in name and "wpe" not in name
        is_matrix = is_matrix and "relative_attention_bias" not in name
        begin = UNUSED_ROWS.get(kind, 0) if "positions" in name else 0
        if quantization == "int16" and any(part in name for part in fused):
            continue  # the largest of all three makes the scale
        is_conv1d = kind == "gpt2" and is_matrix and ".h." in name
        value = value.T if is_conv1d else value
        want = expected(name, value, quantization, is_matrix)
        want = want.T if is_conv1d else want
        if kind == "gemma" and "norm" in name:
            want = want.float() + 1  # it is read as a Granite
        assert got.dtype == want.dtype, name
        assert torch.equal(got[begin:], want[begin:]), name


@pytest.mark.parametrize("kind", [*SEQ2SEQ, "whisper"])
def test_a_model_has_the_weights_of_its_file(kind: str, root: Path) -> None:
    """In float32, tied as the file has them."""
    folder = converted(kind, root, "int8_float16")
    source, model = open_folder(folder), lmdecode.Decoding.from_pretrained(folder).model
    for name, value in named(model).items():
        assert value.dtype == torch.float32
        assert torch.equal(value, source.read(name).float()), name
    tied = model.get_output_embeddings().weight is model.get_decoder().embed_tokens.weight
    before = original(kind)
    was = before.get_output_embeddings().weight is before.get_decoder().embed_tokens.weight
    assert tied == was


@pytest.mark.parametrize("quantization", ["int8", "bfloat16"])
@pytest.mark.parametrize("kind", ["marian", "t5", "llama", "gemma3", "gpt2"])
def test_a_quantized_folder_is_the_model_of_its_values(
    kind: str, quantization: str, root: Path
) -> None:
    """Packed in int8 or float32 they give the tokens that transformers' model of them gives."""
    folder = converted(kind, root, quantization)
    ids = torch.randint(4, 60, (1, 7), generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"max_new_tokens": 8, "num_beams": 2, "do_sample": False}
    decoding = lmdecode.Decoding.from_pretrained(folder)
    model = type(decoding.model)(decoding.model.config).eval()
    model.generation_config = decoding.model.generation_config
    source = open_folder(folder)
    state = {name: source.read(name).float() for name in source.parts}
    if "final_logits_bias" in state:
        state["final_logits_bias"] = state["final_logits_bias"][None]
    model.load_state_dict(state, strict=False)
    assert decoding.generate(ids, **options).tolist() == model.generate(ids, **options).tolist()
    other = lmdecode.Decoding.from_pretrained(folder, "int8").generate(ids, **options)
    want = lmdecode.Decoding.from_pretrained(model, "int8").generate(ids, **options)
    assert other.tolist() == want.tolist()


ctranslate2 = pytest.importorskip("ctranslate2")

STEPS = 12
# CTranslate2 takes tokens out before it makes log-probabilities of logits, and ends sooner.
AS_TRANSFORMERS = {"renormalize_logits": False, "early_stopping": False}
START = 10  # of mBART, whose folders name none


def translations(kind: str, folder: Path, inputs: dict[str, Any], **options: Any) -> list[Any]:
    """Return what CTranslate2 finds, as tokens of ours."""
    words = words_of(original(kind))
    runner = ctranslate2.Translator(str(folder), compute_type="float32", intra_threads=1)
    sources = [
        [words[token] for token, seen in zip(row, mask, strict=True) if seen]
        for row, mask in zip(
            inputs["input_ids"].tolist(), inputs["attention_mask"].tolist(), strict=True
        )
    ]
    if kind == "mbart":
        options["target_prefix"] = [[words[START]]] * len(sources)
    numbers = {word: number for number, word in enumerate(words)}
    found = runner.translate_batch(sources, **options)
    return [[numbers[word] for word in each.hypotheses[0]] for each in found]


def as_converted(kind: str) -> Any:
    """Return a model as the converter takes it: transformers ties T5, so outputs are scaled."""
    model = original(kind)
    if kind in ("mt5", "t5_gated"):
        model = copy.deepcopy(model)
        with torch.no_grad():
            model.get_decoder().final_layer_norm.weight *= model.config.d_model**-0.5
    return model


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("kind", SEQ2SEQ)
def test_translations(kind: str, num_beams: int, root: Path) -> None:
    folder, inputs = converted(kind, root), make_inputs(kind)
    decoding = lmdecode.Decoding.from_pretrained(folder)
    options: dict[str, Any] = {"num_beams": num_beams, "min_new_tokens": STEPS}
    options |= {"max_new_tokens": STEPS}
    if kind == "mbart":
        options["decoder_start_token_id"] = START
    got = decoding.generate(**inputs, **options)
    theirs = translations(
        kind, folder, inputs, beam_size=num_beams, min_decoding_length=STEPS,
        max_decoding_length=STEPS,
    )  # fmt: skip
    assert got[:, -STEPS:].tolist() == [row[-STEPS:] for row in theirs]
    options["decoder_start_token_id"] = got[0, 0].item()
    want = as_converted(kind).generate(**inputs, **options, forced_eos_token_id=None)
    options |= AS_TRANSFORMERS
    assert decoding.generate(**inputs, **options).tolist() == want.tolist()


@pytest.mark.parametrize("kind", SEQ2SEQ)
def test_translations_that_end(kind: str, root: Path) -> None:
    folder, inputs = converted(kind, root), make_inputs(kind, batch=6)
    decoding = lmdecode.Decoding.from_pretrained(folder)
    end = decoding.model.config.eos_token_id
    start = {"decoder_start_token_id": START} if kind == "mbart" else {}
    got = decoding.generate(**inputs, min_new_tokens=1, max_new_tokens=30, num_beams=1, **start)
    theirs = translations(kind, folder, inputs, beam_size=1, max_decoding_length=30)
    rows = [row[1:] for row in got.tolist()]
    rows = [row[: row.index(end)] if end in row else row for row in rows]
    assert rows == [row[1:] if kind == "mbart" and row[:1] == [START] else row for row in theirs]


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("kind", [*CAUSAL, "opt"])
def test_continuations(kind: str, num_beams: int, root: Path) -> None:
    folder, model = converted(kind, root), original(kind)
    words, ids = words_of(model), random_tokens(6)
    options: dict[str, Any] = {"min_new_tokens": STEPS, "max_new_tokens": STEPS}
    options |= {"num_beams": num_beams, "do_sample": False}
    decoding = lmdecode.Decoding.from_pretrained(folder)
    want = model.generate(ids[None], **options).tolist()
    assert decoding.generate(ids[None], **options, **AS_TRANSFORMERS).tolist() == want
    got = decoding.generate(ids[None], **options)
    runner = ctranslate2.Generator(str(folder), compute_type="float32", intra_threads=1)
    found = runner.generate_batch(
        [[words[token] for token in ids.tolist()]], beam_size=num_beams, min_length=STEPS,
        max_length=STEPS, include_prompt_in_result=False,
    )  # fmt: skip
    assert got[0, 6:].tolist() == found[0].sequences_ids[0]


@pytest.mark.parametrize("num_beams", [1, 5])
def test_whisper(num_beams: int, root: Path) -> None:
    folder, model = converted("whisper", root), original("whisper")
    decoding = lmdecode.Decoding.from_pretrained(folder)
    features = torch.randn(2, 80, 200, generator=torch.Generator().manual_seed(4))
    options: dict[str, Any] = {"language": "de", "task": "translate", "num_beams": num_beams}
    options |= {"max_new_tokens": 20}
    want = model.generate(features, **options).tolist()
    assert decoding.generate(features, **options).tolist() == want
    # A Whisper has the rules of transformers, if not asked for others.
    got = decoding.generate(features, **options, renormalize_logits=True)
    runner = ctranslate2.models.Whisper(str(folder), compute_type="float32", intra_threads=1)
    words = whisper_words()
    prompt = ["<|startoftranscript|>", "<|de|>", "<|translate|>", "<|notimestamps|>"]
    found = runner.generate(
        ctranslate2.StorageView.from_array(features.numpy()),
        [[words.index(word) for word in prompt]] * 2,
        beam_size=num_beams,
        max_length=2 * 20,  # of prompt and text; it takes half of it for the text
    )
    rows = [[token for token in row if token != 50257] for row in got.tolist()]
    assert rows == [result.sequences_ids[0] for result in found]


def test_whisper_with_timestamps_and_a_language_that_is_found(root: Path) -> None:
    decoding = lmdecode.Decoding.from_pretrained(converted("whisper", root))
    model = original("whisper")
    features = torch.randn(1, 80, 200, generator=torch.Generator().manual_seed(5))
    for options in ({"return_timestamps": True, "language": "en"}, {}):
        want = model.generate(features, num_beams=2, max_new_tokens=30, **options)
        got = decoding.generate(features, num_beams=2, max_new_tokens=30, **options)
        assert got.tolist() == want.tolist()
