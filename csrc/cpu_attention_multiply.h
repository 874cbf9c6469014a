// The products of the tile kernel, and the softmax between them, for any instruction set X.
//
// A packed operand consists of 4-byte words, each holding X::kStep elements along the summed dimension: one fp32, a pair
// of bf16, or four bytes. One lane sums each element of a result in the order of that dimension, packed or direct, or the
// sum is one of integers. So a row's result does not depend on the other rows.
//
// The rows of queries and of probabilities are X::row_words words. X::splat_step is the element of a step, an X::S sums
// in X::kSums registers, from X::start on, and X::result makes an X::F of it. X::Words is the part of X that does not
// depend on what the words were made from.
//
// Included once by each instruction set's file, inside its anonymous namespace.

// Operands whose steps are words, summed in fp32. The kMicroRows x kVectors sums of the register tile fit 16 or 32
// registers. Up to kDirectRows rows read keys and values in place.
template <class Vectors>
struct SingleWords : Vectors {
    using S = typename Vectors::F;
    static constexpr int kMicroRows = 6, kDirectRows = 6, kSums = 1;
    static constexpr bool kWholeRows = false;  // whether probabilities are packed once all of a row are known

    static constexpr int row_words(int steps) { return steps; }
    static S start(const uint32_t*) { return Vectors::zero(); }
    static typename Vectors::F result(S sum, const uint32_t*) { return sum; }
};

inline int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }
inline int smaller(int64_t a, int64_t b) { return int(a < b ? a : b); }

// Where the sums of a product go: they are stored to `target`, or merged into its content if there are weights. The
// vectors of a row are contiguous; the next row is `stride` elements on.
template <class X>
struct Results {
    float* target;
    int64_t stride;
    const float *maximum = nullptr, *old_weight = nullptr, *tile_weight = nullptr;  // of each row

    // The sums of M rows and N vectors.
    template <int M, int N>
    void take(const typename X::F (&sums)[M][N]) const {
        if (maximum == nullptr) {
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
                for (int n = 0; n < N; ++n) X::store(target + m * stride + n * X::W, sums[m][n]);
            return;
        }
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
            if (maximum[m] == -__builtin_inff()) continue;  // nothing seen: not even -0 may become 0
            const auto old = X::set1(old_weight[m]), weight = X::set1(tile_weight[m]);
            float* const to = target + m * stride;
#pragma GCC unroll 16
            for (int n = 0; n < N; ++n)
                X::store(to + n * X::W, merged_output<X>(X::load(to + n * X::W), old, sums[m][n], weight));
        }
    }
    Results after(int vectors) const { return {target + vectors * X::W, stride, maximum, old_weight, tile_weight}; }
    Results below(int rows) const {
        if (maximum == nullptr) return {target + rows * stride, stride};
        return {target + rows * stride, stride, maximum + rows, old_weight + rows, tile_weight + rows};
    }
};

// Steps [first, first + steps) of M rows of a times b [steps, N vectors] words. Not inlined: the loop wants all
// registers.
template <class X, int M, int N>
__attribute__((noinline)) void multiply_tile(const uint32_t* a, int64_t a_stride, int first, const uint32_t* b,
                                             int steps, Results<X> results) {
    typename X::S sums[M][N];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) sums[m][n] = X::start(a + m * a_stride);
    for (int s = 0; s < steps; ++s, b += X::kVectors * X::W) {
        typename X::U columns[N];
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) columns[n] = X::load_words(b + n * X::W);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
            const auto element = X::splat_step(a + m * a_stride, first + s);
#pragma GCC unroll 16
            for (int n = 0; n < N; ++n) sums[m][n] = X::dot(sums[m][n], element, columns[n]);
        }
    }
    typename X::F all[M][N];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) all[m][n] = X::result(sums[m][n], a + m * a_stride);
    results.take(all);
}

template <class X, int M>
inline void multiply_rows(int vectors, const uint32_t* a, int64_t a_stride, int first, const uint32_t* b, int steps,
                          Results<X> results) {
    if (vectors == X::kVectors) return multiply_tile<X, M, X::kVectors>(a, a_stride, first, b, steps, results);
    int done = 0;
    if constexpr (M == X::kMicroRows)  // fewer rows are what is left of many: not worth more code
        for (; done + 2 <= vectors; done += 2)
            multiply_tile<X, M, 2>(a, a_stride, first, b + done * X::W, steps, results.after(done));
    for (; done < vectors; ++done)
        multiply_tile<X, M, 1>(a, a_stride, first, b + done * X::W, steps, results.after(done));
}

// All rows: kMicroRows at most, and fewer are what is left of many: 4, 2 and 1 at a time, so as not to compile all counts.
template <class X, int M = X::kMicroRows>
inline void multiply(int rows, int vectors, const uint32_t* a, int64_t a_stride, int first, const uint32_t* b,
                     int steps, Results<X> results) {
    if (rows >= M) {
        multiply_rows<X, M>(vectors, a, a_stride, first, b, steps, results);
        rows -= M, a += M * a_stride, results = results.below(M);
    }
    if constexpr (M > 1)
        if (rows > 0) multiply<X, M == 6 ? 4 : M / 2>(rows, vectors, a, a_stride, first, b, steps, results);
}

