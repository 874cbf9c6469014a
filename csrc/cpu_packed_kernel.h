// Products with quantised weights for any instruction set X.
//
// X provides compiler vectors: W lanes of 32 bits, integers (V) or fp32 (F); 2 W integers of 16 bits (S); W integers of 16 bits
// (H) and of 8 bits (B). And `dot`, which adds the two products of each lane's pairs of 16-bit integers, or if kBytes the four
// products of unsigned bytes and signed ones; `fma`, rounded once; `half`, fp16 in the low half of each lane as fp32; `lookup`,
// for each byte from 0 to 15 that of a table.
//
// Included once by each instruction set's file, inside its anonymous namespace.

template <class T>
T load_at(const void* p) {
    T v;
    std::memcpy(&v, p, sizeof(v));
    return v;
}

#include "cpu_packed_expand.h"
#include "cpu_packed_inputs.h"

template <class X>
class PackedKernel {
    using V = typename X::V;
    using F = typename X::F;
    using S = typename X::S;
    static constexpr int W = X::W, kVectors = kOutputs / W;
    static constexpr int M = X::kTileRows, N = X::kTilePanels;
    static constexpr int kWordColumns = X::kBytes ? 1 : 2;  // words of an output that four of its weights are expanded to

  public:
    static void expand(const Weight& w, int64_t panel, int64_t block, int64_t blocks, const Part& part, int64_t at) {
        for (int lane = 0; lane < kOutputs; lane += W) {
            Store to{part.words + at * Part::kWords + lane, part.scales + at * Part::kScales + lane,
                     part.minimums + (part.minimums ? at * Part::kScales + lane : 0)};
            Expand<X>::run(w, panel, block, blocks, lane, to);
        }
    }

    static void multiply_few(const Weight& w, int64_t panel, int64_t block, int64_t blocks, const InputRows& rows,
                             float* totals, int64_t totals_stride) {
        if (rows.count == 1)
            few_by_count<1>(w, panel, block, blocks, rows, totals, totals_stride);
        else
            few_by_count<2>(w, panel, block, blocks, rows, totals, totals_stride);
    }

