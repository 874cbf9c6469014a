// K and V in 8 bits. A row, K or V of one token and one KV head, is head_dim elements of a byte and then the row's scale,
// an unaligned fp32; the value of an element is element * scale. A row's bytes depend on the row alone.
//
// Quantised: scale = max |x| / kLargest, and at least the smallest normal number, so that the quotients x / scale do not
// exceed kLargest; each is rounded to the nearest element, ties to even. A row with a NaN gets a NaN for its scale.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu_elements.h"

namespace nanovllm {

enum class KvFormat : int { plain, int8, fp8 };  // plain: elements of the queries' dtype, without scales

constexpr int kScaleBytes = sizeof(float);

inline int64_t kv_row_bytes(KvFormat format, int head_dim, int element_bytes) {
    return format == KvFormat::plain ? int64_t(head_dim) * element_bytes : head_dim + kScaleBytes;
}

// The stored elements as types, so that pointers to rows count in them.
struct Int8 {
    uint8_t bits;
    static constexpr float kLargest = 127.0f;

    // Adding 1.5 * 2^23 rounds to a whole number, whose two's complement is in the low bits of the sum.
    static uint8_t narrow(float x) { return uint8_t(bits_of(x + 12582912.0f)); }
};

// Four bits of exponent with bias 7 and three of fraction. Below 2^-6 numbers are multiples of 2^-9.
struct E4m3 {
    uint8_t bits;
    static constexpr float kLargest = 448.0f;

    static uint8_t narrow(float x) {
        const uint32_t bits = bits_of(x), magnitude = bits & 0x7fffffff;
        const uint32_t normal = ((magnitude + 0x7ffff + ((magnitude >> 20) & 1)) >> 20) - (120u << 3);
        const uint32_t subnormal = bits_of(widen_scalar(magnitude) * 512.0f + 12582912.0f);
        return uint8_t((magnitude < (121u << 23) ? subnormal : normal) & 0x7f) | uint8_t(bits >> 24 & 0x80);
    }
};

template <class Element>
constexpr bool has_scales = std::is_same_v<Element, Int8> || std::is_same_v<Element, E4m3>;

static inline float widen_scalar(Int8 element) { return float(int8_t(element.bits)); }

static inline float widen_scalar(E4m3 element) {
    const uint32_t magnitude = element.bits & 0x7f, sign = uint32_t(element.bits & 0x80) << 24;
    const float normal = widen_scalar((magnitude << 20) + (120u << 23));
    const float value = magnitude < 8 ? float(int(magnitude)) * 0x1p-9f : normal;
    return sign != 0 ? -value : value;
}

// The scale of a row as it is stored: NaN or infinite if the row held something that is not finite.
inline float raw_scale(const void* row, int head_dim) {
    float scale;
    std::memcpy(&scale, static_cast<const char*>(row) + head_dim, sizeof(scale));
    return scale;
}

inline float nan_if_infinite(float scale) { return scale + (scale - scale); }

template <class Element, class T>
inline __attribute__((always_inline)) void quantize(const T* x, int head_dim, char* row) {
    uint32_t largest = 0;  // bits of magnitudes are in the order of the magnitudes, and NaN is above all
    for (int d = 0; d < head_dim; ++d) {
        const uint32_t magnitude = bits_of(widen_scalar(x[d])) & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    const float wanted = widen_scalar(largest) / Element::kLargest, scale = wanted < 0x1p-126f ? 0x1p-126f : wanted;
    for (int d = 0; d < head_dim; ++d) row[d] = char(Element::narrow(widen_scalar(x[d]) / scale));
    std::memcpy(row + head_dim, &scale, sizeof(scale));
}

// Writes the row of x [head_dim].
template <class T>
void quantize_row(KvFormat format, const T* x, int head_dim, char* row) {
    if (format == KvFormat::int8) return quantize<Int8>(x, head_dim, row);
    quantize<E4m3>(x, head_dim, row);
}

}  // namespace nanovllm
