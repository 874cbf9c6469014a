// The 16-bit elements, as bits, and their values in fp32 and back without any instruction set.
#pragma once

#include <cstdint>
#include <cstring>

namespace nanovllm {

enum class DType : int { bf16, fp16, fp32 };

struct Bf16 {
    uint16_t bits;
};
struct Fp16 {
    uint16_t bits;
};

static inline float widen_scalar(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}
static inline float widen_scalar(float value) { return value; }
static inline float widen_scalar(Bf16 value) { return widen_scalar(uint32_t(value.bits) << 16); }

// Exponent and fraction move into fp32's places and are rebiased by a product with 2^112, which is exact and turns
// fp16's subnormals into normal numbers. Infinity and NaN are set apart: no finite product reaches their exponent.
static inline float widen_scalar(Fp16 value) {
    const uint32_t sign = uint32_t(value.bits & 0x8000) << 16, magnitude = uint32_t(value.bits & 0x7fff) << 13;
    if ((value.bits & 0x7c00) == 0x7c00) return widen_scalar(sign | 0x7f800000 | magnitude);
    const float rebiased = widen_scalar(magnitude) * 0x1p112f;
    return sign != 0 ? -rebiased : rebiased;
}

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
}

// The nearest element, ties to even; a NaN stays one.
template <class Element>
Element narrow_scalar(float value);

template <>
inline __attribute__((always_inline)) float narrow_scalar<float>(float value) {
    return value;
}

template <>
inline __attribute__((always_inline)) Bf16 narrow_scalar<Bf16>(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
    return {uint16_t(value != value ? (bits >> 16) | 0x40 : rounded >> 16)};
}

// Numbers below fp16's smallest normal one are added to 0.5, whose last place is that of fp16's subnormals.
template <>
inline __attribute__((always_inline)) Fp16 narrow_scalar<Fp16>(float value) {
    const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffff;
    const uint32_t normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    const uint32_t subnormal = bits_of(widen_scalar(magnitude) + 0.5f) - bits_of(0.5f);
    const uint32_t special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    const uint32_t finite = magnitude < (113u << 23) ? subnormal : normal;
    return {uint16_t(((bits >> 16) & 0x8000) | (magnitude >= 0x477ff000 ? special : finite))};
}

}  // namespace nanovllm
