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

}  // namespace nanovllm
