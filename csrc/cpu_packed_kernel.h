// Products with quantised weights for any instruction set X.
//
// X brings compiler vectors: W lanes of 32 bits, integers (V) or fp32 (F); 2 W integers of 16 bits (S); W integers of 16 bits
// (H) and of 8 bits (B). And `dot`, which adds the two products of each lane's pairs of 16-bit integers; `fma`, rounded once;
// `half`, fp16 in the low half of each lane as fp32.
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
    static constexpr int kChains = X::kChains > 1 ? 2 : 1;

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

    static void expand(const Weight& w, int64_t panel, int64_t block, int64_t blocks, const Part& part, int64_t at) {
        for (int lane = 0; lane < kOutputs; lane += W) {
            Store to{part.words + at * Part::panel_words(part.planes) + lane, part.scales + at * Part::kScales + lane,
                     part.minimums + (part.minimums ? at * Part::kScales + lane : 0)};
            Expand<X>::run(w, panel, block, blocks, lane, to);
        }
    }

    static void multiply_few(const Weight& w, int64_t panel, int64_t block, int64_t blocks, const IntegerRows& rows,
                             float* totals, int64_t totals_stride) {
        if (rows.count == 1)
            few_by_count<1>(w, panel, block, blocks, rows, totals, totals_stride);
        else
            few_by_count<2>(w, panel, block, blocks, rows, totals, totals_stride);
    }

    static void multiply(const Part& part, const IntegerRows& rows, float* totals) {
        if (part.panels == N)
            rows_by_count<M, N>(part, rows, totals);
        else
            rows_by_count<M, 1>(part, rows, totals);
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
    // ---- targets of Expand

    // Stores the groups, from `lane` on, for `multiply`.
    struct Store {
        uint32_t* words;
        float *scales, *minimums;

        template <int Place, int XPlace = Place>
        void begin() {}
        template <int Place, int XPlace = Place>
        void add(int pair, V v) {
            std::memcpy(words + (Place * 16 + pair) * kOutputs, &v, sizeof(v));
        }
        template <int Place, int XPlace = Place>
        void finish(F scale) {
            std::memcpy(scales + Place * kOutputs, &scale, sizeof(scale));
        }
        template <int Place>
        void finish(F scale, F minimum) {
            finish<Place>(scale);
            std::memcpy(minimums + Place * kOutputs, &minimum, sizeof(minimum));
        }
        template <int Places, int XPlaces = Places>
        void next(int pairs) {
            words += Places * pairs * kOutputs;
            scales += Places * kOutputs;
            minimums += minimums ? Places * kOutputs : 0;
        }
    };

    // Multiplies the groups with R rows at once: what is not stored need not be loaded.
    template <int R>
    struct Multiply {
        IntegerRows x;
        F totals[R];
        V products[2][R][kChains];

        template <int Place, int XPlace = Place>
        void begin() {
#pragma GCC unroll 2
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
                for (int k = 0; k < kChains; ++k) products[Place][r][k] = V{} + (k == 0 ? x.starts[XPlace * R + r] : 0);
        }
        template <int Place, int XPlace = Place>
        void add(int pair, V v) {
#pragma GCC unroll 2
            for (int r = 0; r < R; ++r) {
                const V inputs = V{} + int32_t(x.words[((XPlace * 2 + pair / 8) * R + r) * 8 + pair % 8]);
                products[Place][r][pair % kChains] = X::dot(products[Place][r][pair % kChains], v, inputs);
            }
        }
        template <int Place, int XPlace = Place>
        void finish(F scale) {
#pragma GCC unroll 2
            for (int r = 0; r < R; ++r) {
                const V sum = kChains == 1 ? products[Place][r][0] : products[Place][r][0] + products[Place][r][kChains - 1];
                totals[r] = X::fma(scale, __builtin_convertvector(sum, F) * x.units[XPlace * R + r], totals[r]);
            }
        }
        template <int Place>
        void finish(F scale, F minimum) {
            finish<Place>(scale);
#pragma GCC unroll 2
            for (int r = 0; r < R; ++r) totals[r] = X::fma(minimum, F{} + x.sums[Place * R + r], totals[r]);
        }
        template <int Places, int XPlaces = Places>
        void next(int pairs) {
            x.words += XPlaces * pairs * R;
            x.units += XPlaces * R;
            x.starts += XPlaces * R;
            x.sums += XPlaces * R;
        }
    };

    template <int R>
    static void few_by_count(const Weight& w, int64_t panel, int64_t block, int64_t blocks, const IntegerRows& rows,
                             float* totals, int64_t totals_stride) {
        for (int lane = 0; lane < kOutputs; lane += W) {
            Multiply<R> to;
            to.x = rows;
            for (int r = 0; r < R; ++r) to.totals[r] = load_at<F>(totals + r * totals_stride + lane);
            Expand<X>::run(w, panel, block, blocks, lane, to);
            for (int r = 0; r < R; ++r) std::memcpy(totals + r * totals_stride + lane, &to.totals[r], sizeof(F));
        }
    }

    // ---- integers

    static float power_of_two(int exponent) { return widen_scalar(uint32_t(exponent + 127) << 23); }

    // To the nearest integer, ties to even, for |v| < 2^22: adding 1.5 * 2^23 leaves no room for a fraction.
    static int32_t nearest(float v) { return int32_t(bits_of(v + 12582912.0f) - bits_of(12582912.0f)); }

    template <class T>
    static void quantise_row(const Problem& p, int64_t row, const IntegerRows& rows) {
        constexpr bool kTwo = sizeof(T) == 4;
        const int64_t groups = p.weight.groups(), group = p.weight.layout().group, zero = p.weight.zero();
        const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
        for (int64_t g = 0; g < groups; ++g) {
            float v[32] = {};
            const int64_t count = std::min(group, p.weight.in - g * group);
            if (count == 32)
                for (int i = 0; i < 32; ++i) v[i] = widen_scalar(x[g * group + i]);
            else
                for (int64_t i = 0; i < count; ++i) v[i] = widen_scalar(x[g * group + i]);
            quantise_group<kTwo>(v, group, zero, rows, kTwo ? 2 * row : row, g, groups);
        }
    }

    template <bool Two>
    static void quantise_group(const float v[32], int64_t group, int64_t zero, const IntegerRows& rows, int64_t row,
                               int64_t g, int64_t groups) {
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
        store_group(high, group, zero, unit, rows, row, g, groups);
        if (Two) store_group(low, group, zero, unit * 0x1p-15f, rows, row + 1, g, groups);
    }

    // Pairs are the inputs 4i and 4i + 2, then 4i + 1 and 4i + 3: a word of four 8-bit weights gives two such pairs.
    static void store_group(const int16_t n[32], int64_t group, int64_t zero, float unit, const IntegerRows& rows,
                            int64_t row, int64_t g, int64_t groups) {
        int16_t paired[32];
        int32_t sum = 0;
        for (int i = 0; i < 32; i += 4) {
            paired[i] = n[i], paired[i + 1] = n[i + 2], paired[i + 2] = n[i + 1], paired[i + 3] = n[i + 3];
        }
        for (int i = 0; i < 32; ++i) sum += n[i];
        const int64_t first = row / M * M, tile_rows = std::min<int64_t>(M, rows.count - first);
        const int64_t tile = first * groups + g * tile_rows, at = tile + row - first;
        for (int64_t i = 0; i < group; i += 16)
            std::memcpy(rows.words + tile * group / 2 + (i / 16 * tile_rows + row - first) * 8, paired + i, 32);
        rows.units[at] = unit;
        rows.starts[at] = int32_t(-zero * sum);
        rows.sums[at] = unit * float(sum);
    }

    template <int R, int P>
    static void rows_by_count(const Part& part, const IntegerRows& rows, float* totals) {
        if constexpr (R > 1)
            if (rows.count < R) return rows_by_count<R - 1, P>(part, rows, totals);
        if (part.minimums)
            multiply_tile<R, P, 1, true>(part, rows, totals);
        else if (part.planes == 1)
            multiply_tile<R, P, 1, false>(part, rows, totals);
        else
            multiply_tile<R, P, 2, false>(part, rows, totals);
    }

    template <int R, int P, int Planes, bool Minimums>
    static void multiply_tile(const Part& part, const IntegerRows& rows, float* totals) {
        constexpr int C = P * kVectors;  // vectors of outputs
        // Sums of which one does not wait for the other: integers may be added in any order.
        constexpr int K = R * C <= 2 ? X::kChains : R * C <= 6 ? (X::kChains + 1) / 2 : 1;
        const auto total_at = [=](int r, int c) { return totals + (r * P + c / kVectors) * kOutputs + c % kVectors * W; };
        F sums[R][C];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) sums[r][c] = load_at<F>(total_at(r, c));
        const uint32_t* weights = part.words;
        for (int64_t g = 0; g < part.groups; ++g)
            for (int plane = 0; plane < Planes; ++plane) {
                V products[R][C][K];
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
                    for (int c = 0; c < C; ++c)
#pragma GCC unroll 4
                        for (int k = 0; k < K; ++k) products[r][c][k] = V{} + (k == 0 ? rows.starts[g * R + r] : 0);
                const uint32_t* x = rows.words + g * R * part.pairs;
                for (int64_t pair = 0; pair < part.pairs; pair += 8, x += 8 * R, weights += 8 * kOutputs)
#pragma GCC unroll 8
                    for (int i = 0; i < 8; ++i) {
                        V columns[C];
#pragma GCC unroll 8
                        for (int c = 0; c < C; ++c)
                            columns[c] = load_at<V>(weights + c / kVectors * Part::panel_words(Planes) + i * kOutputs +
                                                    c % kVectors * W);
#pragma GCC unroll 16
                        for (int r = 0; r < R; ++r) {
                            const V inputs = V{} + int32_t(x[r * 8 + i]);
#pragma GCC unroll 8
                            for (int c = 0; c < C; ++c)
                                products[r][c][i % K] = X::dot(products[r][c][i % K], columns[c], inputs);
                        }
                    }
#pragma GCC unroll 8
                for (int c = 0; c < C; ++c) {
                    const int64_t lane = c / kVectors * Part::kScales + c % kVectors * W;
                    const F scale = load_at<F>(part.scales + (g * Planes + plane) * kOutputs + lane);
                    F minimum{};
                    if constexpr (Minimums) minimum = load_at<F>(part.minimums + g * kOutputs + lane);
#pragma GCC unroll 16
                    for (int r = 0; r < R; ++r) {
                        V sum = products[r][c][0];
#pragma GCC unroll 4
                        for (int k = 1; k < K; ++k) sum += products[r][c][k];
                        const int64_t at = g * R + r;
                        sums[r][c] = X::fma(scale, __builtin_convertvector(sum, F) * rows.units[at], sums[r][c]);
                        if constexpr (Minimums) sums[r][c] = X::fma(minimum, F{} + rows.sums[at], sums[r][c]);
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
    return {X::kTileRows, X::kTilePanels, 2, K::quantise, K::expand, K::multiply_few, K::multiply, K::finish};
}
