// Attention as Python calls it.
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "cpu_addresses.h"
#include "cpu_attention.h"
#include "cpu_attention_kv8.h"
#include "cpu_attention_step.h"
#include "cpu_attention_tasks.h"
#include "cpu_threads.h"

namespace nanovllm {
namespace {

using attention::Batch;
using attention::HostTask;
using attention::PagedStep;
using attention::Prepared;
using attention::Sequence;

using Strides = std::pair<int64_t, int64_t>;  // (token, head) in elements
// (address of int64 block addresses, their number, address of int64 [sequences, 7], their number)
using CallTable = std::tuple<uintptr_t, int64_t, uintptr_t, int64_t>;

constexpr int64_t kElementsPerThread = 1 << 14;  // below this, another thread takes longer to start than it saves

template <class T>
std::vector<T> copied(uintptr_t address, int64_t count) {
    const T* const first = pointer<const T>(address);
    return {first, first + count};
}

Batch batch_of(const std::string& dtype, const std::string& kv_dtype, int heads, int kv_heads, int head_dim,
               int block_size, int64_t window, float scale) {
    Batch batch{};
    batch.heads = heads;
    batch.kv_heads = kv_heads;
    batch.head_dim = head_dim;
    batch.block_size = block_size;
    batch.element_bytes = dtype_of(dtype) == DType::fp32 ? 4 : 2;
    batch.format = kv_format_of(kv_dtype, dtype);
    batch.window = window;
    batch.scale = scale;
    return batch;
}

void set_rows(Batch& batch, uintptr_t q, Strides q_strides, uintptr_t out, Strides out_strides, uintptr_t lse,
              Strides lse_strides) {
    batch.rows.q = pointer<const void>(q);
    batch.rows.out = pointer<float>(out);
    batch.rows.lse = pointer<float>(lse);
    std::tie(batch.rows.q_token_stride, batch.rows.q_head_stride) = q_strides;
    std::tie(batch.rows.out_token_stride, batch.rows.out_head_stride) = out_strides;
    std::tie(batch.rows.lse_token_stride, batch.rows.lse_head_stride) = lse_strides;
}

void attend(const std::string& isa, const std::string& dtype, const std::string& kv_dtype, uintptr_t q,
            Strides q_strides, uintptr_t out, Strides out_strides, uintptr_t lse, Strides lse_strides, uintptr_t blocks,
            int64_t block_count, uintptr_t sequences, int64_t sequence_count, int64_t tokens, int heads, int kv_heads,
            int head_dim, int block_size, int64_t window, float scale, bool carry, int threads) {
    Batch batch = batch_of(dtype, kv_dtype, heads, kv_heads, head_dim, block_size, window, scale);
    set_rows(batch, q, q_strides, out, out_strides, lse, lse_strides);
    batch.blocks = pointer<const int64_t>(blocks);
    batch.sequences = pointer<const Sequence>(sequences);
    batch.sequence_count = sequence_count;
    batch.carry = carry;
    check_sequences(batch, tokens, block_count);
    attention::attend(batch, attention::kernel_of(isa_of(isa), dtype_of(dtype), batch.format), threads);
}

void quantize_rows(const std::string& dtype, const std::string& kv_dtype, uintptr_t x, Strides strides, uintptr_t rows,
                   int64_t tokens, int64_t heads, int head_dim, int threads) {
    const KvFormat format = kv_format_of(kv_dtype, dtype);
    const int64_t row_bytes = kv_row_bytes(format, head_dim, 1);
    const int workers = tokens * heads * head_dim < kElementsPerThread ? 1 : threads;
    with_element(dtype, [&](auto element) {
        const auto* from = pointer<const decltype(element)>(x);
        char* to = pointer<char>(rows);
        for_pieces(tokens, workers, Order::runs, [&](int64_t token, int) {
            for (int64_t head = 0; head < heads; ++head)
                quantize_row(format, from + token * strides.first + head * strides.second, head_dim,
                             to + (token * heads + head) * row_bytes);
        });
    });
}

std::shared_ptr<Prepared> host_attention(const std::string& isa, const std::string& dtype, const std::string& kv_dtype,
                                         uintptr_t q, Strides q_strides, uintptr_t out, Strides out_strides,
                                         uintptr_t lse, Strides lse_strides, const std::vector<CallTable>& calls,
                                         int64_t tokens, int heads, int kv_heads, int head_dim, int block_size,
                                         int64_t window, float scale, int threads) {
    Batch batch = batch_of(dtype, kv_dtype, heads, kv_heads, head_dim, block_size, window, scale);
    set_rows(batch, q, q_strides, out, out_strides, lse, lse_strides);
    batch.carry = true;
    auto prepared = std::make_shared<Prepared>(Prepared{
        batch, &attention::kernel_of(isa_of(isa), dtype_of(dtype), batch.format), {}, tokens, threads});
    for (const auto& [blocks, block_count, sequences, sequence_count] : calls) {
        prepared->calls.push_back({copied<int64_t>(blocks, block_count), copied<Sequence>(sequences, sequence_count)});
        batch.sequences = prepared->calls.back().sequences.data();
        batch.sequence_count = sequence_count;
        check_sequences(batch, tokens, block_count);
    }
    return prepared;
}

// Made where it stays, because its batch points to its other members.
std::unique_ptr<PagedStep> paged_step(const std::string& isa, const std::string& dtype, const std::string& kv_dtype,
                                      uintptr_t pool, int64_t layer_stride, int64_t block_stride,
                                      int64_t pool_blocks, uintptr_t slots, int64_t tokens, uintptr_t blocks,
                                      int64_t block_count, uintptr_t sequences, int64_t sequence_count, int heads,
                                      int kv_heads, int head_dim, int block_size, int64_t window, float scale,
                                      int threads) {
    const Batch batch = batch_of(dtype, kv_dtype, heads, kv_heads, head_dim, block_size, window, scale);
    const attention::Kernel& kernel = attention::kernel_of(isa_of(isa), dtype_of(dtype), batch.format);
    return std::make_unique<PagedStep>(
        kernel, dtype, attention::Pool{pool, layer_stride, block_stride, pool_blocks}, batch,
        copied<int64_t>(slots, tokens), copied<int64_t>(blocks, block_count),
        copied<Sequence>(sequences, sequence_count), threads);
}

void bind_tasks(py::module_& module) {
    py::class_<HostTask, std::shared_ptr<HostTask>>(
        module, "HostTask", "The attention of one layer of a step, for any thread to run.")
        .def("take", &attention::take, "(function, data): addresses. Calling function(data) once runs the task.")
        .def("drop", &attention::drop, "data"_a, "Free data that was taken and will not be run.")
        .def("failure", &HostTask::failure, "What went wrong when it ran, or None.");
    py::class_<Prepared, std::shared_ptr<Prepared>>(
        module, "HostAttention", "The arguments of a step's attention, kept for its tasks.")
        .def(py::init(&host_attention), py::kw_only(), "isa"_a, "dtype"_a, "kv_dtype"_a, "q"_a, "q_strides"_a, "out"_a,
             "out_strides"_a, "lse"_a, "lse_strides"_a, "calls"_a, "tokens"_a, "heads"_a, "kv_heads"_a, "head_dim"_a,
             "block_size"_a, "window"_a, "scale"_a, "threads"_a,
             "calls: (block addresses, their number, sequences, their number), which are copied.")
        .def("task",
             [](const std::shared_ptr<Prepared>& prepared, int64_t block_offset) {
                 return std::make_shared<HostTask>(prepared, block_offset);
             },
             "block_offset"_a, "The task whose blocks lie so many bytes behind the addresses given.");
}

}  // namespace

void bind_attention(py::module_& module) {
    module.def("attend", &attend, py::kw_only(), "isa"_a, "dtype"_a, "kv_dtype"_a, "q"_a, "q_strides"_a, "out"_a,
               "out_strides"_a, "lse"_a, "lse_strides"_a, "blocks"_a, "block_count"_a, "sequences"_a,
               "sequence_count"_a, "tokens"_a, "heads"_a, "kv_heads"_a, "head_dim"_a, "block_size"_a, "window"_a,
               "scale"_a, "carry"_a, "threads"_a, WithoutGil(),
               "blocks: int64 block addresses; sequences: int64 [sequence_count, 7]; strides are (token, head).\n\n"
               "Raises ValueError for sequences whose rows or blocks lie outside of what is given.");
    module.def("quantize_rows", &quantize_rows, py::kw_only(), "dtype"_a, "kv_dtype"_a, "x"_a, "strides"_a, "rows"_a,
               "tokens"_a, "heads"_a, "head_dim"_a, "threads"_a, WithoutGil(),
               "x, with strides (token, head), to dense rows [tokens, heads, head_dim + 4] of 8 bits.");
    bind_tasks(module);
    py::class_<PagedStep>(module, "PagedStep",
                          "A step's attention over a pool [layers, blocks, 2, kv_heads, block_size, head_dim].")
        .def(py::init(&paged_step), py::kw_only(), "isa"_a, "dtype"_a, "kv_dtype"_a, "pool"_a, "layer_stride"_a,
             "block_stride"_a, "pool_blocks"_a, "slots"_a, "tokens"_a, "blocks"_a, "block_count"_a,
             "sequences"_a, "sequence_count"_a, "heads"_a, "kv_heads"_a, "head_dim"_a, "block_size"_a, "window"_a,
             "scale"_a, "threads"_a,
             "int64 slots [tokens], blocks and sequences [sequence_count, 7] are copied; strides are bytes.\n\n"
             "Raises ValueError for what lies outside of the pool or the rows.")
        .def("attend", &PagedStep::attend, "layer"_a, "q"_a, "k"_a, "v"_a, "sinks"_a, WithoutGil(),
             "Write k and v into the layer's slots, attend, and write the outputs over q. All are dense.\n\n"
             "sinks: the address of fp32 [heads], from which the LSE of a row begins, or 0.");
}

}  // namespace nanovllm
