"""torch's switches for a whole process (default device and dtype, autocast ...) reach no result."""

import ast
import atexit
import contextlib
import copy
import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten

import lmdecode
from lmdecode import BeamRequest, DisjunctiveConstraint, PhrasalConstraint
from lmdecode.integrations import transformers as hf
from lmdecode.store import Fingerprint, KVStore
from tests.compat.test_faster_transformer import decoding_case, ours
from tests.decoder.decoder_models import make_inputs, make_model
from tests.decoder.random_decoder import random_decoder
from tests.decoder.whisper_models import make_whisper
from tests.speech.models import EASY, sound, tokenizer
from tests.support.cases import bits
from tests.support.causal_models import EOS, random_model, random_tokens
from tests.support.random_tensors import randn as normal

PACKAGE = Path(lmdecode.__file__).parent


X, ROWS = normal(6, 40), normal(6, seed=1)
Q, K, V = normal(2, 4, 3, 16), normal(2, 2, 9, 16, seed=1), normal(2, 2, 9, 24, seed=2)
INTS = torch.randint(3, 40, (6, 9), generator=torch.Generator().manual_seed(3))
PARENTS = torch.tensor([1, 1])
POOL, BATCHES = normal(8, 2, 4, 3), normal(2, 256)
IDS = random_tokens(9)[None]
ONES = torch.ones_like(IDS)
LOGITS = normal(8, 13, seed=5)
LAYER = random_decoder("post_norm")
MEMORY, LENGTHS, STATES = normal(2, 7, 18), torch.tensor([7, 4]), normal(4, 22, seed=4)
G_IDX = torch.arange(256).flip(0) // 64
POSITIONS = torch.zeros(4, dtype=torch.int64)
SOUND = sound(3.0)
FT = decoding_case(1, 2, 2, 8)
ALLOWED = torch.full((6, 2), -1, dtype=torch.int32)

LLAMA, WHISPER = random_model("llama", "plain"), make_whisper()
EAGER, MISTRAL = copy.deepcopy(LLAMA), copy.deepcopy(random_model("mistral", "window"))
MODELS = {kind: make_model(kind) for kind in ("marian", "t5")}
INPUTS = {kind: make_inputs(kind) for kind in MODELS}
MEMORIES = {kind: normal(7, model.config.d_model) for kind, model in MODELS.items()}


def words(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int64, generator=generator).int()


ZEROS, SCALES = words(4, 9), normal(4, 72).half()
AWQ, GPTQ = (words(256, 9), ZEROS, SCALES), (words(32, 72), ZEROS, SCALES)


@functools.cache
def llama_folder() -> Path:
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    LLAMA.save_pretrained(folder)
    return folder


CASES: dict[str, Callable[[Path], Any]] = {}
#: Names of the API that a case uses.
USED: set[str] = set()


