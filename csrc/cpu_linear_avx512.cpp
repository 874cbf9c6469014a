// Linear layers with AVX-512 and no bf16 products: 16-bit weights are widened to fp32 in registers.
#include "cpu_linear.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "cpu_elements.h"
// GCC 12 takes the undefined operand inside its own intrinsics for a mistake of ours.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")

namespace nanovllm::linear {
namespace {

#include "cpu_vectors_avx512.h"
#include "cpu_linear_avx512.h"
#include "cpu_linear_kernel.h"

template <class Element>
struct Widened : LinearAvx512<Element> {
    using Base = LinearAvx512<Element>;
    using typename Base::F;
    using T = Element;
    using V = __m512i;
    static constexpr int W = Base::W;
    static constexpr int kDepth = 1, kExpand = sizeof(T) == 2 && Base::kIsBf16 ? 2 : 1, kInputs = W * kExpand;
    static constexpr int kVectors = 3, kSumInputs = 384, kPassRows = Base::kIsBf16 ? 12 : 6, kTileRows = 9, kFewRows = 24, kFewSums = 24;
    static constexpr int kFetchTwiceRows = sizeof(T) == 2 ? 4 : 7;

    static V load_words(const uint32_t* p) { return _mm512_loadu_si512(p); }
    static void store_words(uint32_t* p, V v) { _mm512_storeu_si512(p, v); }
    static V splat(const uint32_t* p) { return _mm512_set1_epi32(int(*p)); }
    static F dot(F sum, V a, V b) { return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum); }

    static void pack_inputs(const T* x, int64_t inputs, uint32_t* words) {
#pragma GCC unroll 2
        for (int i = 0; i < kInputs; i += W)
            Avx512::store(reinterpret_cast<float*>(words) + i, Base::load_elements(x + i, inputs - i));
    }

    // Pairs of bf16 are turned around together and taken apart by `expand`; other elements are widened before.
    template <bool Whole>
    static void load_weights(const T* w, int64_t stride, int64_t outputs, int64_t inputs, V raw[W]) {
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) {
            if (!Whole && i >= outputs) {
                raw[i] = _mm512_setzero_si512();
            } else if constexpr (kExpand == 2) {
                const T* row = w + i * stride;
                raw[i] = Whole ? _mm512_loadu_si512(row) : _mm512_maskz_loadu_epi16(Base::first_of_32(inputs), row);
            } else {
                raw[i] = _mm512_castps_si512(Whole ? widen(w + i * stride) : Base::load_elements(w + i * stride, inputs));
            }
        }
        Avx512::transpose(raw);
    }
    template <int e>
    static V unit_word(const T* units) {
        if constexpr (kExpand == 2)
            return expand<e>(_mm512_loadu_si512(units));
        else
            return _mm512_castps_si512(widen(units));
    }
    template <int e>
    static V expand(V raw) {
        if constexpr (kExpand == 1) return raw;
        return e == 0 ? _mm512_slli_epi32(raw, 16) : _mm512_and_si512(raw, _mm512_set1_epi32(int(0xffff0000)));
    }
};

constexpr Kernel kBf16 = linear_kernel<Widened<Bf16>>();
constexpr Kernel kFp16 = linear_kernel<Widened<Fp16>>();
constexpr Kernel kFp32 = linear_kernel<Widened<float>>();

}  // namespace

const Kernel& avx512_kernel(DType dtype) {
    return dtype == DType::bf16 ? kBf16 : dtype == DType::fp16 ? kFp16 : kFp32;
}

}  // namespace nanovllm::linear
#endif
