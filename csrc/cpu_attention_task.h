// CPU attention as a task that any thread may run, such as one of CUDA's: C++ from end to end. All arguments lie in a
// struct that was prepared before, nothing in it is Python's, and running it neither takes nor waits for the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "cpu_attention.h"

namespace nanovllm::attention {

// What the Python door has of its own and lends to the tasks.
struct Door {
    DType (*dtype_of)(const std::string& name);
    const Kernel& (*kernel_of)(const std::string& isa, DType dtype);
    void (*check_sequences)(const Batch& batch, int64_t tokens, int64_t block_count);
};

// Adds the classes HostAttention, HostTask and Meter to the module.
void bind_tasks(pybind11::module_& m, const Door& door);

}  // namespace nanovllm::attention
