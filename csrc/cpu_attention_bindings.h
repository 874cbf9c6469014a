// The CPU attention as Python calls it: addresses in, nothing kept. nanovllm/ops/cpu_attention.py checks shapes, dtypes
// and metadata rows before it comes here.
//
// Included once, by cpu_kernels.cpp.
#pragma once

#include "cpu_attention.h"

#include <stdexcept>
#include <string>
#include <utility>

#include "cpu_addresses.h"
#include "cpu_attention_kv8.h"
#include "cpu_attention_step_bindings.h"
#include "cpu_attention_task_bindings.h"
#include "cpu_threads.h"
#include "python_calls.h"

namespace nanovllm {
namespace attention {
namespace {

// q, out and lse are addresses; strides are (token, head) in elements. `blocks` is the address of int64 block
// addresses, `sequences` of int64 [sequence_count, 7] in the order of Sequence.
void attend_batch(const std::string& isa, const std::string& dtype, const std::string& kv_dtype, uintptr_t q,
                  Strides q_strides, uintptr_t out, Strides out_strides, uintptr_t lse, Strides lse_strides,
                  uintptr_t blocks, int64_t block_count, uintptr_t sequences, int64_t sequence_count, int64_t tokens,
                  int heads, int kv_heads, int head_dim, int block_size, int64_t window, float scale, bool carry,
                  int threads) {
    const DType type = dtype_of(dtype);
    Batch batch = batch_of(q, q_strides, out, out_strides, lse, lse_strides);
    batch.blocks = reinterpret_cast<const int64_t*>(blocks);
    batch.sequences = reinterpret_cast<const Sequence*>(sequences);
    batch.sequence_count = sequence_count;
    batch.heads = heads;
    batch.kv_heads = kv_heads;
    batch.head_dim = head_dim;
    batch.block_size = block_size;
    batch.element_bytes = type == DType::fp32 ? 4 : 2;
    batch.format = kv_format_of(kv_dtype, dtype);
    batch.window = window;
    batch.scale = scale;
    batch.carry = carry;
    check_sequences(batch, tokens, block_count);
    const Kernel& kernel = kernel_of(isa_of(isa), type, batch.format);
    const python::WithoutGil without_gil;
    nanovllm::attention::attend(batch, kernel, threads);
}

// Rows of K or V of many tokens to 8 bits.
constexpr int64_t kElementsPerThread = 1 << 14;  // below this, another thread takes longer to start than it saves

// x: [tokens, heads, head_dim] with strides (token, head) in elements; rows: dense [tokens, heads, head_dim + 4].
void quantize_rows(const std::string& dtype, const std::string& kv_dtype, uintptr_t x,
                   Strides strides, uintptr_t rows, int64_t tokens, int64_t heads, int head_dim,
                   int threads) {
    const KvFormat format = kv_format_of(kv_dtype, dtype);
    if (format == KvFormat::plain) throw std::invalid_argument("Rows of " + kv_dtype + " have no scales.");
    const int64_t row_bytes = kv_row_bytes(format, head_dim, 1);
    const int workers = tokens * heads * head_dim < kElementsPerThread ? 1 : threads;
    const python::WithoutGil without_gil;
    with_element(dtype, [&](auto element) {
        using T = decltype(element);
        const T* from = pointer<const T>(x);
        char* to = pointer<char>(rows);
        for_pieces(tokens, workers, Order::runs, [&](int64_t token, int) {
            for (int64_t head = 0; head < heads; ++head)
                quantize_row(format, from + token * strides.first + head * strides.second, head_dim,
                             to + (token * heads + head) * row_bytes);
        });
    });
}

constexpr auto kAttend = python::names("isa", "dtype", "kv_dtype", "q", "q_strides", "out", "out_strides", "lse",
                                       "lse_strides", "blocks", "block_count", "sequences", "sequence_count", "tokens",
                                       "heads", "kv_heads", "head_dim", "block_size", "window", "scale", "carry",
                                       "threads");
constexpr auto kQuantizeRows = python::names("dtype", "kv_dtype", "x", "strides", "rows", "tokens", "heads", "head_dim",
                                             "threads");

}  // namespace
}  // namespace attention

void define_attention(PyObject* module) {
    static PyMethodDef functions[] = {
        python::function<&attention::attend_batch, attention::kAttend>("attend"),
        python::function<&attention::quantize_rows, attention::kQuantizeRows>("quantize_rows"),
        {}};
    python::add_functions(module, functions);
    attention::define_tasks(module);
    attention::define_steps(module);
}

}  // namespace nanovllm
