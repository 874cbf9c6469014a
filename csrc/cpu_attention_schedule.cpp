// Cuts a batch into tasks and runs them over the threads. Nothing decided here can change a bit of the results: a task
// computes whole rows over whole tiles, and tiles that were run apart are merged in their order.
#include <algorithm>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cpu_attention.h"
#include "cpu_threads.h"

namespace nanovllm::attention {
namespace {

constexpr int kMostRows = 384;       // of a task: its state stays in a core's own cache
constexpr int kFewestRows = 96;      // below this, packing the keys takes longer than multiplying them
constexpr int kMostSplitRows = 64;   // with more rows there is enough to share out without splitting the keys
constexpr int kTasksPerThread = 4;   // so that unequal tasks still end together

struct Aligned {
    void operator()(char* p) const { ::operator delete[](p, std::align_val_t(64)); }
};
using Buffer = std::unique_ptr<char[], Aligned>;

Buffer allocate(size_t bytes) { return Buffer(static_cast<char*>(::operator new[](bytes, std::align_val_t(64)))); }

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Tiles whose keys any row of the task may see.
void set_tiles(Task& task) {
    const KeyBlocks& keys = task.keys;
    const int64_t last = task.rows.position + task.rows.tokens;  // one past the last row's own position
    const int64_t end = std::min(last, keys.kv_end) - keys.first_position;
    const int64_t oldest = task.window > 0 ? task.rows.position - task.window + 1 : 0;
    const int64_t begin = std::max<int64_t>(0, oldest - keys.first_position);
    const int per_block = keys.tiles_per_block(), size = keys.block_size;
    const auto tile_of = [&](int64_t key) { return key / size * per_block + key % size / kTileKeys; };
    task.tile_begin = begin < end ? tile_of(begin) : 0;
    task.tile_end = begin < end ? tile_of(end - 1) + 1 : 0;
}

// The task of `tokens` query tokens from `token` on, for one KV head of one sequence, over all keys that they see.
Task make_task(const Batch& batch, const Sequence& seq, int kv_head, int64_t token, int tokens) {
    Task task{};
    const int group = batch.heads / batch.kv_heads;
    const int64_t row = seq.query_start + token, head = int64_t(kv_head) * group;
    QueryRows& rows = task.rows = batch.rows;
    const int64_t q_offset = row * rows.q_token_stride + head * rows.q_head_stride;
    rows.q = static_cast<const char*>(rows.q) + q_offset * batch.element_bytes;
    rows.out += row * rows.out_token_stride + head * rows.out_head_stride;
    rows.lse += row * rows.lse_token_stride + head * rows.lse_head_stride;
    rows.tokens = tokens;
    rows.group = group;
    rows.position = seq.query_position + token;
    const int64_t row_bytes = kv_row_bytes(batch.format, batch.head_dim, batch.element_bytes);
    const int64_t plane = batch.block_size * row_bytes;
    const int64_t k_offset = batch.block_offset + kv_head * plane, v_offset = k_offset + batch.kv_heads * plane;
    task.keys = {batch.blocks + seq.block_start, batch.block_size, batch.head_dim, row_bytes, k_offset,
                 v_offset, seq.first_position, seq.kv_end};
    task.window = batch.window;
    task.scale = batch.scale;
    task.carry = batch.carry;
    set_tiles(task);
    return task;
}

// Tokens per task: as many as keep the state in cache, fewer while the threads would not all have work.
int tokens_per_task(const Batch& batch, int threads) {
    const int group = batch.heads / batch.kv_heads;
    int64_t total = 0;
    for (int64_t i = 0; i < batch.sequence_count; ++i) total += batch.sequences[i].query_len;
    const int64_t share = ceil_div(total * batch.heads, int64_t(threads) * kTasksPerThread);
    const int64_t rows = std::clamp<int64_t>(share, kFewestRows, kMostRows);
    return int(std::max<int64_t>(1, rows / group));
}

std::vector<Task> make_tasks(const Batch& batch, int threads) {
    std::vector<Task> tasks;
    const int64_t step = tokens_per_task(batch, threads);
    for (int64_t i = 0; i < batch.sequence_count; ++i) {
        const Sequence& seq = batch.sequences[i];
        for (int head = 0; head < batch.kv_heads; ++head)
            for (int64_t token = 0; token < seq.query_len; token += step)
                tasks.push_back(make_task(batch, seq, head, token, int(std::min(step, seq.query_len - token))));
    }
    return tasks;
}

int64_t work_of(const Task& task) {
    // Loading and packing a tile costs about as much as multiplying it with eight rows.
    return (task.tile_end - task.tile_begin) * (8 + task.rows.rows());
}

// A split task's pieces, and the room for their partial states.
struct Plan {
    std::vector<Task> pieces;  // largest first
    std::vector<Task> merges;
    std::vector<Buffer> partials;
};

void split(Plan& plan, const Task& task, int64_t pieces) {
    const size_t floats = partial_floats(task.rows.rows(), task.keys.head_dim);
    const int64_t tiles = task.tile_end - task.tile_begin;
    plan.partials.push_back(allocate(size_t(tiles) * floats * sizeof(float)));
    Task whole = task;
    whole.partials = reinterpret_cast<float*>(plan.partials.back().get());
    for (int64_t i = 0; i < pieces; ++i) {
        Task piece = whole;
        piece.tile_begin = task.tile_begin + tiles * i / pieces;
        piece.tile_end = task.tile_begin + tiles * (i + 1) / pieces;
        piece.partials = whole.partials + size_t(piece.tile_begin - task.tile_begin) * floats;
        plan.pieces.push_back(piece);
    }
    plan.merges.push_back(whole);
}

// Most work first; tasks with equal work keep their order. It sorts the same type of pairs as check_sequences, since
// sorting tasks would compile another sort.
void sort_by_work(std::vector<Task>& tasks) {
    std::vector<std::pair<int64_t, int64_t>> order;
    for (size_t i = 0; i < tasks.size(); ++i) order.emplace_back(-work_of(tasks[i]), int64_t(i));
    std::sort(order.begin(), order.end());
    std::vector<Task> sorted;
    sorted.reserve(tasks.size());
    for (const auto& [work, i] : order) sorted.push_back(tasks[size_t(i)]);
    tasks = std::move(sorted);
}

Plan make_plan(const Batch& batch, int threads) {
    Plan plan;
    const std::vector<Task> tasks = make_tasks(batch, threads);
    int64_t work = 0;
    for (const Task& task : tasks) work += work_of(task);
    const int64_t share = std::max<int64_t>(1, ceil_div(work, int64_t(threads) * kTasksPerThread));
    for (const Task& task : tasks) {
        const int64_t tiles = task.tile_end - task.tile_begin;
        const int64_t pieces = std::min(tiles, ceil_div(work_of(task), share));
        if (threads > 1 && pieces > 1 && task.rows.rows() <= kMostSplitRows)
            split(plan, task, pieces);
        else
            plan.pieces.push_back(task);
    }
    sort_by_work(plan.pieces);
    return plan;
}

size_t workspace_bytes(const std::vector<Task>& tasks, const Kernel& kernel) {
    size_t bytes = 0;
    for (const Task& task : tasks)
        bytes = std::max(bytes, kernel.workspace_bytes(task.rows.rows(), task.keys.head_dim));
    return bytes;
}

// Gives each task what its thread will probably read next, so that the first tile of the next task is prefetched too.
void look_ahead(std::vector<Task>& tasks, int workers) {
    for (size_t i = 0; i + workers < tasks.size(); ++i) {
        const Task& next = tasks[i + workers];
        if (next.tile_begin == next.tile_end) continue;
        tasks[i].keys_after = next.keys.tile_rows(next.tile_begin, next.keys.k_offset);
        tasks[i].values_after = next.keys.tile_rows(next.tile_begin, next.keys.v_offset);
    }
}

}  // namespace

void check_sequences(const Batch& batch, int64_t tokens, int64_t block_count) {
    std::vector<std::pair<int64_t, int64_t>> rows;
    for (int64_t i = 0; i < batch.sequence_count; ++i) {
        const Sequence& s = batch.sequences[i];
        const auto refuse = [&](const std::string& rule) {
            throw std::invalid_argument(
                rule + ", got query_start=" + std::to_string(s.query_start) +
                ", query_len=" + std::to_string(s.query_len) + ", block_start=" + std::to_string(s.block_start) +
                ", block_count=" + std::to_string(s.block_count) +
                ", first_position=" + std::to_string(s.first_position) + ", kv_end=" + std::to_string(s.kv_end) +
                ", query_position=" + std::to_string(s.query_position) + " in metadata row " + std::to_string(i) + ".");
        };
        if (std::min({s.query_start, s.query_len, s.block_start, s.block_count, s.first_position, s.kv_end,
                      s.query_position}) < 0)
            refuse("A metadata row must hold no negative number");
        if (s.query_start > tokens || s.query_len > tokens - s.query_start)
            refuse("The query rows of a sequence must lie within the " + std::to_string(tokens) + " rows of q");
        if (s.block_start > block_count || s.block_count > block_count - s.block_start)
            refuse("The blocks of a sequence must lie within the " + std::to_string(block_count) + " given");
        if (s.kv_end > s.first_position + s.block_count * batch.block_size)
            refuse("The kv_end must lie within its blocks of " + std::to_string(batch.block_size) + " tokens");
        if (s.query_len > 0) rows.emplace_back(s.query_start, s.query_start + s.query_len);
    }
    std::sort(rows.begin(), rows.end());
    for (size_t i = 1; i < rows.size(); ++i)
        if (rows[i].first < rows[i - 1].second)
            throw std::invalid_argument("Two sequences must not share a query row, got two with row " +
                                        std::to_string(rows[i].first) + ".");
}

void attend(const Batch& batch, const Kernel& kernel, int threads) {
    Plan plan = make_plan(batch, threads);
    const int64_t pieces = int64_t(plan.pieces.size()), merges = int64_t(plan.merges.size());
    const int workers = int(std::min<int64_t>(threads, std::max<int64_t>(1, pieces)));
    const size_t bytes = workspace_bytes(plan.pieces, kernel);
    look_ahead(plan.pieces, workers);
    const Buffer workspaces = allocate(bytes * workers);
    const auto workspace = [&](int worker) { return workspaces.get() + bytes * worker; };
    for_pieces(pieces, workers, Order::in_turn,
               [&](int64_t i, int worker) { kernel.run(plan.pieces[i], workspace(worker)); });
    for_pieces(merges, workers, Order::in_turn,
               [&](int64_t i, int worker) { kernel.merge(plan.merges[i], workspace(worker)); });
}

}  // namespace nanovllm::attention
