// A decoder layer for few rows, but for its attention: one call before the attention, one call after it.
//
// The kernels and their order are those of the operators in nanovllm/models/decoder.py, and so are the bits.
// With few rows, the Python code between two kernels takes longer than most kernels.
#pragma once

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "cpu_addresses.h"
#include "cpu_delta.h"
#include "cpu_linear.h"
#include "cpu_packed.h"
#include "cpu_rows.h"

namespace nanovllm::layer {

// Rows of a result that only one call needs.
template <class T>
class Scratch {
  public:
    Scratch(int64_t count, int64_t size) : data_(new T[size_t(count) * size_t(size)]), size_(size) {}

    T* data() const { return data_.get(); }
    operator rows::Rows<T>() const { return {data_.get(), size_}; }
    operator rows::Rows<const T>() const { return {data_.get(), size_}; }

  private:
    std::unique_ptr<T[]> data_;
    int64_t size_;
};

struct DenseWeight {
    uintptr_t address;
    int64_t in, out;
    bool interleaved;
};

struct Kernels {
    const linear::Kernel& dense;
    const packed::Kernel& packed;
    DType dtype;
    int threads;
};

// The product with some weights, one below the other, which have the same inputs.
class Linear {
  public:
    using Part = std::variant<DenseWeight, packed::Weight>;

    Linear(std::vector<Part> parts, uintptr_t bias) : parts_(std::move(parts)), bias_(bias) {
        for (const Part& part : parts_)
            std::visit([&](const auto& weight) { in = weight.in, out += weight.out; }, part);
    }

    template <class T>
    void run(const Kernels& kernels, rows::Rows<const T> x, rows::Rows<T> y, int64_t count) const {
        const T* bias = pointer<const T>(bias_);
        for (const Part& part : parts_)
            std::visit([&](const auto& weight) {
                multiply(kernels, weight, x, bias, y, count);
                y.data += weight.out;
                if (bias) bias += weight.out;
            }, part);
    }

    int64_t in = 0, out = 0;

  private:
    std::vector<Part> parts_;
    uintptr_t bias_;  // 0 where there is none

    template <class T>
    static void multiply(const Kernels& kernels, const DenseWeight& weight, rows::Rows<const T> x, const T* bias,
                         rows::Rows<T> y, int64_t count) {
        linear::run({x.data, pointer<const void>(weight.address), bias, y.data, x.stride, y.stride, count, weight.in,
                     weight.out, weight.interleaved}, kernels.dense, kernels.threads);
    }

    template <class T>
    static void multiply(const Kernels& kernels, const packed::Weight& weight, rows::Rows<const T> x, const T* bias,
                         rows::Rows<T> y, int64_t count) {
        packed::run({weight, kernels.dtype, x.data, bias, y.data, x.stride, y.stride, count}, kernels.packed,
                    kernels.threads);
    }
};

struct Norms {
    NormAddress input, heads, mlp, attention_output, mlp_output;  // address 0: no norm
    float eps;
};

// The heads of a projection to q, k and v. A gate may follow each head of q. The first rotary_dim features of each head of
// q and k are rotated, in pairs rotary_dim / 2 apart.
struct HeadLayout {
    int64_t head_dim, rotary_dim;
    bool gated;

    bool in_place() const { return !gated && rotary_dim == head_dim; }  // as rows::place_heads takes them
    int64_t width(int64_t q_heads, int64_t kv_heads) const {
        return ((gated ? 2 : 1) * q_heads + 2 * kv_heads) * head_dim;
    }

    // Writes a row's heads to `to`, in the order that rows::place_heads takes, and its gates to `gate`.
    template <class T>
    void arrange(const T* from, T* to, T* gate, int64_t q_heads, int64_t kv_heads) const {
        for (int64_t head = 0; head < q_heads + kv_heads; ++head) {
            to = copy_pairs(from, to);
            from += head_dim;
            if (!gated || head >= q_heads) continue;
            gate = std::copy_n(from, head_dim, gate);
            from += head_dim;
        }
        std::copy_n(from, kv_heads * head_dim, to);
    }

  private:
    // The features of a head in the order in which the two of a pair are half a head apart, rotated pairs first.
    template <class T>
    T* copy_pairs(const T* head, T* to) const {
        const int64_t rotated = rotary_dim / 2, others = head_dim / 2 - rotated;
        for (int64_t half = 0; half < 2; ++half) {
            to = std::copy_n(head + half * rotated, rotated, to);
            to = std::copy_n(head + rotary_dim + half * others, others, to);
        }
        return to;
    }
};

// The weights of a layer with the gated delta rule besides its projections; see delta::Inputs and delta::GatedNorm.
struct DeltaWeights {
    delta::Sizes sizes;
    uintptr_t conv, rate, dt_bias, norm;
};

class Layer {
  public:
    Layer(const std::string& isa, const std::string& packed_isa, std::string dtype, Norms norms, Linear qkv, Linear o,
          Linear gate_up, Linear down, const HeadLayout& heads, const std::string& activation)
        : isa_(isa_of(isa)), packed_isa_(isa_of(packed_isa)), dtype_(std::move(dtype)),
          norms_(norms), qkv_(std::move(qkv)), o_(std::move(o)), gate_up_(std::move(gate_up)), down_(std::move(down)),
          heads_(heads), activation_(activation_of(activation)) {}

