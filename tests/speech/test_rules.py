"""Windows of long sounds to pieces, and rules of a window's text: penalties and times."""

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lmdecode.beam.state import beam_parameters, new_beam_state
from lmdecode.beam.token_rules import ALWAYS, one_slot
from lmdecode.reference.decoder import timestamp_rule
from lmdecode.speech.chunks import cut_at_quiet, merge_speech
from lmdecode.speech.rules import ruled
from lmdecode.speech.windows import split_window
from tests.decoder.whisper_models import END, FIRST_TIMESTAMP, PREVIOUS, long_audio
from tests.speech.models import EASY, sound, transcriber_pair

FIRST, VOCAB, LAST = 20, 40, 12  # times; tokens; the end token


def penalised(logits: Tensor, new: list[int], penalty: float, size: int) -> Tensor:
    """Return logits as CTranslate2 4.8.5 changes them, before it forbids tokens and times."""
    logits = logits.clone()
    for token in set(new):
        logits[token] = logits[token] * penalty if logits[token] < 0 else logits[token] / penalty
    if size and len(new) >= size - 1:
        last = new[len(new) - (size - 1) :]
        for i in range(len(new) - size + 1):
            if new[i : i + size - 1] == last:
                logits[new[i + size - 1]] = -torch.inf
    return logits


def text(r: random.Random) -> list[int]:
    """Return what may have been generated: pieces of text between times that do not fall."""
    tokens, at = [FIRST], FIRST
    for _ in range(r.randrange(4)):
        tokens += [r.randrange(6) for _ in range(r.randrange(1, 4))]
        at = min(VOCAB - 1, at + r.randrange(1, 4))
        tokens += [at] * r.randrange(1, 3)
    return tokens[: r.randrange(len(tokens) + 1)]


@pytest.mark.parametrize("timed", [False, True])
def test_penalties_come_before_the_rule_of_times(timed: bool) -> None:
    r, generator = random.Random(0), torch.Generator().manual_seed(0)
    changed = 0
    for _ in range(400):
        tokens, prefix = text(r), r.choice([0, 0, 1])
        prefix = min(prefix, len(tokens))
        size, penalty = r.choice([0, 1, 2, 3]), r.choice([0.7, 1.0, 1.3, 2.0])
        raw = torch.randn(VOCAB, generator=generator) * 3
        banned = [r.randrange(LAST) for _ in range(3)]
        prompt = [r.randrange(6) for _ in range(5)]  # the same words: they do not count
        sequence = torch.tensor([[*prompt, *tokens]], dtype=torch.int64)
        times = (FIRST, LAST, 5, -1)

        def forbid(logits: Tensor) -> Tensor:
            logits = logits.clone()
            logits[banned] = -torch.inf  # noqa: B023  called in its own turn
            return timestamp_rule(logits[None], sequence, *times)[0] if timed else logits  # noqa: B023

        state, parameters = new_beam_state(1, 1, 40), beam_parameters(1, 1)
        state.sequences[0, 0, : sequence.shape[1]] = sequence[0]
        state.lengths.fill_(sequence.shape[1])
        parameters.prompt_lengths.fill_(5 + prefix)
        rules = one_slot(
            bans=[(token, 0, ALWAYS, 0) for token in banned], timestamps=times if timed else None
        )
        searches: Any = SimpleNamespace(
            state=state, parameters=parameters, token_rules=rules,
            are_running=lambda: torch.ones(1, dtype=torch.bool),
        )  # fmt: skip
        expected = forbid(penalised(raw, tokens[prefix:], penalty, size))
        scores = forbid(raw.log_softmax(0))
        values = torch.stack([raw, scores])[:, None].clone()
        got = ruled(searches, values, penalty, size)[0]
        assert torch.allclose(got.log_softmax(0), expected.log_softmax(0), atol=1e-5)
        changed += not torch.allclose(got.softmax(0), scores.softmax(0), atol=1e-3)
    assert changed > 50


def greedy(model: Any, memory: Tensor, prompt: list[int], bans: list[int], first: list[int],
           penalty: float, size: int, most: int) -> tuple[list[int], list[float]]:  # fmt: skip
    """Return the text of a window by plain torch, and its log-probabilities among what is left."""
    new, found = list[int](), list[float]()
    while len(new) < most and END not in new:
        ids = torch.tensor([[*prompt, *new]])
        logits = model(decoder_input_ids=ids, encoder_outputs=(memory,)).logits[0, -1].double()
        logits = penalised(logits, new, penalty, size)
        logits[[*bans, *(first if not new else [])]] = -torch.inf
        limit = FIRST_TIMESTAMP + 20
        logits = timestamp_rule(
            logits[None], ids, FIRST_TIMESTAMP, END, len(prompt), limit
        )[0].log_softmax(0)  # fmt: skip
        new.append(int(logits.argmax()))
        found.append(float(logits[new[-1]]))
    return new, found


