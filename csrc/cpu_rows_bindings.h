// Row-wise work as Python calls it: addresses in, nothing kept. nanovllm/ops/cpu_kernels.py checks shapes and dtypes
// before it comes here. Sources and targets are (address, stride in elements).
//
// Included once, by cpu_kernels.cpp.
#pragma once

#include "cpu_rows.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "cpu_addresses.h"
#include "python_calls.h"

namespace python = nanovllm::python;
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
        const python::WithoutGil without_gil;
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
        const python::WithoutGil without_gil;
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
        const python::WithoutGil without_gil;
        rows::gated_unit(gated, threads);
    });
}

void add(const std::string& dtype, const Address& x, const Address& addend, int64_t count, int64_t size, int threads) {
    check_threads(threads);
    with_element(dtype, [&](auto element) {
        using T = decltype(element);
        const rows::Sum<T> sum{rows_at<T>(x), rows_at<const T>(addend), count, size};
        const python::WithoutGil without_gil;
        rows::add(sum, threads);
    });
}

void narrow(const std::string& dtype, const Address& x, const Address& y, int64_t count, int64_t size, int threads) {
    check_threads(threads);
    with_element(dtype, [&](auto element) {
        using T = decltype(element);
        const rows::Narrowed<T> narrowed{rows_at<const float>(x), rows_at<T>(y), count, size};
        const python::WithoutGil without_gil;
        rows::narrow(narrowed, threads);
    });
}

void widen(const std::string& dtype, const Address& x, const Address& y, int64_t count, int64_t size, int threads) {
    check_threads(threads);
    with_element(dtype, [&](auto element) {
        using T = decltype(element);
        const rows::Widened<T> widened{rows_at<const T>(x), rows_at<float>(y), count, size};
        const python::WithoutGil without_gil;
        rows::widen(widened, threads);
    });
}

void copy(const Address& x, const Address& y, int64_t count, int64_t row_bytes, int threads) {
    check_threads(threads);
    const rows::Rows<const char> source = rows_at<const char>(x);
    const rows::Rows<char> target = rows_at<char>(y);
    const python::WithoutGil without_gil;
    rows::copy(source, target, count, row_bytes, threads);
}

void fill(uintptr_t x, int64_t size, float value, int threads) {
    check_threads(threads);
    const python::WithoutGil without_gil;
    rows::fill(pointer<float>(x), size, value, threads);
}

void cos_sin(const Address& angles, const Address& cos, const Address& sin, int64_t count, int64_t size, float factor,
             int threads) {
    check_threads(threads);
    const rows::Angles all{rows_at<const float>(angles), rows_at<float>(cos), rows_at<float>(sin), count, size, factor};
    const python::WithoutGil without_gil;
    rows::cos_sin(all, threads);
}

void powers(uintptr_t bases, uintptr_t exponents, uintptr_t results, int64_t count, int64_t size, int threads) {
    check_threads(threads);
    const rows::Powers all{pointer<const double>(bases), pointer<const double>(exponents), pointer<double>(results),
                           count, size};
    const python::WithoutGil without_gil;
    rows::powers(all, threads);
}

void softmax(const Address& x, const Address& y, int64_t count, int64_t size, bool log, int threads) {
    check_threads(threads);
    if (size < 1) throw std::invalid_argument("A row must not be empty.");
    const rows::Softmax all{rows_at<const float>(x), rows_at<float>(y), count, size, log};
    const python::WithoutGil without_gil;
    rows::softmax(all, threads);
}

void sigmoid(const Address& x, const Address& y, int64_t count, int64_t size, int threads) {
    check_threads(threads);
    const rows::Sigmoid all{rows_at<const float>(x), rows_at<float>(y), count, size};
    const python::WithoutGil without_gil;
    rows::sigmoid(all, threads);
}

void likeliest(const std::string& dtype, const Address& logits, uintptr_t tokens, int64_t count, int64_t size,
               int threads) {
    check_threads(threads);
    if (size < 1) throw std::invalid_argument("A row must not be empty.");
    with_element(dtype, [&](auto element) {
        using T = decltype(element);
        const rows::Likeliest<T> all{rows_at<const T>(logits), pointer<int64_t>(tokens), count, size};
        const python::WithoutGil without_gil;
        rows::likeliest(all, threads);
    });
}

void draw(const Address& scores, const Address& tokens, uintptr_t starts, uintptr_t drawn, int64_t count, int64_t size,
          int threads) {
    check_threads(threads);
    const rows::Draw all{rows_at<const float>(scores), rows_at<const int64_t>(tokens), pointer<const int64_t>(starts),
                         pointer<int64_t>(drawn), count, size};
    const python::WithoutGil without_gil;
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
    const python::WithoutGil without_gil;
    rows::store_kv(store, threads);
}

constexpr auto kRmsNorm = python::names("dtype", "x", "addend", "weight", "y", "rows", "size", "eps", "threads");
constexpr auto kPlaceHeads = python::names("dtype", "heads", "weight", "cos", "sin", "q", "k", "v", "tokens", "q_heads",
                                           "kv_heads", "head_dim", "eps", "threads");
constexpr auto kGatedUnit = python::names("dtype", "activation", "gate_up", "y", "rows", "size", "threads");
constexpr auto kAdd = python::names("dtype", "x", "addend", "rows", "size", "threads");
constexpr auto kNarrow = python::names("dtype", "x", "y", "rows", "size", "threads");
constexpr auto kWiden = python::names("dtype", "x", "y", "rows", "size", "threads");
constexpr auto kCopy = python::names("x", "y", "rows", "row_bytes", "threads");
constexpr auto kFill = python::names("x", "size", "value", "threads");
constexpr auto kCosSin = python::names("angles", "cos", "sin", "rows", "size", "factor", "threads");
constexpr auto kPowers = python::names("bases", "exponents", "results", "rows", "size", "threads");
constexpr auto kSoftmax = python::names("x", "y", "rows", "size", "log", "threads");
constexpr auto kSigmoid = python::names("x", "y", "rows", "size", "threads");
constexpr auto kLikeliest = python::names("dtype", "logits", "tokens", "rows", "size", "threads");
constexpr auto kDraw = python::names("scores", "tokens", "starts", "drawn", "rows", "size", "threads");
constexpr auto kStoreKv = python::names("pool", "block_stride", "blocks", "k", "k_strides", "v", "v_strides", "slots",
                                        "tokens", "kv_heads", "block_size", "head_bytes", "threads");

}  // namespace

namespace nanovllm {

void define_rows(PyObject* module) {
    static PyMethodDef functions[] = {
        python::function<&rms_norm, kRmsNorm>("rms_norm"),
        python::function<&place_heads, kPlaceHeads>("place_heads"),
        python::function<&gated_unit, kGatedUnit>("gated_unit"),
        python::function<&add, kAdd>("add"),
        python::function<&narrow, kNarrow>("narrow"),
        python::function<&widen, kWiden>("widen"),
        python::function<&copy, kCopy>("copy"),
        python::function<&fill, kFill>("fill"),
        python::function<&cos_sin, kCosSin>("cos_sin"),
        python::function<&powers, kPowers>("powers"),
        python::function<&softmax, kSoftmax>("softmax"),
        python::function<&sigmoid, kSigmoid>("sigmoid"),
        python::function<&likeliest, kLikeliest>("likeliest"),
        python::function<&draw, kDraw>("draw"),
        python::function<&store_kv, kStoreKv>("store_kv"),
        {}};
    python::add_functions(module, functions);
}

}  // namespace nanovllm
