// Products with quantised weights with AVX-512 and VNNI.
#include "cpu_packed.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>
// GCC 12 takes the undefined operand inside its own intrinsics for a mistake of ours.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")

namespace nanovllm::packed {
namespace {

#include "cpu_packed_kernel.h"

struct Avx512Vnni {
    static constexpr int W = 16, kTileRows = 6, kTilePanels = 2;
    static constexpr bool kBytes = true;
    using V = int32_t __attribute__((vector_size(64)));
    using S = int16_t __attribute__((vector_size(64)));
    using F = float __attribute__((vector_size(64)));
    using H = uint16_t __attribute__((vector_size(32)));
    using B = int8_t __attribute__((vector_size(16)));

    static V dot(V sum, V a, V b) { return V(_mm512_dpbusd_epi32(__m512i(sum), __m512i(a), __m512i(b))); }
    static F fma(F a, F b, F c) { return F(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(c))); }
    static F halves(const void* p) { return F(_mm512_cvtph_ps(load_at<__m256i>(p))); }
    static F half(V v) { return F(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(__m512i(v)))); }
    static V lookup(const uint8_t* table, V bytes) {
        return V(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(load_at<__m128i>(table)), __m512i(bytes)));
    }
};

constexpr Kernel kKernel = packed_kernel<Avx512Vnni>();

}  // namespace

const Kernel& avx512vnni_kernel() { return kKernel; }

}  // namespace nanovllm::packed
#endif
