// Cuts a product with quantised weights into pieces of work for the threads. Nothing decided here can change a bit of the
// results: every output of a row adds up its groups in their order.
#include <algorithm>

#include "cpu_packed.h"
#include "cpu_scratch.h"
#include "cpu_threads.h"

namespace nanovllm::packed {
namespace {

constexpr int64_t kSliceRows = 256;  // whose integers and totals are held at a time
constexpr int64_t kFewRows = 24;     // reading the weights takes all the time: each thread reads a run of them
constexpr int64_t kThreadElements = 32 << 10;  // below, another thread costs more than it saves

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

InputRows allocate_rows(Scratch& scratch, const Problem& problem, int64_t rows) {
    const int64_t each = rows * problem.weight.groups(), words = each * problem.group_words();
    uint32_t* const memory = scratch.words(words + 3 * each);
    const auto floats = [&](int i) { return reinterpret_cast<float*>(memory + words + i * each); };
    return {memory, floats(0), reinterpret_cast<int32_t*>(floats(1)), floats(2), rows};
}

// Some panels times all rows of a slice.
class PieceRunner {
  public:
    PieceRunner(const Problem& problem, const Kernel& kernel, const InputRows& rows, Scratch& scratch)
        : p_(problem), k_(kernel), rows_(rows), layout_(problem.weight.layout()), groups_(problem.weight.groups()),
          copies_(problem.copies()), outputs_(kernel.tile_panels * kOutputs) {
        const int64_t scales = kernel.tile_panels * Part::kScales, words = kernel.tile_panels * Part::kWords;
        part_.words = scratch.words(words + 2 * scales + kSliceRows * copies_ * outputs_);
        part_.scales = reinterpret_cast<float*>(part_.words + words);
        part_.minimums = problem.weight.has_minimums() ? part_.scales + scales : nullptr;
        part_.group = layout_.group;
        part_.values = layout_.values;
        totals_ = part_.scales + 2 * scales;
    }

    // Panels [panel, panel + panels), rows [row, row + count) of x, whose integers are at the beginning of rows_.
    void run(int64_t panel, int64_t panels, int64_t row, int64_t count) {
        const int64_t part_blocks = kPartInputs / layout_.block_inputs;
        std::fill_n(totals_, count * copies_ * outputs_, 0.0f);
        if (rows_.count <= k_.few_rows) {
            for (int64_t i = 0; i < panels; ++i)
                k_.multiply_few(p_.weight, panel + i, 0, p_.weight.blocks(), rows_, totals_ + i * kOutputs, outputs_);
        } else {
            for (int64_t block = 0; block < p_.weight.blocks(); block += part_blocks)
                run_part(panel, panels, block, std::min(part_blocks, p_.weight.blocks() - block));
        }
        const int64_t output = panel * kOutputs, there = std::min(panels * kOutputs, p_.weight.out - output);
        for (int64_t i = 0; i < count; ++i)
            k_.finish(p_, row + i, output, there, totals_ + i * copies_ * outputs_, outputs_);
    }

  private:
    const Problem& p_;
    const Kernel& k_;
    const InputRows& rows_;
    const Layout& layout_;
    const int64_t groups_, copies_, outputs_;
    Part part_;
    float* totals_;  // [rows][outputs_]

    // Where a last panel is alone, it is also taken for those that are missing.
    void run_part(int64_t panel, int64_t panels, int64_t block, int64_t blocks) {
        const int64_t block_groups = layout_.block_inputs / layout_.group, first = block * block_groups;
        part_.groups = blocks * block_groups;
        for (int64_t i = 0; i < k_.tile_panels; ++i)
            k_.expand(p_.weight, panel + std::min(i, panels - 1), block, blocks, part_, i);
        for (int64_t row = 0; row < rows_.count; row += k_.tile_rows) {
            const int64_t tile_rows = std::min(k_.tile_rows, rows_.count - row), at = row * groups_ + first * tile_rows;
            k_.multiply(part_, {rows_.words + at * p_.group_words(), rows_.units + at, rows_.starts + at, rows_.sums + at,
                                tile_rows}, totals_ + row * outputs_);
        }
    }
};

void run_slice(const Problem& p, const Kernel& k, int64_t row, int64_t count, int threads) {
    thread_local Scratch shared;
    const InputRows rows = allocate_rows(shared, p, count * p.copies());
    Problem slice = p;
    const int64_t size = p.dtype == DType::fp32 ? 4 : 2;
    slice.x = static_cast<const char*>(p.x) + row * p.x_stride * size;
    const int64_t panels = ceil_div(p.weight.out, kOutputs), pieces = ceil_div(panels, k.tile_panels);
    const auto used = [&](int64_t elements) { return int(std::min<int64_t>(threads, 1 + elements / kThreadElements)); };
    for_pieces(count, used(count * p.weight.in), Order::runs, [&](int64_t i, int) { k.quantise(slice, i, rows); });
    const Order order = count <= kFewRows ? Order::runs : Order::in_turn;
    for_pieces(pieces, used(count * p.weight.in * p.weight.out), order, [&](int64_t i, int) {
        thread_local Scratch own;
        const int64_t panel = i * k.tile_panels;
        PieceRunner(p, k, rows, own).run(panel, std::min(k.tile_panels, panels - panel), row, count);
    });
}

}  // namespace

void run(const Problem& problem, const Kernel& kernel, int threads) {
    if (problem.weight.out == 0) return;
    for (int64_t row = 0; row < problem.rows; row += kSliceRows)
        run_slice(problem, kernel, row, std::min(kSliceRows, problem.rows - row), threads);
}

}  // namespace nanovllm::packed
