// AVX-512 with VNNI, for KV in int8: queries and probabilities become integers of 23 bits, and all sums are exact.
//
// A row x of queries, or of probabilities times their values' scales, is x = f * 2^(e - 21) with e the exponent of its
// largest element and f rounded to an integer, |f| <= 2^22. f = d0 + 2^8 d1 + 2^16 d2 with digits of a signed byte each,
// and the instruction multiplies four digits with four elements of KV at once. Its other operand has no sign, so 128 is
// added to the elements, and the sums begin at what that adds to them.
#include "cpu_attention.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "cpu_elements.h"
// GCC 12 takes the undefined operand inside its own intrinsics for a mistake of ours.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")

namespace nanovllm::attention {
namespace {

#include "cpu_vectors_avx512.h"
#include "cpu_attention_kv8_avx512.h"
#include "cpu_attention_math.h"
#include "cpu_attention_multiply.h"
#include "cpu_attention_kernel.h"

struct Digits {
    __m512i d[3];
};

struct IntegerSums : Avx512 {
    using Words = IntegerSums;
    using T = Int8;
    using U = __m512i;
    using Keys = __m512i;
    using S = Digits;
    static constexpr int kStep = 4, kExpand = 1, kMicroRows = 2, kDirectRows = 2, kSums = 3;
    static constexpr bool kWholeRows = true;
    static constexpr float kKeyUnit = 1, kValueUnit = 1;

    // A row: where its three sums begin, its exponent as a float, then for each step a word of each digit and one of 0.
    static constexpr int kHead = 4;
    static constexpr int row_words(int steps) { return kHead + 4 * steps; }

    static U load_words(const uint32_t* p) { return _mm512_loadu_si512(p); }
    static void store_words(uint32_t* p, U v) { _mm512_storeu_si512(p, v); }
    static Digits splat(const uint32_t* p) {
        return {{_mm512_set1_epi32(int(p[0])), _mm512_set1_epi32(int(p[1])), _mm512_set1_epi32(int(p[2]))}};
    }
    static Digits start(const uint32_t* row) { return splat(row); }
    static Digits splat_step(const uint32_t* row, int step) { return splat(row + kHead + 4 * step); }
    static S dot(S sum, Digits a, U b) {
        // As assembly: GCC 12 copies the sums around its own intrinsic.
        for (int i = 0; i < 3; ++i) asm("vpdpbusd %2, %1, %0" : "+v"(sum.d[i]) : "v"(b), "v"(a.d[i]));
        return sum;
    }
    static F result(S sum, const uint32_t* row) {
        F value = _mm512_cvtepi32_ps(sum.d[0]);
        value = fma(_mm512_cvtepi32_ps(sum.d[1]), set1(0x1p8f), value);
        value = fma(_mm512_cvtepi32_ps(sum.d[2]), set1(0x1p16f), value);
        return _mm512_scalef_ps(value, sub(set1(widen_scalar(row[3])), set1(21)));
    }

    template <class Q>
    static void pack_row(const Q* source, int count, uint32_t* dst) {
        pack(0, count, [=](int i) { return widen(source + i); }, dst);
    }
    static void pack_probabilities(const float* weights, int begin, int end, uint32_t* row) {
        pack(begin, end, [=](int i) { return load(weights + i); }, row);
    }

    static void load_keys(const T* k, int64_t stride, int keys, int words, Keys columns[W]) {
        load_byte_keys(k, stride, keys, words, columns);
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) columns[i] = without_sign(columns[i]);
    }
    template <int>
    static U key_word(Keys keys) {
        return keys;
    }

