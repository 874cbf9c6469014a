// Products with quantised weights, y = x W^T + b, on any number of rows. The bits of a row depend on the row and the weights
// alone: all instruction sets give the same.
//
// The inputs of a group (32; 16 for q6_k) are taken as integers of 16 bits: x = unit * n, unit being the power of two that
// lets the group's largest input have 15 bits. Of bf16 and fp16 so many inputs are exact that only those smaller than 1/128
// (fp16: 1/16) of the largest are rounded, by at most 2^-15 of it; fp32 is split into two such integers and is rounded by at
// most 2^-28. A unit is at least 2^-126. The products with the weights' integers and their sum over a group are exact. Then,
// in fp32 and each rounded once, total += scale * (unit * sum), and total += minimum * (unit * sum of n) where weights have
// minimums or zeros, one group after the other. Then the bias; then one rounding.
//
// fp8 is multiplied in fp32 instead: the products of a group's even inputs are added one after the other, each with one
// rounding, and so are those of its odd inputs; total += scale * (even sum + odd sum).
//
// Weights lie in panels of 16 outputs, interleaved by nanovllm/ops/packed_panels.py: each block of inputs is a tile of one
// 4-byte word of each output in turn, so that a vector holds one word of 16 outputs. One or two rows multiply what is expanded
// at once; for more rows, a part of a panel is expanded in the core's first cache, then multiplied with all of them. Where the
// processor multiplies bytes (VNNI), the high and the low bytes of the inputs are multiplied with the weights' bytes, elsewhere
// both are expanded to 16 bits.
#pragma once

#include <cstdint>

#include "cpu_elements.h"
#include "cpu_isa.h"

namespace nanovllm::packed {

constexpr int64_t kOutputs = 16;       // of a panel
constexpr int64_t kPartInputs = 256;   // of a panel that are expanded at a time

enum class Scheme : int { int4, int8, fp8, mxfp4, q4_0, q4_1, q5_0, q5_1, q8_0, q4_k, q5_k, q6_k };

enum class Values : int { unsigned_bytes, signed_bytes, floats };  // that weights are expanded to

struct Layout {
    int64_t block_inputs, tile_bytes;  // of a block of kOutputs outputs
    int64_t group;                     // inputs that share a scale, or fewer
    Values values;
    int32_t zero;                      // what all weights' integers are too large by
    bool minimums;                     // in the data; integers may have zeros besides
};

constexpr Layout kLayouts[] = {
    {32, 256, 32, Values::unsigned_bytes, 8, false},     // int4
    {32, 512, 32, Values::signed_bytes, 0, false},       // int8
    {32, 512, 32, Values::floats, 0, false},             // fp8
    {32, 256, 32, Values::unsigned_bytes, 12, false},    // mxfp4: the integers are twice the numbers of fp4
    {32, 288, 32, Values::unsigned_bytes, 8, false},     // q4_0
    {32, 320, 32, Values::unsigned_bytes, 0, true},      // q4_1
    {32, 352, 32, Values::unsigned_bytes, 16, false},    // q5_0
    {32, 384, 32, Values::unsigned_bytes, 0, true},      // q5_1
    {32, 544, 32, Values::signed_bytes, 0, false},       // q8_0
    {256, 2304, 32, Values::unsigned_bytes, 0, true},    // q4_k
    {256, 2816, 32, Values::unsigned_bytes, 0, true},    // q5_k
    {256, 3360, 16, Values::unsigned_bytes, 32, false},  // q6_k
};

struct Weight {
    Scheme scheme;
    const uint8_t* data;   // [panels][blocks][tile]
    const void* scales;    // int4, int8, fp8, mxfp4: [panels][scale groups][kOutputs]; of mxfp4 bytes, the exponents
    DType scale_dtype;
    const int8_t* zeros;   // int4 (unsigned), int8: as the scales, or null
    int64_t outputs_per_scale;  // of fp8; if more than 1, scales are [out / outputs_per_scale][scale groups]
    int64_t group_size;         // inputs that share one of `scales`
    int64_t in, out;