// Direct products: the same sums in the same order, from keys and values in place. Packing gains nothing with few rows,
// and the bytes pass through the core once. Meanwhile the next tile is prefetched line by line, because memory bandwidth
// determines the time of decode.

constexpr int kLine = 64;

template <class T>
inline void prefetch(const T* from, int count) {
    const char* begin = reinterpret_cast<const char*>(from);
    for (int64_t i = 0; i < int64_t(count * sizeof(T)); i += kLine) __builtin_prefetch(begin + i, 0, 2);
}

// A place that moves through memory and prefetches what it passes.
struct Ahead {
    const char* at = nullptr;
    int owed = 0;

    void move(int bytes) {
        for (owed += bytes; owed >= kLine; owed -= kLine, at += kLine) __builtin_prefetch(at, 0, 2);
    }
};

// Scoring takes about twice as long as weighing for the same bytes. So it also prefetches some of the next values, which
// keeps the memory busy at an even rate.
constexpr int kEarlyValues = 3;  // eighths of the values that are prefetched while scoring

// Keys are transposed W vectors at a time, each of which holds kExpand words of W keys.
template <class X>
constexpr int kKeyWords = X::W * X::kExpand;
constexpr int kHeadMultiple = 16;  // of elements: head sizes are multiples of it

// How many of the remaining words are transposed next. It is a constant where head sizes leave no remainder.
template <class X>
inline int key_words(int left) {
    return kKeyWords<X> * X::kStep <= kHeadMultiple ? kKeyWords<X> : smaller(kKeyWords<X>, left);
}

// Calls `add(e, word)` with each of the kExpand words of W keys in a vector of transposed keys.
template <class X, class Add>
inline __attribute__((always_inline)) void each_key_word(typename X::Keys column, const Add& add) {
    add(0, X::template key_word<0>(column));
    if constexpr (X::kExpand >= 2) add(1, X::template key_word<1>(column));
    if constexpr (X::kExpand == 4) {
        add(2, X::template key_word<2>(column));
        add(3, X::template key_word<3>(column));
    }
}

// M rows of queries, of `words` steps, times N * W keys, of which the first `keys` exist.
template <class X, int M, int N>
inline void score_keys(const uint32_t* q, int words, const typename X::T* k, int64_t stride, int keys, float* scores,
                       int64_t scores_stride, Ahead& next_keys, Ahead& next_values) {
    const int64_t row = X::row_words(words);
    Ahead ahead_keys = next_keys, ahead_values = next_values;  // in registers
    typename X::S sums[M][N];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) sums[m][n] = X::start(q + m * row);
    const auto add_words = [&](int word, int count) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            const int64_t offset = n * X::W * stride + word * X::kStep;
            const int bytes = X::W * count * X::kStep * int(sizeof(typename X::T));
            ahead_keys.move(bytes);
            ahead_values.move(bytes * kEarlyValues / 8);
            typename X::Keys columns[X::W];
            X::load_keys(k + offset, stride, keys - n * X::W, count, columns);
#pragma GCC unroll 16
            for (int i = 0; i < X::W; ++i) {
                if (i * X::kExpand >= count) break;
                each_key_word<X>(columns[i], [&](int e, typename X::U column) {
                    const int step = word + i * X::kExpand + e;
#pragma GCC unroll 16
                    for (int m = 0; m < M; ++m)
                        sums[m][n] = X::dot(sums[m][n], X::splat_step(q + m * row, step), column);
                });
            }
        }
    };
    int word = 0;
    for (; word + kKeyWords<X> <= words; word += kKeyWords<X>) add_words(word, kKeyWords<X>);
    constexpr int kMultiple = kHeadMultiple / X::kStep;
    if constexpr (kKeyWords<X> > kMultiple)
        if (word < words) add_words(word, kKeyWords<X> == 2 * kMultiple ? kMultiple : words - word);
    next_keys = ahead_keys;
    next_values = ahead_values;
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n)
            X::store(scores + m * scores_stride + n * X::W, X::result(sums[m][n], q + m * row));
}

