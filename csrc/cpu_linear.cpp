// The Python door of the few-row linear layer: addresses in, nothing kept. nanovllm/ops/cpu_linear.py checks shapes and
// dtypes before it comes here.
#include "cpu_linear.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <stdexcept>
#include <string>

namespace py = pybind11;
using nanovllm::linear::kStep;
using nanovllm::linear::Problem;

namespace {

bool available() {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512bf16");
#else
    return false;
#endif
}

void check(const Problem& p, int threads) {
    if (!available()) throw std::invalid_argument("The few-row linear layer needs AVX512-bf16: use torch's here.");
    if (std::min(p.rows, p.out) < 0 || p.in < 1 || threads < 1)
        throw std::invalid_argument("Rows and outputs must not be negative, inputs and threads be positive, got " +
                                    std::to_string(p.rows) + ", " + std::to_string(p.out) + ", " +
                                    std::to_string(p.in) + " and " + std::to_string(threads) + ".");
    if (p.sum_block < 1 || (p.sum_block < p.in && p.sum_block % kStep))
        throw std::invalid_argument("sum_block must be a multiple of " + std::to_string(kStep) +
                                    " or hold all inputs, got " + std::to_string(p.sum_block) + ".");
}

void few_row_linear(uintptr_t x, int64_t x_stride, uintptr_t weight, uintptr_t bias, uintptr_t y, int64_t y_stride,
                    int64_t rows, int64_t in_features, int64_t out_features, int64_t sum_block, int threads) {
    Problem problem{};
    problem.x = reinterpret_cast<const uint16_t*>(x);
    problem.weight = reinterpret_cast<const uint16_t*>(weight);
    problem.bias = reinterpret_cast<const uint16_t*>(bias);
    problem.y = reinterpret_cast<uint16_t*>(y);
    problem.x_stride = x_stride;
    problem.y_stride = y_stride;
    problem.rows = rows;
    problem.in = in_features;
    problem.out = out_features;
    problem.sum_block = sum_block;
    check(problem, threads);
    if (rows == 0 || out_features == 0) return;
#if defined(__x86_64__)
    const py::gil_scoped_release release;
    nanovllm::linear::run_avx512bf16(problem, threads);
#endif
}

}  // namespace

PYBIND11_MODULE(_cpu_linear, m) {
    m.doc() = "Linear layers on few bf16 rows on the CPU.";
    m.def("available", &available, "Whether this machine has the instructions.");
    m.def("few_row_linear", &few_row_linear, py::kw_only(), py::arg("x"), py::arg("x_stride"), py::arg("weight"),
          py::arg("bias"), py::arg("y"), py::arg("y_stride"), py::arg("rows"), py::arg("in_features"),
          py::arg("out_features"), py::arg("sum_block"), py::arg("threads"));
}
