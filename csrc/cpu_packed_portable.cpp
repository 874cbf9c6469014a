// Products with quantised weights on any machine: four lanes.
#include <cstring>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "cpu_packed.h"

namespace nanovllm::packed {
namespace {

#include "cpu_packed_kernel.h"

struct Portable {
    static constexpr int W = 4, kTileRows = 2, kTilePanels = 1;
    static constexpr bool kBytes = false;
    using V = int32_t __attribute__((vector_size(16)));
    using S = int16_t __attribute__((vector_size(16)));
    using F = float __attribute__((vector_size(16)));
    using H = uint16_t __attribute__((vector_size(8)));
    using B = int8_t __attribute__((vector_size(4)));

    static V dot(V sum, V a, V b) {
#if defined(__SSE2__)
        return sum + V(_mm_madd_epi16(__m128i(a), __m128i(b)));
#else
        return sum + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
    }
    // Calls of functions, or as long as one: not inlined, for the sake of all the places where they stand.
    [[gnu::noinline]] static F fma(F a, F b, F c) {
        const auto at = [=](int i) { return __builtin_fmaf(a[i], b[i], c[i]); };
        return F{at(0), at(1), at(2), at(3)};
    }
    static F halves(const void* p) { return half(__builtin_convertvector(load_at<H>(p), V)); }
    [[gnu::noinline]] static F half(V v) {
        const auto at = [=](int i) { return widen_scalar(Fp16{uint16_t(v[i])}); };
        return F{at(0), at(1), at(2), at(3)};
    }
    [[gnu::noinline]] static V lookup(const uint8_t* table, V bytes) {
        uint8_t each[sizeof(V)];
        std::memcpy(each, &bytes, sizeof(V));
        for (uint8_t& byte : each) byte = table[byte];
        return load_at<V>(each);
    }
};

constexpr Kernel kKernel = packed_kernel<Portable>();

}  // namespace

const Kernel& portable_kernel() { return kKernel; }

}  // namespace nanovllm::packed
