// Recurrent layers with the gated delta rule: what comes between the projections of such a layer.
//
// Rows of a batch lie in runs: a run is the rows of one sequence, in the order of its tokens. Each sequence has a slot with
// the state of the convolution and the recurrent state, which a run continues. Arithmetic is fp32. A row's bits depend on
// its sequence's tokens alone: not on where a run began, on other runs, on threads, nor on the instruction set.
#pragma once

#include <cstdint>

#include "cpu_rows.h"

namespace nanovllm::delta {

using rows::Rows;

struct Runs {
    const int64_t *slots, *starts;  // [count], [count + 1]: rows starts[i] to starts[i + 1] are of slot slots[i]
    const int64_t* of_row;          // [rows]: the run of each row
    int64_t count, rows;
};

// Of one layer. A key head is shared by value_heads / key_heads value heads.
struct Sizes {
    int64_t key_heads, value_heads, key_dim, value_dim, kernel;

    int64_t key_size() const { return key_heads * key_dim; }
    int64_t value_size() const { return value_heads * value_dim; }
    int64_t channels() const { return 2 * key_size() + value_size(); }
};

// What the recurrence reads of each token: the causal convolution of q, k and v over the last `kernel` tokens with SiLU, q
// and k divided by their norm and q by sqrt(key_dim), decay = exp(-rate * softplus(a + dt_bias)) and beta = sigmoid(b).
// Leaves the last kernel - 1 inputs of each run in its slot.
template <class T>
struct Inputs {
    Sizes sizes;
    Runs runs;
    Rows<const T> x;   // [rows, channels]
    const T* weight;   // [kernel, channels]
    Rows<T> conv;      // of a slot: [channels, kernel - 1]
    Rows<const T> b, a;  // [rows, value_heads]
    const float *rate, *dt_bias;  // [value_heads]
    float* qk;  // [rows, 2 * key_size]
    T* v;       // [rows, value_size]
    float *decay, *beta;  // [rows, value_heads]
};

// For each token S = decay * S + k (beta * (v - decay * S^T k))^T and y = S^T q, for each value head's state S.
template <class T>
struct Recurrence {
    Sizes sizes;
    Runs runs;
    const float* qk;
    const T* v;
    const float *decay, *beta;
    Rows<float> states;  // of a slot: [value_heads, key_dim, value_dim]
    T* y;                // [rows, value_size]
};

// y = x / sqrt(mean(x^2) + eps) * weight * silu(z) for each head of a row, `size` wide.
template <class T>
struct GatedNorm {
    Rows<const T> x, z;
    const T* weight;  // [size]
    Rows<T> y;
    int64_t rows, heads, size;
    float eps;
};

// x *= sigmoid(gate) over rows of `size`.
template <class T>
struct Gate {
    Rows<T> x;
    Rows<const T> gate;
    int64_t rows, size;
};

template <class T>
void prepare(const Inputs<T>& inputs, int threads);
template <class T>
void recur(const Recurrence<T>& recurrence, int threads);
template <class T>
void gated_norm(const GatedNorm<T>& norm, int threads);
template <class T>
void gate(const Gate<T>& gate, int threads);

}  // namespace nanovllm::delta
