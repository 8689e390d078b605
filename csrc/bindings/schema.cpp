// The schema of every op. python/lmdecode/_fakes.py has a fake for each, tests/test_registration.py
// checks that.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(lmdecode, m) {
  // Parameters come as one number for all rows and, instead of it, as a tensor of one number a row.
  // `seed` rows < 0 draw no noise. kept_logits and logprob are None where not asked for.
  m.def(
      "top_k_top_p_sample(Tensor logits, SymInt top_k, Tensor? top_k_rows, float top_p, Tensor? "
      "top_p_rows, "
      "float min_p, Tensor? min_p_rows, float temperature, Tensor? temperature_rows, Tensor? q, "
      "Tensor? seed, "
      "Tensor? position, float eps, bool return_logits, bool return_logprob, int dialect) "
      "-> (Tensor index, Tensor kept_logits, Tensor logprob, Tensor kept_count, Tensor status)");
  m.def(
      "top_k_top_p_sample.out(Tensor logits, SymInt top_k, Tensor? top_k_rows, float top_p, "
      "Tensor? "
      "top_p_rows, "
      "float min_p, Tensor? min_p_rows, float temperature, Tensor? temperature_rows, Tensor? q, "
      "Tensor? seed, "
      "Tensor? position, float eps, int dialect, *, Tensor(a!) index, Tensor(b!)? kept_logits, "
      "Tensor(c!)? logprob, "
      "Tensor(d!) kept_count, Tensor(e!) status) -> ()");
  // Rows are beams. num_beams of them make a request, or, where row_offsets [requests + 1] is
  // given, rows row_offsets[r] to row_offsets[r + 1] make request r. Outputs are [requests,
  // num_candidates], status [requests].
  m.def(
      "log_softmax_top_k(Tensor logits, Tensor beam_scores, SymInt num_candidates, SymInt "
      "num_beams, Tensor? row_offsets) -> (Tensor scores, Tensor tokens, Tensor beams, Tensor "
      "status)");
  // Row r along batch_dim becomes what row parents[r] was; with a length only that many positions
  // along length_dim.
  m.def(
      "reorder_cache_(Tensor(a!)[] tensors, Tensor parents, int batch_dim, int? length_dim, "
      "SymInt? length) -> ()");
  // Queries [B, Hq, S, D], keys and values [B, Hkv, Skv, ...]; with cu_seqlens [tokens, heads,
  // ...]. window and window_right: -1 for no bound; softcap 0: none. lse is None where not asked
  // for.
  m.def(
      "sliding_window_attention(Tensor q, Tensor k, Tensor v, SymInt window, SymInt window_right, "
      "float scale, float softcap, Tensor? sinks, Tensor? alibi_slopes, Tensor? q_positions, "
      "Tensor? kv_lengths, Tensor? cu_seqlens_q, Tensor? cu_seqlens_kv, Tensor? attn_mask, bool "
      "true_is_visible, Tensor? key_padding_mask, bool return_lse) -> (Tensor out, Tensor lse)");
  m.def(
      "sliding_window_decode(Tensor q, Tensor k, Tensor v, SymInt window, SymInt window_right, "
      "float scale, float softcap, Tensor? sinks, Tensor? alibi_slopes, Tensor? q_positions, "
      "Tensor? kv_lengths, Tensor? key_padding_mask, bool return_lse) -> (Tensor out, Tensor "
      "lse)");
  // Outputs [B, H, S, D] or ragged [tokens, H, D], with lse [B, H, S] or [H, tokens].
  m.def(
      "merge_attention_states(Tensor o1, Tensor lse1, Tensor o2, Tensor lse2) -> (Tensor out, "
      "Tensor lse)");
  // The CPU capability in use, by number: 0 default, 1 avx2, 2 avx512.
  m.def("cpu_capability() -> int");
}
