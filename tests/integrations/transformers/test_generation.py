"""``generate(custom_generate=sample)``: greedy search, stopping, streaming, errors."""

import functools
import math
import threading

import pytest
import torch
import transformers
from beam_parity import EVERYTHING
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    TextIteratorStreamer,
)
from transformers.generation.logits_process import SuppressTokensLogitsProcessor, TopPLogitsWarper
from user_processors import Overwrite

from lmdecode.integrations.transformers import beam_search, sample
from lmdecode.integrations.transformers.generate_call import CACHE
from tests.support.releases import BEFORE_5_3, IN_PARTS
from tests.support.word_tokenizer import word_tokenizer

PAD, EOS, VOCAB = 0, 2, 61
STAGES = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02}
assert_identical = functools.partial(torch.testing.assert_close, rtol=0, atol=0)


class Streamer:
    """Collects what a streamer is given."""

    def __init__(self) -> None:
        self.chunks: list[torch.Tensor] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        assert value.device.type == "cpu" and not self.ended
        self.chunks.append(value)

    def end(self) -> None:
        self.ended += 1


def test_greedy_outputs_are_those_of_transformers(model, prompts):
    arguments = {"do_sample": False, "max_new_tokens": 12, **EVERYTHING}
    expected = model.generate(prompts, **arguments)
    got = model.generate(prompts, **arguments, custom_generate=sample)
    assert type(got) is type(expected)
    assert got.keys() == expected.keys()
    for name in expected:
        if name != CACHE:
            assert_identical(got[name], expected[name])
    assert type(got.past_key_values) is type(expected.past_key_values)
    assert got.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()