    // Words of four keys in 16 columns.
    static U value_columns(const T* v, int64_t stride, int keys) {
        const auto row = [=](int i) {
            return i < keys ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(v + i * stride)) : _mm_setzero_si128();
        };
        __m512i rows = _mm512_castsi128_si512(row(0));
        rows = _mm512_inserti32x4(rows, row(1), 1);
        rows = _mm512_inserti32x4(rows, row(2), 2);
        rows = _mm512_inserti32x4(rows, row(3), 3);
        const __m512i turned = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        return without_sign(turn_bytes(_mm512_permutexvar_epi32(turned, rows)));
    }
    // Four vectors come from one load of each row, interleaved within 128-bit lanes; restore_order puts the sums right.
    template <int N>
    static void value_vectors(const T* v, int64_t stride, int keys, U columns[N]) {
        if constexpr (N == 4) {
            __m512i row[4];
#pragma GCC unroll 16
            for (int i = 0; i < 4; ++i)
                row[i] = without_sign(i < keys ? _mm512_loadu_si512(v + i * stride) : _mm512_setzero_si512());
            const __m512i low01 = _mm512_unpacklo_epi8(row[0], row[1]), high01 = _mm512_unpackhi_epi8(row[0], row[1]);
            const __m512i low23 = _mm512_unpacklo_epi8(row[2], row[3]), high23 = _mm512_unpackhi_epi8(row[2], row[3]);
            columns[0] = _mm512_unpacklo_epi16(low01, low23);
            columns[1] = _mm512_unpackhi_epi16(low01, low23);
            columns[2] = _mm512_unpacklo_epi16(high01, high23);
            columns[3] = _mm512_unpackhi_epi16(high01, high23);
        } else {
#pragma GCC unroll 16
            for (int n = 0; n < N; ++n) columns[n] = value_columns(v + n * W, stride, keys);
        }
    }
    template <int N>
    static void restore_order(F results[N]) {
        if constexpr (N == 4) {
            const F a = _mm512_shuffle_f32x4(results[0], results[1], 0x44);  // lanes 0 and 1 of both
            const F b = _mm512_shuffle_f32x4(results[2], results[3], 0x44);
            const F c = _mm512_shuffle_f32x4(results[0], results[1], 0xee);
            const F d = _mm512_shuffle_f32x4(results[2], results[3], 0xee);
            results[0] = _mm512_shuffle_f32x4(a, b, 0x88);
            results[1] = _mm512_shuffle_f32x4(a, b, 0xdd);
            results[2] = _mm512_shuffle_f32x4(c, d, 0x88);
            results[3] = _mm512_shuffle_f32x4(c, d, 0xdd);
        }
    }

  private:
    static __m512i without_sign(__m512i bytes) { return _mm512_xor_si512(bytes, _mm512_set1_epi8(char(0x80))); }

    // In each 128-bit lane, byte j of word i becomes byte i of word j.
    static __m512i turn_bytes(__m512i words) {
        return _mm512_shuffle_epi8(words, _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14,
                                                                               3, 7, 11, 15)));
    }

    // Elements [begin, end), whole vectors that `at` gives, of a row. A row with an element that is not finite gets a
    // NaN for its exponent.
    template <class At>
    static void pack(int begin, int end, const At& at, uint32_t* row) {
        F top = zero();
        __mmask16 finite = 0xffff;
        for (int i = begin; i < end; i += W) {
            const F magnitude = _mm512_abs_ps(at(i));
            finite &= _mm512_cmp_ps_mask(magnitude, set1(__FLT_MAX__), _CMP_LE_OQ);
            top = max(top, magnitude);
        }
        const F exponent = max(set1(-160), _mm512_getexp_ps(set1(reduce_max(top))));  // zero has none
        const F shift = sub(set1(21), exponent);
        const __m512i middle = _mm512_set1_epi32(0x808080);  // 128 for each digit, so that none borrows from the next
        __m512i sums = _mm512_setzero_si512();
        for (int i = begin; i < end; i += W) {
            const __m512i whole = _mm512_cvtps_epi32(_mm512_scalef_ps(at(i), shift));
            const __m512i words = turn_bytes(_mm512_xor_si512(_mm512_add_epi32(whole, middle), middle));
            _mm512_storeu_si512(row + kHead + i, words);
            sums = _mm512_dpbusd_epi32(sums, _mm512_set1_epi8(char(0x80)), words);
        }
        const __m256i halves = _mm256_add_epi32(_mm512_castsi512_si256(sums), _mm512_extracti64x4_epi64(sums, 1));
        const __m128i total = _mm_add_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(row), _mm_sub_epi32(_mm_setzero_si128(), total));
        row[3] = bits_of(finite == 0xffff ? _mm512_cvtss_f32(exponent) : __builtin_nanf(""));
    }
};

constexpr Kernel kKernels[] = {kernel_of<IntegerSums, Bf16>(), kernel_of<IntegerSums, Fp16>(),
                               kernel_of<IntegerSums, float>()};

}  // namespace

const Kernel& avx512vnni_kernel(DType dtype) { return kKernels[int(dtype)]; }

}  // namespace nanovllm::attention
#endif
