// Row-wise work as Python calls it: addresses in, nothing kept. nanovllm/ops/cpu_kernels.py checks shapes and dtypes
// before it comes here. Sources and targets are (address, stride in elements).
//
// Included once, by cpu_kernels.cpp.
#pragma once

#include "cpu_rows.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "cpu_addresses.h"

namespace py = pybind11;
namespace rows = nanovllm::rows;
using nanovllm::Address;
using nanovllm::NormAddress;
using nanovllm::norm_weight;
using nanovllm::pointer;
using nanovllm::rows_at;
using nanovllm::with_element;

namespace {

void check_threads(int threads) {
    if (threads < 1) throw std::invalid_argument("threads must be positive, got " + std::to_string(threads) + ".");
}

void rms_norm(const std::string& dtype, const Address& x, const Address& addend, const NormAddress& weight,
              const Address& y, int64_t count, int64_t size, float eps, int threads) {
    check_threads(threads);
    with_element(dtype, [&](auto element) {
        using T = decltype(element);
        const rows::Norm<T> norm{rows_at<T>(x), rows_at<const T>(addend), norm_weight<T>(weight),
                                 rows_at<T>(y), count, size, eps};
        const py::gil_scoped_release release;
        rows::rms_norm(norm, threads);
    });
}

void place_heads(const std::string& dtype, const Address& heads, const NormAddress& weight, const Address& cos,
                 const Address& sin, const Address& q, const Address& k, const Address& v, int64_t tokens,
                 int64_t q_heads, int64_t kv_heads, int64_t head_dim, float eps, int threads) {
    check_threads(threads);
    with_element(dtype, [&](auto element) {
        using T = decltype(element);
        const rows::Heads<T> all{rows_at<const T>(heads), norm_weight<T>(weight), rows_at<const float>(cos),
                                 rows_at<const float>(sin), rows_at<T>(q), rows_at<T>(k), rows_at<T>(v), tokens,
                                 q_heads, kv_heads, head_dim, eps};
        const py::gil_scoped_release release;
        rows::place_heads(all, threads);
    });
}

void gated_unit(const std::string& dtype, const std::string& activation, const Address& gate_up, const Address& y,
                int64_t count, int64_t size, int threads) {
    check_threads(threads);
    const rows::Activation chosen = nanovllm::activation_of(activation);
    with_element(dtype, [&](auto element) {
        using T = decltype(element);
        const rows::GatedUnit<T> gated{chosen, rows_at<const T>(gate_up), rows_at<T>(y), count, size};
        const py::gil_scoped_release release;
        rows::gated_unit(gated, threads);
    });
}

void add(const std::string& dtype, const Address& x, const Address& addend, int64_t count, int64_t size, int threads) {
    check_threads(threads);
    with_element(dtype, [&](auto element) {
        using T = decltype(element);
        const rows::Sum<T> sum{rows_at<T>(x), rows_at<const T>(addend), count, size};
        const py::gil_scoped_release release;
        rows::add(sum, threads);
    });
}

void narrow(const std::string& dtype, const Address& x, const Address& y, int64_t count, int64_t size, int threads) {
    check_threads(threads);
    with_element(dtype, [&](auto element) {
        using T = decltype(element);
        const rows::Narrowed<T> narrowed{rows_at<const float>(x), rows_at<T>(y), count, size};
        const py::gil_scoped_release release;
        rows::narrow(narrowed, threads);
    });
}

void widen(const std::string& dtype, const Address& x, const Address& y, int64_t count, int64_t size, int threads) {
    check_threads(threads);
    with_element(dtype, [&](auto element) {
        using T = decltype(element);
        const rows::Widened<T> widened{rows_at<const T>(x), rows_at<float>(y), count, size};
        const py::gil_scoped_release release;
        rows::widen(widened, threads);
    });
}

void copy(const Address& x, const Address& y, int64_t count, int64_t row_bytes, int threads) {
    check_threads(threads);
    const rows::Rows<const char> source = rows_at<const char>(x);
    const rows::Rows<char> target = rows_at<char>(y);
    const py::gil_scoped_release release;
    rows::copy(source, target, count, row_bytes, threads);
}

void fill(uintptr_t x, int64_t size, float value, int threads) {
    check_threads(threads);
    const py::gil_scoped_release release;
    rows::fill(pointer<float>(x), size, value, threads);
}

void cos_sin(const Address& angles, const Address& cos, const Address& sin, int64_t count, int64_t size, float factor,
             int threads) {
    check_threads(threads);
    const rows::Angles all{rows_at<const float>(angles), rows_at<float>(cos), rows_at<float>(sin), count, size, factor};
    const py::gil_scoped_release release;
    rows::cos_sin(all, threads);
}

void powers(uintptr_t bases, uintptr_t exponents, uintptr_t results, int64_t count, int64_t size, int threads) {
    check_threads(threads);
    const rows::Powers all{pointer<const double>(bases), pointer<const double>(exponents), pointer<double>(results),
                           count, size};
    const py::gil_scoped_release release;
    rows::powers(all, threads);
}

void softmax(const Address& x, const Address& y, int64_t count, int64_t size, bool log, int threads) {
    check_threads(threads);
    if (size < 1) throw std::invalid_argument("A row must not be empty.");
    const rows::Softmax all{rows_at<const float>(x), rows_at<float>(y), count, size, log};
    const py::gil_scoped_release release;
    rows::softmax(all, threads);
}

void sigmoid(const Address& x, const Address& y, int64_t count, int64_t size, int threads) {
    check_threads(threads);
    const rows::Sigmoid all{rows_at<const float>(x), rows_at<float>(y), count, size};
    const py::gil_scoped_release release;
    rows::sigmoid(all, threads);
}

void likeliest(const std::string& dtype, const Address& logits, uintptr_t tokens, int64_t count, int64_t size,
               int threads) {
    check_threads(threads);
    if (size < 1) throw std::invalid_argument("A row must not be empty.");
    with_element(dtype, [&](auto element) {
        using T = decltype(element);
        const rows::Likeliest<T> all{rows_at<const T>(logits), pointer<int64_t>(tokens), count, size};
        const py::gil_scoped_release release;
        rows::likeliest(all, threads);
    });
}

void draw(const Address& scores, const Address& tokens, uintptr_t starts, uintptr_t drawn, int64_t count, int64_t size,
          int threads) {
    check_threads(threads);
    const rows::Draw all{rows_at<const float>(scores), rows_at<const int64_t>(tokens), pointer<const int64_t>(starts),
                         pointer<int64_t>(drawn), count, size};
    const py::gil_scoped_release release;
    rows::draw(all, threads);
}

// Strides in bytes, of k and v (token, head). Slots are checked here, because each layer brings them again.
void store_kv(uintptr_t pool, int64_t block_stride, int64_t blocks, uintptr_t k, std::pair<int64_t, int64_t> k_strides,
              uintptr_t v, std::pair<int64_t, int64_t> v_strides, uintptr_t slots, int64_t tokens, int64_t kv_heads,
              int64_t block_size, int64_t head_bytes, int threads) {
    check_threads(threads);
    const int64_t *begin = pointer<const int64_t>(slots), *end = begin + tokens;
    const auto outside = std::find_if(begin, end, [&](int64_t s) { return s < -1 || s >= blocks * block_size; });
    if (outside != end)
        throw std::invalid_argument("A slot must be -1 or lie within the " + std::to_string(blocks) + " blocks of " +
                                    std::to_string(block_size) + " tokens, got " + std::to_string(*outside) + ".");
    const rows::Store store{pointer<char>(pool), block_stride, pointer<const char>(k), pointer<const char>(v),
                            k_strides.first, k_strides.second, v_strides.first, v_strides.second, begin, tokens,
                            kv_heads, block_size, head_bytes};
    const py::gil_scoped_release release;
    rows::store_kv(store, threads);
}

}  // namespace