def case(*names: str) -> Callable[[Callable[[Path], Any]], Callable[[Path], Any]]:
    def enter(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
        CASES[function.__name__] = function
        USED.update(names)
        return function

    return enter


@case("top_k_top_p_sample", "Sampler", "verify_draft", "prompt_lookup")
def sampling(folder: Path) -> Any:
    sampler = lmdecode.Sampler(
        6, 40, seed=list(range(6)), temperature=1.5, top_k=9, top_p=0.9, repetition_penalty=1.2,
        logit_bias={3: 1.0}, num_logprobs=3, return_logits=True,
    )  # fmt: skip
    for row in range(6):
        sampler.insert(row, INTS[row])
    yield lmdecode.top_k_top_p_sample(X, top_k=5, top_p=0.8, seed=3, return_logits=True)
    yield lmdecode.top_k_top_p_sample(X, top_k=[3] * 6, temperature=[0.7] * 6, seed=[1] * 6)
    yield sampler.sample(X)
    yield sampler.sample(X, bitmask=ALLOWED)
    drafts = X[:, None].expand(6, 3, 40).contiguous()
    yield lmdecode.verify_draft(drafts, INTS[:, :2], sampler)
    yield lmdecode.prompt_lookup(INTS, 3)


@case("log_softmax_top_k", "new_beam_state", "beam_parameters", "beam_step", "beam_finalize")
def beams(folder: Path) -> Any:
    state = lmdecode.new_beam_state(2, 3, 5)
    state.lengths.fill_(1)
    parameters = lmdecode.beam_parameters(2, 3, end_tokens=[7], max_lengths=5)
    best = lmdecode.log_softmax_top_k(
        X, ROWS, 6, num_beams=[3, 3], sequences=INTS, repetition_penalty=1.3, bias=X,
    )  # fmt: skip
    yield best
    yield lmdecode.beam_step(state, parameters, best.scores, best.tokens, best.beams)
    yield lmdecode.beam_finalize(state, parameters, 2, add_open=True)


@case("BeamSearch", "BeamRequest", "Trie", "format_trace")
def beam_search(folder: Path) -> Any:
    trie = lmdecode.Trie([[3, 4, 5], [3, 6], [8, 9, 10, 11]])
    yield trie.allowed([3])
    traces: list[str] = []
    engine = lmdecode.BeamSearch(on_step=lambda trace: traces.append(lmdecode.format_trace(trace)))
    engine.insert(BeamRequest([1, 2], num_beams=3, max_new_tokens=4, trie=trie))
    engine.insert(
        BeamRequest(
            [4], num_beams=2, max_new_tokens=5, repetition_penalty=1.2, no_repeat_ngram_size=2,
            logit_bias={3: 1.0},
        )
    )  # fmt: skip
    while engine.running:
        yield engine.input_ids()
        yield engine.step(LOGITS[: engine.num_rows])
    yield [(r.sequences, r.scores, r.lengths) for r in engine.pop_finished()], traces


@case("BeamSearchScorer", "BeamHypotheses")
def scorer(folder: Path) -> Any:
    search = lmdecode.BeamSearchScorer(1, 2, "cpu", max_length=8)
    tokens, indices = INTS[:1, :4], INTS[:1, :4] % 2
    yield dict(search.process(INTS[:2, :3], ROWS[None, :4], tokens, indices, 0, EOS))
    yield dict(search.finalize(INTS[:2, :4], ROWS[:2], INTS[0, :2], PARENTS, 8, 0, EOS))


@case("ConstrainedBeamSearchScorer", "PhrasalConstraint", "DisjunctiveConstraint",
      "ConstraintListState", "Constraint")  # fmt: skip
def constrained_scorer(folder: Path) -> Any:
    constraints = [PhrasalConstraint([5, 6]), DisjunctiveConstraint([[7, 8], [9]])]
    search = lmdecode.ConstrainedBeamSearchScorer(1, 2, constraints, "cpu", max_length=8)
    tokens, indices = INTS[:1, :4], INTS[:1, :4] % 2
    yield dict(search.process(INTS[:2, :3], ROWS[None, :4], tokens, indices, X[:2], 0, EOS))
    yield dict(search.finalize(INTS[:2, :4], ROWS[:2], INTS[0, :2], PARENTS, 8, 0, EOS))


@case("sliding_window_attention", "sliding_window_decode", "merge_attention_states", "swa_mask",
      "compressed_swa_mask", "expand_compressed_swa_mask", "ring_cache_append_", "RingKVCache",
      "RingSnapshot")  # fmt: skip
def attention(folder: Path) -> Any:
    first = lmdecode.sliding_window_attention(Q, K, V, window=4, return_lse=True)
    yield lmdecode.merge_attention_states(
        *first, *lmdecode.sliding_window_decode(Q, K, V, softcap=5.0, return_lse=True)
    )
    for form in ("float", "bool"):
        mask = lmdecode.compressed_swa_mask(7, 64, form=form)
        yield lmdecode.expand_compressed_swa_mask(mask, 20, 7, 64), lmdecode.swa_mask(20, 7)
    ring = lmdecode.RingKVCache(2, 2, 16, 4, value_size=24, dtype=torch.float32)
    for begin in (0, 3, 6):
        yield ring.attend(Q, K[:, :, begin : begin + 3], V[:, :, begin : begin + 3])
    snapshot = ring.snapshot()
    ring.rollback(1)
    ring.restore(snapshot)
    keys, values = K[:, :, :5].clone(), V[:, :, :5].clone()
    lmdecode.ring_cache_append_(keys, values, K, V, 3)
    yield ring.keys, ring.values, keys, values


@case("BlockTable", "BlockSlots", "OutOfBlocksError", "copy_blocks_", "BeamIndirection",
      "gather_indirect", "update_beam_indirection_", "reorder_cache_")  # fmt: skip
def caches(folder: Path) -> Any:
    table = lmdecode.BlockTable(8, 4, 3, block_size=4)
    table.insert(5, 2)
    slots = table.append(2)
    table.reorder_([1, 1])
    pools = [POOL.clone()]
    lmdecode.copy_blocks_(pools, slots.copies)
    yield slots, table.table, table.lengths, table.slots(0, 1), pools
    with pytest.raises(lmdecode.OutOfBlocksError):
        lmdecode.BlockTable(1, 1, 3, block_size=4).insert(5)
    indirection = lmdecode.BeamIndirection(2, 9)
    indirection.begin([0, 1], 0, 4)
    for _ in range(3):
        indirection.advance()
        indirection.reorder_(PARENTS)
    yield indirection.gather(K, 7), indirection.lengths
    cache = [K.clone()]
    lmdecode.reorder_cache_(cache, PARENTS)
    yield cache


@case("PackedLinear", "layer_norm", "rms_norm", "DecoderLayer", "DecoderConfig", "DecoderWeights",
      "LayerWeights", "gather_tree")  # fmt: skip
def layers(folder: Path) -> Any:
    for dtype in ("float32", "bfloat16", "int8", "int4"):
        yield lmdecode.PackedLinear(X, ROWS, dtype=dtype)(X, activation="gelu")
    yield hf.packed_from_awq(*AWQ)(BATCHES), hf.packed_from_gptq(*GPTQ, G_IDX)(BATCHES)
    yield lmdecode.layer_norm(X), lmdecode.rms_norm(X)
    layer = lmdecode.DecoderLayer(LAYER[0], LAYER[1].layers[0])
    step = layer.new_caches(MEMORY, LENGTHS, rows=4, capacity=3)
    yield layer(STATES, step, POSITIONS)
    yield ours(FT)


@case("Decoding", "CausalConfig", "CausalWeights", "CausalLayerWeights", "CausalBatch")
def causal(folder: Path) -> Any:
    for model in (LLAMA, llama_folder()):
        decoding = lmdecode.Decoding.from_pretrained(model, "int8", keep_model=False)
        for options in ({}, {"num_beams": 2}, {"do_sample": True, "seed": 3}):
            yield decoding.generate(IDS, max_new_tokens=6, **{"do_sample": False, **options})
    yield [decoding.embed(IDS.tolist(), pooling=pooling) for pooling in ("last", "mean")]
    decoding.save(folder / "saved")
    batch = lmdecode.Decoding.load(folder / "saved").batch(max_requests=2, capacity=32)
    request = batch.add(IDS[0])
    yield batch.step()
    yield batch.step({request: 5})


@case("Engine", "EngineStats", "Request", "RequestResult", "RequestStats", "TokenLogprob",
      "Grammar", "BeamResult", "KVStore", "Session")  # fmt: skip
def engine(folder: Path) -> Any:
    decoding = lmdecode.Decoding.from_pretrained(LLAMA)
    options = dict(capacity_bytes=1 << 22, chunk_tokens=4)
    with KVStore(folder / "store", fingerprint=decoding.fingerprint(), **options) as store:
        for _ in range(2):  # the second one loads what the first has stored
            running = decoding.engine(max_requests=3, capacity=64, store=store)
            requests = [
                running.submit(IDS[0].tolist(), max_new_tokens=5, **more)
                for more in ({"logprobs": 2}, {"num_beams": 2}, {"seed": 1, "temperature": 1.2})
            ]
            yield [request.result()._replace(beams=None) for request in requests]
        decoding.generate(IDS, max_new_tokens=3, do_sample=False, store=store, session="a")
        yield store.session("a").tokens


@case("KVStore")
def plain_store(folder: Path) -> Any:
    shape = Fingerprint(
        model_id="m", weights_hash="w", dtype="float32", num_layers=1, num_kv_heads=2, head_size=16
    )
    options = dict(capacity_bytes=1 << 20, chunk_tokens=4)
    with KVStore(folder / "plain", fingerprint=shape, **options) as store:
        store.put(range(8), [(K[0, :, :8], K[1, :, :8])])
        yield store.load(store.lookup(range(8)))


@case("DecodingBatch")
def encoder_decoder(folder: Path) -> Any:
    for kind, inputs in INPUTS.items():
        decoding = lmdecode.Decoding.from_pretrained(MODELS[kind])
        yield decoding.generate(**inputs, num_beams=2, max_new_tokens=6)
        yield [result.sequences for result in decoding.translate([[5, 6, 2], [9, 2]])]
        batch = decoding.batch(max_requests=2, capacity=9, num_beams=2, source=7)
        batch.add(BeamRequest([2], num_beams=2, max_new_tokens=4), MEMORIES[kind])
        yield [result.sequences for result in batch.run()]


@case("Transcriber")
def speech(folder: Path) -> Any:
    decoding = lmdecode.Decoding.from_pretrained(WHISPER)
    transcriber = lmdecode.Transcriber(decoding, tokenizer=tokenizer())
    found, _ = transcriber.transcribe(SOUND, word_timestamps=True, **EASY)
    yield [(s.start, s.end, s.text, [w.start for w in s.words]) for s in found]


@case()
def packed_models(folder: Path) -> Any:
    for dtype in ("float32", "int4"):
        model = hf.pack_linears_(copy.deepcopy(LLAMA), dtype)
        yield [m.packed for m in model.modules() if isinstance(m, hf.PackedLinearModule)]


@case("batch_invariant")
def eager_models(folder: Path) -> Any:
    with lmdecode.batch_invariant():
        yield EAGER(IDS).logits


# Models of transformers compute by torch's autocast.
WITHOUT_AUTOCAST = {"loops_of_transformers", "eager_models"}


@case()
def loops_of_transformers(folder: Path) -> Any:
    hf.register()
    for model, implementation in ((LLAMA, "sdpa"), (MISTRAL, "lmdecode")):
        model.set_attn_implementation(implementation)
        for options in (
            {"custom_generate": hf.sample, "do_sample": True, "seed": 3},
            {"custom_generate": hf.sample, "repetition_penalty": 1.2, "seed": 1},
            {"custom_generate": hf.beam_search, "num_beams": 3, "no_repeat_ngram_size": 2},
            {"custom_generate": hf.beam_search, "num_beams": 2, "force_words_ids": [[7, 8]]},
        ):
            cache = hf.DynamicRingCache(model.config)
            options = {"do_sample": False, **options, "past_key_values": cache}
            yield model.generate(IDS, attention_mask=ONES, max_new_tokens=9, **options)
    cache = hf.cache_from_kv(LLAMA.config, [(K[0, :, :5, :8], K[1, :, :5, :8])] * 2)
    yield hf.cache_to_kv(cache)


@contextlib.contextmanager
def switched(switch: Callable[[Any], None], value: Any, before: Any) -> Iterator[None]:
    switch(value)
    try:
        yield
    finally:
        switch(before)


DTYPE = torch.set_default_dtype
SWITCHES: dict[str, Callable[[], Any]] = {
    "default device": lambda: switched(torch.set_default_device, "meta", None),
    "default dtype float64": lambda: switched(DTYPE, torch.float64, torch.float32),
    "default dtype bfloat16": lambda: switched(DTYPE, torch.bfloat16, torch.float32),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference mode": torch.inference_mode,
    "deterministic algorithms": lambda: switched(torch.use_deterministic_algorithms, True, False),
}


def results(name: str, folder: Path) -> list[Any]:
    """Return the leaves of what a case yields, tensors as they are when it does."""
    leaves = []
    with torch.no_grad():
        for found in CASES[name](folder):
            for leaf in tree_flatten(found)[0]:
                leaves.append(leaf.clone() if isinstance(leaf, torch.Tensor) else leaf)
    return leaves


@functools.cache
def expected(name: str) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        return results(name, Path(folder))


@pytest.mark.parametrize(
    ("switch", "name"),
    [(s, n) for s in SWITCHES for n in CASES if s != "autocast" or n not in WITHOUT_AUTOCAST],
)
def test_a_switch_of_torch_changes_no_result(switch: str, name: str, tmp_path: Path) -> None:
    want = expected(name)
    with SWITCHES[switch]():
        got = results(name, tmp_path)
    assert len(got) == len(want) > 0
    for one, other in zip(got, want, strict=True):
        assert type(one) is type(other)
        if isinstance(one, torch.Tensor):
            assert (one.dtype, one.device) == (other.dtype, other.device)
            assert torch.equal(bits(one), bits(other))
        else:
            assert one == other


def test_every_public_name_is_in_a_case() -> None:
    others = {
        "DIALECTS", "BeamCandidates", "BeamFinal", "BeamParameters", "BeamSearchOutput",
        "BeamSequences", "BeamState", "BeamStep", "BeamTrace", "KeptSet", "SampleOutput",
        "SamplerOutput", "VerifyOutput",  # tuples that are returned
        "Error", "Fingerprint", "Hit", "SamplingParameters", "StoreError",  # without tensors
        "cpu_capabilities", "cpu_capability", "has_cuda",
    }  # fmt: skip
    assert USED <= set(lmdecode.__all__)
    assert set(lmdecode.__all__) - USED == others


# What makes tensors on the default device; plain torch, and scripts, run where their caller is.
FACTORIES = {
    "arange", "empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randint", "randn",
    "randperm", "scalar_tensor", "tensor", "zeros",
}  # fmt: skip
SCRIPTS = {"cli", "demo", "reference"}


def test_tensors_are_made_with_a_device_and_floats_with_a_dtype() -> None:
    """Of the modules that a process of somebody else's imports."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).parts[0] in SCRIPTS:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner, name = node.func.value, node.func.attr
            if isinstance(owner, ast.Name) and owner.id == "torch" and name in FACTORIES:
                keywords = {keyword.arg for keyword in node.keywords}
                of_ints = name in ("arange", "full", "randint", "randperm", "tensor")
                needed = {"device"} if of_ints else {"device", "dtype"}
                if not needed <= keywords and None not in keywords:
                    found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: torch.{name}")
    assert not found
