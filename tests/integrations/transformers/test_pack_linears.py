"""``pack_linears_``: what becomes of a model's layers, of its memory, of copies of it."""

import copy
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lmdecode import PackedLinear
from lmdecode.integrations.transformers import PackedLinearModule, pack_linears_
from lmdecode.integrations.transformers.linear import packing
from tests.support.op_contract import WrongCall, assert_refused, wrong_calls
from tests.support.tiny_models import seeded_model

IDS = torch.randint(3, 200, (2, 9), generator=torch.Generator().manual_seed(0))
SMALL: dict[str, Any] = dict(vocab_size=200, bos_token_id=1, eos_token_id=2, pad_token_id=0)


def llama(dtype: torch.dtype = torch.float32, **settings: Any) -> nn.Module:
    sizes = {
        "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_hidden_layers": 2, "attention_bias": True,
        "tie_word_embeddings": True,
    }  # fmt: skip
    model = seeded_model("LlamaForCausalLM", **{**sizes, **SMALL, **settings})
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return model.to(dtype)


def gpt2() -> nn.Module:
    return seeded_model("GPT2LMHeadModel", n_embd=64, n_layer=2, n_head=4, **SMALL)


def t5() -> nn.Module:
    return seeded_model(
        "T5ForConditionalGeneration", d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4,
        decoder_start_token_id=0, feed_forward_proj="gated-gelu", **SMALL,
    )  # fmt: skip


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    more = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    return model(input_ids=IDS, **more).logits


def packed(model: nn.Module) -> dict[str, PackedLinearModule]:
    return {n: m for n, m in model.named_modules() if isinstance(m, PackedLinearModule)}


MODELS: dict[str, Callable[[], nn.Module]] = {"llama": llama, "gpt2": gpt2, "t5": t5}


@pytest.mark.parametrize(
    ("dtype", "group", "most"),
    [("float32", None, 1e-5), ("bfloat16", None, 0.02), ("int8", None, 0.04),
     ("int4", None, 0.25), ("int4", 64, 0.25)],
)  # fmt: skip
@pytest.mark.parametrize("name", MODELS)
def test_the_model_stays_the_model(name: str, dtype: str, group: int | None, most: float) -> None:
    model = MODELS[name]()
    want, layers = logits(model), [n for n, m in model.named_modules() if packing.is_linear(m)]
    assert pack_linears_(model, dtype, group_size=group) is model
    assert list(packed(model)) == layers and len(layers) >= 8
    assert not any(packing.is_linear(module) for module in model.modules())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    got = logits(model)
    assert (got - want).norm() <= most * want.norm()
    head = model.get_output_embeddings()
    assert head.layer.dtype == ("int8" if dtype == "int4" else dtype)
    assert {m.layer.dtype for m in packed(model).values() if m is not head} == {dtype}
    if dtype == "float32":
        more = dict(max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(IDS))
        assert torch.equal(model.generate(IDS, **more), MODELS[name]().generate(IDS, **more))


