// Plain loops, which the compiler turns into vectors for each instruction set: the loader picks the best one.
#include "cpu_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "cpu_rows_common.h"

namespace nanovllm::rows {
namespace {

template <class T>
INLINE T normalised(T x, float scale, T weight) {
    return narrow_result<T>(rounded<T>(widen_scalar(x) * scale) * widen_scalar(weight));
}

template <class T, std::enable_if_t<!std::is_same_v<T, float>, int> = 0>
INLINE T normalised(T x, float scale, float weight) {
    return narrow_scalar<T>(widen_scalar(x) * scale * weight);  // a NaN of the weight may have any bits
}

template <class T>
INLINE void add_elements(T* __restrict__ x, const T* __restrict__ addend, int64_t size) {
    for (int64_t i = 0; i < size; ++i) x[i] = narrow_result<T>(widen_scalar(x[i]) + widen_scalar(addend[i]));
}

template <class T, class W>
INLINE void norm_elements(const T* __restrict__ x, const W* __restrict__ weight, T* __restrict__ y, int64_t size,
                          float eps) {
    const float scale = norm_scale(x, size, eps);
    for (int64_t i = 0; i < size; ++i) y[i] = normalised(x[i], scale, weight[i]);
}

// x and y are the same head, or have no byte in common.
template <class T>
INLINE void turn(const T* x, const float* cos, const float* sin, T* y, int64_t half) {
#pragma GCC ivdep
    for (int64_t i = 0; i < half; ++i) {
        const float first = widen_scalar(x[i]), second = widen_scalar(x[i + half]);
        y[i] = narrow_result<T>(first * cos[i] - second * sin[i]);
        y[i + half] = narrow_result<T>(second * cos[i] + first * sin[i]);
    }
}

// x * sigmoid(2u) = x * (1 + tanh(u)) / 2 for u = sqrt(2 / pi) * (x + 0.044715 x^3), without subtracting near numbers.
INLINE float gelu_tanh_of(float x) {
    const float twice_u = 1.5957691216f * (x + 0.044715f * (x * x * x));
    return x / (1.0f + exponential(-twice_u));
}

// NaN stays NaN.
INLINE float at_most(float x, float limit) { return x > limit ? limit : x; }

template <class T>
INLINE void clamped_swiglu(const T* __restrict__ gate, const T* __restrict__ up, T* __restrict__ y, int64_t size) {
    constexpr float kAlpha = 1.702f, kLimit = 7.0f;
    for (int64_t i = 0; i < size; ++i) {
        const float x = at_most(widen_scalar(gate[i]), kLimit);
        const float factor = 1.0f - at_most(-at_most(widen_scalar(up[i]), kLimit), kLimit);
        y[i] = narrow_result<T>(rounded<T>(x / (1.0f + exponential(-kAlpha * x))) * rounded<T>(factor));
    }
}

template <Activation activation, class T>
INLINE void gate(const T* __restrict__ gate, const T* __restrict__ up, T* __restrict__ y, int64_t size) {
    for (int64_t i = 0; i < size; ++i) {
        const float x = widen_scalar(gate[i]);
        const float activated = activation == Activation::silu ? silu_of(x) : gelu_tanh_of(x);
        y[i] = narrow_result<T>(rounded<T>(activated) * widen_scalar(up[i]));
    }
}

template <class T>
INLINE void widen_elements(const T* __restrict__ x, float* __restrict__ y, int64_t size) {
    for (int64_t i = 0; i < size; ++i) y[i] = widen_scalar(x[i]);
}

template <class T>
INLINE void narrow_elements(const float* __restrict__ x, T* __restrict__ y, int64_t size) {
    for (int64_t i = 0; i < size; ++i) y[i] = narrow_scalar<T>(x[i]);
}

// target_clones takes no templates: one function for each element type.
#define ROW_FUNCTIONS(T)                                                                                        \
    FOR_EACH_ISA void add_row(T* x, const T* addend, int64_t size) { add_elements<T>(x, addend, size); }        \
    FOR_EACH_ISA void widen_row(const T* x, float* y, int64_t size) { widen_elements<T>(x, y, size); }          \
    FOR_EACH_ISA void narrow_row(const float* x, T* y, int64_t size) { narrow_elements<T>(x, y, size); }        \
    FOR_EACH_ISA void turn_head(const T* x, const float* cos, const float* sin, T* y, int64_t half) {           \
        turn<T>(x, cos, sin, y, half);                                                                          \
    }                                                                                                           \
    FOR_EACH_ISA void silu_row(const T* gates, const T* up, T* y, int64_t size) {                               \
        gate<Activation::silu>(gates, up, y, size);                                                             \
    }                                                                                                           \
    FOR_EACH_ISA void gelu_tanh_row(const T* gates, const T* up, T* y, int64_t size) {                          \
        gate<Activation::gelu_tanh>(gates, up, y, size);                                                        \
    }                                                                                                           \
    FOR_EACH_ISA void clamped_swiglu_row(const T* gates, const T* up, T* y, int64_t size) {                     \
        clamped_swiglu(gates, up, y, size);                                                                     \
    }
ROW_FUNCTIONS(Bf16)
ROW_FUNCTIONS(Fp16)
ROW_FUNCTIONS(float)

// And one for each type of the weights.
#define NORM_FUNCTIONS(T, W)                                                                                    \
    FOR_EACH_ISA void norm_row(const T* x, const W* weight, T* y, int64_t size, float eps) {                    \
        norm_elements(x, weight, y, size, eps);                                                                 \
    }
NORM_FUNCTIONS(Bf16, Bf16)
NORM_FUNCTIONS(Bf16, float)
NORM_FUNCTIONS(Fp16, Fp16)
NORM_FUNCTIONS(Fp16, float)
NORM_FUNCTIONS(float, float)

FOR_EACH_ISA float largest(const float* x, int64_t size) {
    float most[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) most[lane] = x[0];
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes)
        for (int lane = 0; lane < kLanes; ++lane) most[lane] = x[i + lane] > most[lane] ? x[i + lane] : most[lane];
    float found = most[0];
    for (int lane = 1; lane < kLanes; ++lane) found = most[lane] > found ? most[lane] : found;
    for (; i < size; ++i) found = x[i] > found ? x[i] : found;
    return found;
}

// y = e^(x - shift); returns the sum, which is exact enough in fp64 for any number of elements.
FOR_EACH_ISA double exponentials(const float* __restrict__ x, float* __restrict__ y, int64_t size, float shift) {
    double sums[kLanes] = {};
    for (int64_t i = 0; i < size; ++i) {
        const float difference = x[i] - shift;
        y[i] = difference < -87.0f ? 0.0f : exponential(difference);
    }
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes)
        for (int lane = 0; lane < kLanes; ++lane) sums[lane] += double(y[i + lane]);
    for (int lane = 0; i + lane < size; ++lane) sums[lane] += double(y[i + lane]);
    for (int width = kLanes / 2; width > 0; width /= 2)
        for (int lane = 0; lane < width; ++lane) sums[lane] += sums[lane + width];
    return sums[0];
}