@pytest.mark.skipif(not BEFORE_5_3, reason="later releases can read drafts")
@pytest.mark.parametrize("drafts", ["prompt_lookup_num_tokens", "assistant_model"])
def test_drafts_are_refused_where_transformers_cannot_read_them(llama, prompts, drafts):
    given = {drafts: llama if drafts == "assistant_model" else 3}
    with pytest.raises(ValueError, match=f"^{drafts}: expected transformers 5.3 or later"):
        llama.generate(prompts[:1], max_new_tokens=4, custom_generate=sample, **given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_greedy_in_other_dtypes(make_model, prompts, dtype):
    model = make_model("llama", dtype=dtype)
    arguments = {"do_sample": False, "max_new_tokens": 12}
    expected = model.generate(prompts, **arguments)
    assert torch.equal(model.generate(prompts, **arguments, custom_generate=sample), expected)


def test_greedy_with_left_padding(decoder_model, padded_prompts):
    arguments = {"do_sample": False, "max_new_tokens": 12}
    expected = decoder_model.generate(**padded_prompts, **arguments)
    got = decoder_model.generate(**padded_prompts, **arguments, custom_generate=sample)
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    "arguments",
    [
        {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "min_new_tokens": 9},
        {"use_cache": False},
        pytest.param({"prefill_chunk_size": 4}, marks=IN_PARTS),
        {"cache_implementation": "static"},
        {"max_length": 9, "max_new_tokens": None},
        {
            "logits_processor": LogitsProcessorList(
                [TopPLogitsWarper(0.0), SuppressTokensLogitsProcessor([7])]
            )
        },
        {"guidance_scale": 1.5},
        {"forced_eos_token_id": EOS},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_greedy_with_other_options(llama, prompts, arguments):
    arguments = {"do_sample": False, "max_new_tokens": 10} | arguments
    expected = llama.generate(prompts, **arguments)
    got = llama.generate(prompts, **arguments, custom_generate=sample)
    assert torch.equal(got, expected)


def test_greedy_from_embeddings_and_from_a_cache(llama, prompts):
    arguments = {"do_sample": False, "max_new_tokens": 8}
    embeddings = {"inputs_embeds": llama.get_input_embeddings()(prompts)}
    expected = llama.generate(**embeddings, **arguments)
    assert torch.equal(llama.generate(**embeddings, **arguments, custom_generate=sample), expected)

    def continued(**kwargs):
        first = llama.generate(prompts, **arguments, return_dict_in_generate=True, **kwargs)
        cache = first.past_key_values
        return llama.generate(first.sequences, past_key_values=cache, **arguments, **kwargs)

    assert torch.equal(continued(custom_generate=sample), continued())


def test_end_tokens_end_rows(model, prompts):
    """After its first end token a row has padding only; the run ends with the last row."""
    torch.manual_seed(5)
    ids = model.generate(
        prompts.repeat(20, 1),
        do_sample=True,
        max_new_tokens=40,
        top_k=0,
        temperature=2.0,
        eos_token_id=[EOS, 7, 11],
        custom_generate=sample,
    )
    start = 1 if model.config.is_encoder_decoder else prompts.shape[1]
    generated = ids[:, start:]
    lengths = []
    for row in generated:
        ends = torch.isin(row, torch.tensor([EOS, 7, 11])).nonzero().flatten()
        length = int(ends[0]) + 1 if len(ends) else len(row)
        lengths.append(length)
        assert (row[length:] == PAD).all()
    assert max(lengths) == generated.shape[1]
    assert min(lengths) < generated.shape[1]


class StopRow(StoppingCriteria):
    """Stop each row after its own number of new tokens."""

    def __init__(self, prompt_length: int, new_tokens: list[int]) -> None:
        self.lengths = prompt_length + torch.tensor(new_tokens)
        self.scores = []

    def __call__(self, input_ids, scores, **kwargs):
        self.scores.append(scores)
        return self.lengths <= input_ids.shape[1]


def test_stopping_criteria(llama, prompts):
    arguments = {"do_sample": False, "max_new_tokens": 20}
    expected = llama.generate(
        prompts, **arguments, stopping_criteria=[StopRow(prompts.shape[1], [2, 7, 4])]
    )
    criterion = StopRow(prompts.shape[1], [2, 7, 4])
    got = llama.generate(
        prompts, **arguments, stopping_criteria=[criterion], custom_generate=sample
    )
    assert torch.equal(got, expected)
    assert got.shape[1] == prompts.shape[1] + 7
    assert criterion.scores == [None] * 7


def test_stopping_criteria_see_the_scores(llama, prompts):
    criterion = StopRow(prompts.shape[1], [2, 3, 3])
    got = llama.generate(
        prompts,
        do_sample=True,
        max_new_tokens=20,
        stopping_criteria=[criterion],
        output_scores=True,
        return_dict_in_generate=True,
        custom_generate=sample,
    )
    assert [len(scores) for scores in criterion.scores] == [1, 2, 3]
    assert criterion.scores[-1] is got.scores


@pytest.mark.parametrize("num_beams", [1, 3])
def test_stop_strings(llama, prompts, num_beams):
    tokenizer = word_tokenizer(VOCAB)
    loop = sample if num_beams == 1 else beam_search
    options = {"max_new_tokens": 9, "num_beams": num_beams}
    whole = llama.generate(prompts, **options)
    stop = [f"w{int(whole[0, prompts.shape[1] + 3])}"]
    expected = llama.generate(prompts, **options, stop_strings=stop, tokenizer=tokenizer)
    assert not torch.equal(expected, whole)
    got = llama.generate(
        prompts, **options, stop_strings=stop, tokenizer=tokenizer, custom_generate=loop
    )
    assert torch.equal(got, expected)
    bound = functools.partial(loop, tokenizer=tokenizer)
    got = llama.generate(prompts, **options, stop_strings=stop, custom_generate=bound)
    assert torch.equal(got, expected)
    with pytest.raises(ValueError, match=r"^tokenizer: expected the model's"):
        llama.generate(prompts, **options, stop_strings=stop, custom_generate=loop)


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_streamer(model, prompts, do_sample):
    streamer = Streamer()
    ids = model.generate(
        prompts[:1],
        do_sample=do_sample,
        max_new_tokens=9,
        streamer=streamer,
        custom_generate=sample,
    )
    assert streamer.ended == 1
    streamed = torch.cat([chunk.flatten() for chunk in streamer.chunks])
    assert torch.equal(streamed, ids[0])
    assert all(chunk.shape == (1,) for chunk in streamer.chunks[1:])


def test_streamer_bound_beforehand(llama, prompts):
    streamer = Streamer()
    ids = llama.generate(
        prompts,
        do_sample=True,
        max_new_tokens=9,
        custom_generate=functools.partial(sample, streamer=streamer),
    )
    assert streamer.ended == 1
    assert torch.equal(torch.stack(streamer.chunks, dim=1), ids[:, prompts.shape[1] :])


def around(*args, **kwargs):
    """A function around the loop, which knows nothing of streamers."""
    return sample(*args, **kwargs)


def beams_around(*args, **kwargs):
    return beam_search(*args, **kwargs)


@pytest.mark.parametrize("num_beams", [1, 2])
def test_nobody_waits_for_a_streamer_that_was_dropped(llama, prompts, num_beams):
    streamer = Streamer()
    with pytest.raises(ValueError, match=r"^streamer: generate\(\) was given one, .* bind it"):
        llama.generate(
            prompts,
            max_new_tokens=4,
            num_beams=num_beams,
            streamer=streamer,
            custom_generate=around if num_beams == 1 else beams_around,
        )
    assert streamer.ended == 1
    without = llama.generate(prompts, max_new_tokens=4, custom_generate=around)
    streamer = Streamer()
    ids = llama.generate(
        prompts, max_new_tokens=4, custom_generate=functools.partial(around, streamer=streamer)
    )
    assert streamer.ended == 1 and torch.equal(ids, without)


def test_a_streamers_consumer_does_not_wait(llama, prompts):
    """Texts of a TextIteratorStreamer, read while a thread generates: after an error they end."""

    class Tokenizer:
        def decode(self, ids, **kwargs):
            # transformers 5.24 gives the last token alone, as an int
            return " ".join(map(str, ids if isinstance(ids, list) else [ids])) + "\n"

    for custom_generate, options in (
        (around, {}),
        (sample, {"logits_processor": LogitsProcessorList([Overwrite(0, math.nan, 8)])}),
        (sample, {"seed": -1}),
        (sample, {"seed": torch.tensor(-1)}),
        (sample, {"seed": [1, -1]}),
        (sample, {"num_beams": 0}),
    ):
        streamer = TextIteratorStreamer(Tokenizer(), skip_prompt=True, timeout=60)
        errors = []

        def run(custom_generate=custom_generate, options=options, streamer=streamer, errors=errors):
            try:
                llama.generate(
                    prompts[:1], custom_generate=custom_generate, streamer=streamer, **options
                )
            except (ValueError, RuntimeError) as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        list(streamer)  # raises queue.Empty after the timeout if nobody ends it
        thread.join()
        assert len(errors) == 1


def test_as_a_method_of_a_model(prompts, make_model):
    """A class whose ``_sample`` it is needs no argument of generate()."""

    class Model(transformers.LlamaForCausalLM):
        _sample = sample

    model = Model(make_model("llama").config).eval()
    model.load_state_dict(make_model("llama").state_dict())
    streamer = Streamer()
    torch.manual_seed(9)
    got = model.generate(prompts[:1], do_sample=True, max_new_tokens=9, **STAGES, streamer=streamer)
    torch.manual_seed(9)
    expected = make_model("llama").generate(
        prompts[:1], do_sample=True, max_new_tokens=9, **STAGES, custom_generate=sample
    )
    assert torch.equal(got, expected)
    assert torch.equal(torch.cat([chunk.flatten() for chunk in streamer.chunks]), got[0])


@pytest.mark.parametrize("given", [True, None], ids=["given", "found"])
def test_synced_gpus_runs_on_until_the_others_are_done(llama, prompts, run_synced, given):
    from lmdecode.integrations.transformers.sampling import generate_sampling

    arguments = {
        "do_sample": True, "max_new_tokens": 5, "eos_token_id": None, "seed": torch.arange(3),
        "custom_generate": sample,
    }  # fmt: skip
    got = run_synced(generate_sampling, given, **arguments)
    assert torch.equal(got, llama.generate(prompts, **arguments))


def test_needs_synced_gpus_without_a_process_group(llama):
    from lmdecode.integrations.transformers.generate_call import needs_synced_gpus

    assert needs_synced_gpus(llama) is False


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_num_return_sequences(make_model, prompts, name):
    model = make_model(name)
    torch.manual_seed(6)
    ids = model.generate(
        prompts, do_sample=True, num_return_sequences=4, max_new_tokens=10, custom_generate=sample
    )
    assert len(ids) == 12
    if not model.config.is_encoder_decoder:
        assert torch.equal(ids[:, : prompts.shape[1]], prompts.repeat_interleave(4, 0))
    for copies in ids.view(3, 4, -1).tolist():
        assert len(set(map(tuple, copies))) > 1


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("value", "message"), [(math.nan, "NaN in its logits"), (-math.inf, "no logit above -inf")]
)
def test_logits_without_a_token_raise(llama, prompts, do_sample, value, message):
    processors = LogitsProcessorList([Overwrite(1, value, from_length=prompts.shape[1] + 2)])
    with pytest.raises(RuntimeError, match=f"step 2: .*row 1 has .*{message}"):
        llama.generate(
            prompts,
            do_sample=do_sample,
            max_new_tokens=5,
            eos_token_id=None,
            logits_processor=processors,
            custom_generate=sample,
        )


def test_nan_in_the_models_own_logits_raises(llama, prompts):
    def poison(module, inputs, outputs):
        outputs.logits[2, -1, 5] = math.nan

    hook = llama.register_forward_hook(poison)
    try:
        with pytest.raises(RuntimeError, match=r"step 0: .*row 2 has NaN in its logits$"):
            llama.generate(prompts, do_sample=True, custom_generate=sample, max_new_tokens=5)
    finally:
        hook.remove()


def test_many_failed_rows_are_counted(llama, prompts):
    class Fail(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return torch.full_like(scores, math.nan)

    with pytest.raises(RuntimeError, match=r"row 7 has .*; and 22 more rows$"):
        llama.generate(
            prompts.repeat(10, 1),
            do_sample=True,
            custom_generate=sample,
            max_new_tokens=5,
            logits_processor=LogitsProcessorList([Fail()]),
        )


def test_logits_of_finished_rows_do_not_matter(llama, prompts):
    """Row 1 ends at once; what the model makes of its padding is nobody's error."""

    class EndRow1(LogitsProcessor):
        def __call__(self, input_ids, scores):
            scores = scores.clone()
            scores[:, EOS] = -math.inf
            scores[1] = -math.inf
            scores[1, EOS] = 0.0
            return scores

    length = prompts.shape[1] + 1
    processors = LogitsProcessorList([EndRow1(), Overwrite(1, math.nan, from_length=length)])
    ids = llama.generate(
        prompts,
        do_sample=True,
        max_new_tokens=5,
        logits_processor=processors,
        custom_generate=sample,
    )
    assert ids[1, prompts.shape[1] :].tolist() == [EOS] + [PAD] * 4


def test_beams_are_refused(llama, prompts):
    with pytest.raises(ValueError, match=r"^num_beams: expected 1 for sampling, got 3$"):
        llama.generate(prompts, num_beams=3, max_new_tokens=5, custom_generate=sample)
