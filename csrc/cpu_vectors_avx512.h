// fp32 vectors of AVX-512, and 16-bit elements widened to them.
//
// Included by each file that is compiled for AVX-512, inside its anonymous namespace.

inline __m512 widen(const Bf16* p) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}
inline __m512 widen(const Fp16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline __m512 widen(const float* p) { return _mm512_loadu_ps(p); }

// Of pairs of bf16 elements the first ones, or the second ones.
template <int e>
inline __m512 widen_half(__m512i pairs) {
    const __m512i second = _mm512_set1_epi32(int(0xffff0000));
    return _mm512_castsi512_ps(e == 0 ? _mm512_slli_epi32(pairs, 16) : _mm512_and_si512(pairs, second));
}

struct Avx512 {
    using F = __m512;
    static constexpr int W = 16, kVectors = 4;

    static F load(const float* p) { return _mm512_loadu_ps(p); }
    static void store(float* p, F v) { _mm512_storeu_ps(p, v); }
    static F set1(float v) { return _mm512_set1_ps(v); }
    static F zero() { return _mm512_setzero_ps(); }
    static F add(F a, F b) { return _mm512_add_ps(a, b); }
    static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static F div(F a, F b) { return _mm512_div_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static F max(F a, F b) { return _mm512_max_ps(a, b); }  // b where either is NaN
    static F round(F v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    // v * 2^n for n >= -127, exactly 0 at n = -127.
    static F scale_by_power(F v, F n) {
        const __m512i bits = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23);
        return _mm512_mul_ps(v, _mm512_castsi512_ps(bits));
    }
    static F exponent(F v) { return _mm512_getexp_ps(v); }
    static F mantissa(F v) { return _mm512_getmant_ps(v, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_src); }
    // c where a equals b, else d.
    static F select_equal(F a, F b, F c, F d) {
        return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ), d, c);
    }
    // v in lanes [begin, end), `other` elsewhere.
    static F keep_range(F v, int begin, int end, F other) {
        const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __mmask16 keep = _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(begin)) &
                               _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(end));
        return _mm512_mask_blend_ps(keep, other, v);
    }
    static float reduce_max(F v) { return _mm512_reduce_max_ps(v); }
    static float reduce_sum(F v) { return _mm512_reduce_add_ps(v); }

    // The first of 16 vectors as `row` loads them, zeros for the others: by way of memory, which takes one branch
    // instead of 16.
    template <class Row>
    static void load_some(int count, const Row& row, __m512i vectors[16]) {
        __m512i some[16];
        for (int i = 0; i < 16; ++i) some[i] = i < count ? row(i) : _mm512_setzero_si512();
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) vectors[i] = some[i];
    }

    // a[i][j] becomes a[j][i], in words.
    static void transpose(__m512i a[16]) {
        __m512i b[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i += 2) {
            b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
            b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < 16; i += 4) {  // a[i + c]: column 4 * lane + c of rows i..i+3
            a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
            a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
            a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
            a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
        }
#pragma GCC unroll 16
        for (int c = 0; c < 4; ++c) {  // gather lane l of the four row groups into column 4 * l + c
            const __m512i even_low = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88);
            const __m512i odd_low = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);
            const __m512i even_high = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
            const __m512i odd_high = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
            a[c] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
            a[4 + c] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
            a[8 + c] = _mm512_shuffle_i32x4(even_low, even_high, 0xdd);
            a[12 + c] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
        }
    }
};
