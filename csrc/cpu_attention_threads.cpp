// The threads of _cpu_kernels, for this module too: two sets would take the cores from each other.
#include <pybind11/pybind11.h>

#include "cpu_attention_task.h"
#include "cpu_threads.h"

namespace py = pybind11;

namespace nanovllm {
namespace {

decltype(&run_pieces) shared = nullptr;

}  // namespace

void run_pieces(int64_t pieces, int threads, Order order, Work work, const void* context) {
    shared(pieces, threads, order, work, context);
}

void attention::share_threads() {
    const auto threads = py::module_::import("nanovllm.ops._cpu_kernels").attr("threads").cast<py::capsule>();
    shared = reinterpret_cast<decltype(shared)>(threads.get_pointer<void>());
}

}  // namespace nanovllm
