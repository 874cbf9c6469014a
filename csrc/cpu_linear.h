// A linear layer on few rows, y = x W^T + b in bf16, at the speed at which the weights can be read.
//
// A sum has one order, whatever the number of rows, outputs or threads: over blocks of `sum_block` inputs; within a
// block pair after pair from zero, in fp32; the blocks' sums one after the other; then the bias; then one rounding.
#pragma once

#include <cstdint>

namespace nanovllm::linear {

constexpr int kStep = 32;  // inputs whose weights are one vector

// Strides count elements, not bytes.
struct Problem {
    const uint16_t* x;           // [rows, in] bf16
    const uint16_t* weight;      // [out, in] bf16, contiguous
    const uint16_t* bias;        // [out] bf16 or null
    uint16_t* y;                 // [rows, out] bf16
    int64_t x_stride, y_stride;  // from row to row
    int64_t rows, in, out;       // at least one each
    int64_t sum_block;           // a multiple of kStep, or at least `in`
};

#if defined(__x86_64__)
void run_avx512bf16(const Problem& problem, int threads);
#endif

}  // namespace nanovllm::linear
