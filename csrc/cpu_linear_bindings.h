// Linear layers as Python calls them: addresses in, nothing kept. nanovllm/ops/cpu_kernels.py checks shapes and dtypes
// before it comes here.
//
// Included once, by cpu_kernels.cpp.
#pragma once

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cpu_linear.h"
#include "cpu_names.h"
#include "python_calls.h"

namespace python = nanovllm::python;
namespace linear = nanovllm::linear;

namespace {

void refuse_misfit(bool interleaved, int64_t in_features) {
    if (interleaved && in_features % linear::kInterleavedInputs != 0)
        throw std::invalid_argument("Interleaved weights have a multiple of " +
                                    std::to_string(linear::kInterleavedInputs) + " inputs, not " +
                                    std::to_string(in_features) + ".");
}

void run_linear(const std::string& isa, const std::string& dtype, uintptr_t x, int64_t x_stride, uintptr_t weight,
                uintptr_t bias, uintptr_t y, int64_t y_stride, int64_t rows, int64_t in_features, int64_t out_features,
                bool interleaved, int threads) {
    const linear::Kernel& kernel = linear::kernel_of(nanovllm::isa_of(isa), nanovllm::dtype_of(dtype));
    linear::Problem problem{};
    problem.x = reinterpret_cast<const void*>(x);
    problem.weight = reinterpret_cast<const void*>(weight);
    problem.bias = reinterpret_cast<const void*>(bias);
    problem.y = reinterpret_cast<void*>(y);
    problem.x_stride = x_stride;
    problem.y_stride = y_stride;
    problem.rows = rows;
    problem.in = in_features;
    problem.out = out_features;
    problem.interleaved = interleaved;
    refuse_misfit(interleaved, in_features);
    if (std::min(rows, out_features) < 0 || in_features < 1 || threads < 1)
        throw std::invalid_argument("Rows and outputs must not be negative, inputs and threads be positive, got " +
                                    std::to_string(rows) + ", " + std::to_string(out_features) + ", " +
                                    std::to_string(in_features) + " and " + std::to_string(threads) + ".");
    const python::WithoutGil without_gil;
    linear::run(problem, kernel, threads);
}

void interleave(const std::string& dtype, uintptr_t weight, int64_t out_features, int64_t in_features, bool back,
                int threads) {
    refuse_misfit(true, in_features);
    if (out_features < 0 || threads < 1) throw std::invalid_argument("Outputs and threads must be positive.");
    const python::WithoutGil without_gil;
    linear::interleave(nanovllm::dtype_of(dtype), reinterpret_cast<void*>(weight), out_features, in_features, back,
                       threads);
}

void gather(const std::string& dtype, uintptr_t weight, uintptr_t y, uintptr_t indices, int64_t count,
            int64_t in_features, int64_t out_features, bool interleaved, int threads) {
    refuse_misfit(interleaved, in_features);
    const int64_t* const rows = reinterpret_cast<const int64_t*>(indices);
    for (int64_t i = 0; i < count; ++i)
        if (rows[i] < 0 || rows[i] >= out_features)
            throw std::out_of_range("Row " + std::to_string(rows[i]) + " is not one of " + std::to_string(out_features) + ".");
    const linear::Gather all{reinterpret_cast<const void*>(weight), reinterpret_cast<void*>(y), rows, count,
                             in_features, out_features, interleaved};
    const python::WithoutGil without_gil;
    linear::gather(nanovllm::dtype_of(dtype), all, threads);
}

// Asks for huge pages behind memory that has not been touched yet: with small ones, every second row of weights costs a
// walk through the page tables. Where the system has none, nothing changes.
void use_huge_pages(uintptr_t address, int64_t bytes) {
#if defined(__linux__)
    const auto page = uintptr_t(sysconf(_SC_PAGESIZE));
    const uintptr_t begin = address / page * page, end = (address + uintptr_t(bytes) + page - 1) / page * page;
    (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
    (void)address, (void)bytes;
#endif
}

constexpr auto kLinear = python::names("isa", "dtype", "x", "x_stride", "weight", "bias", "y", "y_stride", "rows",
                                       "in_features", "out_features", "interleaved", "threads");
constexpr auto kInterleave = python::names("dtype", "weight", "out_features", "in_features", "back", "threads");
constexpr auto kGather = python::names("dtype", "weight", "y", "indices", "count", "in_features", "out_features",
                                       "interleaved", "threads");
constexpr auto kUseHugePages = python::names("address", "bytes");

}  // namespace

namespace nanovllm {

void define_linear(PyObject* module) {
    static PyMethodDef functions[] = {
        python::function<&run_linear, kLinear>("linear"),
        python::function<&interleave, kInterleave>("interleave"),
        python::function<&gather, kGather>("gather"),
        python::function<&use_huge_pages, kUseHugePages>("use_huge_pages"),
        {}};
    python::add_functions(module, functions);
    python::add(module, "INTERLEAVED_ROWS", PyLong_FromLong(linear::kGroup));
    python::add(module, "INTERLEAVED_INPUTS", PyLong_FromLong(linear::kInterleavedInputs));
}

}  // namespace nanovllm
