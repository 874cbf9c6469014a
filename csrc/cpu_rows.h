// What stands between the products of a layer, row by row in bf16: norm, rotary embedding, activation, writing of K/V;
// and the activation in fp32.
//
// Arithmetic is fp32, rounded to bf16 where Transformers rounds. A row's bits depend on that row alone: not on other
// rows, on threads, nor on the instruction set, since no multiplication is fused with an addition.
#pragma once

#include <cstdint>

namespace nanovllm::rows {

// Rows of bf16 or fp32; the stride counts elements from row to row.
template <class T>
struct Rows {
    T* data;
    int64_t stride;

    T* at(int64_t row) const { return data + row * stride; }
};
using Source = Rows<const uint16_t>;
using Target = Rows<uint16_t>;

// y = x / sqrt(mean(x^2) + eps) * weight over rows of `size`; where there is an addend, x += addend comes before.
struct Norm {
    Target x;
    Source addend;  // null data: none
    const uint16_t* weight;
    Target y;
    int64_t rows, size;
    float eps;
};

// The heads of a token, q before k before v and each head_dim wide: q and k normalised by their head's weight where
// there are weights, and turned by the token's angles; v as it is. A head's pairs are (i, i + head_dim / 2).
struct Heads {
    Source heads;
    const uint16_t* weight;  // [q_heads + kv_heads, head_dim] or null
    Rows<const float> cos, sin;  // of pair i at i
    Target q, k, v;
    int64_t tokens, q_heads, kv_heads, head_dim;
    float eps;
};

// y = silu(gate) * up for rows of gate and up side by side, `size` wide each.
struct GatedUnit {
    Source gate_up;
    Target y;
    int64_t rows, size;
};

// y = silu(x) over fp32 rows of `size`.
struct Activation {
    Rows<const float> x;
    Rows<float> y;
    int64_t rows, size;
};

// x += addend over rows of `size`.
struct Sum {
    Target x;
    Source addend;
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

void rms_norm(const Norm& norm, int threads);
void place_heads(const Heads& heads, int threads);
void silu_and_mul(const GatedUnit& unit, int threads);
void silu(const Activation& activation, int threads);
void add(const Sum& sum, int threads);
void store_kv(const Store& store, int threads);

}  // namespace nanovllm::rows
