// The products of a linear layer for any instruction set X and element type X::T.
//
// X brings: W lanes of fp32 (F); raw vectors that hold W outputs of X::kInputs inputs each after `load_weights`, of which
// `expand<e>` makes X::kExpand vectors of words (V); `unit_word<e>`, the same of W units of interleaved weights; `dot`,
// which adds the products of one word to the sums.
//
// Included once by each instruction set's file, inside its anonymous namespace.

constexpr int kRowByRowPass = 4;   // most rows over weights that lie row by row, where most work is transposing weights
constexpr int kBlockOutputs = 288;  // of packed weights: a sum block of them stays in a core's own cache

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

template <class X>
class LinearKernel {
    using T = typename X::T;
    using F = typename X::F;
    using V = typename X::V;
    static constexpr int W = X::W;
    static constexpr int N = X::kVectors, kPanel = N * W;
    static constexpr int kWords = W * X::kExpand;  // of the raw vectors of one load
    static constexpr int kUnit = X::kIsBf16 ? 2 : 1;  // inputs of a unit of interleaved weights
    static constexpr int kUnitWords = kUnit / X::kDepth;
    static_assert(kGroup % W == 0 && kInterleavedInputs % X::kInputs == 0);
    static_assert(kWords * X::kDepth == X::kInputs && X::kSumInputs % X::kInputs == 0);

  public:
    // [inputs / kInputs][rows][kWords], zeros after the last input. So the loops below read contiguous words, at offsets
    // that the compiler knows.
    static void pack_rows(const void* x, int64_t stride, int64_t rows, int64_t inputs, uint32_t* packed) {
        for (int64_t row = 0; row < rows; ++row, packed += kWords) {
            const T* source = static_cast<const T*>(x) + row * stride;
            uint32_t* target = packed;
            int64_t k = 0;
            for (; k + X::kInputs <= inputs; k += X::kInputs, target += rows * kWords)
                X::pack_inputs(source + k, X::kInputs, target);  // a constant: no masks
            if (k < inputs) X::pack_inputs(source + k, inputs - k, target);
        }
    }

    // [panels][words][kPanel], zeros where there is no output.
    static void pack_weights(const Problem& p, int64_t output, int64_t outputs, int64_t input, int64_t inputs,
                             uint32_t* packed) {
        const T* weight = static_cast<const T*>(p.weight);
        const int64_t words = packed_words(inputs);
        for (int64_t first = 0; first < outputs; first += kPanel, packed += words * kPanel)
            for (int n = 0; n < N; ++n) {
                const int64_t begin = first + n * W, count = smaller(W, outputs - begin);
                if (p.interleaved) {
                    spread_units(p, output + begin, count, input, inputs, packed + n * W);
                    continue;
                }
                const T* rows = weight + (output + begin) * p.in + input;
                for (int64_t k = 0; k < inputs; k += X::kInputs)
                    turn_inputs(rows + k, p.in, count, inputs - k,
                              packed + k / X::kDepth * kPanel + n * W);
            }
    }

    static void multiply_few(const Problem& p, const PackedRows& rows, int64_t begin, int64_t end,
                             int64_t fetch_ahead) {
        if (p.interleaved) return few_interleaved_by_count<X::kPassRows>(p, rows, begin, end, fetch_ahead);
        few_by_count<kRowByRowPass>(p, rows, begin, end, fetch_ahead);
    }

    static void multiply_tile(const Problem& p, const Tile& t) { tile_by_count<X::kTileRows>(p, t); }

  private:
    // Inputs are filled up with zeros to a multiple of kInputs, with few rows and with many: even a zero has a sign to change.
    static int64_t packed_words(int64_t inputs) { return (inputs + X::kInputs - 1) / X::kInputs * kWords; }

