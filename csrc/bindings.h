// What the binding files share: pybind11, and the tensors of Python as plain addresses.
//
// A binding takes addresses and sizes and keeps nothing. The Python functions in nanovllm/ops and nanovllm/comm check
// shapes and dtypes before. Only the binding files and the modules include this, because pybind11 takes long to compile.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace py = pybind11;
using namespace pybind11::literals;

namespace nanovllm {

// Other Python threads run during the call. A binding that has it must not touch Python objects.
using WithoutGil = py::call_guard<py::gil_scoped_release>;

// Each adds its functions and classes to the module _cpu_kernels.
void bind_attention(py::module_& module);
void bind_delta(py::module_& module);
void bind_layer(py::module_& module);
void bind_products(py::module_& module);
void bind_rows(py::module_& module);

}  // namespace nanovllm
