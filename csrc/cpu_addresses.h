// What Python passes of a tensor, and what the kernels make of it.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "cpu_names.h"
#include "cpu_rows.h"

namespace nanovllm {

// Of a tensor with rows: its address, and the elements from one row to the next.
using Address = std::pair<uintptr_t, int64_t>;

template <class T>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

template <class T>
rows::Rows<T> rows_at(const Address& address) {
    return {pointer<T>(address.first), address.second};
}

// The address of a norm's weights, or 0, and whether they are fp32.
using NormAddress = std::pair<uintptr_t, bool>;

template <class T>
rows::NormWeight<T> norm_weight(const NormAddress& weight) {
    if (weight.second) return {nullptr, pointer<const float>(weight.first)};
    return {pointer<const T>(weight.first), nullptr};
}

inline rows::Activation activation_of(const std::string& name) {
    if (name == "silu") return rows::Activation::silu;
    if (name == "gelu_tanh") return rows::Activation::gelu_tanh;
    if (name == "clamped_swiglu") return rows::Activation::clamped_swiglu;
    throw std::invalid_argument("There is no CPU kernel for the activation " + name + ".");
}

// Calls `work` with an element of the dtype of this PyTorch name.
template <class Work>
void with_element(const std::string& dtype, const Work& work) {
    switch (dtype_of(dtype)) {
        case DType::bf16: return work(Bf16{});
        case DType::fp16: return work(Fp16{});
        case DType::fp32: return work(float{});
    }
}

}  // namespace nanovllm
