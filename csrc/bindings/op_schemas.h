// The schema of every op, and whether it has only CPU kernels. python/lmdecode/_fakes has a fake
// for each op; tests/test_registration.py checks that.
#pragma once

#include <cstddef>

namespace lmdecode {

// kCpuOnly: CUDA tensors raise an error (refused_tensors.cpp). Other ops have their CUDA kernels in
// _C_cuda.
enum class Devices { kAny, kCpuOnly };

struct OpSchema {
  const char* text;
  Devices devices = Devices::kAny;
};

inline constexpr OpSchema kOpSchemas[] = {
    // A parameter is one number for all rows, or instead a tensor with one number for each row.
    // `seed` rows < 0 draw no noise; without `seed`, int_seed >= 0 gives each row its own seed.
    // kept_logits and logprob are None if not requested.
    {"top_k_top_p_sample(Tensor logits, SymInt top_k, Tensor? top_k_rows, float top_p, "
     "Tensor? top_p_rows, float min_p, Tensor? min_p_rows, float temperature, Tensor? "
     "temperature_rows, Tensor? q, Tensor? seed, Tensor? position, float eps, bool "
     "return_logits, bool return_logprob, int dialect, SymInt int_seed=-1, SymInt "
     "int_position=0) -> (Tensor index, Tensor kept_logits, "
     "Tensor logprob, Tensor kept_count, Tensor status)"},
    {"top_k_top_p_sample.out(Tensor logits, SymInt top_k, Tensor? top_k_rows, float top_p, "
     "Tensor? top_p_rows, float min_p, Tensor? min_p_rows, float temperature, Tensor? "
     "temperature_rows, Tensor? q, Tensor? seed, Tensor? position, float eps, int dialect, "
     "SymInt int_seed=-1, SymInt int_position=0, *, Tensor(a!) index, Tensor(b!)? kept_logits, "
     "Tensor(c!)? logprob, Tensor(d!) "
     "kept_count, Tensor(e!) status) -> ()"},
    // tokens [batch, capacity], lengths [batch]. Returns [batch, num_tokens] int64: the tokens that
    // follow the earliest occurrence of the longest n-gram at the end of a text, then -1.
    {"prompt_lookup(Tensor tokens, Tensor lengths, SymInt num_tokens, int max_ngram) -> Tensor",
     Devices::kCpuOnly},
    // Places among the 64-bit numbers of a SamplerRow, and the flags of a step.
    {"sampler_layout() -> (int active, int length, int output_length, int mu, int integers, int "
     "seed, int keeps_text, int numbers, int accept, int raw_logprobs, int stage_counts)"},
    {"sampler_row_bytes(int vocab, int text_capacity, int rules_capacity) -> int"},
    // state [batch, bytes] uint8: rows of csrc/sampling/sampler_state.h, of these sizes. Numbers
    // and rules: the fields of SamplerIntegers, SamplerNumbers and SamplerRules there.
    {"sampler_insert_(Tensor(a!) state, int vocab, int text_capacity, int rules_capacity, int row, "
     "Tensor integers, Tensor numbers, Tensor rules, Tensor prompt) -> ()",
     Devices::kCpuOnly},
    {"sampler_accept_(Tensor(a!) state, int vocab, int text_capacity, int rules_capacity, int row, "
     "Tensor tokens) -> ()",
     Devices::kCpuOnly},
    {"sampler_rewind_(Tensor(a!) state, int vocab, int text_capacity, int rules_capacity, int row, "
     "int count) -> ()",
     Devices::kCpuOnly},
    // The rows of `from`, with more room in `to`.
    {"sampler_copy_(Tensor(a!) to, int text_capacity, int rules_capacity, Tensor from_state, int "
     "from_text_capacity, int from_rules_capacity, int vocab) -> ()",
     Devices::kCpuOnly},
    // results [bytes] uint8: index, rank, top_ids, logprob, top_logprobs, kept_count, stage counts
    // and status of all rows, concatenated. flags: of sampler_layout. num_logprobs -1: none.
    {"sampler_step_(Tensor(a!) state, Tensor logits, Tensor? bitmask, Tensor(b!) results, "
     "Tensor(c!)? kept_logits, Tensor(d!)? kept_ids, Tensor(e!)? kept_logprobs, int vocab, int "
     "text_capacity, int rules_capacity, int num_logprobs, int flags) -> ()"},
    {"sampler_verify_(Tensor(a!) state, Tensor logits, Tensor? bitmask, Tensor draft, Tensor? "
     "parents, Tensor? num_draft, Tensor? draft_logits, Tensor(b!) results, Tensor(c!) tokens, "
     "Tensor(d!) path, Tensor(e!) num_accepted, int vocab, int text_capacity, int "
     "rules_capacity, bool rejection) -> ()"},
    // Rows are beams. num_beams of them make a request, or, where row_offsets [requests + 1] is
    // given, rows row_offsets[r] to row_offsets[r + 1] make request r. Outputs are [requests,
    // num_candidates], status [requests]; log_probs are the scores less the beam scores.
    {"log_softmax_top_k(Tensor logits, Tensor beam_scores, SymInt num_candidates, SymInt "
     "num_beams, Tensor? row_offsets) -> (Tensor scores, Tensor tokens, Tensor beams, Tensor "
     "status, Tensor log_probs)"},
    // The same after the processors of csrc/beam/logits_processors.h. A parameter is one number for
    // all requests, or instead a tensor with one number for each.
    {"log_softmax_top_k.processed(Tensor logits, Tensor beam_scores, SymInt num_candidates, "
     "SymInt num_beams, Tensor? row_offsets, Tensor? sequences, Tensor? lengths, float "
     "repetition_penalty, Tensor? repetition_penalties, SymInt no_repeat_ngram_size, Tensor? "
     "no_repeat_ngram_sizes, Tensor? end_tokens, SymInt min_length, Tensor? min_lengths, "
     "Tensor? suppressed_tokens, Tensor? forced_tokens, Tensor? diversity_tokens, float "
     "diversity_penalty, Tensor? diversity_penalties, Tensor? bias, Tensor? token_bitmask) "
     "-> (Tensor scores, Tensor tokens, Tensor beams, Tensor status, Tensor log_probs)"},
    // The same with rows that a trie constrains (csrc/beam/token_trie.h): its tokens [nodes] and
    // child_begin [nodes + 1], and the node of each row, all int32.
    {"log_softmax_top_k.trie(Tensor logits, Tensor beam_scores, SymInt num_candidates, "
     "SymInt num_beams, Tensor? row_offsets, Tensor? sequences, Tensor? lengths, float "
     "repetition_penalty, Tensor? repetition_penalties, SymInt no_repeat_ngram_size, Tensor? "
     "no_repeat_ngram_sizes, Tensor? end_tokens, SymInt min_length, Tensor? min_lengths, "
     "Tensor? suppressed_tokens, Tensor? forced_tokens, Tensor? diversity_tokens, float "
     "diversity_penalty, Tensor? diversity_penalties, Tensor? bias, Tensor? token_bitmask, "
     "Tensor trie_tokens, Tensor child_begin, Tensor nodes) -> (Tensor scores, Tensor tokens, "
     "Tensor beams, Tensor status, Tensor log_probs)"},
    // A trie of sequences: sequence i is tokens[offsets[i]:offsets[i + 1]], both int64. Returns its
    // tokens [nodes] and child_begin [nodes + 1], int32, and ends [nodes] uint8: 1 if a sequence
    // ends at the node.
    {"trie_build(Tensor tokens, Tensor offsets) -> (Tensor tokens, Tensor child_begin, Tensor "
     "ends)",
     Devices::kCpuOnly},
    // The nodes that tokens [n] int64 lead to from nodes [n] int32, -1 if none.
    {"trie_step(Tensor trie_tokens, Tensor child_begin, Tensor nodes, Tensor tokens) -> Tensor"},
    // state: the 14 tensors of lmdecode.BeamState, parameters: the 8 of lmdecode.BeamParameters.
    // rows: number of rows of the next beams, the last element of row_offsets; below 0 if that can
    // be read, or if row_offsets is not given.
    {"beam_step(Tensor(a!)[] state, Tensor[] parameters, Tensor scores, Tensor tokens, "
     "Tensor beams, Tensor? log_probs, Tensor? status, Tensor? slots, Tensor? row_offsets, "
     "Tensor? parent_offsets, Tensor? sequences, Tensor? stopped, Tensor? bonus, int rules, "
     "SymInt rows) -> (Tensor scores, Tensor tokens, Tensor parents, Tensor decisions)"},
    // A step of any searches, from logits [rows, vocab] to the next beams: rules, candidates, next
    // beams, nodes of tries. searches [n, 9]: the fields of SearchOfStep (csrc/beam/search_step.h),
    // passes: the three fields of PassOfStep; rules: as in decoding_steps_, a row for each
    // rule_row, where empty tensors are rules that are off; nodes [slots, beams] int32.
    // fills_missing: with the rules "scorer" missing candidates continue too; greedy: the one
    // candidate of the one beam is the largest logit. trace: six tensors that receive the
    // candidates, or none. Returns tokens and parents [next_rows], and the state of each search: 0
    // unfinished, 1 done, 2 failed.
    {"beam_search_step_(Tensor logits, Tensor(a!)[] state, Tensor[] parameters, Tensor[] rules, "
     "Tensor searches, Tensor(b!) nodes, int[] passes, int num_candidates, SymInt next_rows, "
     "Tensor? token_bitmask, Tensor? bonus, bool fills_missing, bool greedy, Tensor(c!)[] trace) "
     "-> (Tensor tokens, Tensor parents, Tensor ended)"},
    {"beam_finalize(Tensor(a!)[] state, Tensor[] parameters, SymInt num_return_sequences, "
     "int num_groups, Tensor? slots, Tensor? sequences, Tensor? scores, bool add_open, int "
     "rules) -> (Tensor sequences, Tensor lengths, Tensor scores, Tensor log_probs, Tensor "
     "beam_indices, Tensor places)"},
    // Row r along batch_dim becomes the former row parents[r]; with a length, only its first
    // `length` positions along length_dim.
    {"reorder_cache_(Tensor(a!)[] tensors, Tensor parents, int batch_dim, int? length_dim, "
     "SymInt? length) -> ()"},
    // Row r of the index [rows, capacity] becomes the former row parents[r] up to its length, and
    // its entry at the length becomes r. length_rows [rows], if given, replaces length.
    {"update_beam_indirection_(Tensor(a!) indirection, Tensor parents, SymInt length, "
     "Tensor? length_rows) -> ()"},
    // Writes tokens k [rows, heads, tokens, ...] and v to their slots of a ring: keys [rows, heads,
    // slots, ...] and values. The first token has the position `position`, in row r
    // position_rows[r].
    {"ring_cache_append_(Tensor(a!) keys, Tensor(b!) values, Tensor k, Tensor v, SymInt "
     "position, Tensor? position_rows, SymInt num_sink_tokens) -> ()"},
    // The block table of a paged cache, on the CPU: lmdecode.BlockTable owns these tensors, all
    // int32: block_table [rows, max_blocks], lengths [rows], ref_counts and free_blocks
    // [num_blocks], counters [3]: free blocks, copies, missing blocks. copies [rows, 3] (source,
    // target, positions) and pools [num_blocks, heads, block_size, dim] as in copy_blocks_.
    {"block_table_append_(Tensor(a!) block_table, Tensor(b!) lengths, Tensor(c!) ref_counts, "
     "Tensor(d!) free_blocks, Tensor(e!) counters, Tensor(f!) copies, Tensor num_tokens, int "
     "block_size) -> ()"},
    {"block_table_reorder_(Tensor(a!) block_table, Tensor(b!) lengths, Tensor(c!) "
     "ref_counts, Tensor(d!) free_blocks, Tensor(e!) counters, Tensor parents, int rows, int "
     "block_size) -> ()"},
    {"copy_blocks_(Tensor(a!)[] pools, Tensor copies) -> ()"},
    // Queries [B, Hq, S, D], keys and values [B, Hkv, Skv, ...]; with cu_seqlens [tokens, heads,
    // ...]. window and window_right: -1 for no bound; softcap 0: none. lse is None if not
    // requested.
    {"sliding_window_attention(Tensor q, Tensor k, Tensor v, SymInt window, SymInt "
     "window_right, float scale, float softcap, Tensor? sinks, Tensor? alibi_slopes, Tensor? "
     "q_positions, Tensor? kv_lengths, Tensor? cu_seqlens_q, Tensor? cu_seqlens_kv, Tensor? "
     "attn_mask, bool true_is_visible, Tensor? key_padding_mask, Tensor? block_table, "
     "Tensor? indirection, bool return_lse) -> (Tensor out, Tensor lse)"},
    {"sliding_window_decode(Tensor q, Tensor k, Tensor v, SymInt window, SymInt "
     "window_right, float scale, float softcap, Tensor? sinks, Tensor? alibi_slopes, Tensor? "
     "q_positions, Tensor? kv_lengths, Tensor? key_padding_mask, Tensor? block_table, "
     "Tensor? indirection, bool return_lse) -> (Tensor out, Tensor lse)"},
    // Outputs [B, H, S, D] or ragged [tokens, H, D], with lse [B, H, S] or [H, tokens].
    {"merge_attention_states(Tensor o1, Tensor lse1, Tensor o2, Tensor lse2) -> (Tensor out, "
     "Tensor lse)"},
    // weight [out_features, in_features]; format: a LinearFormat of csrc/linear/packed_linear.h, by
    // number. The packed tensor is in the order of the CPU capability in use.
    {"pack_linear(Tensor weight, int format) -> Tensor", Devices::kCpuOnly},
    // Into bytes of that size, aligned to 64.
    {"pack_linear.out(Tensor weight, int format, *, Tensor(a!) out) -> ()", Devices::kCpuOnly},
    // Converts any CPU capability's order of values to the current one's.
    {"repack_linear(Tensor packed) -> Tensor", Devices::kCpuOnly},
    // The floats of a packed weight, float32 [out_features, in_features].
    {"unpack_linear(Tensor packed, int out_features, int in_features, int format) -> Tensor",
     Devices::kCpuOnly},
    // a [batch, rows, inner] times b [batch, inner, columns], with the bits of packed_linear; the
    // format is 0 or 1.
    {"batched_matmul(Tensor a, Tensor b, int format) -> Tensor", Devices::kCpuOnly},
    // A weight that is already int4: weight uint8 [out_features, in_features], scales float16 and
    // zeros uint8 [out_features, groups]. The group size determines the format: 4, 5 or 6, but 3
    // for groups of 32 without zeros.
    {"pack_quantized_linear(Tensor weight, Tensor scales, Tensor? zeros) -> Tensor",
     Devices::kCpuOnly},
    // Blocks of a GGUF file: uint8 [out_features, bytes of a row], of the type with the file's
    // number. Converts to a packed weight, in the format of the type, or to float32 [out_features,
    // in_features].
    {"pack_gguf_linear(Tensor blocks, int type) -> Tensor", Devices::kCpuOnly},
    {"pack_gguf_linear.out(Tensor blocks, int type, *, Tensor(a!) out) -> ()", Devices::kCpuOnly},
    {"dequantize_gguf(Tensor blocks, int type) -> Tensor", Devices::kCpuOnly},
    // The type at a place of csrc/linear/gguf_blocks.h, zeros after the last: its name, a letter a
    // byte, the first lowest; weights and bytes of a block; its numbers in files and of its format;
    // weights that share a scale.
    {"gguf_type(int index) -> (int name, int weights, int bytes, int number, int format, int "
     "group)"},
    // activation(x W^T + bias) * multiplier + residual; x [..., in_features], multiplier and
    // residual [..., out_features].
    {"packed_linear(Tensor x, Tensor packed, int out_features, int format, Tensor? bias, int "
     "activation, Tensor? multiplier, Tensor? residual) -> Tensor",
     Devices::kCpuOnly},
    {"packed_linear.out(Tensor x, Tensor packed, int out_features, int format, Tensor? bias, "
     "int activation, Tensor? multiplier, Tensor? residual, *, Tensor(a!) out) -> ()",
     Devices::kCpuOnly},
    // x [..., in_features] in float32, bfloat16 or float16, as the bias and the result.
    {"packed_linear_rows(Tensor x, Tensor packed, int out_features, int format, Tensor? bias) -> "
     "Tensor",
     Devices::kCpuOnly},
    {"layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor", Devices::kCpuOnly},
    {"rms_norm(Tensor x, Tensor? weight, float eps) -> Tensor", Devices::kCpuOnly},
    // embedding [vocab, model_size]; weights: the memory of a packed decoder, which begins with its
    // record (model_record.h); state: the 14 tensors of a BeamState, parameters: the 8 of a
    // BeamParameters; rules: the tensors of TokenRules, and with tries the number of each slot's
    // trie, int64, -1 for none, then tokens and child_begin of each trie; caches: the tensors of
    // DecodingCaches; options: rules, greedy, num_groups, num_candidates, max_steps,
    // stop_when_done, chooses (else one step at most, up to the logits); logits [rows of caches,
    // vocab]: receives the last logits of each row; with [2, rows of caches, vocab], also the
    // values after the rules. Returns the number of steps, int64.
    {"decoding_steps_(Tensor embedding, Tensor weights, Tensor(a!)[] state, Tensor[] parameters, "
     "Tensor[] rules, Tensor(b!)[] caches, Tensor(c!) workspace, int[] options, Tensor(d!)? "
     "logits=None) -> Tensor",
     Devices::kCpuOnly},
    // sizes: slots, beams, capacity, num_groups, num_candidates, bans of a slot. Returns int64.
    {"decoding_workspace_bytes(Tensor weights, int[] sizes) -> Tensor", Devices::kCpuOnly},
    // Writes keys and values of memories [n, source, memory_size] of `requests` [n] to the caches.
    {"decoding_read_memory_(Tensor weights, Tensor(a!)[] caches, Tensor memory, Tensor lengths, "
     "Tensor requests) -> ()",
     Devices::kCpuOnly},
    // The encoder of an encoder-decoder model. embedding [vocab, model_size], or empty; weights: as
    // of a decoder; tokens [rows] or inputs [rows, model_size] of concatenated sequences; positions
    // [rows], row_begins [sequences + 1] int64. Returns [rows, model_size].
    {"encoder_forward(Tensor embedding, Tensor weights, Tensor? tokens, Tensor? inputs, Tensor "
     "positions, Tensor row_begins) -> Tensor",
     Devices::kCpuOnly},
    // A step of a decoder-only model. weights: the memory of a packed model, which begins with its
    // record; caches: six tensors for each of windows (csrc/bindings/causal_checks.h). tokens [n];
    // entries [m, 4]: sequence, count of tokens, is_prompt, num_logits. hidden_in, where the
    // weights have a projection of it, and hidden_out: [n, model_size]. Returns [num_logits,
    // vocab_size], the model's.
    {"causal_forward_(Tensor weights, Tensor(a!)[] caches, int[] windows, Tensor(b!) workspace, "
     "Tensor tokens, Tensor entries, int num_logits, int vocab_size, int max_rows, Tensor? "
     "hidden_in=None, Tensor(c!)? hidden_out=None) -> Tensor",
     Devices::kCpuOnly},
    // Steps of sequences that a sampler's rows follow, one entry each: causal_forward_ of the last
    // tokens [rows], then sampler_step_ with the flag accept. A step in which a row chooses one of
    // its ends, or fails, is the last, or the first that ends after so many seconds. results are
    // those of the last step, chosen [steps, rows] the tokens. Returns the number of steps. What a
    // later step has no room for is an error of causal_forward_: the steps before it are done.
    {"causal_steps_(Tensor weights, Tensor(a!)[] caches, int[] windows, Tensor(b!) workspace, "
     "Tensor tokens, Tensor entries, int max_rows, Tensor(c!) state, int text_capacity, int "
     "rules_capacity, Tensor(d!) results, Tensor ends, Tensor(e!) chosen, float seconds) -> Tensor",
     Devices::kCpuOnly},
    // sizes: max_rows, sequences, blocks of a sequence. Returns int64.
    {"causal_workspace_bytes(Tensor weights, int[] sizes) -> Tensor", Devices::kCpuOnly},
    // parents [sequences]; lengths [n, 2]: sequences, and their initial or truncated lengths.
    {"causal_caches_reorder_(Tensor(a!)[] caches, int[] windows, Tensor parents) -> ()",
     Devices::kCpuOnly},
    {"causal_caches_start_(Tensor(a!)[] caches, int[] windows, Tensor lengths) -> ()",
     Devices::kCpuOnly},
    {"causal_caches_truncate_(Tensor(a!)[] caches, int[] windows, Tensor lengths) -> ()",
     Devices::kCpuOnly},
    // options: beam_width, max_seq_len, start_id, end_id. Outputs int32, [max_seq_len, rows] twice
    // and [rows].
    {"faster_transformer_decoding_(Tensor embedding, Tensor weights, Tensor(a!)[] caches, int[] "
     "options) -> (Tensor output_ids, Tensor parent_ids, Tensor sequence_length)",
     Devices::kCpuOnly},
    // weights: of one layer. cache_rows, positions, requests: [rows] int32.
    {"decoder_layer(Tensor x, Tensor weights, Tensor relative_bias, Tensor(a!)[] caches, Tensor "
     "cache_rows, Tensor positions, Tensor requests) -> Tensor",
     Devices::kCpuOnly},
    {"gather_tree(Tensor step_ids, Tensor parent_ids, Tensor max_sequence_lengths, int "
     "end_token) -> Tensor",
     Devices::kCpuOnly},
    // cost [tokens, frames] float32; the first frame of each token, [tokens] int64.
    {"dynamic_time_warping(Tensor cost) -> Tensor", Devices::kCpuOnly},
    // The parts of a decoder step on a device other than matrix products; in plain torch on the CPU
    // (lmdecode.reference.decoder_step). Row r is cache row r; layouts of caches: DecodingCaches.
    // qkv [rows, 3, heads, head size], positions [rows] int32, out [rows, heads, head size].
    {"decoder_self_attention_(Tensor qkv, Tensor(a!) keys, Tensor(b!) values, Tensor table, "
     "Tensor positions, Tensor? bias, float scale, float denominator_epsilon, *, Tensor(c!) "
     "out) -> ()"},
    {"decoder_cross_attention(Tensor queries, Tensor keys, Tensor values, Tensor lengths, "
     "float scale, float denominator_epsilon, *, Tensor(a!) out) -> ()"},
    // key_value [requests, length, 2, heads, head size]
    {"decoder_cross_cache_(Tensor key_value, Tensor(a!) keys, Tensor(b!) values) -> ()"},
    {"decoder_add_norm_(Tensor(a!) x, Tensor? delta, Tensor? bias, Tensor? gamma, Tensor? "
     "beta, float epsilon, bool rms_norm, bool norm_first, *, Tensor(b!) out) -> ()"},
    {"decoder_embed(Tensor tokens, Tensor positions, Tensor embedding, Tensor? "
     "position_table, float scale, int position_offset, *, Tensor(a!) x) -> ()"},
    // activation: a number of lmdecode.linear.ACTIVATIONS
    {"decoder_activate_(Tensor(a!) up, Tensor? gate, int activation) -> ()"},
    // The CPU capability in use, by number: 0 default, 1 avx2, 2 avx512, 3 amx.
    {"cpu_capability() -> int"},
    // The capabilities of this build, a bit for each number; and those that this machine supports.
    {"cpu_capabilities() -> (int built, int usable)"},
};
inline constexpr size_t kOpCount = sizeof(kOpSchemas) / sizeof(kOpSchemas[0]);

}  // namespace lmdecode
