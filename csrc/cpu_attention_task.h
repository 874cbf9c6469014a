// CPU attention as a task that any thread may run, such as one of CUDA's: C++ from end to end. All arguments lie in a
// struct that was prepared before, nothing in it is Python's, and running it neither takes nor waits for the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "cpu_attention.h"

namespace nanovllm::attention {

// Refuses sequences that would read or write outside of q's rows and the given blocks.
using SequenceCheck = void (*)(const Batch& batch, int64_t tokens, int64_t block_count);

// Adds the classes HostAttention, HostTask and Meter to the module.
void bind_tasks(pybind11::module_& m, SequenceCheck check_sequences);

// Adds the class PagedStep, which has nothing to do with tasks (cpu_attention_step.cpp).
void bind_steps(pybind11::module_& m, SequenceCheck check_sequences);

// Adds quantize_rows (cpu_attention_kv8.cpp).
void bind_kv8(pybind11::module_& m);

// Makes run_pieces use the threads of _cpu_kernels (cpu_attention_threads.cpp).
void share_threads();

}  // namespace nanovllm::attention