void softmax_row(const float* x, float* y, int64_t size, bool log) {
    const float most = largest(x, size);
    const double sum = exponentials(x, y, size, most);
    if (log) {
        const float shift = float(std::log(sum));
        for (int64_t i = 0; i < size; ++i) y[i] = (x[i] - most) - shift;
    } else {
        const float share = float(1.0 / sum);
        for (int64_t i = 0; i < size; ++i) y[i] *= share;
    }
}

FOR_EACH_ISA void sigmoid_row(const float* __restrict__ x, float* __restrict__ y, int64_t size) {
    for (int64_t i = 0; i < size; ++i) y[i] = 1.0f / (1.0f + exponential(-x[i]));
}

template <class T>
INLINE int64_t likeliest_element(const T* x, int64_t size) {
    float most[kLanes];
    uint32_t beyond[kLanes] = {};  // not 0: a lane has met NaN or infinity, whose exponents have all bits set
    for (int lane = 0; lane < kLanes; ++lane) most[lane] = -INFINITY;
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes)
        for (int lane = 0; lane < kLanes; ++lane) {
            const float value = widen_scalar(x[i + lane]);
            most[lane] = value > most[lane] ? value : most[lane];
            beyond[lane] |= uint32_t((bits_of(value) & 0x7f800000u) == 0x7f800000u);
        }
    float found = -INFINITY;
    uint32_t any_beyond = 0;
    for (int lane = 0; lane < kLanes; ++lane) {
        found = most[lane] > found ? most[lane] : found;
        any_beyond |= beyond[lane];
    }
    for (; i < size; ++i) {
        const float value = widen_scalar(x[i]);
        found = value > found ? value : found;
        any_beyond |= uint32_t((bits_of(value) & 0x7f800000u) == 0x7f800000u);
    }
    if (any_beyond) return -1;
    for (i = 0; i < size && widen_scalar(x[i]) != found;) ++i;
    return i;
}

