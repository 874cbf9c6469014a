// A step's attention over host blocks, prepared once, and the tasks that carry it out layer by layer.
//
// Python and all tasks that were taken and have not run share the prepared arguments. A running task touches no memory
// of Python's and frees only its share of the arguments. So it can run on a thread that holds locks for which a thread
// with the GIL waits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cpu_attention.h"

namespace nanovllm::attention {

// Consecutive blocks of some sequences, attended in one call. The calls of a task follow each other.
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
inline void clear_state(const Prepared& prepared) {
    const QueryRows& rows = prepared.batch.rows;
    for (int64_t token = 0; token < prepared.tokens; ++token) {
        for (int head = 0; head < prepared.batch.heads; ++head) {
            float* out = rows.out + token * rows.out_token_stride + head * rows.out_head_stride;
            std::fill_n(out, prepared.batch.head_dim, 0.0f);
            rows.lse[token * rows.lse_token_stride + head * rows.lse_head_stride] = -INFINITY;
        }
    }
}

inline void attend_all(const Prepared& prepared, int64_t block_offset) {
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
class HostTask {
public:
    HostTask(std::shared_ptr<const Prepared> prepared, int64_t block_offset)
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

// What a stream calls, on any thread. `data` owns a share of the task.
inline void run_task(void* data) {
    const std::unique_ptr<std::shared_ptr<HostTask>> task(static_cast<std::shared_ptr<HostTask>*>(data));
    (*task)->run();
}

// The addresses of run_task and of its data.
inline std::pair<uintptr_t, uintptr_t> take(const std::shared_ptr<HostTask>& task) {
    return {reinterpret_cast<uintptr_t>(&run_task), reinterpret_cast<uintptr_t>(new std::shared_ptr<HostTask>(task))};
}

inline void drop(const HostTask&, uintptr_t data) { delete reinterpret_cast<std::shared_ptr<HostTask>*>(data); }

}  // namespace nanovllm::attention