    const Layout& layout() const { return kLayouts[int(scheme)]; }
    bool has_minimums() const { return layout().minimums || zeros != nullptr; }
    int32_t zero() const { return zeros ? 0 : layout().zero; }
    int64_t blocks() const { return (in + layout().block_inputs - 1) / layout().block_inputs; }
    int64_t groups() const { return blocks() * layout().block_inputs / layout().group; }
};

// Strides count elements.
struct Problem {
    Weight weight;
    DType dtype;                 // of x, bias and y
    const void* x;               // [rows, in]
    const void* bias;            // [out] or null
    void* y;                     // [rows, out]
    int64_t x_stride, y_stride;  // from row to row
    int64_t rows;

    // Rows of integers that a row of x becomes.
    int64_t copies() const { return dtype == DType::fp32 && weight.layout().values != Values::floats ? 2 : 1; }
    // Words that a group of a row becomes.
    int64_t group_words() const { return weight.layout().group / (weight.layout().values == Values::floats ? 1 : 2); }
};

// Rows of x as integers, in tiles of Kernel::tile_rows; the last tile may have fewer rows. A row of fp32 is two, one after the
// other. For fp8, rows in fp32.
struct InputRows {
    uint32_t* words;  // [tiles][groups][group / 16][rows][8], as the kernel pairs them; fp32: [tiles][groups][rows][group]
    float* units;     // [tiles][groups][rows]
    int32_t* starts;  // [tiles][groups][rows], what the products with a group's bytes are too small by
    float* sums;      // [tiles][groups][rows], unit * the sum of the integers
    int64_t count;    // of rows
};

// A part of Kernel::tile_panels panels, expanded. Each panel has as much memory as a whole part takes.
struct Part {
    static constexpr int64_t kScales = kPartInputs / 16 * kOutputs;
    static constexpr int64_t kWords = kPartInputs * kOutputs;

    uint32_t* words;  // [panels][groups][words of a group][kOutputs]: bytes or pairs of integers, or fp32
    float* scales;    // [panels][groups][kOutputs]
    float* minimums;  // [panels][groups][kOutputs], null where there are none
    int64_t groups, group;  // group: inputs
    Values values;
};

// What an instruction set does.
struct Kernel {
    int64_t tile_rows;    // most rows of `multiply`
    int64_t tile_panels;  // panels of `multiply`
    int64_t few_rows;     // most rows of `multiply_few`
    // One row of x to one or two rows of integers, or to one in fp32.
    void (*quantise)(const Problem& problem, int64_t row, const InputRows& rows);
    // Blocks [block, block + blocks) of a panel into the place of panel `at` of the part.
    void (*expand)(const Weight& weight, int64_t panel, int64_t block, int64_t blocks, const Part& part, int64_t at);
    // Adds the products of these blocks with few rows, which begin at the blocks' inputs, to totals [rows][stride]. The same
    // as `expand` and `multiply`, for which there are too few rows here.
    void (*multiply_few)(const Weight& weight, int64_t panel, int64_t block, int64_t blocks, const InputRows& rows,
                         float* totals, int64_t totals_stride);
    // Adds the part's products with one tile of rows, which begins at the part's inputs, to totals
    // [rows][tile_panels * kOutputs].
    void (*multiply)(const Part& part, const InputRows& tile, float* totals);
    // totals of one row, two for fp32, to outputs [output, output + count) of y.
    void (*finish)(const Problem& problem, int64_t row, int64_t output, int64_t count, const float* totals,
                   int64_t totals_stride);
};

const Kernel& portable_kernel();
#if defined(__x86_64__)
const Kernel& avx2_kernel();
const Kernel& avx512_kernel();
const Kernel& avx512vnni_kernel();
#endif

inline const Kernel& kernel_of(Isa isa) {
#if defined(__x86_64__)
    if (isa == Isa::avx512bf16 || isa == Isa::avx512)
        return __builtin_cpu_supports("avx512vnni") ? avx512vnni_kernel() : avx512_kernel();
    if (isa == Isa::avx2) return avx2_kernel();
#endif
    (void)isa;
    return portable_kernel();
}

void run(const Problem& problem, const Kernel& kernel, int threads);

}  // namespace nanovllm::packed
