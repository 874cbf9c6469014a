// Products with quantised weights for any instruction set X.
//
// X brings compiler vectors: W lanes of 32 bits, integers (V) or fp32 (F); 2 W integers of 16 bits (S); W integers of 16 bits
// (H) and of 8 bits (B). And `dot`, which adds the two products of each lane's pairs of 16-bit integers; `half`, fp16 in the
// low half of each lane as fp32.
//
// Included once by each instruction set's file, inside its anonymous namespace.

template <class T>
T load_at(const void* p) {
    T v;
    std::memcpy(&v, p, sizeof(v));
    return v;
}

#include "cpu_packed_expand.h"

template <class X>
class PackedKernel {
    using V = typename X::V;
    using F = typename X::F;
    static constexpr int W = X::W, kVectors = kOutputs / W;
    static constexpr int M = X::kTileRows, N = X::kTilePanels;

  public:
    // ---- rows of x to integers

    static void quantise(const Problem& p, int64_t row, const IntegerRows& rows) {
        switch (p.dtype) {
            case DType::bf16: return quantise_row<Bf16>(p, row, rows);
            case DType::fp16: return quantise_row<Fp16>(p, row, rows);
            case DType::fp32: return quantise_row<float>(p, row, rows);
        }
    }

    // ---- products

    static void multiply(const Part& part, const IntegerRows& rows, int64_t row_groups, int64_t count, float* totals) {
        if (part.panels == N)
            rows_by_count<M, N>(part, rows, row_groups, count, totals);
        else
            rows_by_count<M, 1>(part, rows, row_groups, count, totals);
    }

    static void finish(const Problem& p, int64_t row, int64_t output, int64_t count, const float* totals,
                       int64_t totals_stride) {
        switch (p.dtype) {
            case DType::bf16: return finish_row<Bf16>(p, row, output, count, totals, totals_stride);
            case DType::fp16: return finish_row<Fp16>(p, row, output, count, totals, totals_stride);
            case DType::fp32: return finish_row<float>(p, row, output, count, totals, totals_stride);
        }
    }

  private:
    static float power_of_two(int exponent) { return widen_scalar(uint32_t(exponent + 127) << 23); }

    // To the nearest integer, ties to even, for |v| < 2^22: adding 1.5 * 2^23 leaves no room for a fraction.
    static int32_t nearest(float v) { return int32_t(bits_of(v + 12582912.0f) - bits_of(12582912.0f)); }

    template <class T>
    static void quantise_row(const Problem& p, int64_t row, const IntegerRows& rows) {
        constexpr bool kTwo = sizeof(T) == 4;
        const int64_t groups = p.weight.groups(), group = p.weight.layout().group, zero = p.weight.zero();
        const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
        for (int64_t g = 0, at = row * groups * (kTwo ? 2 : 1); g < groups; ++g, ++at) {
            float v[32] = {};
            const int64_t count = std::min(group, p.weight.in - g * group);
            if (count == 32)
                for (int i = 0; i < 32; ++i) v[i] = widen_scalar(x[g * group + i]);
            else
                for (int64_t i = 0; i < count; ++i) v[i] = widen_scalar(x[g * group + i]);
            quantise_group<kTwo>(v, group, zero, rows, at, groups);
        }
    }

    template <bool Two>
    static void quantise_group(const float v[32], int64_t group, int64_t zero, const IntegerRows& rows, int64_t at,
                               int64_t groups) {
        uint32_t largest = 0;
        for (int i = 0; i < 32; ++i) largest = std::max(largest, bits_of(v[i]) & 0x7fffffff);
        const bool finite = largest < 0x7f800000;
        // The exponent of the largest input, but so that neither unit nor its inverse leaves fp32's normal numbers.
        const int exponent = std::max(int(largest >> 23) - 127, Two ? -98 : -112);
        const int bits = Two ? 13 : 14;
        const float scale = finite ? power_of_two(bits - exponent) : 0.0f;
        const float unit = finite ? power_of_two(exponent - bits) : std::numeric_limits<float>::quiet_NaN();
        int16_t high[32], low[32];
        for (int i = 0; i < 32; ++i) {
            const float scaled = finite ? v[i] * scale : 0.0f;
            const int32_t n = nearest(scaled);
            high[i] = int16_t(n);
            if (Two) low[i] = int16_t(nearest((scaled - float(n)) * 0x1p15f));
        }
        store_group(high, group, zero, unit, rows, at);
        if (Two) store_group(low, group, zero, unit * 0x1p-15f, rows, at + groups);
    }

