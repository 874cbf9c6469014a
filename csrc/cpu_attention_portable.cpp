// No instruction set beyond the compiler's base: four fp32 lanes as a compiler vector, which any machine has.
#include "cpu_attention.h"
#include "cpu_elements.h"

namespace nanovllm::attention {
namespace {

#include "cpu_vectors_portable.h"
#include "cpu_attention_math.h"
#include "cpu_attention_multiply.h"
#include "cpu_attention_kernel.h"

struct Fp32Words : SingleWords<Portable> {
    using Words = Fp32Words;
    using U = F;
    using Keys = U;
    static constexpr int kStep = 1, kExpand = 1, kDirectRows = 2;
    static constexpr float kKeyUnit = 1, kValueUnit = 1;

    static U load_words(const uint32_t* p) {
        U v;
        std::memcpy(&v, p, sizeof(v));
        return v;
    }
    static U splat_step(const uint32_t* row, int step) { return set1(widen_scalar(row[step])); }
    static F dot(F sum, U a, U b) { return a * b + sum; }

    static void put(uint32_t* dst, float value) { std::memcpy(dst, &value, sizeof(value)); }
    template <class Q>
    static void pack_row(const Q* source, int count, uint32_t* dst) {
        for (int i = 0; i < count; ++i) put(dst + i, widen_scalar(source[i]));
    }
    static void store_words(uint32_t* p, U v) { std::memcpy(p, &v, sizeof(v)); }
    static void store_probabilities(uint32_t* row, int key, F p) { std::memcpy(row + key, &p, sizeof(p)); }
    template <int>
    static U key_word(Keys keys) {
        return keys;
    }
    template <int N>
    static void restore_order(F[N]) {}
};

template <class Element>
struct Widened : Fp32Words {
    using T = Element;

    static void load_keys(const T* k, int64_t stride, int keys, int, U columns[W]) {
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
};

}  // namespace

const Kernel& portable_kernel(DType dtype, KvFormat format) { return kernel_of<Widened, Widened>(dtype, format); }

}  // namespace nanovllm::attention
