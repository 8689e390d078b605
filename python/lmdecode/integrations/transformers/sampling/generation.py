"""The decoding loop of ``generate()`` for sampling and greedy search, with one fused op a step."""

from __future__ import annotations

import functools
import sys
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lmdecode._checks import check_int, dtype_name
from lmdecode.integrations.transformers._prefix_tries import behind_prompt, check_tries
from lmdecode.integrations.transformers._recorder import Recorder
from lmdecode.integrations.transformers._status import raise_for_status
from lmdecode.integrations.transformers.generate_call import (
    arguments_of_generate,
    ending,
    needs_synced_gpus,
    next_inputs,
    prefill,
    refuse_dropped_streamer,
    refuse_other_drafts,
    refuse_other_layers,
    refuse_other_modes,
    with_stop_strings,
)
from lmdecode.integrations.transformers.sampling.assistant import AssistantDrafts
from lmdecode.integrations.transformers.sampling.edits import Rows
from lmdecode.integrations.transformers.sampling.logits_process import as_op_logits
from lmdecode.integrations.transformers.sampling.plan import SamplingPlan, plan_sampling
from lmdecode.integrations.transformers.sampling.read_ahead import lookup_of
from lmdecode.integrations.transformers.sampling.row_sampler import RowSampler
from lmdecode.integrations.transformers.sampling.speculation import (
    Drafts,
    LookupDrafts,
    Speculation,
    check_speculation,
)
from lmdecode.sampling.ops import row_tensor, top_k_top_p_sample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
    from transformers._typing import GenerativePreTrainedModel
    from transformers.generation.streamers import BaseStreamer
    from transformers.generation.utils import (
        GenerateDecoderOnlyOutput,
        GenerateEncoderDecoderOutput,
    )


class _ChosenTokens(NamedTuple):
    """The tokens of one step.

    tokens and status are [B] int64 and uint8 (see ``top_k_top_p_sample``); scores, the processed
    logits, and logits, the model's own, are [B, V] float32, or None where not asked for.
    """

    tokens: torch.Tensor
    status: torch.Tensor
    scores: torch.Tensor | None
    logits: torch.Tensor | None


def _sample_from(
    logits: torch.Tensor,
    input_ids: torch.Tensor,
    plan: SamplingPlan,
    seed: int | torch.Tensor | None,
    position: int | torch.Tensor,
    keep_scores: bool,
    keep_logits: bool,
) -> _ChosenTokens:
    """Choose a token for every row of ``logits`` [B, V], a view of the model's in its dtype."""
    if plan.processors is not None or keep_logits or (keep_scores and not plan.stages):
        # Processors expect float32 of their own, and what is kept must not keep the whole prompt's
        # logits alive. In every other case the op reads the model's logits where they are.
        logits = logits.to(torch.float32, copy=True)
    scores = as_op_logits(logits)
    if plan.processors is not None:
        scores = as_op_logits(plan.processors(input_ids, logits))  # type: ignore[arg-type]
    if plan.greedy:
        drawn = top_k_top_p_sample(scores, temperature=0.0, dialect="transformers")
    else:
        drawn = top_k_top_p_sample(
            scores,
            **plan.stages,
            seed=seed,
            position=position,
            return_logits=keep_scores and bool(plan.stages),
            dialect="transformers",
        )
    processed = drawn.kept_logits if plan.stages else scores
    return _ChosenTokens(
        drawn.index,
        drawn.status,
        processed if keep_scores else None,
        logits if keep_logits else None,
    )


def _mask_name(model: GenerativePreTrainedModel) -> str:
    return "decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask"


def _sample_by_rules(
    logits: torch.Tensor,
    input_ids: torch.Tensor,
    plan: SamplingPlan,
    sampler: RowSampler,
    rows: Rows,
    keep_scores: bool,
    keep_logits: bool,
) -> _ChosenTokens:
    """Choose a token for every row of ``logits`` [B, V] as ``plan.sampler`` says."""
    assert plan.sampler is not None
    processors = plan.sampler.processors
    if processors is not None or keep_logits:
        logits = logits.to(torch.float32, copy=True)
    scores = logits
    if processors is not None:
        scores = processors(input_ids, logits)  # type: ignore[arg-type]
    drawn = sampler.sample(as_op_logits(scores), input_ids, plan.sampler.arguments, rows)
    return _ChosenTokens(
        drawn.index,
        drawn.status.clone(),
        drawn.kept_logits.clone() if keep_scores and drawn.kept_logits is not None else None,
        logits if keep_logits else None,
    )