    // W outputs of kInputs inputs, zeros where there are fewer of either.
    static void load(const T* rows, int64_t stride, int64_t outputs, int64_t inputs, V raw[W]) {
        if (outputs >= W && inputs >= X::kInputs)
            return X::template load_weights<true>(rows, stride, W, X::kInputs, raw);
        V some[W];
        load_some(rows, stride, outputs, inputs, some);
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) raw[i] = some[i];
    }
    // Not inlined: it is rare, and more code than its caller.
    __attribute__((noinline)) static void load_some(const T* rows, int64_t stride, int64_t outputs, int64_t inputs,
                                                    V some[W]) {
        X::template load_weights<false>(rows, stride, outputs, inputs, some);
    }

    static void turn_inputs(const T* rows, int64_t stride, int64_t outputs, int64_t inputs, uint32_t* packed) {
        V raw[W];
        load(rows, stride, outputs, inputs, raw);
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) {
            X::store_words(packed + i * X::kExpand * kPanel, X::template expand<0>(raw[i]));
            if constexpr (X::kExpand == 2)
                X::store_words(packed + (i * 2 + 1) * kPanel, X::template expand<1>(raw[i]));
        }
    }

    // ---- few rows: the weights in place

    // Adds the products of kInputs inputs to the sums of R rows and W outputs.
    template <int R>
    static void add_products(const T* weight, int64_t stride, int64_t outputs, int64_t inputs, const uint32_t* x,
                             int64_t fetch_ahead, F sums[R]) {
        V raw[W];
        load(weight, stride, outputs, inputs, raw);
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i)
            __builtin_prefetch(reinterpret_cast<const char*>(weight + i * stride + fetch_ahead), 0, 2);
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) {
            add_word<R>(X::template expand<0>(raw[i]), x + i * X::kExpand, sums);
            if constexpr (X::kExpand == 2) add_word<R>(X::template expand<1>(raw[i]), x + i * 2 + 1, sums);
        }
    }

    template <int R>
    static void add_word(V weights, const uint32_t* x, F sums[R]) {
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) sums[r] = X::dot(sums[r], X::splat(x + r * kWords), weights);
    }

    // R rows and W outputs, of which the first `outputs` exist.
    template <int R>
    static void few_outputs(const Problem& p, const PackedRows& rows, int64_t output, int64_t outputs,
                            int64_t fetch_ahead) {
        const T* weight = static_cast<const T*>(p.weight) + output * p.in;
        const uint32_t* x = rows.words;
        F totals[R];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) totals[r] = X::zero();
        for (int64_t begin = 0; begin < p.in; begin += X::kSumInputs) {
            F sums[R];
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) sums[r] = X::zero();
            const int64_t end = smaller(p.in, begin + X::kSumInputs);
            for (int64_t k = begin; k < end; k += X::kInputs, x += R * kWords)
                add_products<R>(weight + k, p.in, outputs, end - k, x, fetch_ahead, sums);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) totals[r] = begin == 0 ? sums[r] : X::add(totals[r], sums[r]);
        }
        for (int r = 0; r < R; ++r) store(p, rows.first_row + r, output, smaller(W, outputs), totals[r]);
    }

    template <int R>
    static void few_by_count(const Problem& p, const PackedRows& rows, int64_t begin, int64_t end,
                             int64_t fetch_ahead) {
        if constexpr (R > 1)
            if (rows.count < R) return few_by_count<R - 1>(p, rows, begin, end, fetch_ahead);
        for (int64_t output = begin; output < end; output += W)
            few_outputs<R>(p, rows, output, end - output, fetch_ahead);
    }

    // ---- interleaved weights

    // The units of W outputs from `output` on, of the first inputs.
    static const T* units_of(const Problem& p, int64_t output) {
        return static_cast<const T*>(p.weight) + output / kGroup * kGroup * p.in + output % kGroup * kUnit;
    }

    // All words of W outputs, zeros if there are none, with kPanel words between one and the next.
    static void spread_units(const Problem& p, int64_t output, int64_t count, int64_t input, int64_t inputs,
                             uint32_t* packed) {
        if (count <= 0) {
            for (int64_t word = 0; word < inputs / X::kDepth; ++word, packed += kPanel)
                std::memset(packed, 0, W * sizeof(uint32_t));
            return;
        }
        const T* units = units_of(p, output) + input * kGroup;
        for (int64_t k = 0; k < inputs; k += kUnit, units += kUnit * kGroup, packed += kUnitWords * kPanel)
            spread_unit<0>(units, packed);
    }

    template <int e>
    static void spread_unit(const T* units, uint32_t* packed) {
        if constexpr (e < kUnitWords) {
            X::store_words(packed + e * kPanel, X::template unit_word<e>(units));
            spread_unit<e + 1>(units, packed);
        }
    }

    // From so many rows on, computing takes about as long as reading, so waiting for a line costs time: weights are fetched
    // from twice as far ahead, and into the first cache shortly before their turn. Fewer rows are slower that way.
    template <int R>
    static constexpr bool kFetchTwice = R >= X::kFetchTwiceRows;
    static constexpr int64_t kSoon = 1024 / sizeof(T);

    // Vectors of outputs at a time: as many sums as there are registers for.
    template <int R>
    static constexpr int kFewVectors = R * 4 <= X::kFewSums ? 4 : R < X::kFewSums ? X::kFewSums / R : 1;

    // GCC drops a call of a function that only prefetches, so this one is inlined.
    template <int P, int Locality>
    __attribute__((always_inline)) static void fetch_units(const T* const units[P], int64_t ahead) {
#pragma GCC unroll 4
        for (int v = 0; v < P; ++v)
            __builtin_prefetch(reinterpret_cast<const char*>(units[v] + ahead), 0, Locality);
    }

    template <int R, int P>
    static void few_interleaved(const Problem& p, const PackedRows& rows, int64_t output, int64_t fetch_ahead) {
        const T* units[P];
        F totals[P][R];
        const uint32_t* x = rows.words;
#pragma GCC unroll 4
        for (int v = 0; v < P; ++v) {
            units[v] = units_of(p, output + v * W);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) totals[v][r] = X::zero();
        }
        for (int64_t begin = 0; begin < p.in; begin += X::kSumInputs) {
            F sums[P][R];
#pragma GCC unroll 4
            for (int v = 0; v < P; ++v)
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) sums[v][r] = X::zero();
            for (int64_t k = begin; k < smaller(p.in, begin + X::kSumInputs); k += X::kInputs, x += (R - 1) * kWords) {
                // After the last input come the next P vectors.
                const auto from_here = [&](int64_t count) {
                    return k * kGroup + count < p.in * kGroup ? count : count + (P - 1) * kGroup * p.in;
                };
                const int64_t ahead = from_here(fetch_ahead * (kFetchTwice<R> ? 2 : 1) / P), soon = from_here(kSoon);
                for (const uint32_t* end = x + kWords; x < end; x += kUnitWords) {
                    fetch_units<P, 2>(units, ahead);
                    if constexpr (kFetchTwice<R>) fetch_units<P, 3>(units, soon);
                    add_units<R, P, 0>(units, x, sums);
#pragma GCC unroll 4
                    for (int v = 0; v < P; ++v) units[v] += kGroup * kUnit;
                }
            }
