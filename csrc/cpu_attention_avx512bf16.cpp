// AVX-512 with bf16 products: keys, values and probabilities stay bf16, sums are fp32.
#include "cpu_attention.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <type_traits>

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

namespace nanovllm::attention {
namespace {

#include "cpu_vectors_avx512.h"
#include "cpu_attention_kv8_avx512.h"
#include "cpu_attention_math.h"
#include "cpu_attention_multiply.h"
#include "cpu_attention_kernel.h"

struct Bf16Words : SingleWords<Avx512> {
    using Words = Bf16Words;
    using U = __m512i;
    using Keys = U;
    static constexpr int kStep = 2;

    static U load_words(const uint32_t* p) { return _mm512_loadu_si512(p); }
    static U splat_step(const uint32_t* row, int step) { return _mm512_set1_epi32(int(row[step])); }
    static F dot(F sum, U a, U b) { return add_pair_products(sum, a, b); }

    static void pack_row(const Bf16* source, int count, uint32_t* dst) {
        __builtin_memcpy(dst, source, count * sizeof(Bf16));
    }
    static void store_words(uint32_t* p, U v) { _mm512_storeu_si512(p, v); }
    static void store_probabilities(uint32_t* row, int key, F p) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + key / kStep), narrow_to_bf16(p));
    }
};

struct PairsOfBf16 : Bf16Words {
    using T = Bf16;
    static constexpr int kExpand = 1;

    static void load_keys(const T* k, int64_t stride, int keys, int words, U columns[W]) {
        if (keys >= W && words == W) {
#pragma GCC unroll 16
            for (int i = 0; i < W; ++i) columns[i] = _mm512_loadu_si512(k + i * stride);
        } else {
            const __mmask16 mask = __mmask16((1u << words) - 1);
            load_some(keys, [=](int i) { return _mm512_maskz_loadu_epi32(mask, k + i * stride); }, columns);
        }
        transpose(columns);
    }
    template <int>
    static U key_word(Keys keys) {
        return keys;
    }
    static U value_columns(const T* v, int64_t stride, int keys) {
        return _mm512_or_si512(values(v, keys > 0), _mm512_slli_epi32(values(v + stride, keys > 1), 16));
    }
    // N vectors of value pairs. Two vectors come from one load of each row, interleaved within 128-bit lanes, which is
    // cheaper than across them; restore_order puts the sums right.
    template <int N>
    static void value_vectors(const T* v, int64_t stride, int keys, U columns[N]) {
        if constexpr (N == 1) {
            columns[0] = value_columns(v, stride, keys);
        } else {
#pragma GCC unroll 16
            for (int n = 0; n < N; n += 2) {
                const __m512i none = _mm512_setzero_si512();
                const __m512i a = keys > 0 ? _mm512_loadu_si512(v + n * W) : none;
                const __m512i b = keys > 1 ? _mm512_loadu_si512(v + n * W + stride) : none;
                columns[n] = _mm512_unpacklo_epi16(a, b);
                columns[n + 1] = _mm512_unpackhi_epi16(a, b);
            }
        }
    }
    template <int N>
    static void restore_order(F sums[N]) {
        if constexpr (N > 1) {
            const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
            const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
#pragma GCC unroll 16
            for (int n = 0; n < N; n += 2) {
                const F even = sums[n];
                sums[n] = _mm512_permutex2var_ps(even, low, sums[n + 1]);
                sums[n + 1] = _mm512_permutex2var_ps(even, high, sums[n + 1]);
            }
        }
    }

  private:
    static __m512i values(const T* v, bool there) {
        if (!there) return _mm512_setzero_si512();
        return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(v)));
    }
};

// Elements of 8 bits are exact in bf16.
template <class Element>
struct PairsOfBytes : Bf16Words {
    using T = Element;
    static constexpr int kExpand = 2;
    static constexpr float kKeyUnit = nanovllm::attention::kKeyUnit<T>, kValueUnit = nanovllm::attention::kValueUnit<T>;

    static void load_keys(const T* k, int64_t stride, int keys, int words, Keys columns[W]) {
        load_byte_keys(k, stride, keys, words / kExpand, columns);
    }
    template <int h>
    static U key_word(Keys keys) {
        return widen_pair<h>(T{}, keys);
    }
    static U value_columns(const T* v, int64_t stride, int keys) {
        const F none = zero();
        return pair_of(keys > 0 ? widen(v) : none, keys > 1 ? widen(v + stride) : none);
    }
    template <int N>
    static void value_vectors(const T* v, int64_t stride, int keys, U columns[N]) {
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) columns[n] = value_columns(v + n * W, stride, keys);
    }
    template <int N>
    static void restore_order(F[N]) {}
};

constexpr Kernel kBf16 = kernel_of<PairsOfBf16, Bf16>();
constexpr Kernel kInt8 = kernel_of<PairsOfBytes<Int8>, Bf16>();
constexpr Kernel kFp8 = kernel_of<PairsOfBytes<E4m3>, Bf16>();

}  // namespace

const Kernel& avx512bf16_kernel(KvFormat format) {
    return format == KvFormat::int8 ? kInt8 : format == KvFormat::fp8 ? kFp8 : kBf16;
}

}  // namespace nanovllm::attention
#endif