def _padding(
    input_ids: torch.Tensor, position: int | torch.Tensor, model_kwargs: dict[str, Any], name: str
) -> int | torch.Tensor | None:
    """Return the tokens of padding before each row, < 0: tokens in the cache alone; None: unknown.

    ``position`` is what ``_first_position`` gives, [B] where the mask called ``name`` gave it.
    """
    length = input_ids.shape[1]
    if not isinstance(position, torch.Tensor):
        return length - position
    mask = model_kwargs[name]
    ones = mask != 0
    if mask.shape[1] != length or not bool((ones[:, 1:] >= ones[:, :-1]).all()):
        return None
    return length - position


def _first_position(
    model: GenerativePreTrainedModel,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> int | torch.Tensor:
    """Return the length of the sequences, padding not counted: int or [B] int64.

    Noise is a function of it, so a row draws the same tokens whatever it was padded to.
    """
    mask = model_kwargs.get(_mask_name(model))
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        return (mask != 0).sum(dim=-1).to(input_ids.device)
    # generate() drops a mask of ones and notes its length, which is not that of input_ids where
    # the prompt came as embeddings or is in the cache already.
    return getattr(generation_config, "_mask_length", input_ids.shape[1])


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
    step reads tokens that are proposed behind the text, and takes those that are chosen. The text
    is that without, given equal logits.

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
        Of the same vocabulary: writes what is proposed, with the noise of ``seed``. None: what
        ``generate()`` was given.
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
        ``stop_strings`` without a tokenizer, where a function around this one was given no
        streamer though ``generate()`` was, for a ``Trie`` with tokens beyond the vocabulary, and
        where tokens are to be proposed for several
        sequences, with a cache that cannot take them back, or by an assistant of another
        vocabulary.
    TypeError
        For a ``seed`` that is none, in greedy search too.
    RuntimeError
        If the logits of a row that is not finished have NaN, or nothing above -inf.
    """
    caller = arguments_of_generate(sys._getframe(1))
    streamer = caller.streamer if streamer is None else streamer
    if streamer is None:
        refuse_dropped_streamer(sys._getframe(1), model)
    synced_gpus = caller.synced_gpus if synced_gpus is None else synced_gpus
    if synced_gpus is None:
        synced_gpus = needs_synced_gpus(model)
    with ending(streamer):
        refuse_other_modes(generation_config)
        refuse_other_layers(generation_config, "this loop runs all layers of a model")
        if assistant_model is None:
            assistant_model = caller.assistant_model
        if assistant_model is not None:
            refuse_other_drafts(generation_config, caller)
        tokenizer = caller.tokenizer if tokenizer is None else tokenizer
        result = _decode(
            model,
            input_ids,
            logits_processor,
            with_stop_strings(stopping_criteria, stop_strings, tokenizer),
            generation_config,
            synced_gpus,
            streamer,
            seeds_of_rows(seed, input_ids, generation_config),
            assistant_model,
            caller.inputs_tensor,
            model_kwargs,
        )
    if streamer is not None:
        streamer.end()
    return result


def seeds_of_rows(
    seed: int | Sequence[int] | torch.Tensor | None,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
) -> int | torch.Tensor | None:
    """Return the noise as the op takes it; raise for what is none, or does not fit the rows.

    Greedy search, which the op does without noise, gets what it asks for checked here too.
    """
    if seed is None:
        return None
    if isinstance(seed, (list, tuple)):
        seed = row_tensor("seed", seed, torch.int64, input_ids.device)
    elif not isinstance(seed, torch.Tensor) or not seed.dim():
        number = check_int("sample", "seed", seed, kind="an int, a list or a tensor of them")
        if number < 0:
            raise ValueError(f"seed: expected an int >= 0, got {number}")
        return number
    if seed.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"seed: expected a tensor of int64 or int32, got {dtype_name(seed)}")
    rows, results = input_ids.shape[0], generation_config.num_return_sequences or 1
    if seed.shape != (rows,):
        reason = ""
        if results > 1:
            reason = f", as num_return_sequences = {results} makes {results} rows of each prompt"
        raise ValueError(
            f"seed: expected one number, or one for each of {rows} rows{reason}; "
            f"got {list(seed.shape)}"
        )
    return seed


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
    """Return what reads ahead, if ``generate()`` was asked for it; ``seed`` None is greedy."""
    _, lookup = lookup_of(generation_config, "sample")
    drafts: Drafts
    if lookup is not None:
        name = "prompt_lookup_num_tokens"
        check_speculation(name, model, input_ids, model_kwargs, synced_gpus)
        drafts = LookupDrafts(lookup, model.config.get_text_config().vocab_size)
    elif assistant_model is not None:
        name = "assistant_model"
        check_speculation(name, model, input_ids, model_kwargs, synced_gpus)
        noise = seed.tolist() if isinstance(seed, torch.Tensor) else seed
        drafts = AssistantDrafts(
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


def _decode(
    model: GenerativePreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool,
    streamer: BaseStreamer | None,
    seed: int | torch.Tensor | None,
    assistant_model: GenerativePreTrainedModel | None,
    inputs_tensor: torch.Tensor | None,
    model_kwargs: dict[str, Any],
) -> torch.Tensor | GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput:
    """Run the loop of ``sample``, whose arguments these are."""
    device, batch = input_ids.device, input_ids.shape[0]
    is_encoder_decoder = model.config.is_encoder_decoder
    logits_processor = behind_prompt(logits_processor, input_ids.shape[1])
    check_tries(logits_processor, model.config.get_text_config(decoder=True).vocab_size)
    pad_token = generation_config._pad_token_tensor
    if pad_token is not None:  # with inputs on several devices it may be on another one
        pad_token = pad_token.to(device)
    has_eos = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    do_sample = bool(generation_config.do_sample)
    if seed is None and do_sample:
        seed = torch.randint(0, 2**63 - 1, (batch,), device=device)
    position = _first_position(model, input_ids, generation_config, model_kwargs)
    padding = _padding(input_ids, position, model_kwargs, _mask_name(model))
    kept: dict[tuple[str, int], Any] = {}
    unfinished = torch.ones(batch, dtype=torch.int64, device=device)
    recorder = Recorder(model, generation_config, model_kwargs)
    keeps = {
        "keep_scores": recorder.scores is not None,
        "keep_logits": recorder.logits is not None,
    }
    noise = seed if do_sample else None
    sampler = RowSampler(noise, keeps["keep_scores"])

    forward = model
    if model._valid_auto_compile_criteria(model_kwargs, generation_config):
        forward = model.get_compiled_call(generation_config.compile_config)
    speculation = _speculation(
        model, forward, input_ids, logits_processor, stopping_criteria, generation_config,
        synced_gpus, noise, assistant_model, inputs_tensor, model_kwargs,
    )  # fmt: skip
    outputs = prefill(model, input_ids, generation_config, model_kwargs)

    finished, steps = False, 0
    reading = nullcontext() if speculation is None else closing(speculation)
    with model._optimize_model_for_decode(), reading:
        while model._has_unfinished_sequences(finished, synced_gpus, device=device):
            if outputs is None and speculation is not None:
                outputs = speculation.outputs(input_ids, model_kwargs)
            elif outputs is None:
                inputs = next_inputs(model, input_ids, model_kwargs)
                outputs = forward(**inputs, return_dict=True)
            model_kwargs = model._update_model_kwargs_for_generation(
                outputs, model_kwargs, is_encoder_decoder=is_encoder_decoder
            )
            if finished:  # the other processes are not: the model runs for their sake
                outputs = None
                continue

            logits = outputs.logits[:, -1].to(device)
            rows = None
            if device.type == "cpu" and padding is not None:
                rows = Rows(input_ids.shape[1], logits.shape[1], padding, kept)
            plan = plan_sampling(logits_processor, do_sample, rows)
            if plan.sampler is not None and rows is not None:
                step = _sample_by_rules(logits, input_ids, plan, sampler, rows, **keeps)
            else:
                step = _sample_from(logits, input_ids, plan, seed, position + steps, **keeps)
            recorder.record(outputs, step.scores, step.logits)
            outputs = logits = None  # the logits of a long prompt must not live on

            tokens = step.tokens
            if has_eos and pad_token is not None:
                tokens = torch.where(unfinished.bool(), tokens, pad_token)
            input_ids = torch.cat([input_ids, tokens[:, None]], dim=-1)
            status = step.status * unfinished
            unfinished = unfinished & ~stopping_criteria(input_ids, recorder.scores)
            # The one point of a step at which the host waits for the device.
            failed, any_unfinished = torch.stack((status.max(), unfinished.max())).tolist()
            if failed:
                raise_for_status(status.tolist(), steps)
            finished = not any_unfinished
            if streamer is not None:
                streamer.put(tokens.cpu())
            steps += 1

    return recorder.result(input_ids, model_kwargs)
