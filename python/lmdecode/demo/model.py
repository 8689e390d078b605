"""A whole model in C++: equal tokens, and the tokens a second of each format of weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lmdecode
from lmdecode._tables import aligned_table
from lmdecode.cli.errors import one_line
from lmdecode.cli.terminal import busy
from lmdecode.demo._common import (
    DemoError,
    bar_chart,
    fastest,
    load_model,
    model_folder,
    print_model,
    quoted,
    readable_path,
    require,
    say,
)
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
    file = require("safetensors").safe_open(folder / "model.safetensors", framework="pt")

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
    say(f"{readable_path(folder)}, by lmdecode alone; transformers is not imported yet:\n")
    decoding, tokenizer = pack_shipped_model(folder), Tokenizer.load(folder)
    prompt = tokenizer.encode(PROMPTS[0])
    with decoding.engine(max_requests=1, capacity=len(prompt) + tokens) as engine:
        seconds = []
        for _ in range(_FIRST_CALLS):
            request = engine.submit(prompt, max_new_tokens=tokens, do_sample=False)
            new = request.result().tokens
            seconds.append(request.stats.total or 0.0)
    print(quoted(tokenizer.decode(prompt + new)))
    say(
        f"\n{len(new)} tokens in {min(seconds) * 1e3:.0f} ms, in float32, on one thread: "
        f"{len(new) / min(seconds):,.0f} tokens a second.\n"
    )
    return prompt + new


def _check(
    model: Any, decoding: lmdecode.Decoding, tokenizer: Any, tokens: int, first: list[int] | None
) -> int:
    """Generate with both, and compare ids; return how many texts there were."""
    texts = 0
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        for name in ("greedy", "4 beams"):
            options = {"max_new_tokens": tokens, **_SEARCHES[name]}
            theirs = model.generate(**inputs, **options)
            ours = [decoding.generate(**inputs, **options)]
            if first is not None and (prompt, name) == (PROMPTS[0], "greedy"):
                ours.append(torch.tensor([first]))
            for ids in ours:
                if not torch.equal(theirs, ids):
                    raise DemoError(
                        f"ids differ from those of transformers: {name}, prompt {prompt!r}"
                    )
                texts += 1
    return texts


def run(model_path: Path | None, plot: Path | None, tokens: int, quick: bool) -> None:
    """Run the demo; DemoError where ids differ from those of transformers."""
    folder = model_folder(model_path)
    tokens = min(tokens, _QUICK_TOKENS) if quick else tokens
    first = _first_text(folder, tokens) if model_path is None else None
    with busy("Loading transformers"):
        require("transformers")
        try:  # before the tokenizer is asked for, which a model that is not supported may lack
            engines = {name: lmdecode.Decoding.from_pretrained(folder, name) for name in FORMATS}
        except (OSError, ValueError) as error:
            raise DemoError(one_line(error)) from error
        model, tokenizer = load_model(folder, torch.float32)
    print_model(folder, model)
    inputs = tokenizer(PROMPTS[1], return_tensors="pt", return_token_type_ids=False)
    ids = engines["float32"].generate(**inputs, max_new_tokens=tokens, **_SEARCHES["4 beams"])
    print("4 beams, float32, the whole model in C++:\n")
    print(quoted(tokenizer.decode(ids[0], skip_special_tokens=True)), flush=True)
    texts = _check(model, engines["float32"], tokenizer, tokens, first)
    say(f"\nIn float32, {texts} of {texts} texts have the ids of transformers.")

    def contestant(generate: Callable[..., Any], options: dict[str, Any]) -> Callable[[], Any]:
        length = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        return lambda: generate(**inputs, **length, **options)

    timings: list[dict[str, float]] = []
    for options in _SEARCHES.values():
        engine_calls = {
            name: contestant(engine.generate, options) for name, engine in engines.items()
        }
        contestants = {"transformers": contestant(model.generate, options), **engine_calls}
        seconds, rounds, calls = (0.1, 2, 2) if quick else (0.3, 3, 3)
        timings.append(fastest(contestants, seconds=seconds, rounds=rounds, min_calls=calls))
    say(
        f"\ngenerate() of {tokens} tokens; tokens a second on one thread, fastest call, and how "
        "many times those of transformers:\n"
    )
    rows = []
    for search, timing in zip(_SEARCHES, timings, strict=True):
        stock = timing["transformers"]
        cells = [f"{tokens / timing[n]:,.0f} {stock / timing[n]:5.1f}x" for n in FORMATS]
        rows.append([search, f"{tokens / stock:,.0f}", *cells])
    print(aligned_table(["search", "transformers", *FORMATS], rows))
    if plot is not None:
        names = ("transformers", *FORMATS)
        bars = {name: [timing[name] / tokens * 1e6 for timing in timings] for name in names}
        bar_chart(plot, "generate(): time a token", list(_SEARCHES), bars)