#pragma GCC unroll 4
            for (int v = 0; v < P; ++v)
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) totals[v][r] = begin == 0 ? sums[v][r] : X::add(totals[v][r], sums[v][r]);
        }
        for (int v = 0; v < P; ++v)
            for (int r = 0; r < R; ++r) store(p, rows.first_row + r, output + v * W, W, totals[v][r]);
    }

    // Adds the products of one unit of P x W outputs to the sums of R rows.
    template <int R, int P, int e>
    static void add_units(const T* const units[P], const uint32_t* x, F sums[P][R]) {
        if constexpr (e < kUnitWords) {
            V weights[P];
#pragma GCC unroll 4
            for (int v = 0; v < P; ++v) weights[v] = X::template unit_word<e>(units[v]);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const V element = X::splat(x + e + r * kWords);
#pragma GCC unroll 4
                for (int v = 0; v < P; ++v) sums[v][r] = X::dot(sums[v][r], element, weights[v]);
            }
            add_units<R, P, e + 1>(units, x, sums);
        }
    }

    template <int R>
    static void few_interleaved_by_count(const Problem& p, const PackedRows& rows, int64_t begin, int64_t end,
                                         int64_t fetch_ahead) {
        if constexpr (R > 1)
            if (rows.count < R) return few_interleaved_by_count<R - 1>(p, rows, begin, end, fetch_ahead);
        constexpr int P = kFewVectors<R>;
        // Two and two are faster than three and one.
        for (; begin + P * W <= end && (P != 3 || begin + 4 * W != end); begin += P * W)
            few_interleaved<R, P>(p, rows, begin, fetch_ahead);
        if constexpr (P == 3)
            for (; begin + 2 * W <= end; begin += 2 * W) few_interleaved<R, 2>(p, rows, begin, fetch_ahead);
        for (; begin < end; begin += W)
            for (int64_t row = 0; row < R; row += kRestRows) last_interleaved(p, rows, row, begin);
    }

    // Some rows from `row` on and W of the outputs that whole passes leave at the end of a matrix: too few for more code.
    // If there are fewer rows, the last one is computed more than once.
    static constexpr int kRestRows = 4;
    static void last_interleaved(const Problem& p, const PackedRows& rows, int64_t row, int64_t output) {
        const uint32_t* x[kRestRows];
        F totals[kRestRows];
#pragma GCC unroll 4
        for (int r = 0; r < kRestRows; ++r) {
            x[r] = rows.words + smaller(row + r, rows.count - 1) * kWords;
            totals[r] = X::zero();
        }
        const T* units = units_of(p, output);
        for (int64_t begin = 0; begin < p.in; begin += X::kSumInputs) {
            F sums[kRestRows];
#pragma GCC unroll 4
            for (int r = 0; r < kRestRows; ++r) sums[r] = X::zero();
            for (int64_t k = begin; k < smaller(p.in, begin + X::kSumInputs); k += X::kInputs) {
                for (int word = 0; word < kWords; word += kUnitWords, units += kGroup * kUnit)
                    add_unit<0>(units, x, word, sums);
#pragma GCC unroll 4
                for (int r = 0; r < kRestRows; ++r) x[r] += rows.count * kWords;
            }
#pragma GCC unroll 4
            for (int r = 0; r < kRestRows; ++r) totals[r] = begin == 0 ? sums[r] : X::add(totals[r], sums[r]);
        }
        for (int r = 0; r < smaller(kRestRows, rows.count - row); ++r)
            store(p, rows.first_row + row + r, output, W, totals[r]);
    }

    template <int e>
    static void add_unit(const T* units, const uint32_t* const x[kRestRows], int word, F sums[kRestRows]) {
        if constexpr (e < kUnitWords) {
            const V weights = X::template unit_word<e>(units);
#pragma GCC unroll 4
            for (int r = 0; r < kRestRows; ++r) sums[r] = X::dot(sums[r], X::splat(x[r] + word + e), weights);
            add_unit<e + 1>(units, x, word, sums);
        }
    }

    // ---- many rows: packed weights

    // M rows and C vectors of outputs, of which the first is the one numbered `first` in the panel.
    template <int M, int C>
    static void multiply_vectors(const Problem& p, const Tile& t, int64_t first) {
        const uint32_t *x = t.rows.words, *weights = t.weights + first * W;
        F sums[M][C];
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) sums[m][c] = X::zero();
        for (int64_t k = 0; k < t.inputs; k += X::kInputs, x += (M - 1) * kWords)
