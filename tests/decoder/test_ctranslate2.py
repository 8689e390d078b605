"""Decoding against CTranslate2, which is another implementation of the same search."""

import pytest
import torch

import lmdecode

pytest.importorskip("ctranslate2")
pytest.importorskip("transformers")


@pytest.mark.parametrize("num_beams", [1, 4])
def test_tokens_are_those_of_ctranslate2(num_beams: int) -> None:
    from benchmarks.decoder.bench_decoding import make_model
    from benchmarks.decoder.ctranslate2_peer import translator

    model = make_model(2, 64, 200)
    ids = torch.randint(1, 199, (3, 8), generator=torch.Generator().manual_seed(2))
    ours = lmdecode.Decoding.from_pretrained(model).generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        num_beams=num_beams,
        min_new_tokens=12,
        max_new_tokens=12,
        bad_words_ids=[[199]],
    )
    theirs = translator(model, "float32").translate_batch(
        [[str(token) for token in row] for row in ids.tolist()],
        beam_size=num_beams,
        min_decoding_length=12,
        max_decoding_length=12,
    )
    expected = [[int(token) for token in result.hypotheses[0]] for result in theirs]
    assert ours[:, 1:].tolist() == expected
