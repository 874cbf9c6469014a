// Elements of a linear layer to and from AVX-512's vectors.
//
// Included by the AVX-512 files of the linear layer, inside their anonymous namespace, after cpu_vectors_avx512.h.

template <class T>
struct LinearAvx512 : Avx512 {
    static constexpr bool kIsBf16 = false;

    static __mmask16 first_of_16(int64_t count) {
        return count >= 16 ? __mmask16(-1) : count <= 0 ? __mmask16(0) : __mmask16((1u << count) - 1);
    }
    static __mmask32 first_of_32(int64_t count) { return count >= 32 ? __mmask32(-1) : __mmask32((1u << count) - 1); }
    static F load_elements(const float* p, int64_t count) { return _mm512_maskz_loadu_ps(first_of_16(count), p); }
    static void store_elements(float* p, int64_t count, F v) {
        _mm512_mask_storeu_ps(p, first_of_16(count), v);
    }
};

template <>
struct LinearAvx512<Bf16> : LinearAvx512<float> {
    static constexpr bool kIsBf16 = true;

    static F load_elements(const Bf16* p, int64_t count) {
        const __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_of_16(count), p));
        return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
    }
    // To nearest, ties to even; a NaN stays one.
    static void store_elements(Bf16* p, int64_t count, F v) {
        const __m512i bits = _mm512_castps_si512(v), one = _mm512_set1_epi32(1);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
        const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
        const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        const __m512i high = _mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16);
        _mm256_mask_storeu_epi16(p, first_of_16(count), _mm512_cvtepi32_epi16(high));
    }
};

template <>
struct LinearAvx512<Fp16> : LinearAvx512<float> {
    static F load_elements(const Fp16* p, int64_t count) {
        return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_of_16(count), p));
    }
    static void store_elements(Fp16* p, int64_t count, F v) {
        const __m256i halves = _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm256_mask_storeu_epi16(p, first_of_16(count), halves);
    }
};
