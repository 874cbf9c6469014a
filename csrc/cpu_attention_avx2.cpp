// AVX2 with FMA and F16C: every KV dtype is widened to fp32.
#include "cpu_attention.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <type_traits>

#include "cpu_elements.h"
#pragma GCC target("avx2,fma,f16c")

namespace nanovllm::attention {
namespace {

#include "cpu_vectors_avx2.h"
#include "cpu_attention_math.h"
#include "cpu_attention_multiply.h"
#include "cpu_attention_kernel.h"

struct Fp32Words : SingleWords<Avx2> {
    using Words = Fp32Words;
    using U = __m256;
    using Keys = U;
    static constexpr int kStep = 1;

    static U load_words(const uint32_t* p) { return _mm256_loadu_ps(reinterpret_cast<const float*>(p)); }
    static U splat_step(const uint32_t* row, int step) {
        return _mm256_broadcast_ss(reinterpret_cast<const float*>(row + step));
    }
    static F dot(F sum, U a, U b) { return _mm256_fmadd_ps(a, b, sum); }

    template <class Q>
    static void pack_row(const Q* source, int count, uint32_t* dst) {
        for (int i = 0; i < count; i += W) store(reinterpret_cast<float*>(dst + i), widen(source + i));
    }
    static void store_words(uint32_t* p, U v) { store(reinterpret_cast<float*>(p), v); }

    // Rows of W keys as `row` loads them, transposed; zeros for missing keys.
    template <class Row>
    static void turn_keys(int keys, const Row& row, U columns[W]) {
        if (keys >= W) {
#pragma GCC unroll 16
            for (int i = 0; i < W; ++i) columns[i] = row(i);
        } else {  // through memory, which takes one branch instead of W
            U some[W];
            for (int i = 0; i < W; ++i) some[i] = i < keys ? row(i) : zero();
#pragma GCC unroll 16
            for (int i = 0; i < W; ++i) columns[i] = some[i];
        }
        transpose(columns);
    }
    static void store_probabilities(uint32_t* row, int key, F p) { store(reinterpret_cast<float*>(row + key), p); }
    template <int N>
    static void restore_order(F[N]) {}
};

template <class Element>
struct Widened : Fp32Words {
    using T = Element;
    static constexpr int kDirectRows = 6;
    static constexpr int kExpand = 1;

    static void load_keys(const T* k, int64_t stride, int keys, int, U columns[W]) {
        turn_keys(keys, [=](int i) { return widen(k + i * stride); }, columns);
    }
    template <int>
    static U key_word(Keys keys) {
        return keys;
    }
    static U value_columns(const T* v, int64_t, int keys) { return keys > 0 ? widen(v) : _mm256_setzero_ps(); }
    template <int N>
    static void value_vectors(const T* v, int64_t stride, int keys, U columns[N]) {
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) columns[n] = value_columns(v + n * W, stride, keys);
    }
};

// KV elements of 8 bits, as in cpu_attention_kv8_avx512.h.
template <int e>
inline __m256 widen_element(Int8, __m256i words) {
    const __m256i top = _mm256_slli_epi32(words, 24 - 8 * e);
    return _mm256_cvtepi32_ps(e == 0 ? top : _mm256_and_si256(top, _mm256_set1_epi32(int(0xff000000))));
}

template <int e>
inline __m256 widen_element(E4m3, __m256i words) {
    constexpr int kFirst = e / 2 * 0x02020202 + 0x01010000, kNext = 0x04040404;
    const __m256i bytes = _mm256_broadcastsi128_si256(
        _mm_setr_epi32(kFirst, kFirst + kNext, kFirst + 2 * kNext, kFirst + 3 * kNext));
    const __m256i twice = _mm256_shuffle_epi8(words, bytes);
    const auto bits = [=](int mask) { return _mm256_and_si256(twice, _mm256_set1_epi16(short(mask))); };
    const __m256i exponent = _mm256_set1_epi16(0x3800);
    const __m256i normal = _mm256_or_si256(_mm256_srli_epi16(bits(0x7f00), 4), exponent);
    const __m256i table = _mm256_broadcastsi128_si256(
        _mm_setr_epi32(int(0xc0800000), 0x60402000, 0x37373700, 0x38383838));
    const __m256i index = _mm256_or_si256(bits(0x0707), _mm256_set1_epi16(0x0800));
    const __m256i small = _mm256_cmpeq_epi8(bits(0x7878), _mm256_setzero_si256());
    const __m256i magnitude = _mm256_blendv_epi8(normal, _mm256_shuffle_epi8(table, index), small);
    const __m256i pairs = _mm256_or_si256(magnitude, bits(0x8000));
    const __m256i second = _mm256_set1_epi32(int(0xffff0000));
    return _mm256_castsi256_ps(e % 2 == 0 ? _mm256_slli_epi32(pairs, 16) : _mm256_and_si256(pairs, second));
}

inline __m256 widen(const Int8* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline __m256 widen(const E4m3* p) {
    const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(short(0xbf80))));
}

template <class Element>
struct Bytes : Fp32Words {
    using T = Element;
    static constexpr int kExpand = 4;
    static constexpr bool kInt8 = std::is_same_v<T, Int8>;
    static constexpr float kKeyUnit = kInt8 ? 0x1p-24f : 0x1p8f, kValueUnit = kInt8 ? 1.0f : 0x1p8f;

    static void load_keys(const T* k, int64_t stride, int keys, int words, Keys columns[W]) {
        const auto row = [=](int i) {
            const auto* const bytes = reinterpret_cast<const float*>(k + i * stride);
            return words == W * kExpand ? _mm256_loadu_ps(bytes) : _mm256_zextps128_ps256(_mm_loadu_ps(bytes));
        };
        turn_keys(keys, row, columns);
    }
    template <int e>
    static U key_word(Keys keys) {
        return widen_element<e>(T{}, _mm256_castps_si256(keys));
    }
    static U value_columns(const T* v, int64_t, int keys) { return keys > 0 ? widen(v) : zero(); }
    template <int N>
    static void value_vectors(const T* v, int64_t stride, int keys, U columns[N]) {
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) columns[n] = value_columns(v + n * W, stride, keys);
    }
};

}  // namespace

const Kernel& avx2_kernel(DType dtype, KvFormat format) { return kernel_of<Widened, Bytes>(dtype, format); }

}  // namespace nanovllm::attention
#endif
