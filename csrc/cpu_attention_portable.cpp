// No instruction set beyond the compiler's base: four fp32 lanes as a compiler vector, which any machine has.
#include "cpu_attention.h"
#include "cpu_attention_convert.h"

namespace nanovllm::attention {
namespace {

struct Portable {
    using F = float __attribute__((vector_size(16)));
    using I = int32_t __attribute__((vector_size(16)));
    static constexpr int W = 4, kVectors = 2;

    static F load(const float* p) {
        F v;
        std::memcpy(&v, p, sizeof(v));
        return v;
    }
    static void store(float* p, F v) { std::memcpy(p, &v, sizeof(v)); }
    static F set1(float v) { return F{v, v, v, v}; }
    static F zero() { return F{}; }
    static F add(F a, F b) { return a + b; }
    static F sub(F a, F b) { return a - b; }
    static F mul(F a, F b) { return a * b; }
    static F div(F a, F b) { return a / b; }
    static F fma(F a, F b, F c) { return a * b + c; }
    static F max(F a, F b) { return a > b ? a : b; }  // b where either is NaN
    // To the nearest integer, for |v| < 2^22: adding 1.5 * 2^23 leaves no room for a fraction.
    static F round(F v) { return (v + 12582912.0f) - 12582912.0f; }
    // v * 2^n for n >= -127, exactly 0 at n = -127.
    static F scale_by_power(F v, F n) { return v * reinterpret_cast<F>((__builtin_convertvector(n, I) + 127) << 23); }
    static F exponent(F v) { return __builtin_convertvector((reinterpret_cast<I>(v) >> 23) - 127, F); }
    static F mantissa(F v) { return reinterpret_cast<F>((reinterpret_cast<I>(v) & 0x007fffff) | 0x3f800000); }
    // c where a equals b, else d.
    static F select_equal(F a, F b, F c, F d) { return a == b ? c : d; }
    // v in lanes [begin, end), `other` elsewhere.
    static F keep_range(F v, int begin, int end, F other) {
        const I lane{0, 1, 2, 3};
        return ((lane >= begin) & (lane < end)) ? v : other;
    }
    static float reduce_max(F v) {
        const F a = max(v, F{v[2], v[3], v[0], v[1]});
        return a[0] > a[1] ? a[0] : a[1];
    }
    static float reduce_sum(F v) { return (v[0] + v[2]) + (v[1] + v[3]); }
};

#include "cpu_attention_math.h"
#include "cpu_attention_multiply.h"
#include "cpu_attention_kernel.h"

template <class Element>
struct Widened : Portable {
    using T = Element;
    using U = F;
    static constexpr int kStep = 1;

    static U load_units(const uint32_t* p) {
        U v;
        std::memcpy(&v, p, sizeof(v));
        return v;
    }
    static U splat_unit(const uint32_t* p) { return set1(widen_scalar(*p)); }
    static F dot(F sum, U a, U b) { return a * b + sum; }

    static void put(uint32_t* dst, float value) { std::memcpy(dst, &value, sizeof(value)); }
    static void pack_row(const T* source, int count, uint32_t* dst) {
        for (int i = 0; i < count; ++i) put(dst + i, widen_scalar(source[i]));
    }
    static void store_units(uint32_t* p, U v) { std::memcpy(p, &v, sizeof(v)); }
    static void key_columns(const T* k, int64_t stride, int keys, int, U columns[W]) {
        const auto at = [=](int key, int i) { return key < keys ? widen_scalar(k[key * stride + i]) : 0.0f; };
        for (int i = 0; i < W; ++i) columns[i] = U{at(0, i), at(1, i), at(2, i), at(3, i)};
    }
    static U value_columns(const T* v, int64_t, int keys) {
        if (keys <= 0) return zero();
        return U{widen_scalar(v[0]), widen_scalar(v[1]), widen_scalar(v[2]), widen_scalar(v[3])};
    }
    template <int N>
    static void value_vectors(const T* v, int64_t stride, int keys, U columns[N]) {
        for (int n = 0; n < N; ++n) columns[n] = value_columns(v + n * W, stride, keys);
    }
    template <int N>
    static void restore_order(F[N]) {}
    static void store_probabilities(uint32_t* row, int key, F p) { std::memcpy(row + key, &p, sizeof(p)); }
};

constexpr Kernel kBf16 = kernel_of<Widened<Bf16>>();
constexpr Kernel kFp16 = kernel_of<Widened<Fp16>>();
constexpr Kernel kFp32 = kernel_of<Widened<float>>();

}  // namespace

const Kernel& portable_kernel(DType dtype) {
    return dtype == DType::bf16 ? kBf16 : dtype == DType::fp16 ? kFp16 : kFp32;
}

}  // namespace nanovllm::attention