@torch.no_grad()
@pytest.mark.parametrize(("penalty", "size"), [(1.0, 0), (1.5, 0), (1.0, 1), (1.3, 2)])
@pytest.mark.parametrize("seed", [0, 1])
def test_what_is_generated_is_penalised_and_no_prompt(penalty: float, size: int, seed: int) -> None:
    """As faster-whisper 1.2.1; and its avg_logprob, which is normalised among what is allowed."""
    model, ours = transcriber_pair(seed)
    features = long_audio(2.0, seed=seed)["input_features"]
    memory = model.get_encoder()(features)[0]
    tokens = ours._model.tokens
    earlier = [300, 301, *range(400, 425)]
    prompt = [PREVIOUS, *earlier, tokens.start, tokens.languages["en"], tokens.tasks["transcribe"]]
    expected, log_probs = greedy(
        model, memory, prompt, list(tokens.suppressed), list(tokens.suppressed_first),
        penalty, size, 24,
    )  # fmt: skip
    segments, _ = ours.transcribe(
        sound(2.0, seed), language="en", beam_size=1, initial_prompt=earlier, batched=True,
        repetition_penalty=penalty, no_repeat_ngram_size=size, **EASY,
    )  # fmt: skip
    found = list(segments)
    assert [token for s in found for token in s.tokens] == [t for t in expected if t != END]
    count = len([token for token in expected if token != END])
    assert found[0].avg_logprob == pytest.approx(sum(log_probs) / (count + 1), abs=1e-4)


T = 100  # the first time


@pytest.mark.parametrize(
    ("tokens", "is_cut", "pieces", "step"),
    [
        # One piece that has ended: nothing is said behind it.
        ([T, 1, 2, T + 50], True, [(0, 4, 0, 100)], 300),
        # Two, the second of which has ended.
        ([T, 1, T + 5, T + 6, 2, T + 9], True, [(0, 3, 0, 10), (3, 6, 12, 18)], 300),
        # The last pair says where the next window begins.
        ([T, 1, T + 5, T + 6, 2], True, [(0, 3, 0, 10)], 10),
        ([T, 1, T + 5, T + 6, 2], False, [(0, 3, 0, 10), (3, 5, 12, 300)], 300),
        ([T, 1, T + 5, T + 5], True, [(0, 3, 0, 10)], 10),
        ([T, 1, T + 5, T + 5], False, [(0, 3, 0, 10)], 300),
        # No pair: all of the window.
        ([T, 1, 2], True, [(0, 3, 0, 300)], 300),
        ([1, 2, T + 7], True, [(0, 3, 0, 14)], 300),
        ([], True, [(0, 0, 0, 300)], 300),
    ],
)
def test_pieces(tokens: list[int], is_cut: bool, pieces: list[tuple[int, ...]], step: int) -> None:
    assert split_window(tokens, T, 2, 300, is_cut=is_cut) == (pieces, step)


def test_speech_is_merged() -> None:
    speech = [(0, 100), (150, 280), (290, 310), (700, 900), (950, 1001)]
    assert merge_speech(speech, 300) == [(0, 280), (290, 310), (700, 900), (950, 1001)]
    assert merge_speech(speech, 320) == [(0, 310), (700, 1001)]
    assert merge_speech([], 300) == []


def test_a_long_pause_is_in_no_part() -> None:
    """Behind it a model would say that the next words begin where the last ones ended."""
    speech = [(0, 400), (700, 900), (1201, 1500)]
    assert merge_speech(speech, 3000) == [(0, 900), (1201, 1500)]


def test_cuts_are_where_it_is_quiet() -> None:
    features = torch.zeros(4, 1000)
    for place in (250, 520, 790):
        features[:, place - 15 : place + 15] = -1
    parts = cut_at_quiet(features, 1000, 300)
    assert [begin for begin, _ in parts] == pytest.approx([0, 250, 520, 790], abs=6)
    assert parts[-1][1] == 1000
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(parts))
    assert cut_at_quiet(features, 300, 300) == [(0, 300)]
    even = cut_at_quiet(torch.zeros(4, 1000), 1000, 300)
    assert all(0 < end - begin <= 300 for begin, end in even)
