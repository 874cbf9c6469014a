// Four fp32 lanes as a compiler vector, which any machine has.
//
// Included by each file that is compiled for any machine, inside its anonymous namespace.

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
