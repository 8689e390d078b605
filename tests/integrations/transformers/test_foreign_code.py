"""Models whose modules compute more than their configs and weights say: refused by name."""

import copy
import functools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_pack_linears import llama, t5
from torch import nn
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2

import lmdecode
from lmdecode.integrations.transformers import PackedLinearModule, pack_linears_
from tests.support.tiny_models import change_config

IDS = torch.tensor([[3, 4, 5, 6]])
OPTIONS: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}


class OtherMLP(modeling_llama.LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class OtherLlama(transformers.LlamaForCausalLM):
    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        found = super().forward(*arguments, **keywords)
        found.logits = found.logits.flip(-1)
        return found


class OtherInputs(transformers.LlamaForCausalLM):
    def prepare_inputs_for_generation(self, *arguments: Any, **keywords: Any) -> Any:
        return super().prepare_inputs_for_generation(*arguments, **keywords)


class OtherBias(transformers.models.t5.modeling_t5.T5Attention):
    def compute_bias(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        return super().compute_bias(*arguments, **keywords) * 2


class SameLlama(transformers.LlamaForCausalLM):
    """It changes nothing that is computed."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.name = "mine"

    def shout(self) -> str:
        return self.name.upper()


def steer(module: nn.Module, arguments: Any, output: Any) -> None:
    """A hook."""


def of_class(kind: type) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        model.__class__ = kind

    return change


def other_forward(model: nn.Module) -> None:
    layer = model.model.layers[1]
    forward = layer.forward

    @functools.wraps(forward)  # its names are those of transformers
    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        return forward(*arguments, **keywords) * 2

    layer.forward = wrapped


def forward_of_another_class(model: nn.Module) -> None:
    mlp = model.model.layers[0].mlp
    mlp.forward = types.MethodType(modeling_qwen2.Qwen2MLP.forward, mlp)


def compiled_forward(model: nn.Module) -> None:
    def forward(*arguments: Any, **keywords: Any) -> Any:
        return type(model).forward(model, *arguments, **keywords)

    model.forward = torch.compile(forward)


def other_accelerate_hook(model: nn.Module) -> None:
    model.model.norm._hf_hook = types.SimpleNamespace()


LLAMAS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "the model": (of_class(OtherLlama), "model is a OtherLlama whose forward is not that of"),
    "its inputs": (of_class(OtherInputs), "OtherInputs whose prepare_inputs_for_generation is"),
    "a layer": (lambda model: of_class(OtherMLP)(model.model.layers[0].mlp),
                r"model\.layers\.0\.mlp is a OtherMLP whose forward is not that of transf"),
    "an instance": (other_forward, r"model\.layers\.1 is a LlamaDecoderLayer whose forward"),
    "another class": (forward_of_another_class, r"layers\.0\.mlp is a LlamaMLP whose forward"),
    "compiled": (compiled_forward, "model is a LlamaForCausalLM whose forward"),
    "a hook": (
        lambda model: model.model.layers[1].register_forward_hook(steer),
        r"model\.layers\.1 is a LlamaDecoderLayer with the forward hook .*foreign_code\.steer",
    ),
    "a hook before": (lambda model: model.lm_head.register_forward_pre_hook(lambda *_: None),
                      "lm_head is a Linear with the forward hook .*<lambda>"),
    "weights of a hook": (
        lambda model: nn.utils.weight_norm(model.model.layers[0].mlp.up_proj),
        "mlp.up_proj is a Linear with the forward hook torch.nn.utils.weight_norm",
    ),
    "accelerate": (other_accelerate_hook, r"model\.norm is a .* with the forward hook types\."),
}  # fmt: skip


@pytest.mark.parametrize("name", LLAMAS)
def test_code_of_others_is_refused(name: str) -> None:
    change, message = LLAMAS[name]
    model = llama()
    change(model)
    with pytest.raises(ValueError, match=rf"^Decoding\.from_pretrained: .*{message}") as error:
        lmdecode.Decoding.from_pretrained(model)
    assert "expected transformers' own code alone" in str(error.value)


def test_code_of_others_in_an_encoder_decoder_model_is_refused() -> None:
    model = t5()
    model.encoder.block[0].layer[0].SelfAttention.__class__ = OtherBias
    with pytest.raises(ValueError, match=r"SelfAttention is a OtherBias whose compute_bias is not"):
        lmdecode.Decoding.from_pretrained(model)


@pytest.mark.parametrize(
    "decorated", [lambda method: method, torch.no_grad(), torch.autocast("cpu")]
)
def test_a_class_that_was_changed_is_refused(
    monkeypatch: pytest.MonkeyPatch, decorated: Callable[[Any], Any]
) -> None:
    """As packages do that exchange the methods of transformers."""
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", decorated(OtherMLP.forward))
    with pytest.raises(ValueError, match="mlp is a LlamaMLP whose forward is not that of transf"):
        lmdecode.Decoding.from_pretrained(llama())


def test_hooks_of_all_modules_are_refused() -> None:
    handle = nn.modules.module.register_module_forward_hook(steer)
    try:
        with pytest.raises(ValueError, match=r"all modules have the forward hook .*steer"):
            lmdecode.Decoding.from_pretrained(llama())
    finally:
        handle.remove()


def decorated_by_torch(model: nn.Module) -> None:
    mlp = model.model.layers[0].mlp
    mlp.forward = torch.no_grad()(mlp.forward)


class Kernel(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def with_kernels(model: nn.Module) -> None:
    """What from_pretrained(use_kernels=True) leaves."""
    model._use_kernels = True
    for layer in model.model.layers:
        layer.mlp.__class__ = type("LlamaMLP", (modeling_llama.LlamaMLP,), {
            "kernel_layer_name": "MLP", "__module__": "transformers.models.llama.modeling_llama",
        })  # fmt: skip
        layer.mlp.forward = types.MethodType(Kernel.forward, layer.mlp)


def with_accelerate(model: nn.Module) -> None:
    """What accelerate.hooks.add_hook_to_module leaves."""
    source = "def new_forward(module, *args, **kwargs):\n    return module._old_forward(*args)"
    hooks = types.ModuleType("accelerate.hooks")
    exec(source, hooks.__dict__)
    kind = type("AlignDevicesHook", (), {"__module__": "accelerate.hooks"})
    for module in model.modules():
        module._hf_hook, module._old_forward = kind(), module.forward
        wrapped = functools.partial(hooks.new_forward, module)
        module.forward = functools.update_wrapper(wrapped, module._old_forward)


def compiled(model: nn.Module) -> None:
    model.forward = torch.compile(model.forward)
    model.compile()


def with_recorded_outputs(model: nn.Module) -> None:
    capturing = pytest.importorskip("transformers.utils.output_capturing")
    capturing.install_all_output_capturing_hooks(model)


TAKEN: dict[str, Callable[[nn.Module], Any]] = {
    "hooks that record outputs": with_recorded_outputs,
    "gradients of embeddings": lambda model: model.enable_input_require_grads(),
    "a class with more methods": of_class(SameLlama),
    "compiled": compiled,
    "decorated by torch": decorated_by_torch,
    "kernels": with_kernels,
    "accelerate": with_accelerate,
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_leaves_the_values_is_taken(name: str) -> None:
    model = llama()
    want = lmdecode.Decoding.from_pretrained(model).generate(IDS, **OPTIONS)
    TAKEN[name](model)
    assert torch.equal(lmdecode.Decoding.from_pretrained(model).generate(IDS, **OPTIONS), want)


def test_a_compiled_encoder_decoder_model_is_taken() -> None:
    model = t5()
    want = lmdecode.Decoding.from_pretrained(model).generate(IDS, **OPTIONS)
    decoding = lmdecode.Decoding.from_pretrained(torch.compile(model))
    assert torch.equal(decoding.generate(IDS, **OPTIONS), want)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "mine.OtherLlama"}}, "the class mine.OtherLlama"),
        ({"auto_map": {"AutoModel": "a/b--mine.OtherLlama"}}, "the class a/b--mine.OtherLlama"),
        ({"architectures": ["OtherLlama"]}, "the class OtherLlama; expected LlamaForCausalLM"),
    ],
)
@pytest.mark.parametrize("format_", ["safetensors", "bin"])
def test_folders_with_code_of_their_own_are_refused(
    changes: dict[str, Any], message: str, format_: str, tmp_path: Path
) -> None:
    model = llama()
    model.save_pretrained(tmp_path)
    if format_ == "bin":
        (tmp_path / "model.safetensors").unlink()
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    change_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=rf"from_pretrained: .* has a model of {message}"):
        lmdecode.Decoding.from_pretrained(tmp_path)


def test_a_folder_that_save_pretrained_wrote_of_a_class_with_code(tmp_path: Path) -> None:
    OtherLlama.register_for_auto_class("AutoModelForCausalLM")
    try:
        OtherLlama(llama().config).save_pretrained(tmp_path)
    finally:
        OtherLlama._auto_class = None
    with pytest.raises(ValueError, match=r"has a model of the class .*OtherLlama; expected Llama"):
        lmdecode.Decoding.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (llama, {"auto_map": {"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"}}),
        (llama, {"architectures": ["LLaMAForCausalLM"]}),  # as converters of 2023 wrote it
        (llama, {"architectures": None}),
        (t5, {"architectures": ["T5WithLMHeadModel"]}),
    ],
)
def test_folders_of_classes_of_transformers_are_taken(
    make: Callable[[], nn.Module], changes: dict[str, Any], tmp_path: Path
) -> None:
    """Some carry the code of a class that transformers did not have then, or a former name."""
    model = make()
    model.save_pretrained(tmp_path)
    change_config(tmp_path, **changes)
    want = lmdecode.Decoding.from_pretrained(model).generate(IDS, **OPTIONS)
    assert torch.equal(lmdecode.Decoding.from_pretrained(tmp_path).generate(IDS, **OPTIONS), want)


def test_a_method_that_is_set_after_a_first_look(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    of_class(SameLlama)(model)
    lmdecode.Decoding.from_pretrained(model)
    monkeypatch.setattr(SameLlama, "forward", OtherLlama.forward, raising=False)
    with pytest.raises(ValueError, match="model is a SameLlama whose forward is not that of"):
        lmdecode.Decoding.from_pretrained(model)


def test_layers_with_code_of_others_are_not_packed() -> None:
    for name, change in {
        "hook": lambda linear: linear.register_forward_hook(steer),
        "forward": lambda linear: setattr(linear, "forward", lambda x: x),
    }.items():
        model = llama()
        before = copy.deepcopy(model.state_dict())
        change(model.model.layers[1].mlp.up_proj)
        with pytest.raises(
            ValueError, match=rf"^pack_linears_: model\.layers\.1\.mlp\.up_proj is a Linear.*{name}"
        ):
            pack_linears_(model)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        pack_linears_(model, skip=["layers.1.mlp.up_proj"])
        assert isinstance(model.model.layers[0].mlp.up_proj, PackedLinearModule)


def test_hooks_of_transformers_stay_where_a_layer_is_packed() -> None:
    seen: list[Any] = []
    recorder = types.ModuleType("transformers.recorder")
    recorder.seen = seen
    exec("def record(module, arguments, output):\n    seen.append(output)", recorder.__dict__)
    model = llama()
    handle = model.lm_head.register_forward_hook(recorder.record)
    pack_linears_(model)
    out = model(IDS).logits
    assert len(seen) == 1 and torch.equal(seen[0], out)
    handle.remove()
    model(IDS)
    assert len(seen) == 1
