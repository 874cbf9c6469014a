// Linear layers, y = x W^T + b, on any number of rows, whose bits depend on the row, the weights and the instruction set
// alone.
//
// A sum has one order, fixed here: over blocks of `sum_inputs` inputs; within a block one input after the other from
// zero, in fp32, each output in a lane of its own; the blocks' sums one after the other; then the bias; then one
// rounding. It does not depend on the number of rows, on tiles, on threads or on the addresses of buffers.
//
// Few rows read the weights in place, since reading the weights takes all of their time. For many rows, blocks of weights
// are widened and packed into the processor's cache first. Both do the same sums.
//
// Weights lie row by row, or interleaved as `interleave` leaves them. Few rows then need no shuffles, which take longer
// than reading if there is more than one row, and they read a few streams instead of one for each output.
#pragma once

#include <cstdint>

#include "cpu_elements.h"
#include "cpu_isa.h"

namespace nanovllm::linear {

// Interleaved weights are [out / kGroup, in / unit, kGroup, unit]: one vector has the same inputs of several outputs.
// A unit is a pair of bf16 inputs, and one input of the other types. The last out % kGroup outputs lie row by row.
constexpr int64_t kGroup = 16;
constexpr int64_t kInterleavedInputs = 32;  // `in` is a multiple of so many, so that no kernel pads inputs

// Strides count elements, not bytes.
struct Problem {
    const void* x;               // [rows, in]
    const void* weight;          // [out, in], contiguous
    const void* bias;            // [out] or null
    void* y;                     // [rows, out]
    int64_t x_stride, y_stride;  // from row to row
    int64_t rows, in, out;
    bool interleaved;            // the weights
};

// Rows of x as `pack_rows` leaves them: 4-byte words, each one fp32 input or a pair of bf16 inputs.
struct PackedRows {
    const uint32_t* words;
    int64_t first_row, count;
};

// Some rows times a panel of packed weights: outputs [first_output, first_output + outputs), inputs of one sum block.
struct Tile {
    PackedRows rows;
    const uint32_t* weights;  // as `pack_weights` leaves them
    int64_t first_output, outputs, inputs;
    float* totals;  // [rows, stride] of the sum blocks before, where there are several
    int64_t totals_stride;
    bool first, last;  // of the sum blocks
};

// The rows of the next tile where `left` are left: as many as tiles are compiled for.
constexpr int64_t tile_rows(int64_t left, int64_t most) {
    return left >= most ? most : left >= 6 ? 6 : left >= 4 ? 4 : left >= 2 ? 2 : left;
}

// What an instruction set does for one dtype.
struct Kernel {
    int64_t element_bytes;
    int64_t depth;          // inputs of a word
    int64_t input_multiple; // packed rows are padded to a multiple of so many inputs
    int64_t sum_inputs;     // inputs of a sum block
    int64_t few_rows;       // up to which the weights are read as they lie
    int64_t pass_rows;      // most rows of `multiply_few` over interleaved weights
    int64_t row_by_row_pass;  // and over weights that lie row by row
    int64_t pass_outputs;   // that it takes at a time
    int64_t tile_rows;      // most rows of `multiply_tile`, see the function tile_rows
    int64_t panel_outputs;  // most outputs of `multiply_tile`
    int64_t block_outputs;  // of the packed weights that stay in the cache, whole panels
    void (*pack_rows)(const void* x, int64_t stride, int64_t rows, int64_t inputs, uint32_t* packed);
    void (*pack_weights)(const Problem& problem, int64_t output, int64_t outputs, int64_t input, int64_t inputs,
                         uint32_t* packed);
    void (*multiply_few)(const Problem& problem, const PackedRows& rows, int64_t begin, int64_t end,
                         int64_t fetch_ahead);
    void (*multiply_tile)(const Problem& problem, const Tile& tile);
};

const Kernel& portable_kernel(DType dtype);
#if defined(__x86_64__)
const Kernel& avx2_kernel(DType dtype);
const Kernel& avx512_kernel(DType dtype);
const Kernel& avx512bf16_kernel();
#endif

inline const Kernel& kernel_of(Isa isa, DType dtype) {
#if defined(__x86_64__)
    if (isa == Isa::avx512bf16 && dtype == DType::bf16) return avx512bf16_kernel();
    if (isa == Isa::avx512bf16 || isa == Isa::avx512) return avx512_kernel(dtype);
    if (isa == Isa::avx2) return avx2_kernel(dtype);
#endif
    (void)isa;
    return portable_kernel(dtype);
}

void run(const Problem& problem, const Kernel& kernel, int threads);

// Weights [out, in] from row by row to interleaved, in place, or back.
void interleave(DType dtype, void* weight, int64_t out, int64_t in, bool back, int threads);

// Rows of weights [out, in], which are interleaved or not: y [count, in], dense. Indices must be in [0, out).
struct Gather {
    const void* weight;
    void* y;
    const int64_t* indices;
    int64_t count, in, out;
    bool interleaved;
};
void gather(DType dtype, const Gather& gather, int threads);

}  // namespace nanovllm::linear
