"""Qwen 3.5 0.8B's shape with random weights: a prompt and steps, ours and a peer's in turns.

    python -m benchmarks.state_layers [--rounds 3] [--keep model.gguf]
    LMDECODE_PEERS=PEERS python -m benchmarks.state_layers [--rounds 3] --openvino FOLDER

The first one compares with llama.cpp, of which llama-bench is to be on the path. Both read the same
GGUF file of Q8_0: ours packs it as int8. The second one compares with OpenVINO, of an environment
that benchmarks/decoder/whole_model/install_peers.sh makes. Both make int8 of the float32 weights in
a folder; these and OpenVINO's export, which takes minutes, are written where they are not there.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import lmdecode
from benchmarks.decoder.whole_model.process import EngineProcess, python_of
from benchmarks.gguf_header import write_sizes
from benchmarks.quality.llama_cpp import speeds
from benchmarks.report import machine_line
from lmdecode.decoder.causal_caches import CausalCaches

SIZE, FFN, LAYERS, VOCAB = 1024, 3584, 24, 248320
HEADS, KEY_HEADS, HEAD = 8, 2, 256
DELTA_HEADS, DELTA_SIZE, TAPS = 16, 128, 4
PROMPT, NEW = 2048, 64


def write_model(path: Path) -> None:
    """Write a file as llama.cpp's converter does; matrices are of Q8_0."""
    import gguf

    writer = gguf.GGUFWriter(str(path), "qwen35")
    kind, random = gguf.GGMLQuantizationType.Q8_0, np.random.default_rng(0)
    write_sizes(
        writer, model_size=SIZE, layers=LAYERS, heads=HEADS, key_heads=KEY_HEADS, head_size=HEAD,
        ffn_size=FFN, vocab=VOCAB, epsilon=1e-6, rope_base=1e7, turned=HEAD // 4,
    )  # fmt: skip
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_ssm_conv_kernel(TAPS)
    writer.add_ssm_state_size(DELTA_SIZE)
    writer.add_ssm_group_count(DELTA_HEADS)
    writer.add_ssm_time_step_rank(DELTA_HEADS)
    writer.add_ssm_inner_size(DELTA_SIZE * DELTA_HEADS)
    writer.add_uint32("qwen35.full_attention_interval", 4)

    def matrix(name: str, rows: int, columns: int) -> None:
        values = random.standard_normal((rows, columns), dtype=np.float32) * columns**-0.5
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)

    def vector(name: str, values: Any) -> None:
        writer.add_tensor(name, np.asarray(values, dtype=np.float32))

    values = DELTA_SIZE * DELTA_HEADS
    matrix("token_embd", VOCAB, SIZE)
    vector("output_norm.weight", np.ones(SIZE))
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        for name in ("attn_norm", "post_attention_norm"):
            vector(f"{block}{name}.weight", np.ones(SIZE))
        if (layer + 1) % 4 == 0:
            matrix(f"{block}attn_q", 2 * HEADS * HEAD, SIZE)
            matrix(f"{block}attn_k", KEY_HEADS * HEAD, SIZE)
            matrix(f"{block}attn_v", KEY_HEADS * HEAD, SIZE)
            matrix(f"{block}attn_output", SIZE, HEADS * HEAD)
            for name in ("attn_q_norm", "attn_k_norm"):
                vector(f"{block}{name}.weight", np.ones(HEAD))
        else:
            matrix(f"{block}attn_qkv", 3 * values, SIZE)
            matrix(f"{block}attn_gate", values, SIZE)
            matrix(f"{block}ssm_beta", DELTA_HEADS, SIZE)
            matrix(f"{block}ssm_alpha", DELTA_HEADS, SIZE)
            vector(f"{block}ssm_conv1d.weight", random.standard_normal((3 * values, TAPS)) * 0.5)
            vector(f"{block}ssm_dt.bias", random.standard_normal(DELTA_HEADS))
            vector(f"{block}ssm_a", -np.exp(random.standard_normal(DELTA_HEADS)))
            vector(f"{block}ssm_norm.weight", np.ones(DELTA_SIZE))
            matrix(f"{block}ssm_out", SIZE, values)
        for name, rows, columns in (("gate", FFN, SIZE), ("up", FFN, SIZE), ("down", SIZE, FFN)):
            matrix(f"{block}ffn_{name}", rows, columns)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def ours(model: Any, prompt: int, new: int) -> tuple[float, float]:
    """Return tokens a second of reading a prompt, and of steps behind one token, as llama-bench."""
    caches = CausalCaches(model, 1, prompt + new + 1)
    tokens = torch.arange(prompt) * 7919 % VOCAB
    begin = time.perf_counter()
    caches.forward(tokens, torch.tensor([[0, prompt, 1, 1]]), 1)
    read = time.perf_counter() - begin
    caches.truncate([0], [0])
    entry = torch.tensor([[0, 1, 0, 1]])
    caches.forward(tokens[:1], entry, 1)
    begin = time.perf_counter()
    for token in tokens[:new].split(1):
        caches.forward(token, entry, 1)
    return prompt / read, new / (time.perf_counter() - begin)


