// Linear layers with AVX512-bf16: pairs of inputs are multiplied as they are, the second product of a pair first.
#include "cpu_linear.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "cpu_elements.h"
// GCC 12 takes the undefined operand inside its own intrinsics for a mistake of ours.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#if defined(NANOVLLM_EMULATE_BF16)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")
#endif
#include "cpu_bf16_instructions.h"

namespace nanovllm::linear {
namespace {

#include "cpu_vectors_avx512.h"
#include "cpu_linear_avx512.h"
#include "cpu_linear_kernel.h"

struct PairsOfBf16 : LinearAvx512<Bf16> {
    using T = Bf16;
    using V = __m512i;
    static constexpr int kDepth = 2, kExpand = 1, kInputs = 2 * W;
    static constexpr int kVectors = 3, kSumInputs = 768, kPassRows = 12, kTileRows = 9, kFewRows = 24, kFewSums = 24;
    static constexpr int kFetchTwiceRows = 7;

    static V load_words(const uint32_t* p) { return _mm512_loadu_si512(p); }
    static void store_words(uint32_t* p, V v) { _mm512_storeu_si512(p, v); }
    static V splat(const uint32_t* p) { return _mm512_set1_epi32(int(*p)); }
    static F dot(F sum, V a, V b) { return add_pair_products(sum, a, b); }

    static void pack_inputs(const T* x, int64_t inputs, uint32_t* words) {
        store_words(words, _mm512_maskz_loadu_epi16(first_of_32(inputs), x));
    }
    template <bool Whole>
    static void load_weights(const T* w, int64_t stride, int64_t outputs, int64_t inputs, V raw[W]) {
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) {
            const T* row = w + i * stride;
            if (!Whole && i >= outputs)
                raw[i] = _mm512_setzero_si512();
            else
                raw[i] = Whole ? _mm512_loadu_si512(row) : _mm512_maskz_loadu_epi16(first_of_32(inputs), row);
        }
        transpose(raw);
    }
    template <int>
    static V unit_word(const T* units) {
        return _mm512_loadu_si512(units);
    }
    template <int>
    static V expand(V raw) {
        return raw;
    }
    static void store_elements(Bf16* p, int64_t count, F v) {
        _mm256_mask_storeu_epi16(p, first_of_16(count), narrow_to_bf16(v));
    }
};

constexpr Kernel kBf16 = linear_kernel<PairsOfBf16>();

}  // namespace

const Kernel& avx512bf16_kernel() { return kBf16; }

}  // namespace nanovllm::linear
#endif
