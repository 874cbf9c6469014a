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

delta::Sizes sizes_of(int64_t key_heads, int64_t value_heads, int64_t key_dim, int64_t value_dim, int64_t kernel) {
    if (std::min({key_heads, value_heads, key_dim, value_dim, kernel}) < 1 || value_heads % key_heads)
        throw std::invalid_argument("Sizes must be positive, and value heads a multiple of key heads.");
    return {key_heads, value_heads, key_dim, value_dim, kernel};
}

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

void delta_prepare(const std::string& dtype, const delta::Sizes& sizes, const delta::Runs& runs, const Address& x,
                   uintptr_t weight, const Address& conv, const Address& b, const Address& a, uintptr_t rate,
                   uintptr_t dt_bias, uintptr_t qk, uintptr_t v, uintptr_t decay, uintptr_t beta, int threads) {
    check_threads(threads);
    with_element(dtype, [&](auto element) {
        using T = decltype(element);
        const delta::Inputs<T> inputs{sizes, runs, rows_at<const T>(x), pointer<const T>(weight), rows_at<T>(conv),
                                      rows_at<const T>(b), rows_at<const T>(a), pointer<const float>(rate),
                                      pointer<const float>(dt_bias), pointer<float>(qk), pointer<T>(v),
                                      pointer<float>(decay), pointer<float>(beta)};
        const python::WithoutGil without_gil;
        delta::prepare(inputs, threads);
    });
}

void delta_recur(const std::string& dtype, const delta::Sizes& sizes, const delta::Runs& runs, uintptr_t qk, uintptr_t v,
                 uintptr_t decay, uintptr_t beta, const Address& states, uintptr_t y, int threads) {
    check_threads(threads);
    with_element(dtype, [&](auto element) {
        using T = decltype(element);
        const delta::Recurrence<T> recurrence{sizes, runs, pointer<const float>(qk), pointer<const T>(v),
                                              pointer<const float>(decay), pointer<const float>(beta),
                                              rows_at<float>(states), pointer<T>(y)};
        const python::WithoutGil without_gil;
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
        const python::WithoutGil without_gil;
        delta::gated_norm(norm, threads);
    });
}

void gate(const std::string& dtype, const Address& x, const Address& gate, int64_t count, int64_t size, int threads) {
    check_threads(threads);
    with_element(dtype, [&](auto element) {
        using T = decltype(element);
        const delta::Gate<T> gated{rows_at<T>(x), rows_at<const T>(gate), count, size};
        const python::WithoutGil without_gil;
        delta::gate(gated, threads);
    });
}

constexpr auto kDeltaSizes = python::names("key_heads", "value_heads", "key_dim", "value_dim", "kernel");
constexpr auto kDeltaRuns = python::names("slots", "starts", "of_row", "count", "rows", "num_slots");
constexpr auto kDeltaPrepare = python::names("dtype", "sizes", "runs", "x", "weight", "conv", "b", "a", "rate",
                                             "dt_bias", "qk", "v", "decay", "beta", "threads");
constexpr auto kDeltaRecur = python::names("dtype", "sizes", "runs", "qk", "v", "decay", "beta", "states", "y",
                                           "threads");
constexpr auto kGatedNorm = python::names("dtype", "x", "z", "weight", "y", "rows", "heads", "size", "eps", "threads");
constexpr auto kGate = python::names("dtype", "x", "gate", "rows", "size", "threads");

}  // namespace

namespace nanovllm {

void define_delta(PyObject* module) {
    static PyMethodDef functions[] = {
        python::function<&delta_prepare, kDeltaPrepare>("delta_prepare"),
        python::function<&delta_recur, kDeltaRecur>("delta_recur"),
        python::function<&gated_norm, kGatedNorm>("gated_norm"),
        python::function<&gate, kGate>("gate"),
        {}};
    python::add_functions(module, functions);
    python::add_class<delta::Sizes, &sizes_of, kDeltaSizes>(module, "_cpu_kernels.DeltaSizes");
    python::add_class<delta::Runs, &runs_at, kDeltaRuns>(module, "_cpu_kernels.DeltaRuns");
}

}  // namespace nanovllm
