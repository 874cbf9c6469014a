// Products with quantised weights as Python calls them: addresses in, nothing kept. nanovllm/ops/packed_panels.py checks
// shapes and dtypes before it comes here.
//
// Included once, by cpu_kernels.cpp.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cpu_addresses.h"
#include "cpu_packed.h"

namespace py = pybind11;
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
    const py::gil_scoped_release release;
    packed::run(problem, kernel, threads);
}

}  // namespace

namespace nanovllm {

void define_packed(py::module_& m) {
    py::class_<packed::Weight>(m, "PackedWeight")
        .def(py::init(&weight_of), py::kw_only(), py::arg("scheme"), py::arg("data"), py::arg("scales"),
             py::arg("scale_dtype"), py::arg("zeros"), py::arg("outputs_per_scale"), py::arg("group_size"), py::arg("in_features"),
             py::arg("out_features"));
    m.def("packed_linear", &run_packed, py::kw_only(), py::arg("isa"), py::arg("dtype"), py::arg("x"),
          py::arg("weight"), py::arg("bias"), py::arg("y"), py::arg("rows"), py::arg("threads"));
}

}  // namespace nanovllm
