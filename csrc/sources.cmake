# What csrc is compiled from, and how its kernels are compiled for each level: the one list, which the build of the
# libraries (CMakeLists.txt) and that of the C++ tests (tests/cpp/CMakeLists.txt) both include.

# ---- CPU kernels: each file compiled once for each level (csrc/simd/vec.h)

set(KERNEL_SOURCES
  attention/merge_attention_states_cpu_kernel.cpp
  attention/sliding_window_attention_cpu_kernel.cpp
  attention/sliding_window_decode_cpu_kernel.cpp
  beam/greedy_choice_cpu_kernel.cpp
  beam/log_softmax_top_k_cpu_kernel.cpp
  beam/processor_rows_cpu_kernel.cpp
  decoder/causal_rows_cpu_kernel.cpp
  decoder/delta_rule_cpu_kernel.cpp
  decoder/experts_cpu_kernel.cpp
  decoder/mamba2_cpu_kernel.cpp
  decoder/short_convolution_cpu_kernel.cpp
  decoder/step_attention_cpu_kernel.cpp
  kv_cache/reorder_cache_cpu_kernel.cpp
  linear/norms_cpu_kernel.cpp
  linear/packed_linear_cpu_kernel.cpp
  sampling/sampler_cpu_kernel.cpp
  sampling/top_k_top_p_sample_cpu_kernel.cpp)
# Those that also multiply bfloat16 pairs, where the processor can.
set(BF16_KERNEL_SOURCES
  attention/sliding_window_attention_cpu_kernel.cpp
  attention/sliding_window_decode_cpu_kernel.cpp
  linear/packed_linear_cpu_kernel.cpp)
# Those that also multiply quads of bytes, where the processor can.
set(VNNI_KERNEL_SOURCES linear/packed_linear_cpu_kernel.cpp)
# Those that also multiply tiles, where the processor can.
set(AMX_KERNEL_SOURCES
  attention/sliding_window_attention_cpu_kernel.cpp
  attention/sliding_window_decode_cpu_kernel.cpp
  linear/packed_linear_cpu_kernel.cpp)

# ---- everything else of the CPU, but for the store: rows to threads, plans, the loop of decoding

set(CPU_SOURCES
  attention/merge_attention_states_cpu.cpp
  attention/sliding_window_attention_cpu.cpp
  attention/sliding_window_decode_cpu.cpp
  beam/beam_finalize_cpu.cpp
  beam/beam_step_cpu.cpp
  beam/greedy_choice.cpp
  beam/log_softmax_top_k_cpu.cpp
  beam/processor_edits.cpp
  beam/search_step_cpu.cpp
  beam/timestamp_rule.cpp
  beam/token_trie_build.cpp
  decoder/causal_forward.cpp
  decoder/decoder_forward.cpp
  decoder/decoder_layer_cpu.cpp
  decoder/decoding_cpu.cpp
  decoder/decoding_read_memory_cpu.cpp
  decoder/encoder_forward_cpu.cpp
  decoder/experts_cpu.cpp
  decoder/faster_transformer_search.cpp
  decoder/per_layer_input_cpu.cpp
  decoder/state_layer_cpu.cpp
  decoder/step_attention_cpu.cpp
  kv_cache/block_table.cpp
  kv_cache/copy_blocks_cpu.cpp
  kv_cache/reorder_cache_cpu.cpp
  kv_cache/ring_cache_append_cpu.cpp
  kv_cache/state_slots.cpp
  kv_cache/update_beam_indirection_cpu.cpp
  linear/gguf_blocks.cpp
  linear/norms_cpu.cpp
  linear/packed_linear_cpu.cpp
  linear/repack_linear.cpp
  sampling/prompt_lookup_cpu.cpp
  sampling/sampler_state_cpu.cpp
  sampling/sampler_step_cpu.cpp
  sampling/sampler_text_rules.cpp
  sampling/top_k_top_p_sample_cpu.cpp
  simd/cpu_capability.cpp)

# ---- the bindings of ops: in _C for CPU tensors and in _C_cuda for CUDA tensors; in _C alone; in _C_cuda alone