def write_folder(folder: Path) -> None:
    """Write the model as transformers does."""
    import transformers

    config = transformers.Qwen3_5TextConfig(
        vocab_size=VOCAB, hidden_size=SIZE, intermediate_size=FFN, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS, head_dim=HEAD,
        linear_num_key_heads=DELTA_HEADS, linear_num_value_heads=DELTA_HEADS,
        linear_key_head_dim=DELTA_SIZE, linear_value_head_dim=DELTA_SIZE,
        linear_conv_kernel_dim=TAPS, tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10], "mrope_interleaved": True,
        },
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3_5ForCausalLM(config).save_pretrained(folder)


def openvino(folder: Path, decoding: Any, threads: int) -> EngineProcess:
    """Return OpenVINO with a model, whose logits are ours, but for rounding."""
    python = python_of("openvino", ("openvino", "optimum"))
    if python is None:
        raise SystemExit("state_layers: OpenVINO is not installed")
    tokens = torch.arange(72) * 7919 % VOCAB
    caches = CausalCaches(decoding.decoder, 1, 73)
    logits = caches.forward(tokens, torch.tensor([[0, 72, 1, 1]]), 1)[0].numpy()
    np.savez(folder / "expected.npz", tokens=tokens, steps=8, logits=logits)
    process = EngineProcess(
        python,
        {
            "module": "openvino_engine", "number_format": "int8", "folder": str(folder),
            "threads": threads, "longest": PROMPT, "expected": str(folder / "expected.npz"),
        },
    )  # fmt: skip
    about = process.about()
    print(
        f"OpenVINO {about['version']}; its logits correlate with ours: {about['correlation']:.4f}"
    )
    return process


def of_openvino(process: EngineProcess) -> tuple[float, float]:
    """Return what ``ours`` does; steps are behind some tokens, and the middle one counts."""
    tokens = [token * 7919 % VOCAB for token in range(PROMPT)]
    read = process.call("time_prefill", tokens, "wall")
    return PROMPT / read, 1 / process.call("time_step", tokens[:NEW], 1, NEW, "wall")


def print_table(threads: int, names: tuple[str, str], rows: list[tuple[float, ...]]) -> None:
    """Print medians of turns, each ours and then the peer's."""
    print(machine_line(threads), "\n")
    print("| tokens a second | {} | {} | ratio |\n|---|---|---|---|".format(*names))
    for name, at in ((f"a prompt of {PROMPT}", 0), ("steps", 1)):
        own, peer = (statistics.median(row[i] for row in rows) for i in (at, at + 2))
        print(f"| {name} | {own:.1f} | {peer:.1f} | {own / peer:.2f} |")


def main() -> None:
    """Write the model, let both take turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="of the file: made where it is not there")
    parser.add_argument("--openvino", type=Path, metavar="FOLDER", help="of the model, to be kept")
    arguments = parser.parse_args()
    threads, rows = torch.get_num_threads(), list[tuple[float, ...]]()
    if (folder := arguments.openvino) is not None:
        if not (folder / "config.json").exists():
            write_folder(folder)
        decoding = lmdecode.Decoding.from_pretrained(folder, "int8", keep_model=False)
        process = openvino(folder, decoding, threads)
        ours(decoding.decoder, 64, 4)
        for _ in range(arguments.rounds):
            rows.append((*ours(decoding.decoder, PROMPT, NEW), *of_openvino(process)))
        process.close()
        print_table(threads, ("ours, int8", "OpenVINO, int8"), rows)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.keep or Path(folder) / "model.gguf"
        if not path.exists():
            write_model(path)
        decoding = lmdecode.Decoding.from_pretrained(path, "int8")
        ours(decoding.decoder, 64, 4)
        for _ in range(arguments.rounds):
            theirs = speeds(path, prompt=PROMPT, new=NEW, threads=threads)
            rows.append((*ours(decoding.decoder, PROMPT, NEW), *theirs))
    print_table(threads, ("ours, int8", "llama.cpp, Q8_0"), rows)


if __name__ == "__main__":
    main()
