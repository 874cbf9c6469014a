// What the kernels of rows share. They are plain loops, which the compiler vectorizes for each instruction set; the loader
// picks the best version. The arithmetic gives a row the same bits with all of them.
//
// Included by the files of such kernels, each of which compiles all of it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cpu_elements.h"
#include "cpu_threads.h"

#if defined(__x86_64__) && defined(__GLIBC__)
#define FOR_EACH_ISA __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define FOR_ISAS_TO_AVX2 __attribute__((target_clones("arch=x86-64-v3", "default")))  // where wider vectors gain little
#else
#define FOR_EACH_ISA
#define FOR_ISAS_TO_AVX2
#endif
#define INLINE inline __attribute__((always_inline))  // what is not inlined is not compiled for each instruction set

namespace nanovllm::rows {
namespace {

constexpr int64_t kElementsOfThread = 32768;  // below, a second thread costs more than it does
constexpr int64_t kElementsOfPiece = 8192;     // some microseconds
constexpr int64_t kElementsOfFunction = 16;   // that take as long as a cosine or a logarithm
constexpr int kLanes = 16;                    // partial sums of a row, whatever the width of vectors

INLINE float float_of(uint32_t bits) { return widen_scalar(bits); }

// For results of arithmetic with elements and angles. A NaN among them has no bits that bf16 lacks, so that rounding keeps
// it a NaN. Looking for NaN would take half as long as everything else.
template <class T>
INLINE T narrow_result(float value) {
    return narrow_scalar<T>(value);
}

template <>
INLINE Bf16 narrow_result<Bf16>(float value) {
    const uint32_t bits = bits_of(value);
    return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

template <class T>
INLINE float rounded(float value) {
    return widen_scalar(narrow_result<T>(value));
}

// e^x to 2^-22, 0 or infinity where it is no normal number: 2^n e^r with n whole and |r| <= ln(2) / 2, ln(2) in two
// parts of which the first times n is exact, e^r by its Taylor series.
INLINE float exponential(float x) {
    x = x < -88.0f ? -88.0f : x;
    x = x > 89.0f ? 89.0f : x;
    constexpr float kWhole = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to a whole number
    const float shifted = x * 1.44269504f + kWhole, n = shifted - kWhole;
    const float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float e = 1.0f / 5040.0f;
    e = e * r + 1.0f / 720.0f;
    e = e * r + 1.0f / 120.0f;
    e = e * r + 1.0f / 24.0f;
    e = e * r + 1.0f / 6.0f;
    e = e * r + 0.5f;
    e = e * r * r + r + 1.0f;
    return e * float_of((bits_of(shifted) - bits_of(kWhole) + 127) << 23);
}

template <class T>
INLINE float sum_of_squares(const T* x, int64_t size) {
    float sums[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes)
        for (int lane = 0; lane < kLanes; ++lane) sums[lane] += widen_scalar(x[i + lane]) * widen_scalar(x[i + lane]);
    for (int lane = 0; i + lane < size; ++lane) sums[lane] += widen_scalar(x[i + lane]) * widen_scalar(x[i + lane]);
    for (int width = kLanes / 2; width > 0; width /= 2)
        for (int lane = 0; lane < width; ++lane) sums[lane] += sums[lane + width];
    return sums[0];
}

// 1 / sqrt(mean(x^2) + eps).
template <class T>
INLINE float norm_scale(const T* x, int64_t size, float eps) {
    return 1.0f / std::sqrt(sum_of_squares(x, size) / float(size) + eps);
}

INLINE float sigmoid_of(float x) { return 1.0f / (1.0f + exponential(-x)); }

INLINE float silu_of(float x) { return x / (1.0f + exponential(-x)); }

template <class Work>
void for_each(int64_t rows, int64_t elements_of_row, int threads, const Work& work) {
    const int64_t together = std::max<int64_t>(1, kElementsOfPiece / std::max<int64_t>(1, elements_of_row));
    const int used = int(std::min<int64_t>(threads, 1 + rows * elements_of_row / kElementsOfThread));
    for_pieces((rows + together - 1) / together, used, Order::runs, [&](int64_t piece, int) {
        const int64_t end = std::min(rows, (piece + 1) * together);
        for (int64_t row = piece * together; row < end; ++row) work(row);
    });
}

}  // namespace
}  // namespace nanovllm::rows
