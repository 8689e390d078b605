"""A whole model in C++: equal tokens, and the tokens a second of each format of weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lmdecode
from lmdecode.cli.terminal import busy
from lmdecode.demo import harness
from lmdecode.demo.harness import STOCK, Look, quote, say
from lmdecode.serving.tokenizer import Tokenizer, read_json

PROMPTS = ("Psalms 23\nThe LORD is my", "And Jesus said unto them,", "In those days there was")
FORMATS = ("float32", "bfloat16", "int8")
_SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "4 beams": {"do_sample": False, "num_beams": 4},
    "sampled": {"do_sample": True, "top_k": 50, "top_p": 0.95},
}
_QUICK_TOKENS = 40
_FIRST_CALLS = 8


def pack_shipped_model(folder: Path) -> lmdecode.Decoding:
    """Pack the weights of the folder in float32. Of Mistral's switches, it uses the plain ones."""
    config = read_json(folder / "config.json")
    file = harness.require("safetensors").safe_open(folder / "model.safetensors", framework="pt")

    def weight(name: str) -> Tensor:
        return file.get_tensor(f"model.{name}.weight").float()

    def layer(number: int) -> lmdecode.CausalLayerWeights:
        attention, ffn = f"layers.{number}.self_attn", f"layers.{number}.mlp"
        weights = dict.fromkeys(lmdecode.CausalLayerWeights._fields)
        weights |= {
            "attention_norm_gamma": weight(f"layers.{number}.input_layernorm"),
            "qkv": torch.cat([weight(f"{attention}.{name}_proj") for name in "qkv"]),
            "attention_out": weight(f"{attention}.o_proj"),
            "ffn_norm_gamma": weight(f"layers.{number}.post_attention_layernorm"),
            **{f"ffn_{name}": weight(f"{ffn}.{name}_proj") for name in ("gate", "up", "down")},
        }
        return lmdecode.CausalLayerWeights(**weights)  # type: ignore[arg-type]

    layers, head_size = config["num_hidden_layers"], config["head_dim"]
    turns = torch.arange(0, head_size, 2, dtype=torch.float32, device="cpu") / head_size
    sizes = lmdecode.CausalConfig(
        num_layers=layers, model_size=config["hidden_size"], head_size=head_size,
        num_heads=config["num_attention_heads"], num_kv_heads=config["num_key_value_heads"],
        ffn_size=config["intermediate_size"], vocab_size=config["vocab_size"],
        windows=(config["sliding_window"],) * layers, rotary=(0,) * layers, rotary_scales=(1.0,),
        norm_epsilon=config["rms_norm_eps"],
    )  # fmt: skip
    weights = lmdecode.CausalWeights(
        embedding=weight("embed_tokens"), positions=None, final_norm_gamma=weight("norm"),
        rotary=(1.0 / config["rope_parameters"]["rope_theta"] ** turns,), final_norm_beta=None,
        logits=None, logits_bias=None, layers=[layer(number) for number in range(layers)],
    )  # fmt: skip
    return lmdecode.Decoding(sizes, weights)


def _first_text(folder: Path, tokens: int) -> list[int]:
    """Go on with the first prompt by lmdecode alone, print it, and return all of its tokens."""
    say(f"{harness.readable_path(folder)}, by lmdecode alone; transformers is not imported yet:\n")
    decoding, tokenizer = pack_shipped_model(folder), Tokenizer.load(folder)
    prompt = tokenizer.encode(PROMPTS[0])
    with decoding.engine(max_requests=1, capacity=len(prompt) + tokens) as engine:
        seconds = []
        for _ in range(_FIRST_CALLS):
            request = engine.submit(prompt, max_new_tokens=tokens, do_sample=False)
            new = request.result().tokens
            seconds.append(request.stats.total or 0.0)
    quote(tokenizer.decode(prompt + new))
    say(
        f"\n{len(new)} tokens in {min(seconds) * 1e3:.0f} ms, in float32, on one thread: "
        f"{len(new) / min(seconds):,.0f} tokens a second.\n"
    )
    return prompt + new


def run(look: Look) -> None:
    """Run the demo; DemoError where ids differ from those of transformers."""
    folder, tokens = harness.model_folder(look.model), look.up_to(_QUICK_TOKENS)
    first = _first_text(folder, tokens) if look.model is None else None
    with busy("Loading transformers"):
        harness.require("transformers")
        engines = {name: lmdecode.Decoding.from_pretrained(folder, name) for name in FORMATS}
        model, tokenizer = harness.load_model(folder, torch.float32)
    harness.print_model(folder, model)
    all_inputs = [harness.batch_of(tokenizer, [text]) for text in PROMPTS]
    texts = 0
    for inputs, prompt in zip(all_inputs, PROMPTS, strict=True):
        for name in ("greedy", "4 beams"):
            options = {"max_new_tokens": tokens, **_SEARCHES[name]}
            theirs = model.generate(**inputs, **options)
            ours = [engines["float32"].generate(**inputs, **options)]
            if (prompt, name) == (PROMPTS[1], "4 beams"):
                print("4 beams, float32, the whole model in C++:\n")
                quote(tokenizer.decode(ours[0][0], skip_special_tokens=True))
            if first is not None and (prompt, name) == (PROMPTS[0], "greedy"):
                ours.append(torch.tensor([first]))
            for ids in ours:
                harness.check_equal(ids, theirs, f"{name}, prompt {prompt!r}")
            texts += len(ours)
    say(f"\nIn float32, {texts} of {texts} texts have the ids of transformers.")

    length: Any = {**all_inputs[1], "max_new_tokens": tokens, "min_new_tokens": tokens}
    contestants = {STOCK: model, **engines}
    timings = harness.timed(
        {search: {name: partial(of.generate, **length, **options)
                  for name, of in contestants.items()}
         for search, options in _SEARCHES.items()},
        look.quick,
    )  # fmt: skip
    say(
        f"\ngenerate() of {tokens} tokens; tokens a second on one thread, fastest call, and how "
        "many times those of transformers:\n"
    )
    rows = []
    for search, timing in timings.items():
        stock = timing[STOCK]
        cells = [f"{tokens / timing[n]:,.0f} {stock / timing[n]:5.1f}x" for n in FORMATS]
        rows.append([search, f"{tokens / stock:,.0f}", *cells])
    harness.print_table(["search", STOCK, *FORMATS], *rows)
