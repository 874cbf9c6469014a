// Plain loops, which the compiler turns into vectors for each instruction set.
#include "cpu_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#if defined(__x86_64__) && defined(__GLIBC__)
#define FOR_EACH_ISA __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_ISA
#endif
#define INLINE inline __attribute__((always_inline))  // what is not inlined is not compiled for each instruction set

namespace nanovllm::rows {
namespace {

constexpr int64_t kElementsOfThread = 32768;  // below, a second thread costs more than it does
constexpr int kLanes = 16;                    // partial sums of a row, whatever the width of vectors

INLINE float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
}

INLINE float widen(uint16_t value) { return float_of(uint32_t(value) << 16); }

// To nearest, ties to even. A NaN stays one: those that come from bf16 or from an operation have an empty lower half.
INLINE uint16_t narrow(float value) {
    const uint32_t bits = bits_of(value);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE float rounded(float value) { return widen(narrow(value)); }

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

// 1 / sqrt(mean(x^2) + eps).
INLINE float norm_scale(const uint16_t* x, int64_t size, float eps) {
    float sums[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes)
        for (int lane = 0; lane < kLanes; ++lane) sums[lane] += widen(x[i + lane]) * widen(x[i + lane]);
    for (int lane = 0; i + lane < size; ++lane) sums[lane] += widen(x[i + lane]) * widen(x[i + lane]);
    for (int width = kLanes / 2; width > 0; width /= 2)
        for (int lane = 0; lane < width; ++lane) sums[lane] += sums[lane + width];
    return 1.0f / std::sqrt(sums[0] / float(size) + eps);
}

INLINE float normalised(uint16_t x, float scale, uint16_t weight) {
    return rounded(rounded(widen(x) * scale) * widen(weight));
}

FOR_EACH_ISA void add_row(uint16_t* __restrict__ x, const uint16_t* __restrict__ addend, int64_t size) {
    for (int64_t i = 0; i < size; ++i) x[i] = narrow(widen(x[i]) + widen(addend[i]));
}

FOR_EACH_ISA void norm_row(const uint16_t* __restrict__ x, const uint16_t* __restrict__ weight,
                           uint16_t* __restrict__ y, int64_t size, float eps) {
    const float scale = norm_scale(x, size, eps);
    for (int64_t i = 0; i < size; ++i) y[i] = narrow(normalised(x[i], scale, weight[i]));
}

FOR_EACH_ISA void turn_head(const uint16_t* __restrict__ x, const float* __restrict__ cos,
                            const float* __restrict__ sin, uint16_t* __restrict__ y, int64_t half) {
    for (int64_t i = 0; i < half; ++i) {
        const float first = widen(x[i]), second = widen(x[i + half]);
        y[i] = narrow(first * cos[i] - second * sin[i]);
        y[i + half] = narrow(second * cos[i] + first * sin[i]);
    }
}

FOR_EACH_ISA void norm_and_turn_head(const uint16_t* __restrict__ x, const uint16_t* __restrict__ weight,
                                     const float* __restrict__ cos, const float* __restrict__ sin,
                                     uint16_t* __restrict__ y, int64_t half, float eps) {
    const float scale = norm_scale(x, 2 * half, eps);
    for (int64_t i = 0; i < half; ++i) {
        const float first = normalised(x[i], scale, weight[i]);
        const float second = normalised(x[i + half], scale, weight[i + half]);
        y[i] = narrow(first * cos[i] - second * sin[i]);
        y[i + half] = narrow(second * cos[i] + first * sin[i]);
    }
}

INLINE float silu_of(float x) { return x / (1.0f + exponential(-x)); }

FOR_EACH_ISA void silu_row(const float* __restrict__ x, float* __restrict__ y, int64_t size) {
    for (int64_t i = 0; i < size; ++i) y[i] = silu_of(x[i]);
}

FOR_EACH_ISA void gated_row(const uint16_t* __restrict__ gate, const uint16_t* __restrict__ up,
                            uint16_t* __restrict__ y, int64_t size) {
    for (int64_t i = 0; i < size; ++i) y[i] = narrow(rounded(silu_of(widen(gate[i]))) * widen(up[i]));
}

template <class Work>
void for_each(int64_t rows, int64_t elements_of_row, int threads, const Work& work) {
    const int used = int(std::min<int64_t>(threads, 1 + rows * elements_of_row / kElementsOfThread));
#pragma omp parallel for schedule(static) num_threads(used) if (used > 1)
    for (int64_t row = 0; row < rows; ++row) work(row);
}

}  // namespace

void rms_norm(const Norm& n, int threads) {
    for_each(n.rows, n.size, threads, [&](int64_t row) {
        if (n.addend.data) add_row(n.x.at(row), n.addend.at(row), n.size);
        norm_row(n.x.at(row), n.weight, n.y.at(row), n.size, n.eps);
    });
}

void place_heads(const Heads& h, int threads) {
    const int64_t turned = h.q_heads + h.kv_heads, size = h.head_dim;
    for_each(h.tokens, (turned + h.kv_heads) * size, threads, [&](int64_t token) {
        const uint16_t* source = h.heads.at(token);
        const float *cos = h.cos.at(token), *sin = h.sin.at(token);
        for (int64_t head = 0; head < turned; ++head) {
            uint16_t* q = h.q.at(token) + head * size;
            uint16_t* target = head < h.q_heads ? q : h.k.at(token) + (head - h.q_heads) * size;
            if (h.weight)
                norm_and_turn_head(source + head * size, h.weight + head * size, cos, sin, target, size / 2, h.eps);
            else
                turn_head(source + head * size, cos, sin, target, size / 2);
        }
        std::memcpy(h.v.at(token), source + turned * size, size_t(h.kv_heads * size) * sizeof(uint16_t));
    });
}

void silu_and_mul(const GatedUnit& u, int threads) {
    for_each(u.rows, u.size, threads, [&](int64_t row) {
        gated_row(u.gate_up.at(row), u.gate_up.at(row) + u.size, u.y.at(row), u.size);
    });
}

void silu(const Activation& a, int threads) {
    for_each(a.rows, a.size, threads, [&](int64_t row) { silu_row(a.x.at(row), a.y.at(row), a.size); });
}

void add(const Sum& s, int threads) {
    for_each(s.rows, s.size, threads, [&](int64_t row) { add_row(s.x.at(row), s.addend.at(row), s.size); });
}

void store_kv(const Store& s, int threads) {
    const int64_t plane = s.kv_heads * s.block_size * s.head_bytes;
    for_each(s.tokens, s.kv_heads * s.head_bytes, threads, [&](int64_t token) {
        if (s.slots[token] < 0) return;
        const int64_t block = s.slots[token] / s.block_size, offset = s.slots[token] % s.block_size;
        char* target = s.pool + block * s.block_stride + offset * s.head_bytes;
        const char *k = s.k + token * s.k_token_stride, *v = s.v + token * s.v_token_stride;
        for (int64_t head = 0; head < s.kv_heads; ++head, target += s.block_size * s.head_bytes) {
            std::memcpy(target, k + head * s.k_head_stride, size_t(s.head_bytes));
            std::memcpy(target + plane, v + head * s.v_head_stride, size_t(s.head_bytes));
        }
    });
}

}  // namespace nanovllm::rows
