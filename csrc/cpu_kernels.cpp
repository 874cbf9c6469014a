// The extension module of everything between two attentions on the CPU.
#include "cpu_kernels.h"

#include <pybind11/stl.h>

#include "cpu_isa.h"

PYBIND11_MODULE(_cpu_kernels, m) {
    m.doc() = "Linear layers and row-wise work on the CPU.";
    m.def("instruction_sets", &nanovllm::instruction_sets, "Instruction sets that this machine runs, best first.");
    nanovllm::define_linear(m);
    nanovllm::define_rows(m);
    nanovllm::define_packed(m);
    nanovllm::define_layer(m);
}
