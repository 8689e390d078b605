"""Train the small King James Bible language model kept in ``model/``.

The text comes from the program ``bible`` (Debian package ``bible-kjv``). Each chapter becomes
one document: a header such as ``Genesis 1``, then one verse per line. The script trains a
byte-level BPE tokenizer and a small Mistral model (grouped-query attention, a sliding window
shorter than the training context) on the CPU, and keeps the checkpoint with the lowest loss on
held-out chapters. Needs torch >= 2.9 (for Muon), transformers, tokenizers and tqdm.
"""

from __future__ import annotations

import argparse
import copy
import math
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

BOOKS = (
    "Genesis|Exodus|Leviticus|Numbers|Deuteronomy|Joshua|Judges|Ruth|1 Samuel|2 Samuel|1 Kings|"
    "2 Kings|1 Chronicles|2 Chronicles|Ezra|Nehemiah|Esther|Job|Psalm|Proverbs|Ecclesiastes|"
    "Song of Solomon|Isaiah|Jeremiah|Lamentations|Ezekiel|Daniel|Hosea|Joel|Amos|Obadiah|Jonah|"
    "Micah|Nahum|Habakkuk|Zephaniah|Haggai|Zechariah|Malachi|Matthew|Mark|Luke|John|Acts|Romans|"
    "1 Corinthians|2 Corinthians|Galatians|Ephesians|Philippians|Colossians|1 Thessalonians|"
    "2 Thessalonians|1 Timothy|2 Timothy|Titus|Philemon|Hebrews|James|1 Peter|2 Peter|1 John|"
    "2 John|3 John|Jude|Revelation"
).split("|")
VERSE = re.compile(r"(\d?[A-Za-z]+)(\d+):\d+ (.+)")
BOS, EOS, PAD = "<s>", "</s>", "<pad>"

VOCAB_SIZE = 4096
CONTEXT = 256  # tokens per training row, twice the attention window
WINDOW = 128
MAX_LENGTH = 4096  # the limit the saved files name; the window lets the model run past CONTEXT
HOLD_OUT_EVERY = 50  # every 50th chapter is kept for validation

BATCH_SIZE = 8
CHUNK = 4  # rows per forward pass; the gradients of a batch are summed over its chunks
PEAK_LR = 4e-3
WEIGHT_DECAY = 0.1
ATTENTION_DROPOUT = 0.1
WARMUP = 0.02  # part of the time given to the linear warmup
EVAL_SECONDS = 90.0


