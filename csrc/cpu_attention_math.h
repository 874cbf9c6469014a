// exp and log on vectors of fp32, and the merge of two softmax states, for any instruction set X.
//
// The polynomials are our own: they run on whole vectors, and a lane's result does not depend on the lanes beside it.
// Included once by each instruction set's file, inside its anonymous namespace, after its X is defined.

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLn2 = 0.693147180559945309f;

// 2^x, relative error below 2e-7; exactly 0 below 2^-127; NaN stays NaN. Taylor in base 2 on [-1/2, 1/2].
template <class X>
inline typename X::F exp2_f32(typename X::F x) {
    x = X::max(X::set1(-127.0f), x);  // operand order: a NaN in the second operand comes out
    const auto n = X::round(x);
    const auto f = X::sub(x, n);
    auto p = X::set1(1.5403530393381609e-4f);
    p = X::fma(p, f, X::set1(1.3333558146428443e-3f));
    p = X::fma(p, f, X::set1(9.6181291076284772e-3f));
    p = X::fma(p, f, X::set1(5.5504108664821580e-2f));
    p = X::fma(p, f, X::set1(2.4022650695910072e-1f));
    p = X::fma(p, f, X::set1(6.9314718055994531e-1f));
    p = X::fma(p, f, X::set1(1.0f));
    return X::scale_by_power(p, n);
}

template <class X>
inline typename X::F exp_f32(typename X::F x) {
    return exp2_f32<X>(X::mul(x, X::set1(kLog2E)));
}

// Natural log of a positive normal number: exponent apart, then 2 atanh((m - 1) / (m + 1)) on mantissas in [1, 2).
template <class X>
inline typename X::F log_f32(typename X::F x) {
    const auto e = X::exponent(x);
    const auto m = X::mantissa(x);
    const auto one = X::set1(1.0f);
    const auto s = X::div(X::sub(m, one), X::add(m, one));
    const auto z = X::mul(s, s);
    auto p = X::set1(1.0f / 15);
    p = X::fma(p, z, X::set1(1.0f / 13));
    p = X::fma(p, z, X::set1(1.0f / 11));
    p = X::fma(p, z, X::set1(1.0f / 9));
    p = X::fma(p, z, X::set1(1.0f / 7));
    p = X::fma(p, z, X::set1(1.0f / 5));
    p = X::fma(p, z, X::set1(1.0f / 3));
    p = X::fma(p, z, one);
    const auto mantissa_log = X::mul(X::add(s, s), p);
    return X::fma(e, X::set1(kLn2), mantissa_log);
}

// Merges the tile states (maximum in base 2, sum) of `rows` rows into their LSE, and leaves the two weights:
// output = old_weight * output + tile_weight * accumulator. A row that sees no key of the tile keeps its LSE, and its
// weights are not used. Arrays are padded to whole vectors.
template <class X>
__attribute__((noinline)) void merge_weights(int rows, const float* tile_max, const float* tile_sum, float* lse,
                                             float* old_weight, float* tile_weight) {
    const auto none = X::set1(-__builtin_inff());
    for (int r = 0; r < rows; r += X::W) {
        const auto maximum = X::load(tile_max + r);
        const auto sum = X::load(tile_sum + r);
        const auto before = X::load(lse + r);
        const auto tile_lse = X::fma(maximum, X::set1(kLn2), log_f32<X>(sum));
        const auto top = X::max(before, tile_lse);
        const auto a = exp_f32<X>(X::sub(before, top));
        const auto b = exp_f32<X>(X::sub(tile_lse, top));
        const auto total = X::add(a, b);
        X::store(old_weight + r, X::div(a, total));
        X::store(tile_weight + r, X::div(b, X::mul(total, sum)));
        const auto merged = X::add(top, log_f32<X>(total));
        X::store(lse + r, X::select_equal(maximum, none, before, merged));
    }
}

// One vector of a row's output: the only place where a tile's accumulator meets the state, so that merging at once and
// merging later give the same bits.
template <class X>
inline typename X::F merged_output(typename X::F output, typename X::F old_weight, typename X::F accumulator,
                                   typename X::F tile_weight) {
    return X::fma(accumulator, tile_weight, X::mul(output, old_weight));
}