namespace nanovllm {

void define_rows(py::module_& m) {
    m.def("rms_norm", &rms_norm, py::kw_only(), py::arg("dtype"), py::arg("x"), py::arg("addend"), py::arg("weight"),
          py::arg("y"), py::arg("rows"), py::arg("size"), py::arg("eps"), py::arg("threads"));
    m.def("place_heads", &place_heads, py::kw_only(), py::arg("dtype"), py::arg("heads"), py::arg("weight"),
          py::arg("cos"), py::arg("sin"), py::arg("q"), py::arg("k"), py::arg("v"), py::arg("tokens"),
          py::arg("q_heads"), py::arg("kv_heads"), py::arg("head_dim"), py::arg("eps"), py::arg("threads"));
    m.def("gated_unit", &gated_unit, py::kw_only(), py::arg("dtype"), py::arg("activation"), py::arg("gate_up"),
          py::arg("y"), py::arg("rows"), py::arg("size"), py::arg("threads"));
    m.def("add", &add, py::kw_only(), py::arg("dtype"), py::arg("x"), py::arg("addend"), py::arg("rows"),
          py::arg("size"), py::arg("threads"));
    m.def("narrow", &narrow, py::kw_only(), py::arg("dtype"), py::arg("x"), py::arg("y"), py::arg("rows"),
          py::arg("size"), py::arg("threads"));
    m.def("widen", &widen, py::kw_only(), py::arg("dtype"), py::arg("x"), py::arg("y"), py::arg("rows"),
          py::arg("size"), py::arg("threads"));
    m.def("copy", &copy, py::kw_only(), py::arg("x"), py::arg("y"), py::arg("rows"), py::arg("row_bytes"),
          py::arg("threads"));
    m.def("fill", &fill, py::kw_only(), py::arg("x"), py::arg("size"), py::arg("value"), py::arg("threads"));
    m.def("cos_sin", &cos_sin, py::kw_only(), py::arg("angles"), py::arg("cos"), py::arg("sin"), py::arg("rows"),
          py::arg("size"), py::arg("factor"), py::arg("threads"));
    m.def("powers", &powers, py::kw_only(), py::arg("bases"), py::arg("exponents"), py::arg("results"),
          py::arg("rows"), py::arg("size"), py::arg("threads"));
    m.def("softmax", &softmax, py::kw_only(), py::arg("x"), py::arg("y"), py::arg("rows"), py::arg("size"),
          py::arg("log"), py::arg("threads"));
    m.def("sigmoid", &sigmoid, py::kw_only(), py::arg("x"), py::arg("y"), py::arg("rows"), py::arg("size"),
          py::arg("threads"));
    m.def("likeliest", &likeliest, py::kw_only(), py::arg("dtype"), py::arg("logits"), py::arg("tokens"),
          py::arg("rows"), py::arg("size"), py::arg("threads"));
    m.def("draw", &draw, py::kw_only(), py::arg("scores"), py::arg("tokens"), py::arg("starts"), py::arg("drawn"),
          py::arg("rows"), py::arg("size"), py::arg("threads"));
    m.def("store_kv", &store_kv, py::kw_only(), py::arg("pool"), py::arg("block_stride"), py::arg("blocks"),
          py::arg("k"), py::arg("k_strides"), py::arg("v"), py::arg("v_strides"), py::arg("slots"), py::arg("tokens"),
          py::arg("kv_heads"), py::arg("block_size"), py::arg("head_bytes"), py::arg("threads"));
}

}  // namespace nanovllm