// `score_keys` for keys in 8 bits. Widening takes more instructions than the products of few rows, so all N vectors are
// turned first, as bytes in the nearest cache, and then widened in turns: the sums of one do not wait for each other.
template <class X, int M, int N>
inline void score_bytes(const uint32_t* q, int words, const typename X::T* k, int64_t stride, int keys, float* scores,
                        int64_t scores_stride, Ahead& next_keys, Ahead& next_values) {
    const int word_bytes = int((X::W * stride + words - 1) / words);  // with their share of the scales
    const int64_t row = X::row_words(words);
    Ahead ahead_keys = next_keys, ahead_values = next_values;  // in registers
    typename X::S sums[M][N];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) sums[m][n] = X::start(q + m * row);
    for (int word = 0; word < words; word += kKeyWords<X>) {
        const int count = smaller(kKeyWords<X>, words - word);
        alignas(64) typename X::Keys columns[N][X::W];
        for (int n = 0; n < N; ++n) {
            ahead_keys.move(word_bytes * count);
            ahead_values.move(word_bytes * count * kEarlyValues / 8);
            X::load_keys(k + n * X::W * stride + word * X::kStep, stride, keys - n * X::W, count, columns[n]);
        }
        for (int i = 0; i * X::kExpand < count; ++i) {
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n)
                each_key_word<X>(columns[n][i], [&](int e, typename X::U column) {
                    const int step = word + i * X::kExpand + e;
#pragma GCC unroll 16
                    for (int m = 0; m < M; ++m)
                        sums[m][n] = X::dot(sums[m][n], X::splat_step(q + m * row, step), column);
                });
        }
    }
    next_keys = ahead_keys;
    next_values = ahead_values;
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n)
            X::store(scores + m * scores_stride + n * X::W, X::result(sums[m][n], q + m * row));
}

// Steps [first, first + steps) of M rows of probabilities times N vectors of as many steps of values, of which `keys`
// keys are there; a step of N vectors takes step_bytes of memory.
template <class X, int M, int N>
inline void weigh_columns(const uint32_t* p, int64_t p_stride, int first, int steps, const typename X::T* v,
                          int64_t stride, int keys, int step_bytes, Ahead& next_values, Results<typename X::Words> target) {
    const int prefetched = step_bytes * (8 - kEarlyValues) / 8;
    Ahead ahead = next_values;  // in registers
    typename X::S sums[M][N];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) sums[m][n] = X::start(p + m * p_stride);
    const auto weigh = [&](int s, int keys_there) __attribute__((always_inline)) {
        ahead.move(prefetched);
        typename X::U columns[N];
        X::template value_vectors<N>(v + int64_t(s) * X::kStep * stride, stride, keys_there, columns);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
            const auto weight = X::splat_step(p + m * p_stride, first + s);
#pragma GCC unroll 16
            for (int n = 0; n < N; ++n) sums[m][n] = X::dot(sums[m][n], weight, columns[n]);
        }
    };
    const int whole = smaller(steps, keys / X::kStep);
    for (int s = 0; s < whole; ++s) weigh(s, X::kStep);
    if constexpr (X::kStep > 1)  // a step of one missing key adds nothing: its probability is zero
        for (int s = whole; s < steps; ++s) weigh(s, keys - s * X::kStep);
    next_values = ahead;
    typename X::F all[M][N];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) all[m][n] = X::result(sums[m][n], p + m * p_stride);
        X::template restore_order<N>(all[m]);
    }
    target.take(all);
}

// Scores of one row to probabilities: p = 2^(scale2 * score - maximum), 0 where masked. Works on keys
// [key_begin, key_end) of the tile, whole vectors; [visible_begin, visible_end) of them are visible.
//
// With KV in 8 bits each score is first multiplied by its key's scale, and each probability, once it is summed, by its
// value's. The scales of a key that the row does not see change nothing.
template <class X, bool kScales>
__attribute__((noinline)) void softmax_row(float* scores, uint32_t* probabilities, const float* key_scales,
                                           const float* value_scales, int key_begin, int key_end, int visible_begin,
                                           int visible_end, float scale2, float* maximum, float* sum) {
    const auto none = X::set1(-__builtin_inff());
    auto top = none;
    for (int key = key_begin; key < key_end; key += X::W) {
        auto s = X::load(scores + key);
        if constexpr (kScales) {
            s = X::mul(s, X::load(key_scales + key));
            X::store(scores + key, s);
        }
        if (key < visible_begin || key + X::W > visible_end) {
            s = X::keep_range(s, visible_begin - key, visible_end - key, none);
            X::store(scores + key, s);
        }
        top = X::max(top, s);
    }
    const float top2 = X::reduce_max(top) * scale2;
    *maximum = top2;
    const bool empty = top2 == -__builtin_inff();  // then there is nothing to subtract: inf - inf would be NaN
    const auto scale = X::set1(scale2), shift = X::set1(empty ? 0.0f : -top2);
    auto total = X::zero();
    for (int key = key_begin; key < key_end; key += X::W) {
        const auto p = exp2_f32<X>(X::fma(X::load(scores + key), scale, shift));
        total = X::add(total, p);
        auto weight = p;
        if constexpr (kScales)
            weight = X::select_equal(p, X::zero(), p, X::mul(p, X::load(value_scales + key)));
        if constexpr (X::kWholeRows)
            X::store(scores + key, weight);
        else
            X::store_probabilities(probabilities, key, weight);
    }
    if constexpr (X::kWholeRows) X::pack_probabilities(scores, key_begin, key_end, probabilities);
    *sum = X::reduce_sum(total);
}
