// A step's attention over host blocks, prepared once, and the tasks that carry it out layer by layer.
//
// Who owns what: the prepared arguments are shared by Python and by all tasks that were taken and have not run. A task
// that runs touches memory of the process's own and nothing of Python's, and frees no more than its share of that, so
// that it can run on a thread that holds locks which a thread with the GIL waits for.
//
// Included once, by cpu_attention_bindings.h.
#pragma once

#include "cpu_attention.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cpu_names.h"
#include "python_calls.h"

namespace nanovllm::attention {
namespace {

using Strides = std::pair<int64_t, int64_t>;  // (token, head) in elements

// Consecutive blocks of some sequences, attended in one call; the calls of a task follow each other.
struct Call {
    std::vector<int64_t> blocks;
    std::vector<Sequence> sequences;
};

struct Prepared {
    Batch batch;  // blocks and sequences are those of each call
    const Kernel* kernel;
    std::vector<Call> calls;
    int64_t tokens;  // rows whose state is written
    int threads;
};

// The state of a row before any key was seen.
void clear_state(const Prepared& prepared) {
    const QueryRows& rows = prepared.batch.rows;
    for (int64_t token = 0; token < prepared.tokens; ++token) {
        for (int head = 0; head < prepared.batch.heads; ++head) {
            float* out = rows.out + token * rows.out_token_stride + head * rows.out_head_stride;
            std::fill_n(out, prepared.batch.head_dim, 0.0f);
            rows.lse[token * rows.lse_token_stride + head * rows.lse_head_stride] = -INFINITY;
        }
    }
}

void attend_all(const Prepared& prepared, int64_t block_offset) {
    clear_state(prepared);
    for (const Call& call : prepared.calls) {
        Batch batch = prepared.batch;
        batch.blocks = call.blocks.data();
        batch.sequences = call.sequences.data();
        batch.sequence_count = int64_t(call.sequences.size());
        batch.block_offset = block_offset;
        attend(batch, *prepared.kernel, prepared.threads);
    }
}

// One layer of a step.
class LayerTask {
public:
    LayerTask(std::shared_ptr<const Prepared> prepared, int64_t block_offset)
        : prepared_(std::move(prepared)), block_offset_(block_offset) {}

    void run() {
        try {
            attend_all(*prepared_, block_offset_);
        } catch (const std::exception& error) {
            fail(error.what());
        }
    }

    std::optional<std::string> failure() const {
        const std::lock_guard<std::mutex> guard(lock_);
        return failure_;
    }

private:
    void fail(const char* what) {
        const std::lock_guard<std::mutex> guard(lock_);
        failure_ = what;
    }

