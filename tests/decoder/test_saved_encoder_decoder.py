"""``Decoding.save`` and ``load`` of encoder-decoder models; test_saved_model.py has the rest."""

import copy
import json
import multiprocessing
import pickle
import shutil
import sys
import zlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, MarianConfig, MarianMTModel

import lmdecode
from lmdecode.decoder.device_loop import DeviceDecoder
from lmdecode.integrations.transformers import pack_linears_
from lmdecode.linear.formats import FORMATS
from lmdecode.readers.transformers import stand_in
from lmdecode.readers.transformers.encoder_decoder import decoder_of
from tests.decoder.decoder_models import (
    MODELS,
    PAD,
    make_inputs,
    make_model,
    make_whisper_with_timestamps,
)
from tests.decoder.test_saved_model import check_damaged_weights
from tests.support.anonymous_memory import peak_without_files
from tests.support.causal_models import random_model
from tests.support.other_capability import call_elsewhere
from tests.support.records import with_entries

ROOT = Path(__file__).parents[2]
NEW = 7


def _saved(folder: Path, kind: str = "marian", dtype: str = "float32") -> lmdecode.Decoding:
    decoding = lmdecode.Decoding.from_pretrained(make_model(kind), dtype)
    decoding.save(folder)
    return decoding


def _sources(kind: str) -> list[list[int]]:
    ids = make_inputs(kind)["input_ids"].tolist()
    return [[token for token in row if token != PAD] for row in ids]


def _tensors(decoding: lmdecode.Decoding) -> list[torch.Tensor]:
    """All that is packed."""
    parts = list(decoding.encoder.parts.values())
    found = [*decoding.decoder.of_model, *parts[0].of_model]
    return found + [linear.packed for linear in parts[1:]]


def _bits(decoding: lmdecode.Decoding, kind: str) -> list[torch.Tensor]:
    """What every way to run a model gives."""
    inputs, found = make_inputs(kind), []
    for num_beams in (1, 3):
        options: dict[str, Any] = {"num_beams": num_beams, "max_new_tokens": NEW}
        outputs = decoding.generate(
            **inputs, **options, return_dict_in_generate=True, output_scores=True
        )
        found += [outputs.sequences, *outputs.scores]
        if num_beams > 1:
            found.append(outputs.sequences_scores)
    memory = decoding.encoder(**inputs).last_hidden_state
    batch = decoding.batch(max_requests=2, num_beams=2, capacity=NEW + 1, source=memory.shape[1])
    config = GenerationConfig(num_beams=2, max_new_tokens=NEW, suppress_tokens=[])
    if kind == "whisper":
        decoding.model.generation_config.begin_suppress_tokens = None  # no batch has it
        decoding.model.generation_config.suppress_tokens = None
    for row in memory[:2]:
        batch.add([1], row, generation_config=config)
    found += [tensor for result in batch.run() for tensor in (result.sequences, result.scores)]
    if kind != "whisper":
        for result in decoding.translate(_sources(kind), num_beams=2, max_new_tokens=NEW):
            found += [result.sequences, result.scores]
    return [memory, *found]


@pytest.mark.parametrize("dtype", sorted(FORMATS))
@pytest.mark.parametrize("kind", sorted(MODELS))
def test_a_loaded_model_is_the_saved_one(kind: str, dtype: str, tmp_path: Path) -> None:
    decoding = _saved(tmp_path, kind, dtype)
    (file,) = tmp_path.glob("weights-*.bin")
    loaded = lmdecode.Decoding.load(tmp_path, verify=True)
    assert loaded.config == decoding.config and type(loaded.model) is type(decoding.model)
    mapped = [tensor for tensor in _tensors(loaded) if tensor.numel()]
    assert len({tensor.untyped_storage().data_ptr() for tensor in mapped}) == 1
    assert mapped[0].untyped_storage().nbytes() == file.stat().st_size
    assert all(set(p.stride()) <= {0} for p in loaded.model.parameters())  # one value each
    assert all(map(torch.equal, _bits(loaded, kind), _bits(decoding, kind)))