    static void multiply(const Part& part, const InputRows& rows, float* totals) {
        rows_by_count<M>(part, rows, totals);
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
    static V broadcast(uint32_t word) { return V{} + int32_t(word); }
    static F broadcast(float number) { return number - F{}; }  // adding zero would change -0

    // Four weights of each output, as `multiply` reads them.
    template <bool Signed>
    [[gnu::always_inline]] static void pair(V v, V pairs[2]) {
        pairs[0] = Signed ? V(S(S(v) << 8) >> 8) : v & 0x00ff00ff;
        pairs[1] = V(S(v) >> 8);  // the highest bit of an unsigned weight is zero
    }

    // The products of one group of R rows with W * C outputs. `x` points to the rows' words for the first of the weights.
    // Where bytes are multiplied, one of the factors is unsigned: of the inputs' low bytes they, of the high bytes the weights,
    // which are 128 too large for that if they are signed.
    template <int R, int C, bool Signed>
    struct Products {
        V low[R][C], high[X::kBytes ? R : 1][C];

        [[gnu::always_inline]] explicit Products(const int32_t* starts) {
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
                for (int c = 0; c < C; ++c) {
                    low[r][c] = V{} + (starts ? starts[r] : 0);
                    if constexpr (X::kBytes) high[r][c] = V{};
                }
        }
        [[gnu::always_inline]] void add(const V weights[C], const uint32_t* x) {
            V shifted[C];
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) shifted[c] = Signed && X::kBytes ? weights[c] ^ int32_t(0x80808080) : weights[c];
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const V inputs = broadcast(x[r * 8]);
#pragma GCC unroll 8
                for (int c = 0; c < C; ++c)
                    low[r][c] = X::kBytes ? X::dot(low[r][c], inputs, weights[c]) : X::dot(low[r][c], weights[c], inputs);
                if constexpr (X::kBytes)
#pragma GCC unroll 8
                    for (int c = 0; c < C; ++c) high[r][c] = X::dot(high[r][c], shifted[c], broadcast(x[r * 8 + 4]));
            }
        }
        [[gnu::always_inline]] V sum(int r, int c) const {
            if constexpr (X::kBytes) return low[r][c] + (high[r][c] << 8);
            return low[r][c];
        }
    };

    // ---- targets of Expand

    // Stores the groups, from `lane` on, for `multiply`.
    struct Store {
        uint32_t* words;
        float *scales, *minimums;

        struct Scales {
            float *scales, *minimums;

            void finish(F scale) { std::memcpy(scales, &scale, sizeof(scale)); }
            void finish(F scale, F minimum) {
                finish(scale);
                std::memcpy(minimums, &minimum, sizeof(minimum));
            }
        };
        template <bool Signed>
        struct Group : Scales {
            uint32_t* words;

            [[gnu::always_inline]] void add(int i, V v) {
                V pairs[2] = {v};
                if constexpr (!X::kBytes) pair<Signed>(v, pairs);
#pragma GCC unroll 2
                for (int j = 0; j < kWordColumns; ++j)
                    std::memcpy(words + (kWordColumns * i + j) * kOutputs, &pairs[j], sizeof(V));
            }
        };
        struct Floats : Scales {
            uint32_t* words;

            [[gnu::always_inline]] void add(int i, F v) { std::memcpy(words + i * kOutputs, &v, sizeof(v)); }
        };

        template <bool Signed, int Words>
        Group<Signed> group(int n) {
            const int64_t at = n * kOutputs;
            return {{scales + at, minimums + (minimums ? at : 0)}, words + at * Words * kWordColumns};
        }
        Floats floats() { return {{scales, minimums}, words}; }
        template <int Words>
        void next(int groups) {
            pass(groups, groups * Words * kWordColumns);
        }
        void next_floats() { pass(1, 32); }
        void pass(int groups, int columns) {
            words += columns * kOutputs;
            scales += groups * kOutputs;
            minimums += minimums ? groups * kOutputs : 0;
        }
    };

    // Multiplies the groups with R rows at once: what is not stored need not be loaded.
    template <int R>
    struct Multiply {
        InputRows x;
        F totals[R];

        // Of a single row, even and odd words have sums of their own, so that one need not wait for the other.
        template <bool Signed, int Words>
        struct Group {
            static constexpr int kChains = R == 1 && Words == 8 && X::kBytes ? 2 : 1;

            Multiply& to;
            int n;
            const uint32_t* words;
            Products<R, 1, Signed> products[kChains];

            [[gnu::always_inline]] void add(int i, V v) {
                const uint32_t* const unit = words + i / 4 * R * 8;
                auto& chain = products[i % kChains];
                if constexpr (X::kBytes) return chain.add(&v, unit + i % 4);
                V pairs[2];
                pair<Signed>(v, pairs);
                chain.add(&pairs[0], unit + i % 4 * 2);
                chain.add(&pairs[1], unit + i % 4 * 2 + 1);
            }
            [[gnu::always_inline]] void finish(F scale) {
#pragma GCC unroll 2
                for (int r = 0; r < R; ++r) {
                    V sum = products[0].sum(r, 0);
                    if constexpr (kChains == 2) sum += products[1].sum(r, 0);
                    to.totals[r] = X::fma(scale, __builtin_convertvector(sum, F) * to.x.units[n * R + r], to.totals[r]);
                }
            }
            [[gnu::always_inline]] void finish(F scale, F minimum) {
                finish(scale);
#pragma GCC unroll 2
                for (int r = 0; r < R; ++r) to.totals[r] = X::fma(minimum, broadcast(to.x.sums[n * R + r]), to.totals[r]);
            }
        };
        struct Floats {
            Multiply& to;
            F sums[R][2];

            [[gnu::always_inline]] void add(int i, F v) {
#pragma GCC unroll 2
                for (int r = 0; r < R; ++r)
                    sums[r][i % 2] = X::fma(v, broadcast(widen_scalar(to.x.words[r * 32 + i])), sums[r][i % 2]);
            }
            [[gnu::always_inline]] void finish(F scale) {
#pragma GCC unroll 2
                for (int r = 0; r < R; ++r) to.totals[r] = X::fma(scale, sums[r][0] + sums[r][1], to.totals[r]);
            }
        };

        template <bool Signed, int Words>
        [[gnu::always_inline]] Group<Signed, Words> group(int n) {
            using P = Products<R, 1, Signed>;
            const uint32_t* const words = x.words + n * Words * 2 * R;
            const int32_t* const starts = x.starts + n * R;
            if constexpr (Group<Signed, Words>::kChains == 2) return {*this, n, words, {P(starts), P(nullptr)}};
            else return {*this, n, words, {P(starts)}};
        }
        [[gnu::always_inline]] Floats floats() { return {*this, {}}; }
        template <int Words>
        void next(int groups) {
            pass(groups, Words * 2);
        }
        void next_floats() { pass(1, 32); }
        void pass(int groups, int words) {
            x.words += groups * words * R;
            x.units += groups * R;
            x.starts += groups * R;
            x.sums += groups * R;
        }
    };

    template <int R>
    static void few_by_count(const Weight& w, int64_t panel, int64_t block, int64_t blocks, const InputRows& rows,
                             float* totals, int64_t totals_stride) {
        for (int lane = 0; lane < kOutputs; lane += W) {
            Multiply<R> to;
            to.x = rows;
            for (int r = 0; r < R; ++r) to.totals[r] = load_at<F>(totals + r * totals_stride + lane);
            Expand<X>::run(w, panel, block, blocks, lane, to);
            for (int r = 0; r < R; ++r) std::memcpy(totals + r * totals_stride + lane, &to.totals[r], sizeof(F));
        }
    }

    // ---- many rows

    template <int R>
    static void rows_by_count(const Part& part, const InputRows& rows, float* totals) {
        if constexpr (R > 1)
            if (rows.count < R) return rows_by_count<R - 1>(part, rows, totals);
        if (part.values == Values::floats) return multiply_floats<R>(part, rows, totals);
        // Pairs of 16-bit integers are the same for signed weights as for others.
        const bool is_signed = X::kBytes && part.values == Values::signed_bytes;
        is_signed ? multiply_tile<R, X::kBytes>(part, rows, totals) : multiply_tile<R, false>(part, rows, totals);
    }

    static float* total_at(float* totals, int r, int c) {
        return totals + (r * N + c / kVectors) * kOutputs + c % kVectors * W;
    }

    template <int R, bool Signed>
    static void multiply_tile(const Part& part, const InputRows& rows, float* totals) {
        constexpr int C = N * kVectors;  // vectors of outputs
        const uint32_t* weights = part.words;
        const uint32_t* x = rows.words;
        for (int64_t g = 0; g < part.groups; ++g) {
            Products<R, C, Signed> products(rows.starts + g * R);
            for (int64_t unit = 0; unit < part.group / 16; ++unit, x += 8 * R)
#pragma GCC unroll 8
                for (int i = 0; i < 4 * kWordColumns; ++i, weights += kOutputs) {
                    V columns[C];
#pragma GCC unroll 8
                    for (int c = 0; c < C; ++c)
                        columns[c] = load_at<V>(weights + c / kVectors * Part::kWords + c % kVectors * W);
                    products.add(columns, x + i);
                }
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) {
                const int64_t lane = c / kVectors * Part::kScales + g * kOutputs + c % kVectors * W;
                const F scale = load_at<F>(part.scales + lane);
                const F minimum = part.minimums ? load_at<F>(part.minimums + lane) : F{};
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) {
                    float* const at = total_at(totals, r, c);
                    const F product = __builtin_convertvector(products.sum(r, c), F) * rows.units[g * R + r];
                    F total = X::fma(scale, product, load_at<F>(at));
                    if (part.minimums) total = X::fma(minimum, broadcast(rows.sums[g * R + r]), total);
                    std::memcpy(at, &total, sizeof(F));
                }
            }
        }
    }

    template <int R>
    static void multiply_floats(const Part& part, const InputRows& rows, float* totals) {
        constexpr int C = N * kVectors;
        const uint32_t *weights = part.words, *x = rows.words;
        for (int64_t g = 0; g < part.groups; ++g, x += 32 * R) {
            F sums[2][R][C] = {};
            for (int i = 0; i < 32; i += 2)
#pragma GCC unroll 2
                for (int k = 0; k < 2; ++k, weights += kOutputs) {
                    F columns[C];
#pragma GCC unroll 8
                    for (int c = 0; c < C; ++c)
                        columns[c] = load_at<F>(weights + c / kVectors * Part::kWords + c % kVectors * W);
#pragma GCC unroll 16
                    for (int r = 0; r < R; ++r) {
                        const F input = broadcast(widen_scalar(x[r * 32 + i + k]));
#pragma GCC unroll 8
                        for (int c = 0; c < C; ++c) sums[k][r][c] = X::fma(columns[c], input, sums[k][r][c]);
                    }
                }
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) {
                const F scale = load_at<F>(part.scales + c / kVectors * Part::kScales + g * kOutputs + c % kVectors * W);
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) {
                    float* const at = total_at(totals, r, c);
                    const F total = X::fma(scale, sums[0][r][c] + sums[1][r][c], load_at<F>(at));
                    std::memcpy(at, &total, sizeof(F));
                }
            }
        }
    }

    template <class T>
    static void finish_row(const Problem& p, int64_t row, int64_t output, int64_t count, const float* totals,
                           int64_t totals_stride) {
        const T* bias = static_cast<const T*>(p.bias);
        T* y = static_cast<T*>(p.y) + row * p.y_stride + output;
        for (int64_t i = 0; i < count; ++i) {
            float total = totals[i];
            if (p.copies() == 2) total += totals[totals_stride + i];
            y[i] = narrow_scalar<T>(bias ? total + widen_scalar(bias[output + i]) : total);
        }
    }
};

template <class X>
constexpr Kernel packed_kernel() {
    using K = PackedKernel<X>;
    return {X::kTileRows, X::kTilePanels, 2, Inputs<X>::quantise, K::expand, K::multiply_few, K::multiply, K::finish};
}
