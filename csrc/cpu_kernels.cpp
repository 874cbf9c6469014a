// The extension module of the kernels on the CPU.
//
// All bindings are compiled here, at once: most of the time goes to pybind11's templates.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cpu_attention_bindings.h"
#include "cpu_delta_bindings.h"
#include "cpu_isa.h"
#include "cpu_layer_bindings.h"
#include "cpu_linear_bindings.h"
#include "cpu_packed_bindings.h"
#include "cpu_rows_bindings.h"

PYBIND11_MODULE(_cpu_kernels, m) {
    m.doc() = "Attention, linear layers and row-wise work on the CPU.";
    m.def("instruction_sets", &nanovllm::instruction_sets, "Instruction sets that this machine runs, best first.");
    nanovllm::define_attention(m);
    nanovllm::define_linear(m);
    nanovllm::define_rows(m);
    nanovllm::define_delta(m);
    nanovllm::define_packed(m);
    nanovllm::define_layer(m);
}
