// AVX-512 without bf16 products: every KV dtype is widened to fp32 where it is packed.
#include "cpu_attention.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "cpu_elements.h"
// GCC 12 takes the undefined operand inside its own intrinsics for a mistake of ours.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")

namespace nanovllm::attention {
namespace {

#include "cpu_vectors_avx512.h"
#include "cpu_attention_math.h"
#include "cpu_attention_multiply.h"
#include "cpu_attention_kernel.h"

template <class Element>
struct Widened : Avx512 {
    using T = Element;
    using U = __m512;
    static constexpr int kStep = 1;

    static U load_units(const uint32_t* p) { return _mm512_loadu_ps(p); }
    static U splat_unit(const uint32_t* p) { return _mm512_set1_ps(*reinterpret_cast<const float*>(p)); }
    static F dot(F sum, U a, U b) { return _mm512_fmadd_ps(a, b, sum); }

    static void pack_row(const T* source, int count, uint32_t* dst) {
        for (int i = 0; i < count; i += W) _mm512_storeu_ps(dst + i, widen(source + i));
    }
    static void store_units(uint32_t* p, U v) { _mm512_storeu_ps(p, v); }
    static void key_columns(const T* k, int64_t stride, int keys, int, U columns[W]) {
        __m512i a[W];
        for (int i = 0; i < W; ++i)
            a[i] = i < keys ? _mm512_castps_si512(widen(k + i * stride)) : _mm512_setzero_si512();
        transpose(a);
        for (int i = 0; i < W; ++i) columns[i] = _mm512_castsi512_ps(a[i]);
    }
    static U value_columns(const T* v, int64_t, int keys) { return keys > 0 ? widen(v) : _mm512_setzero_ps(); }
    template <int N>
    static void value_vectors(const T* v, int64_t stride, int keys, U columns[N]) {
        for (int n = 0; n < N; ++n) columns[n] = value_columns(v + n * W, stride, keys);
    }
    template <int N>
    static void restore_order(F[N]) {}
    static void store_probabilities(uint32_t* row, int key, F p) { _mm512_storeu_ps(row + key, p); }
};

constexpr Kernel kBf16 = kernel_of<Widened<Bf16>>();
constexpr Kernel kFp16 = kernel_of<Widened<Fp16>>();
constexpr Kernel kFp32 = kernel_of<Widened<float>>();

}  // namespace

const Kernel& avx512_kernel(DType dtype) {
    return dtype == DType::bf16 ? kBf16 : dtype == DType::fp16 ? kFp16 : kFp32;
}

}  // namespace nanovllm::attention
#endif
