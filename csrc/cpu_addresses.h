// What Python hands over of a tensor with rows: its address, and the elements from one row to the next.
#pragma once

#include <cstdint>
#include <utility>

#include "cpu_rows.h"

namespace nanovllm {

using Address = std::pair<uintptr_t, int64_t>;

template <class T>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

template <class T>
rows::Rows<T> rows_at(const Address& address) {
    return {pointer<T>(address.first), address.second};
}

// Calls `work` with an element of the dtype that PyTorch calls so.
template <class Work>
void with_element(const std::string& dtype, const Work& work) {
    switch (dtype_of(dtype)) {
        case DType::bf16: return work(Bf16{});
        case DType::fp16: return work(Fp16{});
        case DType::fp32: return work(float{});
    }
}

}  // namespace nanovllm