def test_layers_are_rotated_unless_they_are_not() -> None:
    for rotate in (None, True, False):
        layer = packed(pack_linears_(llama(), "int8", rotate=rotate))["lm_head"].layer
        weight = llama().lm_head.weight
        want = PackedLinear(weight, dtype="int8", rotate=rotate)
        assert torch.equal(layer.packed, want.packed)
    assert not torch.equal(want.packed, PackedLinear(weight, dtype="int8").packed)
    with pytest.raises(ValueError, match=r"^pack_linears_: rotate is True; expected None with fl"):
        pack_linears_(llama(), "float32", rotate=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_keep_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    model = llama(dtype)
    want = logits(model)
    pack_linears_(model)
    assert logits(model).dtype == dtype and model.lm_head.weight.dtype == dtype
    assert (logits(model).float() - want.float()).norm() < 0.05 * want.float().norm()


def test_a_layer_computes_what_packed_linear_does() -> None:
    torch.manual_seed(0)
    linear, conv = nn.Linear(48, 33), Conv1D(33, 48)
    nn.init.normal_(conv.bias)
    model = pack_linears_(nn.Sequential(nn.Sequential(linear), nn.ReLU(), nn.Sequential(conv)))
    x = torch.randn(2, 5, 48)
    for at, weight, bias in ((0, linear.weight, linear.bias), (2, conv.weight.T, conv.bias)):
        layer = PackedLinear(weight.detach(), bias.detach(), dtype="int8")
        assert torch.equal(model[at](x), layer(x))
        assert torch.equal(model[at](x.bfloat16()), layer(x.bfloat16().float()).bfloat16())
    assert model[0][0].bias.equal(linear.bias) and model[0][0].weight.shape == (33, 48)
    assert model[0][0].weight.is_meta and (model[0][0].in_features, 33) == (48, 33)


def test_a_tied_head_is_packed_and_the_embedding_stays() -> None:
    model = llama()
    embedding = model.get_input_embeddings().weight
    assert model.lm_head.weight is embedding
    before = embedding.detach().clone()
    pack_linears_(model)
    assert isinstance(model.lm_head, PackedLinearModule)
    assert model.get_input_embeddings().weight is embedding and embedding.equal(before)
    assert model.all_tied_weights_keys == {}
    model.tie_weights(recompute_mapping=False)
    with pytest.raises(ValueError, match="its weight is packed, and cannot be replaced or tied"):
        model.tie_weights()


def test_skip() -> None:
    model = pack_linears_(llama(), skip=("lm_head", "layers.1.mlp", "q_proj"))
    left = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    assert sorted(left) == sorted([
        "lm_head", "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj",
        *(f"model.layers.1.mlp.{part}_proj" for part in ("gate", "up", "down")),
    ])  # fmt: skip
    assert "model.layers.0.mlp.down_proj" in packed(model)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert model.all_tied_weights_keys == {"lm_head.weight": "model.embed_tokens.weight"}
    pack_linears_(model)  # the rest
    assert not any(isinstance(module, nn.Linear) for module in model.modules())


def test_a_module_in_two_places_stays_one() -> None:
    shared = nn.Linear(8, 8)
    model = pack_linears_(nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)}))
    assert model["a"] is model["b"][0] and isinstance(model["a"], PackedLinearModule)


def test_subclasses_stay() -> None:
    attention = nn.MultiheadAttention(8, 2)
    model = pack_linears_(nn.Sequential(attention, nn.Linear(8, 8)))
    assert isinstance(attention.out_proj, nn.Linear)
    assert list(packed(model)) == ["1"]


def test_the_old_weights_go_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama(tie_word_embeddings=False)
    weights = [weakref.ref(m.weight) for m in model.modules() if packing.is_linear(m)]
    alive = []

    def counted(*arguments: Any, **keywords: Any) -> PackedLinear:
        alive.append(sum(weight() is not None for weight in weights))
        return PackedLinear(*arguments, **keywords)

    monkeypatch.setattr(packing, "PackedLinear", counted)
    pack_linears_(model)
    assert alive == list(range(len(weights), 0, -1))
    assert not any(weight() is not None for weight in weights)


def test_copies_and_pickles() -> None:
    model = pack_linears_(llama(torch.bfloat16), "int4")
    want, file = logits(model), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
    ):
        assert torch.equal(logits(other), want)


def test_other_dtypes_and_devices() -> None:
    model = pack_linears_(llama())
    want = logits(model)
    layer = model.model.layers[0].mlp.up_proj.layer
    half = copy.deepcopy(model).to(torch.bfloat16)
    assert logits(half).dtype == torch.bfloat16
    assert (logits(half).float() - want).norm() < 0.05 * want.norm()
    assert half.model.layers[0].mlp.up_proj.layer.packed.equal(layer.packed)
    with pytest.raises(ValueError, match="packed weights cannot be moved to meta"):
        model.lm_head.to("meta")
    assert torch.equal(logits(model.to("cpu")), want)


def is_counted(model: nn.Module) -> bool:
    """Whether the buffers of a packed model have the weights that its layers multiply by."""
    buffers = {id(buffer) for buffer in model.buffers()}
    return all(id(module.layer.packed) in buffers for module in packed(model).values())


def test_packed_weights_are_counted() -> None:
    model = gpt2()
    buffers = sum(b.nbytes for b in model.buffers())
    pack_linears_(model, "int4")
    want = sum(m.layer.packed.nbytes for m in packed(model).values())
    want += sum(p.nbytes for p in model.parameters()) + buffers
    assert model.get_memory_footprint() == want
    model.transformer.more = model.lm_head  # in two places, and counted once
    assert model.get_memory_footprint() == want
    others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(model).half()]
    assert all(is_counted(other) for other in [model, *others])
    before = model.lm_head.layer.packed.clone()
    model.lm_head.to_empty(device="cpu")
    assert is_counted(model) and model.lm_head.layer.packed.equal(before)


