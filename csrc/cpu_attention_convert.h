// The 16-bit KV elements, as bits, and their exact values in fp32 without any instruction set.
#pragma once

#include <cstdint>
#include <cstring>

namespace nanovllm::attention {

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

}  // namespace nanovllm::attention
