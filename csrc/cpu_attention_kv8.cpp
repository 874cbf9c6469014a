// Rows of K or V of many tokens to 8 bits.
#include "cpu_attention_kv8.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <utility>

#include "cpu_addresses.h"
#include "cpu_attention_task.h"
#include "cpu_threads.h"

namespace py = pybind11;

namespace nanovllm::attention {
namespace {

constexpr int64_t kElementsPerThread = 1 << 14;  // below this, another thread takes longer to start than it saves

// x: [tokens, heads, head_dim] with strides (token, head) in elements; rows: dense [tokens, heads, head_dim + 4].
void quantize_rows(const std::string& dtype, const std::string& kv_dtype, uintptr_t x,
                   std::pair<int64_t, int64_t> strides, uintptr_t rows, int64_t tokens, int64_t heads, int head_dim,
                   int threads) {
    const KvFormat format = kv_format_of(kv_dtype, dtype);
    if (format == KvFormat::plain) throw std::invalid_argument("Rows of " + kv_dtype + " have no scales.");
    const int64_t row_bytes = kv_row_bytes(format, head_dim, 1);
    const int workers = tokens * heads * head_dim < kElementsPerThread ? 1 : threads;
    const py::gil_scoped_release release;
    with_element(dtype, [&](auto element) {
        using T = decltype(element);
        const T* from = pointer<const T>(x);
        char* to = pointer<char>(rows);
        for_pieces(tokens, workers, Order::runs, [&](int64_t token, int) {
            for (int64_t head = 0; head < heads; ++head)
                quantize_row(format, from + token * strides.first + head * strides.second, head_dim,
                             to + (token * heads + head) * row_bytes);
        });
    });
}

}  // namespace

void bind_kv8(py::module_& m) {
    m.def("quantize_rows", &quantize_rows, py::kw_only(), py::arg("dtype"), py::arg("kv_dtype"), py::arg("x"),
          py::arg("strides"), py::arg("rows"), py::arg("tokens"), py::arg("heads"), py::arg("head_dim"),
          py::arg("threads"));
}

}  // namespace nanovllm::attention