FOR_EACH_ISA int64_t likeliest_of(const Bf16* x, int64_t size) { return likeliest_element(x, size); }
FOR_EACH_ISA int64_t likeliest_of(const Fp16* x, int64_t size) { return likeliest_element(x, size); }
FOR_EACH_ISA int64_t likeliest_of(const float* x, int64_t size) { return likeliest_element(x, size); }

// SplitMix64's mixing of a 64-bit state (Steele, Lea and Flood, 2014).
uint64_t mixed(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

double gumbel_noise(uint64_t start, int64_t token) {
    const uint64_t number = mixed(start + uint64_t(token + 1) * 0x9E3779B97F4A7C15u);
    const double uniform = (double(number >> 12) + 0.5) * 0x1p-52;
    return -std::log(-std::log(uniform));
}

}  // namespace

template <class T>
void rms_norm(const Norm<T>& n, int threads) {
    for_each(n.rows, n.size, threads, [&](int64_t row) {
        if (n.addend.data) add_row(n.x.at(row), n.addend.at(row), n.size);
        if (n.weight.wide)
            norm_row(n.x.at(row), n.weight.wide, n.y.at(row), n.size, n.eps);
        else
            norm_row(n.x.at(row), n.weight.narrow, n.y.at(row), n.size, n.eps);
    });
}

template <class T>
void place_heads(const Heads<T>& h, int threads) {
    const int64_t turned = h.q_heads + h.kv_heads, size = h.head_dim;
    for_each(h.tokens, (turned + h.kv_heads) * size, threads, [&](int64_t token) {
        const T* source = h.heads.at(token);
        const float *cos = h.cos.at(token), *sin = h.sin.at(token);
        for (int64_t head = 0; head < turned; ++head) {
            T* q = h.q.at(token) + head * size;
            T* target = head < h.q_heads ? q : h.k.at(token) + (head - h.q_heads) * size;
            const NormWeight<T> weight = h.weight + head * size;
            const T* x = source + head * size;
            if (weight.wide) norm_row(x, weight.wide, target, size, h.eps), x = target;
            if (weight.narrow) norm_row(x, weight.narrow, target, size, h.eps), x = target;
            turn_head(x, cos, sin, target, size / 2);
        }
        std::memcpy(h.v.at(token), source + turned * size, size_t(h.kv_heads * size) * sizeof(T));
    });
}

template <class T>
void gated_unit(const GatedUnit<T>& u, int threads) {
    for_each(u.rows, u.size, threads, [&](int64_t row) {
        const T *gates = u.gate_up.at(row), *up = gates + u.size;
        switch (u.activation) {
            case Activation::silu: return silu_row(gates, up, u.y.at(row), u.size);
            case Activation::gelu_tanh: return gelu_tanh_row(gates, up, u.y.at(row), u.size);
            case Activation::clamped_swiglu: return clamped_swiglu_row(gates, up, u.y.at(row), u.size);
        }
    });
}

template <class T>
void add(const Sum<T>& s, int threads) {
    for_each(s.rows, s.size, threads, [&](int64_t row) { add_row(s.x.at(row), s.addend.at(row), s.size); });
}

template <class T>
void narrow(const Narrowed<T>& n, int threads) {
    for_each(n.rows, n.size, threads, [&](int64_t row) { narrow_row(n.x.at(row), n.y.at(row), n.size); });
}

