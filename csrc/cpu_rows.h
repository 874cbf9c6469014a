// What stands between the products of a network, row by row: norm, rotary embedding, activation, writing of K/V, softmax
// and the noise of a draw.
//
// Arithmetic is fp32, rounded to the element type where Transformers rounds. A row's bits depend on that row alone: not on
// other rows, on threads, nor on the instruction set, since no multiplication is fused with an addition and no function
// of a library is used whose result depends on where an element stands.
#pragma once

#include <cstdint>

#include "cpu_elements.h"

namespace nanovllm::rows {

// Rows of elements; the stride counts elements from row to row.
template <class T>
struct Rows {
    T* data;
    int64_t stride;

    T* at(int64_t row) const { return data + row * stride; }
};

// Weights of a norm: of the element type T, by which a quotient is multiplied when it has been rounded to T, or fp32, by
// which it is multiplied before. At most one pointer is set.
template <class T>
struct NormWeight {
    const T* narrow;
    const float* wide;

    NormWeight operator+(int64_t count) const { return {narrow ? narrow + count : narrow, wide ? wide + count : wide}; }
};

// y = x / sqrt(mean(x^2) + eps) * weight over rows of `size`; where there is an addend, x += addend comes before.
template <class T>
struct Norm {
    Rows<T> x;
    Rows<const T> addend;  // null data: none
    NormWeight<T> weight;
    Rows<T> y;
    int64_t rows, size;
    float eps;
};

// The heads of a token, q before k before v and each head_dim wide: q and k normalised by their head's weight where
// there are weights, and turned by the token's angles; v as it is. A head's pairs are (i, i + head_dim / 2).
template <class T>
struct Heads {
    Rows<const T> heads;
    NormWeight<T> weight;  // [q_heads + kv_heads, head_dim] or null
    Rows<const float> cos, sin;  // of pair i at i
    Rows<T> q, k, v;
    int64_t tokens, q_heads, kv_heads, head_dim;
    float eps;
};

// clamped_swiglu: min(gate, 7) * sigmoid(1.702 * that) * (1 + up within 7 of 0), as gpt-oss has it.
enum class Activation { silu, gelu_tanh, clamped_swiglu };

// y = activation(gate) * up for rows of gate and up side by side, `size` wide each.
template <class T>
struct GatedUnit {
    Activation activation;
    Rows<const T> gate_up;
    Rows<T> y;
    int64_t rows, size;
};

// x += addend over rows of `size`.
template <class T>
struct Sum {
    Rows<T> x;
    Rows<const T> addend;
    int64_t rows, size;
};

// y = x in the type of y, rounded to the nearest.
template <class T>
struct Narrowed {
    Rows<const float> x;
    Rows<T> y;
    int64_t rows, size;
};

// y = x, exactly.
template <class T>
struct Widened {
    Rows<const T> x;
    Rows<float> y;
    int64_t rows, size;
};

// cos and sin of `size` angles a row, times `factor`; cos stands twice, for the first and the second of a pair.
struct Angles {
    Rows<const float> angles;
    Rows<float> cos, sin;  // [rows, 2 * size] and [rows, size]
    int64_t rows, size;
    float factor;
};

// y = softmax(x), or its logarithm, over rows of `size`.
struct Softmax {
    Rows<const float> x;
    Rows<float> y;
    int64_t rows, size;
    bool log;
};

// y = 1 / (1 + e^-x) over rows of `size`.
struct Sigmoid {
    Rows<const float> x;
    Rows<float> y;
    int64_t rows, size;
};

// The index of each row's largest score plus Gumbel noise, as nanovllm/layers/sampler.py defines the noise.
struct Draw {
    Rows<const float> scores;
    Rows<const int64_t> tokens;  // a stride of 0: the same for all rows
    const int64_t* starts;       // [rows]
    int64_t* drawn;              // [rows]
    int64_t rows, size;
};

// The index of each row's largest element, the first of equal ones; -1 if the row holds NaN or infinity.
template <class T>
struct Likeliest {
    Rows<const T> logits;
    int64_t* tokens;  // [rows]
    int64_t rows, size;
};

// Bytes of K and V of each token into its slot of a pool [blocks, 2, kv_heads, block_size, head]; slot -1: nowhere.
struct Store {
    char* pool;
    int64_t block_stride;
    const char *k, *v;
    int64_t k_token_stride, k_head_stride, v_token_stride, v_head_stride;
    const int64_t* slots;
    int64_t tokens, kv_heads, block_size, head_bytes;
};

template <class T>
void rms_norm(const Norm<T>& norm, int threads);
template <class T>
void place_heads(const Heads<T>& heads, int threads);
template <class T>
void gated_unit(const GatedUnit<T>& gated, int threads);
template <class T>
void add(const Sum<T>& sum, int threads);
template <class T>
void narrow(const Narrowed<T>& narrowed, int threads);
template <class T>
void widen(const Widened<T>& widened, int threads);
void fill(float* x, int64_t size, float value, int threads);
void copy(Rows<const char> x, Rows<char> y, int64_t rows, int64_t row_bytes, int threads);
void cos_sin(const Angles& angles, int threads);
void softmax(const Softmax& softmax, int threads);
void sigmoid(const Sigmoid& sigmoid, int threads);
void draw(const Draw& draw, int threads);
template <class T>
void likeliest(const Likeliest<T>& likeliest, int threads);
void store_kv(const Store& store, int threads);

}  // namespace nanovllm::rows