def test_the_buffer_stays_that_of_the_layer() -> None:
    module = PackedLinearModule(PackedLinear(torch.ones(4, 4)))
    with pytest.raises(ValueError, match="packed cannot be set"):
        module.packed = torch.zeros(3)
    assert module.packed is module.layer.packed


def test_state_dicts_are_refused() -> None:
    state = llama().state_dict()
    model = pack_linears_(llama())
    with pytest.raises(ValueError, match="a state dict cannot hold packed weights"):
        model.state_dict()
    with pytest.raises(ValueError, match="load the state dict before pack_linears_"):
        model.load_state_dict(state)


def test_gradients_are_refused() -> None:
    model = pack_linears_(llama())
    assert not model(IDS).logits.requires_grad
    x = torch.randn(1, 3, 64, requires_grad=True)
    with pytest.raises(ValueError, match="x requires a gradient"):
        model(inputs_embeds=x)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.slow
def test_compile() -> None:
    for model in (llama(), llama(torch.bfloat16)):
        pack_linears_(model)
        want = logits(model)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        with torch.no_grad():
            got = compiled(IDS, use_cache=False).logits
        assert (got.float() - want.float()).abs().max() < 0.02 * want.float().abs().max()


LINEARS = nn.Sequential(nn.Linear(4, 4))
PACKED = pack_linears_(nn.Sequential(nn.Linear(4, 4)))
WRONG = [
    ("model is of type str; expected an nn.Module", lambda: pack_linears_("llama")),
    ("model is a linear layer itself", lambda: pack_linears_(nn.Linear(3, 3))),
    ("dtype is 'int3'; expected one of float32", lambda: pack_linears_(LINEARS, "int3")),
    ("group_size is 48; expected 32, 64 or 128",
     lambda: pack_linears_(LINEARS, "int4", group_size=48)),
    ("group_size is 32; expected None with int8", lambda: pack_linears_(LINEARS, group_size=32)),
    ("skip is of type str; expected a sequence of str",
     lambda: pack_linears_(LINEARS, skip="lm_head")),
    ("skip is of type int", lambda: pack_linears_(LINEARS, skip=[1])),
    ("skip has 'lm_heed', which is in the name of no module",
     lambda: pack_linears_(LINEARS, skip=["0", "lm_heed"])),
    (
        "0.1 is on meta; expected a model on cpu",
        lambda: pack_linears_(
            nn.Sequential(nn.Sequential(LINEARS[0], nn.Linear(3, 3, device="meta")))
        ),
    ),
    ("1 has dtype float64",
     lambda: pack_linears_(nn.Sequential(LINEARS[0], nn.Linear(3, 3, dtype=torch.float64)))),
    ("model is a Sequential without a layer to pack; expected a torch.nn.Linear or Conv1D",
     lambda: pack_linears_(nn.Sequential(nn.ReLU()), "int4")),
    ("without a layer to pack", lambda: pack_linears_(LINEARS, skip=["0"])),
    ("without a layer to pack", lambda: pack_linears_(PACKED, "int4")),
]  # fmt: skip


@wrong_calls(WRONG)
def test_wrong_calls(wrong: WrongCall) -> None:
    assert_refused(wrong)
    assert type(LINEARS[0]) is nn.Linear and LINEARS[0].weight.requires_grad


@pytest.mark.parametrize("kind", [nn.Linear, lambda inputs, outputs: Conv1D(outputs, inputs)])
def test_a_later_layer_of_too_many_inputs(kind: Callable[[int, int], nn.Module]) -> None:
    """It is known before the first layer is packed."""
    model = nn.Sequential(kind(4, 4), kind((1 << 17) + 1, 1))
    message = (
        "^pack_linears_: 1: weight has 131073 input features; expected at most 131072 for int8"
    )
    with pytest.raises(ValueError, match=message):
        pack_linears_(model)
    assert not packed(model) and model[0].weight.requires_grad
    assert len(packed(pack_linears_(model, "int4"))) == 2
