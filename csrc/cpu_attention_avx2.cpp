// AVX2 with FMA and F16C: every KV dtype is widened to fp32 where it is packed.
#include "cpu_attention.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "cpu_attention_convert.h"
#pragma GCC target("avx2,fma,f16c")

namespace nanovllm::attention {
namespace {

inline __m256 widen(const Bf16* p) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
inline __m256 widen(const Fp16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline __m256 widen(const float* p) { return _mm256_loadu_ps(p); }

struct Avx2 {
    using F = __m256;
    static constexpr int W = 8, kVectors = 2;

    static F load(const float* p) { return _mm256_loadu_ps(p); }
    static void store(float* p, F v) { _mm256_storeu_ps(p, v); }
    static F set1(float v) { return _mm256_set1_ps(v); }
    static F zero() { return _mm256_setzero_ps(); }
    static F add(F a, F b) { return _mm256_add_ps(a, b); }
    static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    static F div(F a, F b) { return _mm256_div_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    static F max(F a, F b) { return _mm256_max_ps(a, b); }  // b where either is NaN
    static F round(F v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    // v * 2^n for n >= -127, exactly 0 at n = -127.
    static F scale_by_power(F v, F n) {
        const __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
        return _mm256_mul_ps(v, _mm256_castsi256_ps(bits));
    }
    static F exponent(F v) {
        const __m256i biased = _mm256_srli_epi32(_mm256_castps_si256(v), 23);
        return _mm256_cvtepi32_ps(_mm256_sub_epi32(biased, _mm256_set1_epi32(127)));
    }
    static F mantissa(F v) {
        const __m256i fraction = _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x007fffff));
        return _mm256_castsi256_ps(_mm256_or_si256(fraction, _mm256_set1_epi32(0x3f800000)));
    }
    // c where a equals b, else d.
    static F select_equal(F a, F b, F c, F d) { return _mm256_blendv_ps(d, c, _mm256_cmp_ps(a, b, _CMP_EQ_OQ)); }
    // v in lanes [begin, end), `other` elsewhere.
    static F keep_range(F v, int begin, int end, F other) {
        const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        const __m256i before = _mm256_cmpgt_epi32(_mm256_set1_epi32(begin), lane);
        const __m256i inside = _mm256_andnot_si256(before, _mm256_cmpgt_epi32(_mm256_set1_epi32(end), lane));
        return _mm256_blendv_ps(other, v, _mm256_castsi256_ps(inside));
    }
    static float reduce_max(F v) {
        const __m128 a = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        const __m128 b = _mm_max_ps(a, _mm_movehl_ps(a, a));
        return _mm_cvtss_f32(_mm_max_ss(b, _mm_shuffle_ps(b, b, 1)));
    }
    static float reduce_sum(F v) {
        const __m128 a = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        const __m128 b = _mm_add_ps(a, _mm_movehl_ps(a, a));
        return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
    }
};

#include "cpu_attention_math.h"
#include "cpu_attention_multiply.h"
#include "cpu_attention_kernel.h"

template <class Element>
struct Widened : Avx2 {
    using T = Element;
    using U = __m256;
    static constexpr int kStep = 1;

    static U load_units(const uint32_t* p) { return _mm256_loadu_ps(reinterpret_cast<const float*>(p)); }
    static U splat_unit(const uint32_t* p) { return _mm256_broadcast_ss(reinterpret_cast<const float*>(p)); }
    static F dot(F sum, U a, U b) { return _mm256_fmadd_ps(a, b, sum); }

    static void pack_row(const T* source, int count, uint32_t* dst) {
        for (int i = 0; i < count; i += W) store(reinterpret_cast<float*>(dst + i), widen(source + i));
    }
    static void store_units(uint32_t* p, U v) { store(reinterpret_cast<float*>(p), v); }
    static void key_columns(const T* k, int64_t stride, int keys, int, U columns[W]) {
        __m256 a[8], b[8];
        for (int i = 0; i < 8; ++i) a[i] = i < keys ? widen(k + i * stride) : _mm256_setzero_ps();
        for (int i = 0; i < 8; i += 2) {
            b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
            b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
        }
        for (int i = 0; i < 8; i += 4) {  // a[i + c]: columns c and 4 + c of rows i..i+3
            a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
            a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
            a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
            a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
        }
        for (int c = 0; c < 4; ++c) {
            columns[c] = _mm256_permute2f128_ps(a[c], a[4 + c], 0x20);
            columns[4 + c] = _mm256_permute2f128_ps(a[c], a[4 + c], 0x31);
        }
    }
    static U value_columns(const T* v, int64_t, int keys) { return keys > 0 ? widen(v) : _mm256_setzero_ps(); }
    template <int N>
    static void value_vectors(const T* v, int64_t stride, int keys, U columns[N]) {
        for (int n = 0; n < N; ++n) columns[n] = value_columns(v + n * W, stride, keys);
    }
    template <int N>
    static void restore_order(F[N]) {}
    static void store_probabilities(uint32_t* row, int key, F p) { store(reinterpret_cast<float*>(row + key), p); }
};

constexpr Kernel kBf16 = kernel_of<Widened<Bf16>>();
constexpr Kernel kFp16 = kernel_of<Widened<Fp16>>();
constexpr Kernel kFp32 = kernel_of<Widened<float>>();

}  // namespace

const Kernel& avx2_kernel(DType dtype) {
    return dtype == DType::bf16 ? kBf16 : dtype == DType::fp16 ? kFp16 : kFp32;
}

}  // namespace nanovllm::attention
#endif
