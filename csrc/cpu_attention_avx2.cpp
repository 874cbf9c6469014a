// AVX2 with FMA and F16C: every KV dtype is widened to fp32 where it is packed.
#include "cpu_attention.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "cpu_elements.h"
#pragma GCC target("avx2,fma,f16c")

namespace nanovllm::attention {
namespace {

#include "cpu_vectors_avx2.h"
#include "cpu_attention_math.h"
#include "cpu_attention_multiply.h"
#include "cpu_attention_kernel.h"

template <class Element>
struct Widened : Avx2 {
    using T = Element;
    using U = __m256;
    using Keys = U;
    static constexpr int kStep = 1, kExpand = 1;

    static U load_words(const uint32_t* p) { return _mm256_loadu_ps(reinterpret_cast<const float*>(p)); }
    static U splat_word(const uint32_t* p) { return _mm256_broadcast_ss(reinterpret_cast<const float*>(p)); }
    static F dot(F sum, U a, U b) { return _mm256_fmadd_ps(a, b, sum); }

    static void pack_row(const T* source, int count, uint32_t* dst) {
        for (int i = 0; i < count; i += W) store(reinterpret_cast<float*>(dst + i), widen(source + i));
    }
    static void store_words(uint32_t* p, U v) { store(reinterpret_cast<float*>(p), v); }
    static void load_keys(const T* k, int64_t stride, int keys, int, U columns[W]) {
        for (int i = 0; i < W; ++i) columns[i] = i < keys ? widen(k + i * stride) : zero();
        transpose(columns);
    }
    template <int>
    static U key_word(Keys keys) {
        return keys;
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