#pragma GCC unroll 4
            for (int word = 0; word < kWords; ++word, ++x, weights += kPanel) {
                V columns[C];
#pragma GCC unroll 4
                for (int c = 0; c < C; ++c) columns[c] = X::load_words(weights + c * W);
#pragma GCC unroll 16
                for (int m = 0; m < M; ++m) {
                    const V element = X::splat(x + m * kWords);
#pragma GCC unroll 4
                    for (int c = 0; c < C; ++c) sums[m][c] = X::dot(sums[m][c], element, columns[c]);
                }
            }
        F results[M][C];  // in memory, so that what follows is a loop
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) results[m][c] = sums[m][c];
        for (int m = 0; m < M; ++m)
            for (int c = 0; c < C; ++c) finish(p, t, m, (first + c) * W, results[m][c]);
    }

    // The sum of one block: added to those before it, then kept for those after it or stored.
    static void finish(const Problem& p, const Tile& t, int row, int64_t column, F sum) {
        float* total = t.totals + row * t.totals_stride + column;
        if (!t.first) sum = X::add(X::load(total), sum);
        if (!t.last) return X::store(total, sum);
        store(p, t.rows.first_row + row, t.first_output + column, smaller(W, t.outputs - column), sum);
    }

    template <int M>
    static void tile_by_count(const Problem& p, const Tile& t) {
        if constexpr (M > 1)
            if (t.rows.count < M) return tile_by_count<tile_rows(M - 1, X::kTileRows)>(p, t);
        // The last panel may have outputs for some of its vectors only. Of two, or for the last rows, all are multiplied then.
        if (N <= 2 || M < X::kTileRows || t.outputs > kPanel - W) return multiply_vectors<M, N>(p, t, 0);
        if constexpr (N > 2 && M == X::kTileRows)
            for (int64_t n = 0; n * W < t.outputs; ++n) multiply_vectors<M, 1>(p, t, n);
    }

    static void store(const Problem& p, int64_t row, int64_t output, int64_t outputs, F sum) {
        if (outputs <= 0) return;
        if (p.bias) sum = X::add(sum, X::load_elements(static_cast<const T*>(p.bias) + output, outputs));
        X::store_elements(static_cast<T*>(p.y) + row * p.y_stride + output, outputs, sum);
    }
};

template <class X>
constexpr Kernel linear_kernel() {
    using K = LinearKernel<X>;
    Kernel kernel{};
    kernel.element_bytes = sizeof(typename X::T);
    kernel.depth = X::kDepth;
    kernel.input_multiple = X::kInputs;
    kernel.sum_inputs = X::kSumInputs;
    kernel.few_rows = X::kFewRows;
    kernel.pass_rows = X::kPassRows;
    kernel.row_by_row_pass = kRowByRowPass;
    kernel.pass_outputs = 2 * X::W;
    kernel.tile_rows = X::kTileRows;
    kernel.panel_outputs = X::kVectors * X::W;
    kernel.block_outputs = kBlockOutputs / kernel.panel_outputs * kernel.panel_outputs;
    kernel.pack_rows = K::pack_rows;
    kernel.pack_weights = K::pack_weights;
    kernel.multiply_few = K::multiply_few;
    kernel.multiply_tile = K::multiply_tile;
    return kernel;
}