set(BINDING_SOURCES
  bindings/beam_finalize.cpp
  bindings/beam_search_step.cpp
  bindings/beam_step.cpp
  bindings/copy_blocks.cpp
  bindings/log_softmax_top_k.cpp
  bindings/merge_attention_states.cpp
  bindings/reorder_cache.cpp
  bindings/ring_cache_append.cpp
  bindings/sampler_step.cpp
  bindings/sliding_window_attention.cpp
  bindings/top_k_top_p_sample.cpp
  bindings/trie_step.cpp
  bindings/update_beam_indirection.cpp)
set(CPU_BINDING_SOURCES
  bindings/block_table.cpp
  bindings/causal_caches.cpp
  bindings/causal_checks.cpp
  bindings/causal_forward.cpp
  bindings/cpu_capability.cpp
  bindings/decoder_checks.cpp
  bindings/decoder_layer.cpp
  bindings/decoding_steps.cpp
  bindings/dynamic_time_warping.cpp
  bindings/encoder_forward.cpp
  bindings/faster_transformer.cpp
  bindings/model_record.cpp
  bindings/norms.cpp
  bindings/packed_linear.cpp
  bindings/prompt_lookup.cpp
  bindings/refused_tensors.cpp
  bindings/sampler.cpp
  bindings/schema.cpp
  bindings/trie_build.cpp)
set(CUDA_BINDING_SOURCES bindings/decoder_step_cuda.cpp)

# ---- CUDA kernels

set(CUDA_KERNEL_SOURCES
  attention/merge_attention_states_cuda.cu
  attention/sliding_window_attention_cuda.cu
  attention/sliding_window_attention_rule_cuda.cu
  attention/sliding_window_decode_cuda.cu
  beam/beam_finalize_cuda.cu
  beam/beam_step_cuda.cu
  beam/greedy_rows_cuda.cu
  beam/log_softmax_top_k_cuda.cu
  beam/search_step_cuda.cu
  beam/trie_cuda.cu
  decoder/step_attention_cuda.cu
  decoder/step_rows_cuda.cu
  kv_cache/copy_blocks_cuda.cu
  kv_cache/reorder_cache_cuda.cu
  kv_cache/ring_cache_append_cuda.cu
  kv_cache/update_beam_indirection_cuda.cu
  sampling/sampler_cuda.cu
  sampling/top_k_top_p_sample_cuda.cu)

# ---- the persistent KV store: no torch, but SQLite

set(STORE_SOURCES
  store/address_map.cpp
  store/bus_error.cpp
  store/crc32c.cpp
  store/free_areas.cpp
  store/group_commit.cpp
  store/index_database.cpp
  store/plane_copy.cpp
  store/posix_file_system.cpp
  store/prefix_index.cpp
  store/sha256.cpp
  store/slab_files.cpp
  store/slot_layout.cpp
  store/slot_space.cpp
  store/store_engine.cpp
  store/store_erase.cpp
  store/store_load.cpp
  store/store_put.cpp
  store/store_transfer.cpp
  store/token_chain.cpp)

foreach(list KERNEL_SOURCES BF16_KERNEL_SOURCES VNNI_KERNEL_SOURCES AMX_KERNEL_SOURCES CPU_SOURCES BINDING_SOURCES
             CPU_BINDING_SOURCES CUDA_BINDING_SOURCES CUDA_KERNEL_SOURCES STORE_SOURCES)
  list(TRANSFORM ${list} PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
endforeach()

# gcc 12 takes the undefined operand inside its own AVX-512 intrinsics for an uninitialised variable.
set(AVX512_WARNINGS -Wno-maybe-uninitialized -Wno-uninitialized)
set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/store/crc32c.cpp PROPERTIES
                            COMPILE_OPTIONS "${AVX512_WARNINGS}")

# ---- the levels that this processor family has: of each, its kernel files and its flags

