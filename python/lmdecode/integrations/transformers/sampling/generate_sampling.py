"""The decoding loop of ``generate()`` for sampling and greedy search, with one fused op a step."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from lmdecode.integrations.transformers._recorder import Recorder
from lmdecode.integrations.transformers.generate_call import (
    arguments_of_generate,
    behind_prompt,
    check_tries,
    ending,
    needs_synced_gpus,
    noise_of_rows,
    refuse_other_drafts,
    refuse_other_layers,
    refuse_other_modes,
    with_stop_strings,
)
from lmdecode.integrations.transformers.running_model import RunningModel
from lmdecode.integrations.transformers.sampling.loop import sample_tokens
from lmdecode.integrations.transformers.sampling.speculation import (
    Speculation,
    SpeculativeAssistant,
    SpeculativeDrafts,
    SpeculativeLookup,
    check_speculation,
    lookup_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
    from transformers._typing import GenerativePreTrainedModel
    from transformers.generation.streamers import BaseStreamer
    from transformers.generation.utils import (
        GenerateDecoderOnlyOutput,
        GenerateEncoderDecoderOutput,
    )


def sample(
    model: GenerativePreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool | None = None,
    streamer: BaseStreamer | None = None,
    *,
    seed: int | Sequence[int] | torch.Tensor | None = None,
    stop_strings: str | list[str] | None = None,
    tokenizer: Any = None,
    assistant_model: GenerativePreTrainedModel | None = None,
    inputs_tensor: torch.Tensor | None = None,
    **model_kwargs: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput:
    """Decode by sampling or greedily: ``model.generate(..., custom_generate=sample)``.

    The loop of ``GenerationMixin._sample`` of transformers 5.23, with its outputs, its stopping and
    its streaming. Where that copies the logits to float32, runs the warpers, a softmax and
    ``torch.multinomial``, this calls ``top_k_top_p_sample`` on the model's logits. The temperature,
    top-k, top-p and min-p warpers at the end of ``logits_processor`` become arguments of it. On the
    CPU, where penalties, biases, bans or other filters of transformers stand there too, one
    ``Sampler`` does it all. Every other processor is called as it is, before. Tokens have the
    distribution that transformers draws from, and greedy tokens are the same.
    ``prefix_allowed_tokens_fn`` may be a ``lmdecode.Trie`` of what may follow the prompt.

    With ``prompt_lookup_num_tokens`` or ``assistant_model`` of ``generate()``, for one sequence, a
    step reads draft tokens after the text, and takes those that are chosen. Given equal logits, the
    text is the same as without drafts.

    Parameters
    ----------
    model
        Any model with a language modelling head, decoder-only or encoder-decoder.
    input_ids
        [B, S] int64, the prompts (of the decoder), B including ``num_return_sequences``.
    logits_processor, stopping_criteria, generation_config
        As ``generate()`` prepares them.
    synced_gpus
        Run the model until every process is done. None: what ``generate()`` was given, or if that
        is None too, whether the weights are sharded over processes.
    streamer
        Gets each step's tokens, [B] on the CPU, and is ended, after an error too. None: what
        ``generate()`` was given.
    seed
        int, or one for each row, a list or [B] int64: the noise of a row is a function of its seed
        and of the token's position in its sequence, not of the other rows. One below 0 in a list or
        tensor makes its row greedy. None: drawn from torch's default generator of the device, so
        that ``torch.manual_seed`` makes a run repeatable. Without effect in greedy search.
        ``generate(seed=...)`` passes it through.
    stop_strings, tokenizer
        Texts at which a row ends, and the model's tokenizer, of ``generate()``. They are read from
        its arguments, not from a ``generation_config``, for which it finds no tokenizer.
    assistant_model
        A model of the same vocabulary, which drafts tokens with the noise of ``seed``. None: the
        one given to ``generate()``.
    inputs_tensor
        The input of ``generate()``, for an assistant's encoder; ``generate()`` passes it.
    **model_kwargs
        Arguments of the model's forward pass.

    Returns
    -------
    torch.Tensor or GenerateDecoderOnlyOutput or GenerateEncoderDecoderOutput
        [B, S + new tokens] int64; in the latter, for ``return_dict_in_generate``, ``scores`` are
        the processed and filtered logits, float32, -inf where filtered.

    Raises
    ------
    ValueError
        For ``num_beams`` > 1 and other modes of ``generate()`` that are not this loop (early exit,
        contrastive, DoLa), for an int ``seed`` < 0 and seeds for other than B rows, for
        ``stop_strings`` without a tokenizer, if a function around this one did not pass on the
        streamer of ``generate()``, for a ``Trie`` with tokens beyond the vocabulary, and for drafts
        of several sequences, with a cache that cannot take tokens back, or by an assistant of
        another vocabulary.
    TypeError
        For a ``seed`` of a wrong type, in greedy search too.
    RuntimeError
        If the logits of a row that is not finished have NaN, or nothing above -inf.
    """
    caller = arguments_of_generate(model, streamer)
    streamer = caller.streamer
    synced_gpus = caller.synced_gpus if synced_gpus is None else synced_gpus
    if synced_gpus is None:
        synced_gpus = needs_synced_gpus(model)
    with ending(streamer):
        refuse_other_modes(generation_config)
        refuse_other_layers(generation_config, "this loop runs all layers of a model")
        if assistant_model is None:
            assistant_model = caller.assistant_model
        if assistant_model is not None:
            refuse_other_drafts(generation_config, caller.assistant_tokenizer)
        tokenizer = caller.tokenizer if tokenizer is None else tokenizer
        stopping_criteria = with_stop_strings(stopping_criteria, stop_strings, tokenizer)
        noise = noise_of_rows(seed, input_ids, generation_config)
        logits_processor = behind_prompt(logits_processor, input_ids.shape[1])
        check_tries(logits_processor, model.config.get_text_config(decoder=True).vocab_size)
        of_decoder = model.config.is_encoder_decoder
        mask = model_kwargs.get("decoder_attention_mask" if of_decoder else "attention_mask")
        encoder_outputs = model_kwargs["encoder_outputs"] if of_decoder else None
        recorder = Recorder(model, generation_config, encoder_outputs)
        with RunningModel(
            model, generation_config, model_kwargs, recorder, synced_gpus=synced_gpus,
            optimizes=True,
        ) as running:  # fmt: skip
            running.speculation = _speculation(
                model, running.forward, input_ids, logits_processor, stopping_criteria,
                generation_config, synced_gpus, noise, assistant_model, inputs_tensor,
                model_kwargs,
            )  # fmt: skip
            sequences = sample_tokens(
                running, input_ids, logits_processor, stopping_criteria, generation_config,
                recorder, noise=noise, mask=mask, streamer=streamer,
            )  # fmt: skip
            running.wait_for_others(sequences)
        result = recorder.result(sequences, running.cache)
    if streamer is not None:
        streamer.end()
    return result


def _speculation(
    model: GenerativePreTrainedModel,
    forward: Any,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool,
    seed: int | torch.Tensor | None,
    assistant_model: GenerativePreTrainedModel | None,
    inputs_tensor: torch.Tensor | None,
    model_kwargs: dict[str, Any],
) -> Speculation | None:
    """Return the speculative decoding that ``generate()`` requests, or None.

    Without a seed the search is greedy.
    """
    _, lookup = lookup_of(generation_config, "sample")
    drafts: SpeculativeDrafts
    if lookup is not None:
        name = "prompt_lookup_num_tokens"
        check_speculation(name, model, input_ids, model_kwargs, synced_gpus)
        drafts = SpeculativeLookup(lookup, model.config.get_text_config().vocab_size)
    elif assistant_model is not None:
        name = "assistant_model"
        check_speculation(name, model, input_ids, model_kwargs, synced_gpus)
        noise = seed.tolist() if isinstance(seed, torch.Tensor) else seed
        drafts = SpeculativeAssistant(
            model,
            assistant_model,
            generation_config,
            logits_processor,
            model_kwargs,
            inputs_tensor,
            functools.partial(sample, seed=noise),
        )
    else:
        return None
    return Speculation(name, model, forward, drafts, model_kwargs, stopping_criteria.max_length)
