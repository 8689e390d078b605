// Rows of hidden features of a step's tokens: what another model computed, which a model for
// multi-token prediction reads, and what is behind the final norm.
// docs/reference/causal_models.md is the user's page.
#pragma once

#include "decoder/causal_workspace.h"

namespace lmdecode::decoder {

// w.x, which has the embeddings, becomes the projection of these and of params.hidden_in.
void project_hidden_rows(const CausalForwardParams& params, const CausalWorkspace& w,
                         const LayerBuffers& buffers, int64_t num_segments, int64_t rows);

// x [count, model_size], in place; nothing where the model has no such norm.
void apply_final_norm(const CausalModel& model, float* x, int64_t count);

// w.x, and params.hidden_out of it, get the final norm of all rows.
void write_hidden_rows(const CausalForwardParams& params, const CausalWorkspace& w,
                       int64_t num_segments, int64_t rows);

}  // namespace lmdecode::decoder