    // Pairs are the inputs 4i and 4i + 2, then 4i + 1 and 4i + 3: a word of four 8-bit weights gives two such pairs.
    static void store_group(const int16_t n[32], int64_t group, int64_t zero, float unit, const IntegerRows& rows,
                            int64_t at) {
        int16_t paired[32];
        int32_t sum = 0;
        for (int i = 0; i < 32; i += 4) {
            paired[i] = n[i], paired[i + 1] = n[i + 2], paired[i + 2] = n[i + 1], paired[i + 3] = n[i + 3];
        }
        for (int i = 0; i < 32; ++i) sum += n[i];
        std::memcpy(rows.words + at * group / 2, paired, size_t(group) * 2);
        rows.units[at] = unit;
        rows.starts[at] = int32_t(-zero * sum);
        rows.sums[at] = unit * float(sum);
    }

    template <int R, int P>
    static void rows_by_count(const Part& part, const IntegerRows& rows, int64_t row_groups, int64_t count,
                              float* totals) {
        if constexpr (R > 1)
            if (count < R) return rows_by_count<R - 1, P>(part, rows, row_groups, count, totals);
        if (part.minimums)
            multiply_tile<R, P, true>(part, rows, row_groups, totals);
        else
            multiply_tile<R, P, false>(part, rows, row_groups, totals);
    }

    template <int R, int P, bool Minimums>
    static void multiply_tile(const Part& part, const IntegerRows& rows, int64_t row_groups, float* totals) {
        constexpr int C = P * kVectors;  // vectors of outputs
        const int64_t row_words = row_groups * part.pairs, panel_words = part.groups * part.planes * part.pairs * kOutputs;
        const auto total_at = [=](int r, int c) { return totals + (r * P + c / kVectors) * kOutputs + c % kVectors * W; };
        F sums[R][C];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) sums[r][c] = load_at<F>(total_at(r, c));
        const uint32_t* weights = part.words;
        for (int64_t g = 0; g < part.groups; ++g)
            for (int64_t plane = 0; plane < part.planes; ++plane, weights += part.pairs * kOutputs) {
                V products[R][C];
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
                    for (int c = 0; c < C; ++c) products[r][c] = V{} + rows.starts[r * row_groups + g];
                const uint32_t *x = rows.words + g * part.pairs, *w = weights;
                for (int64_t pair = 0; pair < part.pairs; pair += 8)
#pragma GCC unroll 8
                    for (int i = 0; i < 8; ++i, ++x, w += kOutputs) {
                        V columns[C];
#pragma GCC unroll 8
                        for (int c = 0; c < C; ++c)
                            columns[c] = load_at<V>(w + c / kVectors * panel_words + c % kVectors * W);
#pragma GCC unroll 16
                        for (int r = 0; r < R; ++r) {
                            const V inputs = V{} + int32_t(x[r * row_words]);
#pragma GCC unroll 8
                            for (int c = 0; c < C; ++c) products[r][c] = X::dot(products[r][c], columns[c], inputs);
                        }
                    }
#pragma GCC unroll 8
                for (int c = 0; c < C; ++c) {
                    const int64_t group = c / kVectors * part.groups + g, lane = c % kVectors * W;
                    const F scale = load_at<F>(part.scales + (group * part.planes + plane) * kOutputs + lane);
                    F minimum{};
                    if constexpr (Minimums) minimum = load_at<F>(part.minimums + group * kOutputs + lane);
#pragma GCC unroll 16
                    for (int r = 0; r < R; ++r) {
                        const int64_t at = r * row_groups + g;
                        F sum = scale * __builtin_convertvector(products[r][c], F) * rows.units[at];
                        if constexpr (Minimums) sum += minimum * rows.sums[at];
                        sums[r][c] += sum;
                    }
                }
            }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) std::memcpy(total_at(r, c), &sums[r][c], sizeof(F));
    }

    template <class T>
    static void finish_row(const Problem& p, int64_t row, int64_t output, int64_t count, const float* totals,
                           int64_t totals_stride) {
        const T* bias = static_cast<const T*>(p.bias);
        T* y = static_cast<T*>(p.y) + row * p.y_stride + output;
        for (int64_t i = 0; i < count; ++i) {
            float total = totals[i];
            if (sizeof(T) == 4) total += totals[totals_stride + i];
            y[i] = narrow_scalar<T>(bias ? total + widen_scalar(bias[output + i]) : total);
        }
    }
};

template <class X>
constexpr Kernel packed_kernel() {
    using K = PackedKernel<X>;
    return {X::kTileRows, X::kTilePanels, K::quantise, Expand<X>::run, K::multiply, K::finish};
}