def read_chapters() -> list[str]:
    """Return the text of each chapter: its header, then one verse per line."""
    if shutil.which("bible") is None:
        sys.exit("train.py: the program 'bible' was not found: install the package bible-kjv")
    run = subprocess.run(
        ["bible", "-f", "Gen1:1-Rev22:21"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    chapters: list[str] = []
    books_seen: list[str] = []
    last = None
    for line in run.stdout.splitlines():
        match = VERSE.fullmatch(line.strip())
        if match is None:
            sys.exit(f"train.py: cannot read this line of the program 'bible': {line!r}")
        book, chapter, verse = match.groups()
        if (book, chapter) != last:
            last = (book, chapter)
            if book not in books_seen:
                books_seen.append(book)
            chapters.append(f"{BOOKS[len(books_seen) - 1]} {chapter}\n")
        chapters[-1] += verse + "\n"
    return chapters


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer that round-trips any text and puts <s> in front."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS}:1 $B:1",
        special_tokens=[(BOS, bpe.token_to_id(BOS))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=MAX_LENGTH,
    )


def encode_chapter(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Encode one chapter as <s> text </s>."""
    return tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]


def line_starts(tokens: torch.Tensor, bos: int, eos: int, newline: int) -> torch.Tensor:
    """Return the positions where a header or a verse starts (a header at its <s>)."""
    after_newline = torch.zeros_like(tokens, dtype=torch.bool)
    after_newline[1:] = tokens[:-1] == newline
    starts = (tokens == bos) | (after_newline & (tokens != eos))
    starts[-(CONTEXT - 1) :] = False
    return starts.nonzero().squeeze(1)


def sample_batch(tokens: torch.Tensor, starts: torch.Tensor, bos: int) -> torch.Tensor:
    """Draw rows of CONTEXT tokens, each of which is <s> and then a run of whole-line text."""
    rows = []
    for start in starts[torch.randint(len(starts), (BATCH_SIZE,))].tolist():
        body = start + int(tokens[start] == bos)
        rows.append(torch.cat([tokens.new_tensor([bos]), tokens[body : body + CONTEXT - 1]]))
    return torch.stack(rows)


def make_model(tokenizer: PreTrainedTokenizerFast) -> MistralForCausalLM:
    """Return the untrained model."""
    config = MistralConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=WINDOW,
        max_position_embeddings=MAX_LENGTH,
        attention_dropout=ATTENTION_DROPOUT,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="eager",
    )
    model = MistralForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def make_optimizers(model: MistralForCausalLM) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers and AdamW for the embedding and the norms."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.dim() == 2 and "embed_tokens" not in name
        (matrices if is_matrix else others).append(parameter)
    return [
        torch.optim.Muon(
            matrices, lr=PEAK_LR, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=PEAK_LR, betas=(0.9, 0.99), weight_decay=0.0, fused=True),
    ]


def learning_rate(done: float) -> float:
    """Return the learning rate when the part ``done`` of the time has passed."""
    if done < WARMUP:
        return PEAK_LR * done / WARMUP
    return PEAK_LR * 0.5 * (1.0 + math.cos(math.pi * (done - WARMUP) / (1.0 - WARMUP)))


@torch.no_grad()
def held_out_loss(model: MistralForCausalLM, chapters: list[list[int]]) -> float:
    """Return the mean loss per token, in nats, over whole chapters."""
    training = model.training
    model.eval()
    total, count = 0.0, 0
    for chapter in chapters:
        ids = torch.tensor([chapter])
        predicted = len(chapter) - 1
        total += model(input_ids=ids, labels=ids, use_cache=False).loss.item() * predicted
        count += predicted
    model.train(training)
    return total / count


def save_model(model: MistralForCausalLM, out: Path) -> None:
    """Save the weights as bfloat16, replacing each file at once so that readers never break."""
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
        for file in Path(folder).iterdir():
            file.chmod(0o644)
            file.replace(out / file.name)


def train(
    model: MistralForCausalLM,
    train_chapters: list[list[int]],
    valid_chapters: list[list[int]],
    newline: int,
    seconds: float,
    out: Path,
) -> int:
    """Train for the given time, keep the best checkpoint in ``out`` and return the steps done."""
    bos, eos = model.config.bos_token_id, model.config.eos_token_id
    tokens = torch.tensor([token for chapter in train_chapters for token in chapter])
    starts = line_starts(tokens, bos, eos, newline)
    optimizers = make_optimizers(model)
    model.train()
    best = math.inf
    average: float | None = None
    steps = 0
    begin = time.monotonic()
    next_eval = EVAL_SECONDS
    bar = tqdm(
        total=round(seconds),
        mininterval=1.0,
        bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} s{postfix}",
    )
    while True:
        elapsed = time.monotonic() - begin
        bar.update(min(int(elapsed), bar.total) - bar.n)
        if elapsed >= next_eval or elapsed >= seconds:
            next_eval = elapsed + EVAL_SECONDS
            held_out = held_out_loss(model, valid_chapters)
            if held_out < best:
                best = held_out
                save_model(model, out)
            bar.set_postfix_str(f"step {steps}, loss {average:.3f}, held out {held_out:.4f}")
        if elapsed >= seconds:
            break
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = learning_rate(elapsed / seconds)
        chunks = sample_batch(tokens, starts, bos).split(CHUNK)
        batch_loss = 0.0
        for chunk in chunks:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(input_ids=chunk, labels=chunk, use_cache=False).loss / len(chunks)
            loss.backward()
            batch_loss += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        steps += 1
        average = batch_loss if average is None else 0.98 * average + 0.02 * batch_loss
    bar.close()
    return steps


def main() -> None:
    """Run the whole training."""
    parser = argparse.ArgumentParser(description="Train the King James Bible language model.")
    parser.add_argument("--minutes", type=float, default=35.0, help="time to train (default 35)")
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
    chapters = read_chapters()
    train_texts = [c for i, c in enumerate(chapters) if i % HOLD_OUT_EVERY != HOLD_OUT_EVERY - 1]
    valid_texts = chapters[HOLD_OUT_EVERY - 1 :: HOLD_OUT_EVERY]
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(train_texts)
    tokenizer.save_pretrained(args.out)
    train_chapters = [encode_chapter(tokenizer, text) for text in train_texts]
    valid_chapters = [encode_chapter(tokenizer, text) for text in valid_texts]
    newline = tokenizer("\n", add_special_tokens=False)["input_ids"][0]
    model = make_model(tokenizer)
    steps = train(model, train_chapters, valid_chapters, newline, args.minutes * 60.0, args.out)

    tokenizer = AutoTokenizer.from_pretrained(args.out)
    model = AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.float32).eval()
    loss = held_out_loss(model, valid_chapters)
    size = sum(len(text.encode()) for text in valid_texts)
    bits = loss / math.log(2) * sum(len(c) - 1 for c in valid_chapters) / size
    prompt = tokenizer("In the beginning", return_tensors="pt")
    sample = model.generate(
        **prompt, do_sample=True, temperature=0.8, top_k=50, top_p=0.9, max_new_tokens=120
    )
    print(f"parameters {model.num_parameters()}, steps {steps}")
    sizes = [sum(map(len, chapters)) for chapters in (train_chapters, valid_chapters)]
    print(f"training tokens {sizes[0]}, held-out tokens {sizes[1]}")
    print(f"held-out loss {loss:.4f}, perplexity {math.exp(loss):.2f}, bits per byte {bits:.4f}")
    print(tokenizer.decode(sample[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
