// The parts of the extension module _cpu_kernels, each of which adds its functions.
#pragma once

#include <pybind11/pybind11.h>

namespace nanovllm {

void define_linear(pybind11::module_& m);
void define_rows(pybind11::module_& m);
void define_layer(pybind11::module_& m);
void define_packed(pybind11::module_& m);

}  // namespace nanovllm
