// Cuts a linear layer into pieces of work for the threads. Nothing decided here can change a bit of the results: a piece
// computes whole outputs of whole rows.
#include <algorithm>
#include <vector>

#include "cpu_linear.h"
#include "cpu_scratch.h"
#include "cpu_threads.h"

namespace nanovllm::linear {
namespace {

constexpr int64_t kOwnCacheBytes = 256 << 10;  // of weights that a core keeps for itself until their turn comes
constexpr int64_t kNearBytes = 1024;
constexpr int64_t kInterleavedBytes = 6 << 10;  // ahead of all the vectors of outputs that share a broadcast
constexpr int64_t kInterleavedOutputs = 4 * kGroup;  // between one pass of rows and the next
constexpr int64_t kLine = 64;
constexpr int64_t kPieceBytes = 128 << 10;     // of weights for few rows: some microseconds
constexpr int64_t kThreadElements = 16 << 10;  // of weights times rows; below, another thread costs more than it saves
constexpr int64_t kMostPieceRows = 1024;
constexpr int64_t kPiecesPerThread = 4;  // so that unequal pieces still end together

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

const char* row_of_x(const Problem& p, const Kernel& k, int64_t row, int64_t input) {
    return static_cast<const char*>(p.x) + (row * p.x_stride + input) * k.element_bytes;
}

// The weights are read once; a later pass of rows finds them in the cache.
void run_few(const Problem& p, const Kernel& k, int threads) {
    thread_local Scratch scratch;
    const int64_t passes = ceil_div(p.rows, p.interleaved ? k.pass_rows : k.row_by_row_pass);
    const int64_t most = ceil_div(p.rows, passes);
    const int64_t row_words = ceil_div(p.in, k.input_multiple) * k.input_multiple / k.depth;
    uint32_t* const words = scratch.words(p.rows * row_words);
    for (int64_t row = 0; row < p.rows; row += most)
        k.pack_rows(row_of_x(p, k, row, 0), p.x_stride, std::min(most, p.rows - row), p.in, words + row * row_words);
    // The next panel's weights are fetched meanwhile, or the next inputs' where the core could not keep a panel.
    const int64_t most_outputs = kPieceBytes / (p.in * k.element_bytes) / kInterleavedOutputs * kInterleavedOutputs;
    const int64_t read = std::max(kInterleavedOutputs, most_outputs);
    const int64_t outputs = !p.interleaved ? k.pass_outputs : passes > 1 ? kInterleavedOutputs : read;
    const bool fetch_panel = !p.interleaved && outputs * p.in * k.element_bytes <= kOwnCacheBytes;
    const int64_t near = (p.interleaved ? kInterleavedBytes : kNearBytes) / k.element_bytes;
    const int64_t fetch_ahead = fetch_panel ? outputs * p.in : near;
    const int64_t panels = ceil_div(p.out, outputs);
    const int used = int(std::min<int64_t>(threads, 1 + p.rows * p.out * p.in / kThreadElements));
    for_pieces(panels, used, Order::runs, [&](int64_t panel, int) {
        const int64_t begin = panel * outputs, end = std::min(p.out, begin + outputs);
        for (int64_t row = 0; row < p.rows; row += most)
            k.multiply_few(p, {words + row * row_words, row, std::min(most, p.rows - row)}, begin, end, fetch_ahead);
    });
}

// A piece of work: some rows times the weights of some outputs.
struct Piece {
    int64_t row, rows, output, outputs;
};

class PieceRunner {
  public:
    PieceRunner(const Problem& problem, const Kernel& kernel, Scratch& scratch, int64_t piece_rows)
        : p_(problem), k_(kernel), sum_words_(kernel.sum_inputs / kernel.depth) {
        const int64_t weights = kernel.block_outputs * sum_words_, x = kernel.tile_rows * sum_words_;
        const int64_t totals = problem.in > kernel.sum_inputs ? piece_rows * kernel.block_outputs : 0;
        weights_ = scratch.words(weights + x + totals);
        x_ = weights_ + weights;
        totals_ = reinterpret_cast<float*>(x_ + x);
    }

    void run(const Piece& piece) {
        for (int64_t input = 0; input < p_.in; input += k_.sum_inputs) run_sum_block(piece, input);
    }

  private:
    const Problem& p_;
    const Kernel& k_;
    const int64_t sum_words_;
    uint32_t *weights_, *x_;
    float* totals_;

    // Prefetches the next tile's rows of x while this one is multiplied: a share of them with each panel, since a core
    // waits for a few dozen lines at a time. GCC drops a call of a function that only prefetches, so this one is inlined.
    __attribute__((always_inline)) void fetch_share(int64_t row, int64_t count, int64_t panel, int64_t panels,
                                                    int64_t input, int64_t inputs) const {
        for (int64_t r = count * panel / panels; r < count * (panel + 1) / panels; ++r) {
            const char *begin = row_of_x(p_, k_, row + r, input), *end = begin + inputs * k_.element_bytes;
            for (; begin < end; begin += kLine) __builtin_prefetch(begin, 0, 2);
        }
    }

