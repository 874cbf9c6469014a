// Linear layers with AVX2, FMA and F16C: 16-bit weights are widened to fp32 in registers.
#include "cpu_linear.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <type_traits>

#include "cpu_elements.h"
#pragma GCC target("avx2,fma,f16c")

namespace nanovllm::linear {
namespace {

#include "cpu_vectors_avx2.h"
#include "cpu_linear_kernel.h"

// Some elements by way of memory, since AVX2 masks neither 16-bit loads nor stores.
template <class T>
struct SomeElements : Avx2 {
    static F load_elements(const T* p, int64_t count) {
        if (count >= W) return widen(p);
        T some[W] = {};
        for (int64_t i = 0; i < count; ++i) some[i] = p[i];
        return widen(some);
    }
    static void store_elements(T* p, int64_t count, F v) {
        alignas(32) float some[W];
        store(some, v);
        for (int64_t i = 0; i < smaller(W, count); ++i) p[i] = narrow_scalar<T>(some[i]);
    }
};

template <class Element>
struct Widened : SomeElements<Element> {
    using Base = SomeElements<Element>;
    using F = __m256;
    using T = Element;
    using V = __m256i;
    static constexpr int W = Avx2::W;
    static constexpr bool kIsBf16 = std::is_same_v<T, Bf16>;
    static constexpr int kDepth = 1, kExpand = kIsBf16 ? 2 : 1, kInputs = W * kExpand;
    static constexpr int kVectors = 2, kSumInputs = 384, kPassRows = 6, kTileRows = 6, kFewRows = 18, kFewSums = 12;
    static constexpr int kFetchTwiceRows = sizeof(T) == 2 ? 4 : 7;

    static V load_words(const uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
    static void store_words(uint32_t* p, V v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
    static V splat(const uint32_t* p) {
        return _mm256_castps_si256(_mm256_broadcast_ss(reinterpret_cast<const float*>(p)));
    }
    static F dot(F sum, V a, V b) { return _mm256_fmadd_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), sum); }

    static void pack_inputs(const T* x, int64_t inputs, uint32_t* words) {
#pragma GCC unroll 2
        for (int i = 0; i < kInputs; i += W)
            Avx2::store(reinterpret_cast<float*>(words) + i, Base::load_elements(x + i, inputs - i));
    }

    // Pairs of bf16 are turned around together and taken apart by `expand`; other elements are widened before.
    template <bool Whole>
    static void load_weights(const T* w, int64_t stride, int64_t outputs, int64_t inputs, V raw[W]) {
        __m256 rows[W];
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) {
            const T* row = w + i * stride;
            if (!Whole && i >= outputs)
                rows[i] = _mm256_setzero_ps();
            else if constexpr (kExpand == 2)
                rows[i] = Whole ? _mm256_loadu_ps(reinterpret_cast<const float*>(row)) : some_pairs(row, inputs);
            else
                rows[i] = Whole ? widen(row) : Base::load_elements(row, inputs);
        }
        Avx2::transpose(rows);
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) raw[i] = _mm256_castps_si256(rows[i]);
    }
    static F some_pairs(const T* row, int64_t inputs) {
        if (inputs >= 2 * W) return _mm256_loadu_ps(reinterpret_cast<const float*>(row));
        T some[2 * W] = {};
        for (int64_t i = 0; i < inputs; ++i) some[i] = row[i];
        return _mm256_loadu_ps(reinterpret_cast<const float*>(some));
    }
    template <int e>
    static V unit_word(const T* units) {
        if constexpr (kExpand == 2)
            return expand<e>(load_words(reinterpret_cast<const uint32_t*>(units)));
        else
            return _mm256_castps_si256(widen(units));
    }
    template <int e>
    static V expand(V raw) {
        if constexpr (kExpand == 1) return raw;
        return e == 0 ? _mm256_slli_epi32(raw, 16) : _mm256_and_si256(raw, _mm256_set1_epi32(int(0xffff0000)));
    }
};

constexpr Kernel kBf16 = linear_kernel<Widened<Bf16>>();
constexpr Kernel kFp16 = linear_kernel<Widened<Fp16>>();
constexpr Kernel kFp32 = linear_kernel<Widened<float>>();

}  // namespace

const Kernel& avx2_kernel(DType dtype) {
    return dtype == DType::bf16 ? kBf16 : dtype == DType::fp16 ? kFp16 : kFp32;
}

}  // namespace nanovllm::linear
#endif