def test_it_is_saved_again(tmp_path: Path) -> None:
    """Its file is mapped while it is written once more, with the same bytes."""
    _saved(tmp_path, "bart", "int8")
    loaded = lmdecode.Decoding.load(tmp_path)
    expected, names = _bits(loaded, "bart"), sorted(path.name for path in tmp_path.iterdir())
    loaded.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    again = lmdecode.Decoding.load(tmp_path, verify=True)
    for decoding in (loaded, again, copy.deepcopy(again), pickle.loads(pickle.dumps(again))):
        assert all(map(torch.equal, _bits(decoding, "bart"), expected))


def test_models_of_the_two_kinds_replace_each_other(tmp_path: Path) -> None:
    causal = lmdecode.Decoding.from_pretrained(random_model("llama", "plain"))
    for decoding in (causal, lmdecode.Decoding.from_pretrained(make_model("t5")), causal):
        decoding.save(tmp_path)
        assert len(list(tmp_path.glob("weights-*.bin"))) == 1
        assert lmdecode.Decoding.load(tmp_path, verify=True).config == decoding.config


@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16])
def test_what_encoder_and_decoder_share_stands_once(own: torch.dtype, tmp_path: Path) -> None:
    """In the file, and before: of a model in bfloat16 there is one float32 embedding."""
    decoding = lmdecode.Decoding.from_pretrained(make_model("marian").to(own))
    decoding.save(tmp_path)
    embedding = decoding.decoder.of_model[0]
    (file,) = tmp_path.glob("weights-*.bin")
    taken = sum(-(-tensor.nbytes // 64) * 64 for tensor in _tensors(decoding))
    assert file.stat().st_size == taken - embedding.nbytes
    loaded = lmdecode.Decoding.load(tmp_path)
    of_encoder = loaded.encoder.parts["encoder"].of_model[0]
    assert loaded.decoder.of_model[0].data_ptr() == of_encoder.data_ptr()


def test_vocabularies_of_their_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = copy.deepcopy(make_model("marian").config)
    config.update({"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 48})
    config.update({"decoder_start_token_id": 2, "tie_word_embeddings": False, "pad_token_id": 1})
    model = MarianMTModel(MarianConfig.from_dict(config.to_dict())).eval()
    decoding = lmdecode.Decoding.from_pretrained(model)
    decoding.save(tmp_path)
    loaded = lmdecode.Decoding.load(tmp_path)
    options: dict[str, Any] = {**make_inputs("marian"), "num_beams": 2, "max_new_tokens": NEW}
    assert loaded.generate(**options).equal(decoding.generate(**options))


def test_a_decoder_alone(tmp_path: Path) -> None:
    """Of weights of one's own: there is no encoder, and no model."""
    decoding = lmdecode.Decoding(*decoder_of(make_model("mbart")))
    decoding.save(tmp_path)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".bin", ".json"]
    loaded = lmdecode.Decoding.load(tmp_path)
    assert loaded.model is None and loaded.encoder is None
    memory, found = torch.randn(5, 32), []
    for of in (decoding, loaded):
        batch = of.batch(max_requests=1, num_beams=2, capacity=9, source=5)
        batch.add(lmdecode.BeamRequest([2], num_beams=2, max_new_tokens=NEW), memory)
        found += [result.scores for result in batch.run()]
    assert found[0].equal(found[1])


def test_whisper_finds_the_language_without_its_own_weights(tmp_path: Path) -> None:
    """And everything else that its ``generation_config`` has beside what all have."""
    model = make_whisper_with_timestamps()
    decoding, inputs = lmdecode.Decoding.from_pretrained(model), make_inputs("whisper")
    options: dict[str, Any] = {**inputs, "task": "transcribe", "max_new_tokens": NEW}
    with torch.no_grad():
        expected = model.generate(**options)
        languages = model.detect_language(**inputs)
    decoding.save(tmp_path)
    loaded = lmdecode.Decoding.load(tmp_path)
    assert loaded.generate(**options).equal(expected)
    assert loaded.model.generation_config.lang_to_id == model.generation_config.lang_to_id
    for language, token in model.generation_config.lang_to_id.items():
        given = loaded.generate(**options, language=language)
        assert given.equal(expected) == bool((languages == token).all())


def test_files_of_tokenizers_and_processors(tmp_path: Path) -> None:
    names = ("preprocessor_config.json", "normalizer.json", "source.spm", "target.spm",
             "vocab.json", "sentencepiece.bpe.model")  # fmt: skip
    source = tmp_path / "source"
    make_model("marian").save_pretrained(source)
    for name in names:
        (source / name).write_text(f"of {name}")
    (source / "notes.txt").write_text("of no tokenizer")
    lmdecode.Decoding.from_pretrained(source, "int8").save(tmp_path / "model")
    for name in names:
        assert (tmp_path / "model" / name).read_text() == f"of {name}"
    assert not (tmp_path / "model" / "notes.txt").exists()


NEEDS = r"^Decoding\.generate: .*; expected .*, as decoding\.model has no weights for its own enc"


@pytest.mark.parametrize("is_kept", [False, None])
def test_what_the_models_own_encoder_does(is_kept: bool | None, tmp_path: Path) -> None:
    """It is an error where there are no weights of it: loaded, or not kept."""
    decoding = _saved(tmp_path)
    if is_kept is None:
        decoding = lmdecode.Decoding.load(tmp_path)
    else:
        decoding = lmdecode.Decoding.from_pretrained(make_model("marian"), keep_model=is_kept)
    inputs = make_inputs("marian")
    holes = inputs["attention_mask"].clone()
    holes[0, 1] = 0
    for what, arguments in (
        ("inputs_embeds is given", {"inputs_embeds": torch.zeros(1, 3, 32)}),
        ("output_hidden_states is True", {**inputs, "output_hidden_states": True}),
        (r"attention_mask of shape \[3, 12\] is not one run", {**inputs, "attention_mask": holes}),
    ):
        with pytest.raises(ValueError, match=NEEDS) as error:
            decoding.generate(**arguments, max_new_tokens=NEW, return_dict_in_generate=True)
        error.match(what)
    model, ids = decoding.model, inputs["input_ids"]
    for run in (
        lambda: model(ids),
        lambda: model.generate(ids, max_new_tokens=2),
        lambda: model.get_encoder()(ids),
        lambda: model.get_decoder()(ids),
    ):
        with pytest.raises(RuntimeError, match=r"^Marian\w+: .* has no weights; expected"):
            run()
    for take in (lmdecode.Decoding.from_pretrained, pack_linears_):
        with pytest.raises(ValueError, match=r"model stands in .* no weights; expected a model"):
            take(model)
    memory = make_model("marian").get_encoder()(**inputs)  # which it needs no encoder for
    given = {"encoder_outputs": memory, "attention_mask": inputs["attention_mask"]}
    assert len(decoding.generate(**given, max_new_tokens=NEW)) == 3
    model.generate = decoding.generate  # as pipelines call it
    assert model.generate(**inputs, max_new_tokens=NEW).shape[0] == 3


def test_features_of_another_length(tmp_path: Path) -> None:
    _saved(tmp_path, "whisper")
    features = make_inputs("whisper")["input_features"][..., :38]
    with pytest.raises(ValueError, match=NEEDS) as error:
        lmdecode.Decoding.load(tmp_path).encoder(input_features=features)
    error.match(r"has shape \[3, 8, 38\] on cpu; expected \[batch, 8, 40\] on cpu")


@pytest.mark.parametrize("is_loaded_here", [False, True])
@pytest.mark.parametrize("kind", ["m2m_100", "umt5", "whisper"])
def test_a_model_that_is_not_kept(kind: str, is_loaded_here: bool, tmp_path: Path) -> None:
    model = make_model(kind)
    expected = _bits(lmdecode.Decoding.from_pretrained(copy.deepcopy(model)), kind)
    weights = [parameter.clone() for parameter in model.parameters()]
    if is_loaded_here:
        model.save_pretrained(tmp_path)
    given = tmp_path if is_loaded_here else model
    decoding = lmdecode.Decoding.from_pretrained(given, keep_model=False)
    assert decoding.model is not model and type(decoding.model) is type(model)
    assert all(set(p.stride()) <= {0} for p in decoding.model.parameters())  # one value each
    assert all(map(torch.equal, model.parameters(), weights))  # the caller's own
    assert all(map(torch.equal, _bits(decoding, kind), expected))


def test_on_a_device_and_with_caches_of_their_own(tmp_path: Path) -> None:
    decoding = _saved(tmp_path / "model")
    with pytest.raises(ValueError, match="cache_dtype is 'int8'; expected None for the decoder"):
        lmdecode.Decoding.load(tmp_path / "model", cache_dtype="int8")
    decoding.decoder = DeviceDecoder(*decoder_of(make_model("marian")), device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"^Decoding\.save: the decoder is on .*; expected"):
        decoding.save(tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("dtype", sorted(FORMATS))
@pytest.mark.slow
def test_a_model_of_another_processor_is_packed_again(dtype: str, tmp_path: Path) -> None:
    """Bit for bit what is packed here from the start: encoder, decoder and convolutions."""
    call_elsewhere("tests.decoder.test_saved_encoder_decoder:_saved", tmp_path, "whisper", dtype)
    here = lmdecode.Decoding.from_pretrained(make_model("whisper"), dtype)
    with pytest.warns(UserWarning, match="was packed for another kind of processor"):
        loaded = lmdecode.Decoding.load(tmp_path)
    assert all(map(torch.equal, _tensors(loaded), _tensors(here)))
    assert all(map(torch.equal, _bits(loaded, "whisper"), _bits(here, "whisper")))


def _of_decoder(manifest: dict[str, Any]) -> list[Any]:
    """Return dtype, shape and offset of the decoder's embedding."""
    return manifest["facts"]["places"]["decoder"][0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop("kind"), r"damaged lmdecode\.json \('kind'\)"),
        (lambda m: m.update(kind="causal"), "other weights"),
        (lambda m: m.update(version=4), "is of version 4, this is version 5"),
        (lambda m: m["facts"].update(places=3), "other weights"),
        (lambda m: m["weights"].update(bytes=float("inf")), r"damaged lmdecode\.json"),
        (lambda m: m["facts"].pop("places"), "other weights .*'places'"),
        (lambda m: m["facts"]["places"].pop("decoder"), "parts are encoder; expected a decoder"),
        (lambda m: m["facts"]["places"].update(more=[]), "other weights"),
        (lambda m: m["facts"]["sizes"].pop("conv1"), "other weights .*'conv1'"),
        (lambda m: m["facts"]["sizes"]["conv1"].update(in_features=23), "other weights .*packed"),
        (lambda m: m["facts"]["places"]["conv2"].pop(), "other weights"),
        (lambda m: _of_decoder(m).__setitem__(2, 60), "other weights .* at 60; ex"),
        (lambda m: _of_decoder(m).__setitem__(2, -64), "other weights .* at -64; e"),
        (lambda m: _of_decoder(m).__setitem__(2, 1 << 40), "other weights"),
        (lambda m: _of_decoder(m).__setitem__(0, "int8"), "other weights .* int8 "),
        (lambda m: _of_decoder(m).__setitem__(1, [64, 31]), "other .*embedd"),
    ],
)
def test_manifests_of_other_models(
    change: Callable[[Any], Any], message: str, tmp_path: Path
) -> None:
    """Whole ones, but not as ``save`` writes them; known at once, not at the first step."""
    _saved(tmp_path, "whisper")
    manifest = json.loads((tmp_path / "lmdecode.json").read_text())
    change(manifest)
    manifest.pop("crc32")
    manifest["crc32"] = zlib.crc32(json.dumps(manifest, sort_keys=True).encode())
    (tmp_path / "lmdecode.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"^Decoding\.load: .*" + message):
        lmdecode.Decoding.load(tmp_path)


@pytest.mark.parametrize(
    ("part", "name", "value", "message"),
    [
        ("encoder", "config.num_heads", 0, "num_heads is 0"),
        ("decoder", "config.num_layers", 3, r"layers\.2\.qkv is absent"),
        ("encoder", "config.ffn_size", 47, "ffn_up"),
        ("decoder", "kind", "encoder", 'of kind "encoder"; expected "decoder"'),
        ("decoder", "weights.layers.0.qkv", [1 << 40, 64], "qkv is at byte"),
        ("decoder", "weight_format", "file", "dtype is 'file'"),
    ],
)
def test_records_of_other_models(
    part: str, name: str, value: Any, message: str, tmp_path: Path
) -> None:
    _saved(tmp_path, "whisper")
    places = json.loads((tmp_path / "lmdecode.json").read_text())["facts"]["places"]
    (path,) = tmp_path.glob("weights-*.bin")
    memory = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    _, (size,), at = places[part][1]
    memory[at : at + size] = with_entries(memory[at : at + size], {name: value})
    path.write_bytes(bytes(memory.tolist()))
    with pytest.raises(ValueError, match=r"^Decoding\.load: .* has other weights .*" + message):
        lmdecode.Decoding.load(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_damaged_configs(name: str, tmp_path: Path) -> None:
    _saved(tmp_path)
    text = (tmp_path / name).read_text()
    for damaged in ("", text[:-9]):
        (tmp_path / name).write_text(damaged)
        with pytest.raises(ValueError, match=rf"^Decoding\.load: .* has a damaged .*{name}"):
            lmdecode.Decoding.load(tmp_path)


def test_the_config_of_another_model(tmp_path: Path) -> None:
    _saved(tmp_path, "whisper")
    make_model("umt5").config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^Decoding\.load: .* config\.json .*another model's"):
        lmdecode.Decoding.load(tmp_path)


def test_a_model_that_is_written_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of one and configs of the other would be a model that nobody saved."""
    _saved(tmp_path)
    other = make_model("marian")
    other.generation_config.decoder_start_token_id = 7
    writer = lmdecode.Decoding.from_pretrained(other, "int8")
    read = stand_in.skeleton_of

    def read_late(folder: Path) -> Any:
        writer.save(folder)
        return read(folder)

    monkeypatch.setattr(stand_in, "skeleton_of", read_late)
    with pytest.raises(ValueError, match=r"^Decoding\.load: .* was written again while it was"):
        lmdecode.Decoding.load(tmp_path)


def test_damaged_weights(tmp_path: Path) -> None:
    _saved(tmp_path, "whisper", "int8")
    check_damaged_weights(tmp_path)


# Memory


def _folder_of_a_large_model(folder: Path) -> int:
    """Write one in bfloat16, which is float32 once it is loaded: return the bytes of that."""
    torch.manual_seed(0)
    config = MarianConfig(
        vocab_size=4000, d_model=512, encoder_layers=3, decoder_layers=2, encoder_ffn_dim=2048,
        decoder_ffn_dim=2048, encoder_attention_heads=8, decoder_attention_heads=8,
        max_position_embeddings=64, pad_token_id=3999, decoder_start_token_id=3999,
    )  # fmt: skip
    model = MarianMTModel(config)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    model.to(torch.bfloat16).save_pretrained(folder / "model")
    return whole


def _held(folder: str, keep_model: bool) -> int:
    """Return what a Decoding holds in memory that is no file, in bytes."""
    lmdecode.Decoding.from_pretrained("examples/g2p/model", "int8")  # what is loaded late

    def taken() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) << 10

    before = taken()
    decoding = lmdecode.Decoding.from_pretrained(folder, "int8", keep_model=keep_model)
    after = taken()
    del decoding
    return after - before


def loading(folder: str) -> Callable[[], object]:
    lmdecode.Decoding.from_pretrained("examples/g2p/model", "int8").save(Path(folder) / "warm")
    lmdecode.Decoding.load(Path(folder) / "warm")
    return lambda: lmdecode.Decoding.load(Path(folder) / "packed", verify=True)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc as on Linux")
def test_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are let go of are not held; those that are mapped are no process's own."""
    # What is freed goes back to the system, as it does where weights are larger than 32 MB.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(1 << 16))
    whole = _folder_of_a_large_model(tmp_path)
    lmdecode.Decoding.from_pretrained(tmp_path / "model", "int8").save(tmp_path / "packed")
    (file,) = (tmp_path / "packed").glob("weights-*.bin")
    packed = file.stat().st_size
    assert packed < whole / 2
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as process:
        held = process.submit(_held, str(tmp_path / "model"), False).result()
    assert 0.9 * packed <= held <= 1.2 * packed + (4 << 20)
    with ProcessPoolExecutor(1, mp_context=context) as process:
        held = process.submit(_held, str(tmp_path / "model"), True).result()
    assert held > 0.9 * whole  # so that the bound above is one on the model's own
    taken = peak_without_files(loading, str(tmp_path))
    assert taken < packed / 4
    shutil.rmtree(tmp_path / "packed")