    // `gate` is written where queries have gates.
    void project(const Address& x, const Address& cos, const Address& sin, const Address& q, const Address& k,
                 const Address& v, const Address& gate, int64_t count, int64_t q_heads, int64_t kv_heads,
                 int threads) const {
        if (qkv_.out != heads_.width(q_heads, kv_heads))
            throw std::invalid_argument("The input projection must give the heads of q, with their gates, k and v.");
        if (count == 0) return;
        with_element(dtype_, [&](auto element) {
            using T = decltype(element);
            const Scratch<T> normed(count, qkv_.in), projected(count, qkv_.out),
                arranged(heads_.in_place() ? 0 : count, qkv_.out);
            rows::rms_norm<T>({rows_at<T>(x), {nullptr, 0}, norm_weight<T>(norms_.input), normed, count, qkv_.in,
                               norms_.eps}, threads);
            qkv_.run<T>(kernels(threads), normed, projected, count);
            const rows::Rows<const T> heads = heads_.in_place() ? projected : arranged;
            if (!heads_.in_place()) {
                const rows::Rows<T> from = projected, to = arranged, gates = rows_at<T>(gate);
                for (int64_t row = 0; row < count; ++row)
                    heads_.arrange<T>(from.at(row), to.at(row), gates.at(row), q_heads, kv_heads);
            }
            rows::place_heads<T>({heads, norm_weight<T>(norms_.heads), rows_at<const float>(cos),
                                  rows_at<const float>(sin), rows_at<T>(q), rows_at<T>(k), rows_at<T>(v), count,
                                  q_heads, kv_heads, heads_.head_dim, norms_.eps}, threads);
        });
    }

    // Writes what the output projection of a recurrent layer reads to y. `qkv` projects to q, k, v, z, b and a side by
    // side, which stay in `projection`.
    void recur(const DeltaWeights& weights, const delta::Runs& runs, const Address& x, const Address& conv,
               const Address& states, const Address& projection, const Address& y, int threads) const {
        const delta::Sizes& sizes = weights.sizes;
        const int64_t count = runs.rows, heads = sizes.value_heads, values = sizes.value_size();
        if (qkv_.out != sizes.channels() + values + 2 * heads)
            throw std::invalid_argument("The input projection must give q, k, v, z, b and a.");
        if (count == 0) return;
        with_element(dtype_, [&](auto element) {
            using T = decltype(element);
            const Scratch<T> normed(count, qkv_.in), v(count, values), sums(count, values);
            const rows::Rows<T> projected = rows_at<T>(projection);
            const Scratch<float> qk(count, 2 * sizes.key_size()), decay(count, heads), beta(count, heads);
            rows::rms_norm<T>({rows_at<T>(x), {nullptr, 0}, norm_weight<T>(norms_.input), normed, count, qkv_.in,
                               norms_.eps}, threads);
            qkv_.run<T>(kernels(threads), normed, projected, count);
            const rows::Rows<const T> mixed{projected.data, projected.stride},
                z{mixed.data + sizes.channels(), mixed.stride}, b{z.data + values, mixed.stride},
                a{b.data + heads, mixed.stride};
            delta::prepare<T>({sizes, runs, mixed, pointer<const T>(weights.conv), rows_at<T>(conv), b, a,
                               pointer<const float>(weights.rate), pointer<const float>(weights.dt_bias), qk.data(),
                               v.data(), decay.data(), beta.data()}, threads);
            delta::recur<T>({sizes, runs, qk.data(), v.data(), decay.data(), beta.data(), rows_at<float>(states),
                             sums.data()}, threads);
            delta::gated_norm<T>({sums, z, pointer<const T>(weights.norm), rows_at<T>(y), count, heads,
                                  sizes.value_dim, norms_.eps}, threads);
        });
    }

    void finish(const Address& x, const Address& attended, int64_t count, int threads) const {
        if (count == 0) return;
        with_element(dtype_, [&](auto element) {
            using T = decltype(element);
            const rows::Rows<T> residual = rows_at<T>(x);
            const Scratch<T> projected(count, o_.out), normed(count, o_.out), gates(count, gate_up_.out),
                activated(count, down_.in);
            // What is added to the residual stream: `projected`, in `normed` if it has a norm.
            const auto output = [&](const NormAddress& weight) -> const Scratch<T>& {
                if (!weight.first) return projected;
                rows::rms_norm<T>({projected, {nullptr, 0}, norm_weight<T>(weight), normed, count, o_.out, norms_.eps},
                                  threads);
                return normed;
            };
            o_.run<T>(kernels(threads), rows_at<const T>(attended), projected, count);
            const rows::Rows<const T> attention_output = output(norms_.attention_output);
            rows::rms_norm<T>({residual, attention_output, norm_weight<T>(norms_.mlp), normed, count, o_.out,
                               norms_.eps}, threads);
            gate_up_.run<T>(kernels(threads), normed, gates, count);
            rows::gated_unit<T>({activation_, gates, activated, count, down_.in}, threads);
            down_.run<T>(kernels(threads), activated, projected, count);
            rows::add<T>({residual, output(norms_.mlp_output), count, o_.out}, threads);
        });
    }

  private:
    Isa isa_, packed_isa_;  // of dense weights, and of packed ones
    std::string dtype_;
    Norms norms_;
    Linear qkv_, o_, gate_up_, down_;
    HeadLayout heads_;
    rows::Activation activation_;

    Kernels kernels(int threads) const {
        const DType dtype = dtype_of(dtype_);
        return {linear::kernel_of(isa_, dtype), packed::kernel_of(packed_isa_), dtype, threads};
    }
};

}  // namespace nanovllm::layer
