// Products with quantised weights with AVX2 and F16C.
#include "cpu_packed.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>
#pragma GCC target("avx2,fma,f16c")

namespace nanovllm::packed {
namespace {

#include "cpu_packed_kernel.h"

struct Avx2 {
    static constexpr int W = 8, kTileRows = 4, kTilePanels = 1;
    static constexpr bool kBytes = false;
    using V = int32_t __attribute__((vector_size(32)));
    using S = int16_t __attribute__((vector_size(32)));
    using F = float __attribute__((vector_size(32)));
    using H = uint16_t __attribute__((vector_size(16)));
    using B = int8_t __attribute__((vector_size(8)));

    // The statement without instructions keeps the compiler from collecting products before it adds them, for which it
    // has too few registers.
    static V dot(V sum, V a, V b) {
        V result = sum + V(_mm256_madd_epi16(__m256i(a), __m256i(b)));
        asm("" : "+x"(result));
        return result;
    }
    static F fma(F a, F b, F c) { return F(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(c))); }
    static F halves(const void* p) { return F(_mm256_cvtph_ps(load_at<__m128i>(p))); }
    // Lanes hold no more than 16 bits, so that packing does not saturate.
    static F half(V v) {
        const __m128i low = _mm256_castsi256_si128(__m256i(v)), high = _mm256_extracti128_si256(__m256i(v), 1);
        return F(_mm256_cvtph_ps(_mm_packus_epi32(low, high)));
    }
    static V lookup(const uint8_t* table, V bytes) {
        return V(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load_at<__m128i>(table)), __m256i(bytes)));
    }
};

constexpr Kernel kKernel = packed_kernel<Avx2>();

}  // namespace

const Kernel& avx2_kernel() { return kKernel; }

}  // namespace nanovllm::packed
#endif