    void run_sum_block(const Piece& piece, int64_t input) {
        const int64_t inputs = std::min(k_.sum_inputs, p_.in - input);
        k_.pack_weights(p_, piece.output, piece.outputs, input, inputs, weights_);
        const int64_t words = ceil_div(inputs, k_.input_multiple) * k_.input_multiple / k_.depth;
        const int64_t panels = ceil_div(piece.outputs, k_.panel_outputs);
        for (int64_t done = 0, count; done < piece.rows; done += count) {
            count = tile_rows(piece.rows - done, k_.tile_rows);
            const int64_t row = piece.row + done, next = tile_rows(piece.rows - done - count, k_.tile_rows);
            k_.pack_rows(row_of_x(p_, k_, row, input), p_.x_stride, count, inputs, x_);
            for (int64_t panel = 0; panel < panels; ++panel) {
                fetch_share(row + count, next, panel, panels, input, inputs);
                const int64_t column = panel * k_.panel_outputs;
                k_.multiply_tile(p_, {{x_, row, count}, weights_ + column * words, piece.output + column,
                                      std::min(k_.panel_outputs, piece.outputs - column), inputs,
                                      totals_ + done * k_.block_outputs + column, k_.block_outputs, input == 0,
                                      input + inputs == p_.in});
            }
        }
    }
};

void run_many(const Problem& p, const Kernel& k, int threads) {
    const int64_t blocks = ceil_div(p.out, k.block_outputs);
    const int64_t wanted = threads > 1 ? ceil_div(kPiecesPerThread * threads, blocks) : 1;
    // Packing a block costs about as much as multiplying it with four tiles of rows.
    const int64_t splits = std::max(ceil_div(p.rows, kMostPieceRows),
                                    std::min(wanted, std::max<int64_t>(1, p.rows / (8 * k.tile_rows))));
    const int64_t rows = ceil_div(ceil_div(p.rows, splits), k.tile_rows) * k.tile_rows;
    const int64_t row_pieces = ceil_div(p.rows, rows), pieces = blocks * row_pieces;
    for_pieces(pieces, threads, Order::in_turn, [&](int64_t i, int) {
        thread_local Scratch scratch;
        const int64_t row = i % row_pieces * rows, output = i / row_pieces * k.block_outputs;
        PieceRunner(p, k, scratch, rows)
            .run({row, std::min(rows, p.rows - row), output, std::min(k.block_outputs, p.out - output)});
    });
}

// The last outputs, which are no whole group, lie row by row.
void run_interleaved_and_rest(Problem p, const Kernel& k, int threads) {
    Problem rest = p;
    p.out = p.out / kGroup * kGroup;
    rest.out -= p.out;
    rest.interleaved = false;
    rest.weight = static_cast<const char*>(rest.weight) + p.out * p.in * k.element_bytes;
    rest.y = static_cast<char*>(rest.y) + p.out * k.element_bytes;
    if (rest.bias) rest.bias = static_cast<const char*>(rest.bias) + p.out * k.element_bytes;
    run(p, k, threads);
    run(rest, k, threads);
}

template <class Unit>
void interleave_units(void* weight, int64_t groups, int64_t units, bool back, int threads) {
    for_pieces(groups, threads, Order::runs, [&](int64_t group, int) {
        Unit* const here = static_cast<Unit*>(weight) + group * kGroup * units;
        const std::vector<Unit> copy(here, here + kGroup * units);
        for (int64_t unit = 0; unit < units; ++unit)
            for (int64_t i = 0; i < kGroup; ++i) {
                const int64_t by_row = i * units + unit, interleaved = unit * kGroup + i;
                here[back ? by_row : interleaved] = copy[size_t(back ? interleaved : by_row)];
            }
    });
}

template <class Unit>
void gather_units(const Gather& g, int64_t units, int threads) {
    const Unit* const weight = static_cast<const Unit*>(g.weight);
    const int64_t grouped = g.interleaved ? g.out / kGroup * kGroup : 0;
    const int used = int(std::min<int64_t>(threads, 1 + g.count * units / kThreadElements));
    for_pieces(g.count, used, Order::runs, [&](int64_t i, int) {
        const int64_t row = g.indices[i];
        Unit* const y = static_cast<Unit*>(g.y) + i * units;
        if (row >= grouped) {
            std::copy_n(weight + row * units, units, y);
            return;
        }
        const Unit* const first = weight + row / kGroup * kGroup * units + row % kGroup;
        for (int64_t unit = 0; unit < units; ++unit) y[unit] = first[unit * kGroup];
    });
}

}  // namespace

void gather(DType dtype, const Gather& g, int threads) {
    if (dtype == DType::fp32)
        gather_units<uint32_t>(g, g.in, threads);
    else if (dtype == DType::bf16 && g.interleaved)
        gather_units<uint32_t>(g, g.in / 2, threads);
    else
        gather_units<uint16_t>(g, g.in, threads);
}

void interleave(DType dtype, void* weight, int64_t out, int64_t in, bool back, int threads) {
    const int64_t groups = out / kGroup;
    if (dtype == DType::fp16)
        interleave_units<uint16_t>(weight, groups, in, back, threads);
    else
        interleave_units<uint32_t>(weight, groups, dtype == DType::bf16 ? in / 2 : in, back, threads);
}

void run(const Problem& problem, const Kernel& kernel, int threads) {
    if (problem.rows == 0 || problem.out == 0) return;
    if (problem.interleaved && problem.out % kGroup != 0) return run_interleaved_and_rest(problem, kernel, threads);
    if (problem.rows <= kernel.few_rows)
        run_few(problem, kernel, threads);
    else
        run_many(problem, kernel, threads);
}

}  // namespace nanovllm::linear