set(LEVELS default_)
set(LEVEL_SOURCES_default_ ${KERNEL_SOURCES})
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  list(APPEND LEVELS avx2 avx512 avx512_bf16 avx512_vnni avx512_amx)
  set(LEVEL_SOURCES_avx2 ${KERNEL_SOURCES})
  set(LEVEL_SOURCES_avx512 ${KERNEL_SOURCES})
  set(LEVEL_SOURCES_avx512_bf16 ${BF16_KERNEL_SOURCES})
  set(LEVEL_SOURCES_avx512_vnni ${VNNI_KERNEL_SOURCES})
  set(LEVEL_SOURCES_avx512_amx ${AMX_KERNEL_SOURCES})
  set(avx2 -mavx2 -mfma -mbmi -mbmi2 -mf16c)
  set(avx512 -DLMD_SIMD_AVX512 ${avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl ${AVX512_WARNINGS})
  set(LEVEL_FLAGS_avx2 -DLMD_SIMD_AVX2 ${avx2})
  set(LEVEL_FLAGS_avx512 ${avx512})
  set(LEVEL_FLAGS_avx512_bf16 ${avx512} -DLMD_SIMD_AVX512_BF16 -mavx512bf16)
  set(LEVEL_FLAGS_avx512_vnni ${avx512} -DLMD_SIMD_AVX512_VNNI -mavx512vnni)
  # Without the instructions of tiles, for an emulation of them.
  set(amx ${avx512} -DLMD_SIMD_AVX512_BF16 -DLMD_SIMD_AVX512_VNNI -DLMD_SIMD_AVX512_AMX
          -mavx512bf16 -mavx512vnni)
  set(LEVEL_FLAGS_avx512_amx ${amx} -mamx-tile -mamx-bf16 -mamx-int8)
endif()

set(CSRC_FOLDER ${CMAKE_CURRENT_LIST_DIR})

# Leaves in LEVELS those that a build asks for. What is linked with them is compiled with LEVEL_DEFINITIONS
# (csrc/simd/kernel_levels.h).
#   wanted: all; or native, those that this processor makes use of
function(choose_levels wanted)
  set(chosen ${LEVELS})
  list(TRANSFORM LEVELS REPLACE "(.+)" "-DLMD_HAS_\\1" OUTPUT_VARIABLE definitions)
  string(TOUPPER "${definitions}" definitions)
  if(wanted STREQUAL native AND NOT CMAKE_CROSSCOMPILING)
    try_run(ran compiled
      SOURCES ${CSRC_FOLDER}/simd/print_native_levels.cpp ${CSRC_FOLDER}/simd/cpu_capability.cpp
      COMPILE_DEFINITIONS ${definitions}
      CMAKE_FLAGS -DINCLUDE_DIRECTORIES=${CSRC_FOLDER}
      CXX_STANDARD 20 CXX_STANDARD_REQUIRED ON
      COMPILE_OUTPUT_VARIABLE log RUN_OUTPUT_VARIABLE chosen)
    if(NOT compiled OR NOT ran EQUAL 0)
      message(FATAL_ERROR "which CPU levels this processor runs was not found out; LMDECODE_LEVELS=all builds every "
                          "one:\n${log}${chosen}")
    endif()
  elseif(NOT wanted MATCHES "^(all|native)$")
    message(FATAL_ERROR "LMDECODE_LEVELS is '${wanted}'; expected all or native")
  endif()
  list(TRANSFORM chosen REPLACE "(.+)" "LMD_HAS_\\1" OUTPUT_VARIABLE definitions)
  string(TOUPPER "${definitions}" definitions)
  set(LEVELS ${chosen} PARENT_SCOPE)
  set(LEVEL_DEFINITIONS ${definitions} PARENT_SCOPE)
endfunction()

# An object library of kernel files compiled for a level.
#   sources: a list; ARGN: more options of the compiler
function(add_level_kernels name level sources)
  add_library(${name} OBJECT ${sources})
  target_compile_definitions(${name} PRIVATE LMD_SIMD=${level})
  target_compile_options(${name} PRIVATE ${LEVEL_FLAGS_${level}} ${ARGN})
endfunction()
