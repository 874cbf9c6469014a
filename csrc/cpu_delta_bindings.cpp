// The gated delta rule as Python calls it. A slot is a row of a tensor of states.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "bindings.h"
#include "cpu_addresses.h"
#include "cpu_delta.h"

namespace nanovllm {
namespace {

// The runs must cover all rows. Their slots are checked here, because a wrong one would write over other memory.
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
    with_element(dtype, [&](auto element) {
        using T = decltype(element);
        delta::prepare<T>({sizes, runs, rows_at<const T>(x), pointer<const T>(weight), rows_at<T>(conv),
                           rows_at<const T>(b), rows_at<const T>(a), pointer<const float>(rate),
                           pointer<const float>(dt_bias), pointer<float>(qk), pointer<T>(v), pointer<float>(decay),
                           pointer<float>(beta)}, threads);
    });
}

void delta_recur(const std::string& dtype, const delta::Sizes& sizes, const delta::Runs& runs, uintptr_t qk, uintptr_t v,
                 uintptr_t decay, uintptr_t beta, const Address& states, uintptr_t y, int threads) {
    with_element(dtype, [&](auto element) {
        using T = decltype(element);
        delta::recur<T>({sizes, runs, pointer<const float>(qk), pointer<const T>(v), pointer<const float>(decay),
                         pointer<const float>(beta), rows_at<float>(states), pointer<T>(y)}, threads);
    });
}

void gated_norm(const std::string& dtype, const Address& x, const Address& z, uintptr_t weight, const Address& y,
                int64_t count, int64_t heads, int64_t size, float eps, int threads) {
    with_element(dtype, [&](auto element) {
        using T = decltype(element);
        delta::gated_norm<T>({rows_at<const T>(x), rows_at<const T>(z), pointer<const T>(weight), rows_at<T>(y), count,
                              heads, size, eps}, threads);
    });
}

void gate(const std::string& dtype, const Address& x, const Address& gate, int64_t count, int64_t size, int threads) {
    with_element(dtype, [&](auto element) {
        using T = decltype(element);
        delta::gate<T>({rows_at<T>(x), rows_at<const T>(gate), count, size}, threads);
    });
}

}  // namespace

void bind_delta(py::module_& module) {
    py::class_<delta::Sizes>(module, "DeltaSizes")
        .def(py::init<int64_t, int64_t, int64_t, int64_t, int64_t>(), py::kw_only(), "key_heads"_a, "value_heads"_a,
             "key_dim"_a, "value_dim"_a, "kernel"_a);
    py::class_<delta::Runs>(module, "DeltaRuns", "Addresses of int64, valid while their tensors live.")
        .def(py::init(&runs_at), py::kw_only(), "slots"_a, "starts"_a, "of_row"_a, "count"_a, "rows"_a, "num_slots"_a,
             "Raises ValueError for a slot that is none of `num_slots`.");
    module.def("delta_prepare", &delta_prepare, py::kw_only(), "dtype"_a, "sizes"_a, "runs"_a, "x"_a, "weight"_a,
               "conv"_a, "b"_a, "a"_a, "rate"_a, "dt_bias"_a, "qk"_a, "v"_a, "decay"_a, "beta"_a, "threads"_a,
               WithoutGil(), "rate, dt_bias, qk, decay and beta are fp32. A row of conv is a slot.");
    module.def("delta_recur", &delta_recur, py::kw_only(), "dtype"_a, "sizes"_a, "runs"_a, "qk"_a, "v"_a, "decay"_a,
               "beta"_a, "states"_a, "y"_a, "threads"_a, WithoutGil(),
               "qk, decay, beta and states are fp32. A row of states is a slot.");
    module.def("gated_norm", &gated_norm, py::kw_only(), "dtype"_a, "x"_a, "z"_a, "weight"_a, "y"_a, "rows"_a,
               "heads"_a, "size"_a, "eps"_a, "threads"_a, WithoutGil(), "Norm of each head, times weight and silu(z).");
    module.def("gate", &gate, py::kw_only(), "dtype"_a, "x"_a, "gate"_a, "rows"_a, "size"_a, "threads"_a, WithoutGil(),
               "x *= sigmoid(gate).");
}

}  // namespace nanovllm
