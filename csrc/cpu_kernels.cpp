// The extension module of the kernels on the CPU.
//
// All bindings are compiled here, at once.
#include "python_calls.h"

#include "cpu_attention_bindings.h"
#include "cpu_delta_bindings.h"
#include "cpu_layer_bindings.h"
#include "cpu_linear_bindings.h"
#include "cpu_names.h"
#include "cpu_packed_bindings.h"
#include "cpu_rows_bindings.h"

namespace {

PyModuleDef kModule = {PyModuleDef_HEAD_INIT, "_cpu_kernels", "Attention, linear layers and row-wise work on the CPU.",
                       -1, nullptr, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__cpu_kernels() {
    return nanovllm::python::import_module(kModule, [](PyObject* module) {
        static PyMethodDef functions[] = {
            nanovllm::python::function<&nanovllm::instruction_sets>(
                "instruction_sets", "Instruction sets that this machine runs, best first."),
            {}};
        nanovllm::python::add_functions(module, functions);
        nanovllm::define_attention(module);
        nanovllm::define_linear(module);
        nanovllm::define_rows(module);
        nanovllm::define_delta(module);
        nanovllm::define_packed(module);
        nanovllm::define_layer(module);
    });
}
