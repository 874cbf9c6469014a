// AVX-512 without bf16 products: every KV dtype is widened to fp32.
#include "cpu_attention.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <type_traits>

#include "cpu_elements.h"
// GCC 12 takes the undefined operand inside its own intrinsics for a mistake of ours.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")

namespace nanovllm::attention {
namespace {

#include "cpu_vectors_avx512.h"
#include "cpu_attention_kv8_avx512.h"
#include "cpu_attention_math.h"
#include "cpu_attention_multiply.h"
#include "cpu_attention_kernel.h"

struct Fp32Words : SingleWords<Avx512> {
    using Words = Fp32Words;
    using U = __m512;
    using Keys = __m512i;
    static constexpr int kStep = 1;

    static U load_words(const uint32_t* p) { return _mm512_loadu_ps(p); }
    static U splat_step(const uint32_t* row, int step) {
        return _mm512_set1_ps(reinterpret_cast<const float*>(row)[step]);
    }
    static F dot(F sum, U a, U b) { return _mm512_fmadd_ps(a, b, sum); }

    template <class Q>
    static void pack_row(const Q* source, int count, uint32_t* dst) {
        for (int i = 0; i < count; i += W) _mm512_storeu_ps(dst + i, widen(source + i));
    }
    static void store_words(uint32_t* p, U v) { _mm512_storeu_ps(p, v); }
    static void store_probabilities(uint32_t* row, int key, F p) { _mm512_storeu_ps(row + key, p); }
};

template <class Element>
struct Widened : Fp32Words {
    using T = Element;
    static constexpr int kDirectRows = 6;
    static constexpr bool kPairs = std::is_same_v<T, Bf16>;  // are turned around together and taken apart afterwards
    static constexpr int kExpand = kPairs ? 2 : 1;

    static void load_keys(const T* k, int64_t stride, int keys, int words, Keys columns[W]) {
        if (keys >= W && words == W * kExpand)
#pragma GCC unroll 16
            for (int i = 0; i < W; ++i) columns[i] = load_key(k + i * stride, words);
        else
            load_some(keys, [=](int i) { return load_key(k + i * stride, words); }, columns);
        transpose(columns);
    }
    template <int e>
    static U key_word(Keys keys) {
        if constexpr (kPairs) return widen_half<e>(keys);
        return _mm512_castsi512_ps(keys);
    }
    static U value_columns(const T* v, int64_t, int keys) { return keys > 0 ? widen(v) : _mm512_setzero_ps(); }
    template <int N>
    static void value_vectors(const T* v, int64_t stride, int keys, U columns[N]) {
        if constexpr (kPairs && N > 1) {
#pragma GCC unroll 16
            for (int n = 0; n < N; n += 2) {
                const __m512i pairs = keys > 0 ? _mm512_loadu_si512(v + n * W) : _mm512_setzero_si512();
                columns[n] = widen_half<0>(pairs);
                columns[n + 1] = widen_half<1>(pairs);
            }
        } else {
#pragma GCC unroll 16
            for (int n = 0; n < N; ++n) columns[n] = value_columns(v + n * W, stride, keys);
        }
    }
    // Where pairs were taken apart, every second vector holds the odd columns of two.
    template <int N>
    static void restore_order(F sums[N]) {
        if constexpr (kPairs && N > 1) {
            const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
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
    static Keys load_key(const T* k, int words) {
        if constexpr (!kPairs) return _mm512_castps_si512(widen(k));
        return words == 2 * W ? _mm512_loadu_si512(k) : _mm512_maskz_loadu_epi32(__mmask16((1u << words / 2) - 1), k);
    }
};

template <class Element>
struct Bytes : Fp32Words {
    using T = Element;
    static constexpr int kExpand = 4;
    static constexpr float kKeyUnit = nanovllm::attention::kKeyUnit<T>, kValueUnit = nanovllm::attention::kValueUnit<T>;

    static void load_keys(const T* k, int64_t stride, int keys, int words, Keys columns[W]) {
        load_byte_keys(k, stride, keys, words / kExpand, columns);
    }
    template <int e>
    static U key_word(Keys keys) {
        return widen_element<e>(T{}, keys);
    }
    static U value_columns(const T* v, int64_t, int keys) { return keys > 0 ? widen(v) : _mm512_setzero_ps(); }
    template <int N>
    static void value_vectors(const T* v, int64_t stride, int keys, U columns[N]) {
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) columns[n] = value_columns(v + n * W, stride, keys);
    }
    template <int N>
    static void restore_order(F[N]) {}
};

}  // namespace

const Kernel& avx512_kernel(DType dtype, KvFormat format) { return kernel_of<Widened, Bytes>(dtype, format); }

}  // namespace nanovllm::attention
#endif