    std::shared_ptr<const Prepared> prepared_;
    int64_t block_offset_;
    mutable std::mutex lock_;
    std::optional<std::string> failure_;
};

using TaskHandle = std::shared_ptr<LayerTask>;

TaskHandle* handle_of(std::uintptr_t data) { return reinterpret_cast<TaskHandle*>(data); }

// What a stream calls, on any thread.
void run_task(void* data) {
    const std::unique_ptr<TaskHandle> task(static_cast<TaskHandle*>(data));
    (*task)->run();
}

std::pair<std::uintptr_t, std::uintptr_t> take(const TaskHandle& task) {
    return {reinterpret_cast<std::uintptr_t>(&run_task), reinterpret_cast<std::uintptr_t>(new TaskHandle(task))};
}

// ---- preparing

// (address of int64 block addresses, their number, address of int64 [sequences, 7], their number)
using CallTable = std::array<int64_t, 4>;

Call call_of(const CallTable& table) {
    const auto [blocks, block_count, sequences, sequence_count] = table;
    const auto* addresses = reinterpret_cast<const int64_t*>(blocks);
    const auto* rows = reinterpret_cast<const Sequence*>(sequences);
    return {{addresses, addresses + block_count}, {rows, rows + sequence_count}};
}

Batch batch_of(uintptr_t q, Strides q_strides, uintptr_t out, Strides out_strides, uintptr_t lse,
               Strides lse_strides) {
    Batch batch{};
    batch.rows.q = reinterpret_cast<const void*>(q);
    batch.rows.out = reinterpret_cast<float*>(out);
    batch.rows.lse = reinterpret_cast<float*>(lse);
    std::tie(batch.rows.q_token_stride, batch.rows.q_head_stride) = q_strides;
    std::tie(batch.rows.out_token_stride, batch.rows.out_head_stride) = out_strides;
    std::tie(batch.rows.lse_token_stride, batch.rows.lse_head_stride) = lse_strides;
    batch.carry = true;
    return batch;
}

std::shared_ptr<Prepared> prepare(const std::string& isa, const std::string& dtype,
                                  const std::string& kv_dtype, Batch batch, const std::vector<CallTable>& tables, int64_t tokens) {
    auto prepared = std::make_shared<Prepared>();
    const DType type = nanovllm::dtype_of(dtype);
    batch.element_bytes = type == DType::fp32 ? 4 : 2;
    batch.format = kv_format_of(kv_dtype, dtype);
    prepared->kernel = &kernel_of(isa_of(isa), type, batch.format);
    prepared->batch = batch;
    prepared->tokens = tokens;
    for (const CallTable& table : tables) {
        prepared->calls.push_back(call_of(table));
        const Call& call = prepared->calls.back();
        batch.sequences = call.sequences.data();
        batch.sequence_count = int64_t(call.sequences.size());
        check_sequences(batch, tokens, int64_t(call.blocks.size()));
    }
    return prepared;
}

std::shared_ptr<Prepared> host_attention(const std::string& isa, const std::string& dtype, const std::string& kv_dtype,
                                         uintptr_t q, Strides q_strides, uintptr_t out, Strides out_strides,
                                         uintptr_t lse, Strides lse_strides, const std::vector<CallTable>& calls,
                                         int64_t tokens, int heads, int kv_heads, int head_dim, int block_size,
                                         int64_t window, float scale, int threads) {
    Batch batch = batch_of(q, q_strides, out, out_strides, lse, lse_strides);
    batch.heads = heads;
    batch.kv_heads = kv_heads;
    batch.head_dim = head_dim;
    batch.block_size = block_size;
    batch.window = window;
    batch.scale = scale;
    auto prepared = prepare(isa, dtype, kv_dtype, batch, calls, tokens);
    prepared->threads = threads;
    return prepared;
}

TaskHandle task_of(const std::shared_ptr<Prepared>& prepared, int64_t block_offset) {
    return std::make_shared<LayerTask>(prepared, block_offset);
}

void drop(const TaskHandle&, std::uintptr_t data) { delete handle_of(data); }

constexpr auto kHostAttention = python::names("isa", "dtype", "kv_dtype", "q", "q_strides", "out", "out_strides", "lse",
                                              "lse_strides", "calls", "tokens", "heads", "kv_heads", "head_dim",
                                              "block_size", "window", "scale", "threads");
constexpr auto kTask = python::names("block_offset");
constexpr auto kDrop = python::names("data");

}  // namespace

void define_tasks(PyObject* module) {
    static PyMethodDef of_task[] = {
        python::method<&take>("take", "(function, data): addresses; calling function(data) once runs the task."),
        python::method<&drop, kDrop>("drop", "Let go of data that was taken and will not be run."),
        python::method<&LayerTask::failure>("failure", "What went wrong when it ran, or None."),
        {}};
    static PyMethodDef of_attention[] = {
        python::method<&task_of, kTask>("task", "The task whose blocks lie so many bytes behind the addresses given."),
        {}};
    python::add_class<LayerTask>(module, "_cpu_kernels.HostTask", of_task);
    python::add_class<Prepared, &host_attention, kHostAttention>(module, "_cpu_kernels.HostAttention", of_attention);
}

}  // namespace nanovllm::attention
