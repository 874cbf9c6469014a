// The CPU attention as Python calls it: addresses in, nothing kept. nanovllm/ops/cpu_attention.py checks shapes, dtypes
// and metadata rows before it comes here.
#include "cpu_attention.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cpu_attention_task.h"

namespace py = pybind11;
namespace attention = nanovllm::attention;
using nanovllm::DType;
using attention::Kernel;

namespace {

// Refuses sequences that would read or write outside of q's rows and the given blocks. Here and not in Python, because
// a batch may hold hundreds and each layer brings them again.
void check_sequences(const attention::Batch& batch, int64_t tokens, int64_t block_count) {
    std::vector<std::pair<int64_t, int64_t>> rows;
    for (int64_t i = 0; i < batch.sequence_count; ++i) {
        const attention::Sequence& s = batch.sequences[i];
        const auto refuse = [&](const std::string& rule) {
            throw std::invalid_argument(
                rule + ", got query_start=" + std::to_string(s.query_start) +
                ", query_len=" + std::to_string(s.query_len) + ", block_start=" + std::to_string(s.block_start) +
                ", block_count=" + std::to_string(s.block_count) +
                ", first_position=" + std::to_string(s.first_position) + ", kv_end=" + std::to_string(s.kv_end) +
                ", query_position=" + std::to_string(s.query_position) + " in metadata row " + std::to_string(i) + ".");
        };
        if (std::min({s.query_start, s.query_len, s.block_start, s.block_count, s.first_position, s.kv_end,
                      s.query_position}) < 0)
            refuse("A metadata row must hold no negative number");
        if (s.query_start > tokens || s.query_len > tokens - s.query_start)
            refuse("The query rows of a sequence must lie within the " + std::to_string(tokens) + " rows of q");
        if (s.block_start > block_count || s.block_count > block_count - s.block_start)
            refuse("The blocks of a sequence must lie within the " + std::to_string(block_count) + " given");
        if (s.kv_end > s.first_position + s.block_count * batch.block_size)
            refuse("The kv_end must lie within its blocks of " + std::to_string(batch.block_size) + " tokens");
        if (s.query_len > 0) rows.emplace_back(s.query_start, s.query_start + s.query_len);
    }
    std::sort(rows.begin(), rows.end());
    for (size_t i = 1; i < rows.size(); ++i)
        if (rows[i].first < rows[i - 1].second)
            throw std::invalid_argument("Two sequences must not share a query row, got two with row " +
                                        std::to_string(rows[i].first) + ".");
}

// q, out and lse are addresses; strides are (token, head) in elements. `blocks` is the address of int64 block
// addresses, `sequences` of int64 [sequence_count, 7] in the order of attention::Sequence.
void attend(const std::string& isa, const std::string& dtype, const std::string& kv_dtype, uintptr_t q,
            std::pair<int64_t, int64_t> q_strides, uintptr_t out, std::pair<int64_t, int64_t> out_strides, uintptr_t lse,
            std::pair<int64_t, int64_t> lse_strides, uintptr_t blocks, int64_t block_count, uintptr_t sequences,
            int64_t sequence_count, int64_t tokens, int heads, int kv_heads, int head_dim, int block_size,
            int64_t window, float scale, bool carry, int threads) {
    const DType type = nanovllm::dtype_of(dtype);
    attention::Batch batch{};
    batch.rows.q = reinterpret_cast<const void*>(q);
    batch.rows.out = reinterpret_cast<float*>(out);
    batch.rows.lse = reinterpret_cast<float*>(lse);
    std::tie(batch.rows.q_token_stride, batch.rows.q_head_stride) = q_strides;
    std::tie(batch.rows.out_token_stride, batch.rows.out_head_stride) = out_strides;
    std::tie(batch.rows.lse_token_stride, batch.rows.lse_head_stride) = lse_strides;
    batch.blocks = reinterpret_cast<const int64_t*>(blocks);
    batch.sequences = reinterpret_cast<const attention::Sequence*>(sequences);
    batch.sequence_count = sequence_count;
    batch.heads = heads;
    batch.kv_heads = kv_heads;
    batch.head_dim = head_dim;
    batch.block_size = block_size;
    batch.element_bytes = type == DType::fp32 ? 4 : 2;
    batch.format = nanovllm::kv_format_of(kv_dtype, dtype);
    batch.window = window;
    batch.scale = scale;
    batch.carry = carry;
    check_sequences(batch, tokens, block_count);
    const Kernel& kernel = attention::kernel_of(nanovllm::isa_of(isa), type, batch.format);
    const py::gil_scoped_release release;
    attention::attend(batch, kernel, threads);
}

}  // namespace

PYBIND11_MODULE(_cpu_attention, m) {
    m.doc() = "Attention of query rows over KV blocks on the CPU.";
    m.def("attend", &attend, py::kw_only(), py::arg("isa"), py::arg("dtype"), py::arg("kv_dtype"), py::arg("q"),
          py::arg("q_strides"), py::arg("out"), py::arg("out_strides"), py::arg("lse"), py::arg("lse_strides"), py::arg("blocks"),
          py::arg("block_count"), py::arg("sequences"), py::arg("sequence_count"), py::arg("tokens"), py::arg("heads"),
          py::arg("kv_heads"), py::arg("head_dim"),
          py::arg("block_size"), py::arg("window"), py::arg("scale"), py::arg("carry"), py::arg("threads"));
    attention::bind_tasks(m, &check_sequences);
    attention::bind_steps(m, &check_sequences);
    attention::bind_kv8(m);
    attention::share_threads();
}
