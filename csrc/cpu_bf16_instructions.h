// The two instructions of AVX512-bf16 that the kernels use.
//
// With NANOVLLM_EMULATE_BF16 they are put together from AVX-512's own, to the same bits, so that a machine without them
// can test what is written for them. Included after the target options of a file are set.
#pragma once

namespace nanovllm {

#if defined(NANOVLLM_EMULATE_BF16)
#define NANOVLLM_EMULATED __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"), always_inline))

// Subnormal numbers count as zero, before and after.
static inline NANOVLLM_EMULATED __m512 flushed(__m512 v) {
    const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(0x7fffffff));
    const __mmask16 tiny = _mm512_cmplt_epu32_mask(magnitude, _mm512_set1_epi32(0x00800000));
    return _mm512_mask_and_ps(v, tiny, v, _mm512_set1_ps(-0.0f));
}

static inline NANOVLLM_EMULATED __m512 add_pair_products(__m512 sum, __m512i a, __m512i b) {
    const __m512i high = _mm512_set1_epi32(int(0xffff0000));
    const __m512 a1 = flushed(_mm512_castsi512_ps(_mm512_and_si512(a, high)));
    const __m512 b1 = flushed(_mm512_castsi512_ps(_mm512_and_si512(b, high)));
    const __m512 a0 = flushed(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)));
    const __m512 b0 = flushed(_mm512_castsi512_ps(_mm512_slli_epi32(b, 16)));
    return flushed(_mm512_fmadd_ps(a0, b0, flushed(_mm512_fmadd_ps(a1, b1, flushed(sum)))));
}

static inline NANOVLLM_EMULATED __m256i narrow_to_bf16(__m512 v) {
    const __m512i bits = _mm512_castps_si512(flushed(v));
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16));
}
#else
static inline __m512 add_pair_products(__m512 sum, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

static inline __m256i narrow_to_bf16(__m512 v) { return (__m256i)_mm512_cvtneps_pbh(v); }
#endif

}  // namespace nanovllm