template <class T>
void widen(const Widened<T>& w, int threads) {
    for_each(w.rows, w.size, threads, [&](int64_t row) { widen_row(w.x.at(row), w.y.at(row), w.size); });
}

void fill(float* x, int64_t size, float value, int threads) {
    constexpr int64_t kTogether = kElementsOfPiece;
    for_each((size + kTogether - 1) / kTogether, kTogether, threads, [&](int64_t piece) {
        std::fill_n(x + piece * kTogether, std::min(kTogether, size - piece * kTogether), value);
    });
}

template <class T>
void likeliest(const Likeliest<T>& l, int threads) {
    for_each(l.rows, l.size, threads, [&](int64_t row) { l.tokens[row] = likeliest_of(l.logits.at(row), l.size); });
}

#define INSTANTIATE(T)                                    \
    template void rms_norm<T>(const Norm<T>&, int);       \
    template void place_heads<T>(const Heads<T>&, int);   \
    template void gated_unit<T>(const GatedUnit<T>&, int); \
    template void add<T>(const Sum<T>&, int);             \
    template void narrow<T>(const Narrowed<T>&, int);     \
    template void widen<T>(const Widened<T>&, int);       \
    template void likeliest<T>(const Likeliest<T>&, int);
INSTANTIATE(Bf16)
INSTANTIATE(Fp16)
INSTANTIATE(float)

void copy(Rows<const char> x, Rows<char> y, int64_t rows, int64_t row_bytes, int threads) {
    for_each(rows, row_bytes, threads, [&](int64_t row) { std::memcpy(y.at(row), x.at(row), size_t(row_bytes)); });
}

// libm's functions of one number: those of whole vectors compute the end of a row in another way.
void cos_sin(const Angles& a, int threads) {
    for_each(a.rows, a.size * kElementsOfFunction, threads, [&](int64_t row) {
        const float* angles = a.angles.at(row);
        float *cos = a.cos.at(row), *sin = a.sin.at(row);
        for (int64_t i = 0; i < a.size; ++i) {
            cos[i] = cos[i + a.size] = std::cos(angles[i]) * a.factor;
            sin[i] = std::sin(angles[i]) * a.factor;
        }
    });
}

void softmax(const Softmax& s, int threads) {
    for_each(s.rows, s.size, threads, [&](int64_t row) { softmax_row(s.x.at(row), s.y.at(row), s.size, s.log); });
}

void sigmoid(const Sigmoid& s, int threads) {
    for_each(s.rows, s.size, threads, [&](int64_t row) { sigmoid_row(s.x.at(row), s.y.at(row), s.size); });
}

void draw(const Draw& d, int threads) {
    for_each(d.rows, d.size * kElementsOfFunction, threads, [&](int64_t row) {
        const float* scores = d.scores.at(row);
        const int64_t* tokens = d.tokens.at(row);
        double best = -INFINITY;
        int64_t found = 0;
        for (int64_t i = 0; i < d.size; ++i) {
            if (scores[i] == -INFINITY) continue;
            const double score = double(scores[i]) + gumbel_noise(uint64_t(d.starts[row]), tokens[i]);
            if (score > best) best = score, found = i;
        }
        d.drawn[row] = found;
    });
}

void store_kv(const Store& s, int threads) {
    const int64_t plane = s.kv_heads * s.block_size * s.head_bytes;
    for_each(s.tokens, s.kv_heads * s.head_bytes, threads, [&](int64_t token) {
        if (s.slots[token] < 0) return;
        const int64_t block = s.slots[token] / s.block_size, offset = s.slots[token] % s.block_size;
        char* target = s.pool + block * s.block_stride + offset * s.head_bytes;
        const char *k = s.k + token * s.k_token_stride, *v = s.v + token * s.v_token_stride;
        for (int64_t head = 0; head < s.kv_heads; ++head, target += s.block_size * s.head_bytes) {
            std::memcpy(target, k + head * s.k_head_stride, size_t(s.head_bytes));
            std::memcpy(target + plane, v + head * s.v_head_stride, size_t(s.head_bytes));
        }
    });
}

}  // namespace nanovllm::rows
