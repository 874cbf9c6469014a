// Recurrent layers as Python calls them: addresses in, nothing kept. nanovllm/ops/cpu_delta.py checks shapes and dtypes
// before it comes here. Rows are (address, stride in elements); a slot is a row of its tensor of states.
//
// Included once, by cpu_kernels.cpp.
#pragma once

#include "cpu_delta.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cpu_rows_bindings.h"

namespace delta = nanovllm::delta;

namespace {

struct DeltaSizes : delta::Sizes {
    DeltaSizes(int64_t key_heads, int64_t value_heads, int64_t key_dim, int64_t value_dim, int64_t kernel)
        : Sizes{key_heads, value_heads, key_dim, value_dim, kernel} {
        if (std::min({key_heads, value_heads, key_dim, value_dim, kernel}) < 1 || value_heads % key_heads)
            throw std::invalid_argument("Sizes must be positive, and value heads a multiple of key heads.");
    }
};

// The caller's runs must cover the rows; their slots are checked here, because each layer brings them again.
delta::Runs runs_at(uintptr_t slots, uintptr_t starts, uintptr_t of_row, int64_t count, int64_t rows,
                    int64_t num_slots) {
    const int64_t* first = pointer<const int64_t>(slots);
    const auto outside = std::find_if(first, first + count, [&](int64_t s) { return s < 0 || s >= num_slots; });
    if (outside != first + count)
        throw std::invalid_argument("A slot must lie within the " + std::to_string(num_slots) + " of the states, got " +
                                    std::to_string(*outside) + ".");
    return {first, pointer<const int64_t>(starts), pointer<const int64_t>(of_row), count, rows};
}

struct DeltaRuns : delta::Runs {
    DeltaRuns(uintptr_t slots, uintptr_t starts, uintptr_t of_row, int64_t count, int64_t rows, int64_t num_slots)
        : Runs(runs_at(slots, starts, of_row, count, rows, num_slots)) {}
};

void delta_prepare(const std::string& dtype, const DeltaSizes& sizes, const DeltaRuns& runs, const Address& x,
                   uintptr_t weight, const Address& conv, const Address& b, const Address& a, uintptr_t rate,
                   uintptr_t dt_bias, uintptr_t qk, uintptr_t v, uintptr_t decay, uintptr_t beta, int threads) {
    check_threads(threads);
    with_element(dtype, [&](auto element) {
        using T = decltype(element);
        const delta::Inputs<T> inputs{sizes, runs, rows_at<const T>(x), pointer<const T>(weight), rows_at<T>(conv),
                                      rows_at<const T>(b), rows_at<const T>(a), pointer<const float>(rate),
                                      pointer<const float>(dt_bias), pointer<float>(qk), pointer<T>(v),
                                      pointer<float>(decay), pointer<float>(beta)};
        const py::gil_scoped_release release;
        delta::prepare(inputs, threads);
    });
}

void delta_recur(const std::string& dtype, const DeltaSizes& sizes, const DeltaRuns& runs, uintptr_t qk, uintptr_t v,
                 uintptr_t decay, uintptr_t beta, const Address& states, uintptr_t y, int threads) {
    check_threads(threads);
    with_element(dtype, [&](auto element) {
        using T = decltype(element);
        const delta::Recurrence<T> recurrence{sizes, runs, pointer<const float>(qk), pointer<const T>(v),
                                              pointer<const float>(decay), pointer<const float>(beta),
                                              rows_at<float>(states), pointer<T>(y)};
        const py::gil_scoped_release release;
        delta::recur(recurrence, threads);
    });
}

void gated_norm(const std::string& dtype, const Address& x, const Address& z, uintptr_t weight, const Address& y,
                int64_t count, int64_t heads, int64_t size, float eps, int threads) {
    check_threads(threads);
    with_element(dtype, [&](auto element) {
        using T = decltype(element);
        const delta::GatedNorm<T> norm{rows_at<const T>(x), rows_at<const T>(z), pointer<const T>(weight),
                                       rows_at<T>(y), count, heads, size, eps};
        const py::gil_scoped_release release;
        delta::gated_norm(norm, threads);
    });
}

void gate(const std::string& dtype, const Address& x, const Address& gate, int64_t count, int64_t size, int threads) {
    check_threads(threads);
    with_element(dtype, [&](auto element) {
        using T = decltype(element);
        const delta::Gate<T> gated{rows_at<T>(x), rows_at<const T>(gate), count, size};
        const py::gil_scoped_release release;
        delta::gate(gated, threads);
    });
}

}  // namespace

namespace nanovllm {

void define_delta(py::module_& m) {
    py::class_<DeltaSizes>(m, "DeltaSizes")
        .def(py::init<int64_t, int64_t, int64_t, int64_t, int64_t>(), py::kw_only(), py::arg("key_heads"),
             py::arg("value_heads"), py::arg("key_dim"), py::arg("value_dim"), py::arg("kernel"));
    py::class_<DeltaRuns>(m, "DeltaRuns")
        .def(py::init<uintptr_t, uintptr_t, uintptr_t, int64_t, int64_t, int64_t>(), py::kw_only(), py::arg("slots"),
             py::arg("starts"), py::arg("of_row"), py::arg("count"), py::arg("rows"), py::arg("num_slots"));
    m.def("delta_prepare", &delta_prepare, py::kw_only(), py::arg("dtype"), py::arg("sizes"), py::arg("runs"),
          py::arg("x"), py::arg("weight"), py::arg("conv"), py::arg("b"), py::arg("a"), py::arg("rate"),
          py::arg("dt_bias"), py::arg("qk"), py::arg("v"), py::arg("decay"), py::arg("beta"), py::arg("threads"));
    m.def("delta_recur", &delta_recur, py::kw_only(), py::arg("dtype"), py::arg("sizes"), py::arg("runs"),
          py::arg("qk"), py::arg("v"), py::arg("decay"), py::arg("beta"), py::arg("states"), py::arg("y"),
          py::arg("threads"));
    m.def("gated_norm", &gated_norm, py::kw_only(), py::arg("dtype"), py::arg("x"), py::arg("z"), py::arg("weight"),
          py::arg("y"), py::arg("rows"), py::arg("heads"), py::arg("size"), py::arg("eps"), py::arg("threads"));
    m.def("gate", &gate, py::kw_only(), py::arg("dtype"), py::arg("x"), py::arg("gate"), py::arg("rows"),
          py::arg("size"), py::arg("threads"));
}

}  // namespace nanovllm
