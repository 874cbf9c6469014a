// KV elements of 8 bits, widened in AVX-512 registers.
//
// Included by each attention kernel that is compiled for AVX-512, inside its anonymous namespace, after its vectors.
//
// What comes out is the element times a power of two, the same for all elements: 1 / kKeyUnit of the element type for
// keys, 1 / kValueUnit for values. It saves instructions, is exact, and is made good by the scales.

template <class Element>
constexpr float kKeyUnit = std::is_same_v<Element, Int8> ? 0x1p-24f : 0x1p8f;
template <class Element>
constexpr float kValueUnit = std::is_same_v<Element, Int8> ? 1.0f : 0x1p8f;

// Element e of the four in each word.
template <int e>
inline __m512 widen_element(Int8, __m512i words) {
    const __m512i top = _mm512_slli_epi32(words, 24 - 8 * e);
    return _mm512_cvtepi32_ps(e == 0 ? top : _mm512_and_si512(top, _mm512_set1_epi32(int(0xff000000))));
}

// (a & mask) | b, for a mask of 16 bits.
inline __m512i and_or(__m512i a, int mask, __m512i b) {
    return _mm512_ternarylogic_epi32(a, _mm512_set1_epi16(short(mask)), b, 0xea);
}

// Elements 2 * h and 2 * h + 1 of each word as bf16, times 2^-8. Numbers without exponent come from a table.
template <int h>
inline __m512i widen_pair(E4m3, __m512i words) {
    constexpr int kFirst = h * 0x02020202 + 0x01010000, kNext = 0x04040404;  // each of the two bytes twice
    const __m512i bytes = _mm512_broadcast_i32x4(
        _mm_setr_epi32(kFirst, kFirst + kNext, kFirst + 2 * kNext, kFirst + 3 * kNext));
    const __m512i twice = _mm512_shuffle_epi8(words, bytes);
    // Exponents 112 + 0..15, so that their bits stand beside each other.
    const __m512i normal = and_or(_mm512_srli_epi16(twice, 4), 0x07f0, _mm512_set1_epi16(0x3800));
    const __mmask64 small = _mm512_testn_epi8_mask(twice, _mm512_set1_epi8(0x78));
    // Of f * 2^-17 for f from 0 to 7: the low bytes, then the high ones.
    const __m512i table = _mm512_broadcast_i32x4(
        _mm_setr_epi32(int(0xc0800000), 0x60402000, 0x37373700, 0x38383838));
    const __m512i index = and_or(twice, 0x0707, _mm512_set1_epi16(0x0800));
    return and_or(twice, 0x8000, _mm512_mask_shuffle_epi8(normal, small, table, index));
}

template <int e>
inline __m512 widen_element(E4m3, __m512i words) {
    return widen_half<e % 2>(widen_pair<e / 2>(E4m3{}, words));
}

// Two numbers that are exact in bf16.
inline __m512i pair_of(__m512 low, __m512 high) {
    return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(low), 16), _mm512_castps_si512(high));
}

template <int h>
inline __m512i widen_pair(Int8, __m512i words) {
    return pair_of(widen_element<2 * h>(Int8{}, words), widen_element<2 * h + 1>(Int8{}, words));
}

// 16 elements beside each other.
inline __m512 widen(const Int8* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
// As fp16 without its highest bit of exponent.
inline __m512 widen(const E4m3* p) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(short(0xbf80))));
}

// Words of four elements of 16 keys, `keys` of which are there, turned around.
template <class Element>
inline void load_byte_keys(const Element* first, int64_t stride, int keys, int words, __m512i columns[16]) {
    __m512i rows[16];
    if (keys >= 16 && words == 16) {
        for (int i = 0; i < 16; i += 4, first += 4 * stride) {
            asm("" : "+r"(first));  // or the compiler keeps 16 addresses
            for (int j = 0; j < 4; ++j) rows[i + j] = _mm512_loadu_si512(first + j * stride);
        }
    } else {
        const __mmask16 there = __mmask16((1u << words) - 1);
        Avx512::load_some(keys, [=](int i) { return _mm512_maskz_loadu_epi32(there, first + i * stride); }, rows);
    }
    Avx512::transpose(rows);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) columns[i] = rows[i];
}
