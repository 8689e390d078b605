"""Text with the drafts of an assistant, against text without: tokens a second and the same tokens.

    python -m benchmarks.drafts [--mtp] [--noise 0.02] [--new 128] [--rounds 3] [--keep FOLDER]

Both models have random weights. The assistant is the first layers of the model, with its embedding
and its head. What the other layers add is scaled down to noise, so that the two agree about as
often as trained models of one family do: the table says how often. With ``--mtp`` the model has the
shape of Qwen 3.5 0.8B, and its layer for multi-token prediction drafts. What its other layers add
is scaled down likewise.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

import lmdecode
from benchmarks.report import machine_line

SIZES: dict[str, Any] = {
    "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16,
    "num_key_value_heads": 4, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
LAYERS, ASSISTANT_LAYERS = 40, 3
QWEN: dict[str, Any] = {
    "vocab_size": 248320, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
    "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 0.8, "top_p": 0.95},
}
PROMPT = 64


def make_models(noise: float) -> tuple[lmdecode.Decoding, lmdecode.Decoding, float]:
    """Return the model, its assistant, and how many times more weights the model has."""
    config = transformers.LlamaConfig(num_hidden_layers=LAYERS, **SIZES)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                size = 3.0 if name == "lm_head.weight" else 1.5
                parameter.normal_(std=size * min(parameter.shape) ** -0.5)
        model.model.embed_tokens.weight.normal_()
        for layer in model.model.layers[ASSISTANT_LAYERS:]:
            layer.self_attn.o_proj.weight *= noise
            layer.mlp.down_proj.weight *= noise
    small = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(num_hidden_layers=ASSISTANT_LAYERS, **SIZES)
    )
    weights = model.state_dict()
    small.load_state_dict({name: weights[name] for name in small.state_dict()})
    ratio = model.num_parameters() / small.num_parameters()
    packed = [
        lmdecode.Decoding.from_pretrained(each, "int8", keep_model=False)
        for each in (model, copy.deepcopy(small))
    ]
    return packed[0], packed[1], ratio


def make_mtp_model(noise: float) -> lmdecode.Decoding:
    """Return a model with a layer that predicts further tokens from the last one alone."""
    config = transformers.Qwen3_5TextConfig(**QWEN)
    size = config.hidden_size
    torch.manual_seed(0)
    model = transformers.Qwen3_5ForCausalLM(config).eval()
    one = transformers.Qwen3_5TextConfig(
        **{**QWEN, "num_hidden_layers": 1, "vocab_size": 8}, layer_types=["full_attention"]
    )
    layer = transformers.Qwen3_5TextModel(one)
    added = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
    with torch.no_grad():
        for part, factor in ((model, noise), (layer, 0.0)):
            for name, parameter in part.named_parameters():
                if parameter.dim() == 2:
                    parameter.normal_(std=1.5 * min(parameter.shape) ** -0.5)
                    parameter.mul_(factor if name.endswith(added) else 1.0)
        model.model.embed_tokens.weight.normal_()
        # Else the model would repeat its last token, which its head has as a row.
        model.model.norm.weight.normal_().sub_(1.0)
        layer.norm.weight.copy_(model.model.norm.weight)
    tensors = {name: value for name, value in model.state_dict().items() if "lm_head" not in name}
    of_layer = {name: value for name, value in layer.state_dict().items() if "embed" not in name}
    tensors |= {f"mtp.{name}": value for name, value in of_layer.items()}
    tensors["mtp.fc.weight"] = torch.cat((torch.eye(size), torch.zeros(size, size)), dim=1)
    for name in ("embedding", "hidden"):
        tensors[f"mtp.pre_fc_norm_{name}.weight"] = torch.zeros(size)
    with tempfile.TemporaryDirectory() as folder:
        save_file(
            {name: value.bfloat16().contiguous() for name, value in tensors.items()},
            Path(folder) / "model.safetensors",
            metadata={"format": "pt"},
        )
        config.architectures = ["Qwen3_5ForCausalLM"]
        config.save_pretrained(folder)
        del model, tensors
        return lmdecode.Decoding.from_pretrained(folder, "int8", mtp=True)


def write(
    decoding: lmdecode.Decoding, rows: int, new: int, drafts: dict[str, Any], **options: Any
) -> tuple[list[list[int]], float, Any]:
    """Return the texts of some prompts, the seconds after their first tokens, and the counts."""
    engine = decoding.engine(max_requests=rows, capacity=PROMPT + new, **drafts)
    requests = []
    for row in range(rows):
        vocab = decoding.config.vocab_size
        tokens = torch.randint(3, vocab, (PROMPT,), generator=_seeded(row)).tolist()
        seed = {"seed": row} if options else {}
        requests.append(
            engine.submit(tokens, max_new_tokens=new, eos_token_id=(), **options, **seed)
        )
    engine.step()
    begin = time.perf_counter()
    while engine.step():
        pass
    seconds = time.perf_counter() - begin
    return [request.result().tokens for request in requests], seconds, engine.stats


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def main() -> None:
    """Make the models, let both ways take turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mtp", action="store_true", help="multi-token prediction drafts")
    parser.add_argument("--noise", type=float, default=0.02, help="of the other layers")
    parser.add_argument("--new", type=int, default=128, help="tokens of a text")
    parser.add_argument("--drafts", type=int, default=4, help="tokens of a draft")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--keep", type=Path, help="of the packed models: made where not there")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kept = given.keep or Path(folder)
        assistant: Any = "mtp"
        if given.mtp:
            if not (kept / "mtp").is_dir():
                make_mtp_model(given.noise).save(kept / "mtp")
            model = lmdecode.Decoding.load(kept / "mtp")
        else:
            names = ("model", "assistant")
            if not (kept / "assistant").is_dir():
                for name, made in zip(names, make_models(given.noise), strict=False):
                    made.save(kept / name)
            model, assistant = (lmdecode.Decoding.load(kept / name) for name in names)
        drafts = {
            "assistant_model": assistant, "num_assistant_tokens": given.drafts,
            "assistant_confidence_threshold": 0.0,
        }  # fmt: skip
        write(model, 1, 8, drafts)
        table = []
        for rows in given.rows:
            for kind, options in KINDS.items():
                speeds: tuple[list[float], list[float]] = ([], [])
                for _ in range(given.rounds):
                    expected, plain, _ = write(model, rows, given.new, {}, **options)
                    got, drafted, stats = write(model, rows, given.new, drafts, **options)
                    if got != expected:
                        raise AssertionError(f"{kind}, {rows} texts: the drafts change the text")
                    for times, seconds in zip(speeds, (plain, drafted), strict=True):
                        times.append(rows * (given.new - 1) / seconds)
                without, with_drafts = map(statistics.median, speeds)
                accepted = stats.accepted_tokens / stats.drafted_tokens
                per_step = rows * (given.new - 1) / (stats.steps - 1)
                table.append((kind, rows, accepted, per_step, without, with_drafts))
    print(machine_line(torch.get_num_threads()), "\n")
    print("| texts | at once | accepted | tokens a step | tokens/s without | with | ratio |")
    print("|---|---|---|---|---|---|---|")
    for kind, rows, accepted, per_step, without, with_drafts in table:
        print(
            f"| {kind} | {rows} | {accepted:.0%} | {per_step:.2f} | {without:.1f} | "
            f"{with_drafts:.1f} | {with_drafts / without:.2f} |"
        )


if __name__ == "__main__":
    main()
