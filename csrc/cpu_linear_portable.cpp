// Linear layers on any machine: four fp32 lanes, a product and a sum being two roundings.
#include <type_traits>

#include "cpu_elements.h"
#include "cpu_linear.h"

namespace nanovllm::linear {
namespace {

#include "cpu_vectors_portable.h"
#include "cpu_linear_kernel.h"

template <class Element>
struct Widened : Portable {
    using T = Element;
    using V = F;
    static constexpr int kDepth = 1, kExpand = 1, kInputs = W;
    static constexpr bool kIsBf16 = std::is_same_v<T, Bf16>;
    static constexpr int kVectors = 2, kSumInputs = 384, kPassRows = 6, kTileRows = 6, kFewRows = 12, kFewSums = 12;
    static constexpr int kFetchTwiceRows = kPassRows + 1;  // never: computing takes several times as long as reading

    static V load_words(const uint32_t* p) {
        V v;
        std::memcpy(&v, p, sizeof(v));
        return v;
    }
    static void store_words(uint32_t* p, V v) { std::memcpy(p, &v, sizeof(v)); }
    static V splat(const uint32_t* p) { return set1(widen_scalar(*p)); }
    static F dot(F sum, V a, V b) { return a * b + sum; }

    static void pack_inputs(const T* x, int64_t inputs, uint32_t* words) { store_words(words, load_elements(x, inputs)); }
    template <bool Whole>
    static void load_weights(const T* w, int64_t stride, int64_t outputs, int64_t inputs, V raw[W]) {
        const auto at = [=](int row, int i) {
            return row < outputs && i < inputs ? widen_scalar(w[row * stride + i]) : 0.0f;
        };
        for (int i = 0; i < W; ++i) raw[i] = V{at(0, i), at(1, i), at(2, i), at(3, i)};
    }
    template <int e>
    static V unit_word(const T* units) {
        const auto at = [=](int i) { return widen_scalar(units[kIsBf16 ? 2 * i + e : i]); };
        return V{at(0), at(1), at(2), at(3)};
    }
    template <int>
    static V expand(V raw) {
        return raw;
    }
    static F load_elements(const T* p, int64_t count) {
        const auto at = [=](int i) { return i < count ? widen_scalar(p[i]) : 0.0f; };
        return F{at(0), at(1), at(2), at(3)};
    }
    static void store_elements(T* p, int64_t count, F v) {
        for (int i = 0; i < W; ++i)
            if (i < count) p[i] = narrow_scalar<T>(v[i]);
    }
};

constexpr Kernel kBf16 = linear_kernel<Widened<Bf16>>();
constexpr Kernel kFp16 = linear_kernel<Widened<Fp16>>();
constexpr Kernel kFp32 = linear_kernel<Widened<float>>();

}  // namespace

const Kernel& portable_kernel(DType dtype) {
    return dtype == DType::bf16 ? kBf16 : dtype == DType::fp16 ? kFp16 : kFp32;
}

}  // namespace nanovllm::linear
