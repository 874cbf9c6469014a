// fp32 vectors of AVX2 with FMA and F16C, and 16-bit elements widened to them.
//
// Included by each file that is compiled for AVX2, inside its anonymous namespace.

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

    // a[i][j] becomes a[j][i].
    static void transpose(__m256 a[8]) {
        __m256 b[8];
#pragma GCC unroll 16
        for (int i = 0; i < 8; i += 2) {
            b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
            b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < 8; i += 4) {  // a[i + c]: columns c and 4 + c of rows i..i+3
            a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
            a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
            a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
            a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
        }
#pragma GCC unroll 16
        for (int c = 0; c < 4; ++c) {
            const __m256 low = a[c], high = a[4 + c];
            a[c] = _mm256_permute2f128_ps(low, high, 0x20);
            a[4 + c] = _mm256_permute2f128_ps(low, high, 0x31);
        }
    }
};
