// Row-wise work as Python calls it.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "bindings.h"
#include "cpu_addresses.h"
#include "cpu_rows.h"

namespace nanovllm {
namespace {

void rms_norm(const std::string& dtype, const Address& x, const Address& addend, const NormAddress& weight,
              const Address& y, int64_t count, int64_t size, float eps, int threads) {
    with_element(dtype, [&](auto element) {
        using T = decltype(element);
        rows::rms_norm<T>({rows_at<T>(x), rows_at<const T>(addend), norm_weight<T>(weight), rows_at<T>(y), count, size,
                           eps}, threads);
    });
}

void place_heads(const std::string& dtype, const Address& heads, const NormAddress& weight, const Address& cos,
                 const Address& sin, const Address& q, const Address& k, const Address& v, int64_t tokens,
                 int64_t q_heads, int64_t kv_heads, int64_t head_dim, float eps, int threads) {
    with_element(dtype, [&](auto element) {
        using T = decltype(element);
        rows::place_heads<T>({rows_at<const T>(heads), norm_weight<T>(weight), rows_at<const float>(cos),
                              rows_at<const float>(sin), rows_at<T>(q), rows_at<T>(k), rows_at<T>(v), tokens, q_heads,
                              kv_heads, head_dim, eps}, threads);
    });
}

void gated_unit(const std::string& dtype, const std::string& activation, const Address& gate_up, const Address& y,
                int64_t count, int64_t size, int threads) {
    const rows::Activation chosen = activation_of(activation);
    with_element(dtype, [&](auto element) {
        using T = decltype(element);
        rows::gated_unit<T>({chosen, rows_at<const T>(gate_up), rows_at<T>(y), count, size}, threads);
    });
}

void add(const std::string& dtype, const Address& x, const Address& addend, int64_t count, int64_t size, int threads) {
    with_element(dtype, [&](auto element) {
        using T = decltype(element);
        rows::add<T>({rows_at<T>(x), rows_at<const T>(addend), count, size}, threads);
    });
}

void narrow(const std::string& dtype, const Address& x, const Address& y, int64_t count, int64_t size, int threads) {
    with_element(dtype, [&](auto element) {
        using T = decltype(element);
        rows::narrow<T>({rows_at<const float>(x), rows_at<T>(y), count, size}, threads);
    });
}

void widen(const std::string& dtype, const Address& x, const Address& y, int64_t count, int64_t size, int threads) {
    with_element(dtype, [&](auto element) {
        using T = decltype(element);
        rows::widen<T>({rows_at<const T>(x), rows_at<float>(y), count, size}, threads);
    });
}

void copy(const Address& x, const Address& y, int64_t count, int64_t row_bytes, int threads) {
    rows::copy(rows_at<const char>(x), rows_at<char>(y), count, row_bytes, threads);
}

void fill(uintptr_t x, int64_t size, float value, int threads) {
    rows::fill(pointer<float>(x), size, value, threads);
}

void cos_sin(const Address& angles, const Address& cos, const Address& sin, int64_t count, int64_t size, float factor,
             int threads) {
    rows::cos_sin({rows_at<const float>(angles), rows_at<float>(cos), rows_at<float>(sin), count, size, factor},
                  threads);
}

void softmax(const Address& x, const Address& y, int64_t count, int64_t size, bool log, int threads) {
    rows::softmax({rows_at<const float>(x), rows_at<float>(y), count, size, log}, threads);
}

void sigmoid(const Address& x, const Address& y, int64_t count, int64_t size, int threads) {
    rows::sigmoid({rows_at<const float>(x), rows_at<float>(y), count, size}, threads);
}

void likeliest(const std::string& dtype, const Address& logits, uintptr_t tokens, int64_t count, int64_t size,
               int threads) {
    with_element(dtype, [&](auto element) {
        using T = decltype(element);
        rows::likeliest<T>({rows_at<const T>(logits), pointer<int64_t>(tokens), count, size}, threads);
    });
}

void draw(const Address& scores, const Address& tokens, uintptr_t starts, uintptr_t drawn, int64_t count, int64_t size,
          int threads) {
    rows::draw({rows_at<const float>(scores), rows_at<const int64_t>(tokens), pointer<const int64_t>(starts),
                pointer<int64_t>(drawn), count, size}, threads);
}

// A slot outside of the pool would write over other memory, so each call checks them.
void store_kv(uintptr_t pool, int64_t block_stride, int64_t blocks, uintptr_t k, std::pair<int64_t, int64_t> k_strides,
              uintptr_t v, std::pair<int64_t, int64_t> v_strides, uintptr_t slots, int64_t tokens, int64_t kv_heads,
              int64_t block_size, int64_t head_bytes, int threads) {
    const int64_t *begin = pointer<const int64_t>(slots), *end = begin + tokens;
    const auto outside = std::find_if(begin, end, [&](int64_t s) { return s < -1 || s >= blocks * block_size; });
    if (outside != end)
        throw std::invalid_argument("A slot must be -1 or lie within the " + std::to_string(blocks) + " blocks of " +
                                    std::to_string(block_size) + " tokens, got " + std::to_string(*outside) + ".");
    rows::store_kv({pointer<char>(pool), block_stride, pointer<const char>(k), pointer<const char>(v), k_strides.first,
                    k_strides.second, v_strides.first, v_strides.second, begin, tokens, kv_heads, block_size,
                    head_bytes}, threads);
}

}  // namespace

void bind_rows(py::module_& module) {
    module.def("rms_norm", &rms_norm, py::kw_only(), "dtype"_a, "x"_a, "addend"_a, "weight"_a, "y"_a, "rows"_a,
               "size"_a, "eps"_a, "threads"_a, WithoutGil(),
               "weight: its address and whether it is fp32. An addend is added to x in place before.");
    module.def("place_heads", &place_heads, py::kw_only(), "dtype"_a, "heads"_a, "weight"_a, "cos"_a, "sin"_a, "q"_a,
               "k"_a, "v"_a, "tokens"_a, "q_heads"_a, "kv_heads"_a, "head_dim"_a, "eps"_a, "threads"_a, WithoutGil(),
               "Strides are from token to token; the heads of a token are contiguous. weight: as of `rms_norm`.");
    module.def("gated_unit", &gated_unit, py::kw_only(), "dtype"_a, "activation"_a, "gate_up"_a, "y"_a, "rows"_a,
               "size"_a, "threads"_a, WithoutGil(), "activation: \"silu\", \"gelu_tanh\" or \"clamped_swiglu\".");
    module.def("add", &add, py::kw_only(), "dtype"_a, "x"_a, "addend"_a, "rows"_a, "size"_a, "threads"_a, WithoutGil(),
               "x += addend.");
    module.def("narrow", &narrow, py::kw_only(), "dtype"_a, "x"_a, "y"_a, "rows"_a, "size"_a, "threads"_a, WithoutGil(),
               "y = x, where x is fp32 and y of `dtype`.");
    module.def("widen", &widen, py::kw_only(), "dtype"_a, "x"_a, "y"_a, "rows"_a, "size"_a, "threads"_a, WithoutGil(),
               "y = x, where x is of `dtype` and y fp32.");
    module.def("copy", &copy, py::kw_only(), "x"_a, "y"_a, "rows"_a, "row_bytes"_a, "threads"_a, WithoutGil(),
               "y = x. Strides are in bytes.");
    module.def("fill", &fill, py::kw_only(), "x"_a, "size"_a, "value"_a, "threads"_a, WithoutGil(),
               "Set all elements of an fp32 x.");
    module.def("cos_sin", &cos_sin, py::kw_only(), "angles"_a, "cos"_a, "sin"_a, "rows"_a, "size"_a, "factor"_a,
               "threads"_a, WithoutGil(), "All fp32; cos is twice as wide as the angles.");
    module.def("softmax", &softmax, py::kw_only(), "x"_a, "y"_a, "rows"_a, "size"_a, "log"_a, "threads"_a, WithoutGil(),
               "fp32 rows, or with `log` their logarithm.");
    module.def("sigmoid", &sigmoid, py::kw_only(), "x"_a, "y"_a, "rows"_a, "size"_a, "threads"_a, WithoutGil(),
               "fp32 rows.");
    module.def("likeliest", &likeliest, py::kw_only(), "dtype"_a, "logits"_a, "tokens"_a, "rows"_a, "size"_a,
               "threads"_a, WithoutGil(), "The int64 index of each row's largest element.");
    module.def("draw", &draw, py::kw_only(), "scores"_a, "tokens"_a, "starts"_a, "drawn"_a, "rows"_a, "size"_a,
               "threads"_a, WithoutGil(), "fp32 scores; int64 tokens, starts and drawn.");
    module.def("store_kv", &store_kv, py::kw_only(), "pool"_a, "block_stride"_a, "blocks"_a, "k"_a, "k_strides"_a,
               "v"_a, "v_strides"_a, "slots"_a, "tokens"_a, "kv_heads"_a, "block_size"_a, "head_bytes"_a, "threads"_a,
               WithoutGil(),
               "Strides are in bytes, those of k and v (token, head). Raises ValueError for a slot outside of the pool.");
}

}  // namespace nanovllm
