// The extension module of the CPU kernels.
#include "bindings.h"
#include "cpu_names.h"

PYBIND11_MODULE(_cpu_kernels, module) {
    module.doc() =
        "Attention, linear layers and row-wise work on the CPU. Use nanovllm.ops, which checks the arguments.\n\n"
        "A tensor is its address, or a pair of its address and its stride from row to row in elements. Address 0 means\n"
        "that there is none. `dtype` is \"bfloat16\", \"float16\" or \"float32\"; `isa` is one of `instruction_sets()`.";
    module.def("instruction_sets", &nanovllm::instruction_sets,
               "The instruction sets that this machine runs, best first. Raises ValueError if NANOVLLM_CPU_ISA names "
               "another.");
    nanovllm::bind_products(module);
    nanovllm::bind_rows(module);
    nanovllm::bind_delta(module);
    nanovllm::bind_layer(module);
    nanovllm::bind_attention(module);
}
