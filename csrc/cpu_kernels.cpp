// The extension module of everything between two attentions on the CPU.
//
// All bindings are compiled here, at once: most of the time goes to pybind11's templates.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cpu_delta_bindings.h"
#include "cpu_isa.h"
#include "cpu_layer_bindings.h"
#include "cpu_linear_bindings.h"
#include "cpu_packed_bindings.h"
#include "cpu_rows_bindings.h"
#include "cpu_threads.h"

PYBIND11_MODULE(_cpu_kernels, m) {
    m.doc() = "Linear layers and row-wise work on the CPU.";
    m.def("instruction_sets", &nanovllm::instruction_sets, "Instruction sets that this machine runs, best first.");
    nanovllm::define_linear(m);
    nanovllm::define_rows(m);
    nanovllm::define_delta(m);
    nanovllm::define_packed(m);
    nanovllm::define_layer(m);
    // One set of threads for all modules: two would take the cores from each other.
    m.attr("threads") = pybind11::capsule(reinterpret_cast<void*>(&nanovllm::run_pieces), "nanovllm.run_pieces");
}
