// Products with quantised weights as Python calls them: addresses in, nothing kept. nanovllm/ops/packed_panels.py checks
// shapes and dtypes before it comes here.
//
// Included once, by cpu_kernels.cpp.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cpu_addresses.h"
#include "cpu_packed.h"
#include "python_calls.h"

namespace python = nanovllm::python;
namespace packed = nanovllm::packed;
using nanovllm::Address;
using nanovllm::pointer;

namespace {

packed::Weight weight_of(const std::string& scheme, uintptr_t data, uintptr_t scales, const std::string& scale_dtype,
                         uintptr_t zeros, int64_t outputs_per_scale, int64_t group_size, int64_t in_features,
                         int64_t out_features) {
    if (out_features < 0 || in_features < 1 || std::min(group_size, outputs_per_scale) < 1)
        throw std::invalid_argument("Outputs must not be negative, inputs and group sizes be positive, got " +
                                    std::to_string(out_features) + ", " + std::to_string(in_features) + ", " +
                                    std::to_string(group_size) + " and " + std::to_string(outputs_per_scale) + ".");
    return {packed::scheme_of(scheme), pointer<const uint8_t>(data), pointer<const void>(scales),
            nanovllm::dtype_of(scale_dtype), pointer<const int8_t>(zeros), outputs_per_scale, group_size, in_features,
            out_features};
}

void run_packed(const std::string& isa, const std::string& dtype, const Address& x, const packed::Weight& weight,
                uintptr_t bias, const Address& y, int64_t rows, int threads) {
    if (rows < 0 || threads < 1)
        throw std::invalid_argument("Rows must not be negative, threads be positive, got " + std::to_string(rows) +
                                    " and " + std::to_string(threads) + ".");
    const packed::Kernel& kernel = packed::kernel_of(nanovllm::isa_of(isa));
    const packed::Problem problem{weight, nanovllm::dtype_of(dtype), pointer<const void>(x.first),
                                  pointer<const void>(bias), pointer<void>(y.first), x.second, y.second, rows};
    const python::WithoutGil without_gil;
    packed::run(problem, kernel, threads);
}

constexpr auto kPackedWeight = python::names("scheme", "data", "scales", "scale_dtype", "zeros", "outputs_per_scale",
                                             "group_size", "in_features", "out_features");
constexpr auto kPackedLinear = python::names("isa", "dtype", "x", "weight", "bias", "y", "rows", "threads");

}  // namespace

namespace nanovllm {

void define_packed(PyObject* module) {
    static PyMethodDef functions[] = {
        python::function<&run_packed, kPackedLinear>("packed_linear"),
        {}};
    python::add_functions(module, functions);
    python::add_class<packed::Weight, &weight_of, kPackedWeight>(module, "_cpu_kernels.PackedWeight");
}

}  // namespace nanovllm
