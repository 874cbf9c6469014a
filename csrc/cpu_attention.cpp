// The Python door of the CPU attention: addresses in, nothing kept. nanovllm/ops/cpu_attention.py checks shapes, dtypes
// and spans before it comes here.
#include "cpu_attention.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace py = pybind11;
namespace attention = nanovllm::attention;
using attention::DType;
using attention::Kernel;

namespace {

DType dtype_of(const std::string& name) {
    if (name == "bfloat16") return DType::bf16;
    if (name == "float16") return DType::fp16;
    if (name == "float32") return DType::fp32;
    throw std::invalid_argument("no CPU attention for dtype " + name);
}

// Instruction sets that this machine runs, best first.
std::vector<std::string> instruction_sets() {
    std::vector<std::string> found;
#if defined(__x86_64__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (avx512 && __builtin_cpu_supports("avx512bf16")) found.push_back("avx512bf16");
    if (avx512) found.push_back("avx512");
    if (avx2) found.push_back("avx2");
#endif
    found.push_back("portable");
    return found;
}

const Kernel& kernel_of(const std::string& isa, DType dtype) {
#if defined(__x86_64__)
    if (isa == "avx512bf16" && dtype == DType::bf16) return attention::avx512bf16_kernel();
    if (isa == "avx512bf16" || isa == "avx512") return attention::avx512_kernel(dtype);
    if (isa == "avx2") return attention::avx2_kernel(dtype);
#endif
    if (isa == "portable") return attention::portable_kernel(dtype);
    throw std::invalid_argument("no CPU attention for instruction set " + isa);
}

// q, out and lse are addresses; strides are (token, head) in elements. `blocks` is the address of int64 block addresses,
// `sequences` of int64 [sequence_count, 7] in the order of attention::Sequence.
void attend(const std::string& isa, const std::string& dtype, uintptr_t q, std::pair<int64_t, int64_t> q_strides,
            uintptr_t out, std::pair<int64_t, int64_t> out_strides, uintptr_t lse, std::pair<int64_t, int64_t> lse_strides,
            uintptr_t blocks, uintptr_t sequences, int64_t sequence_count, int heads, int kv_heads, int head_dim,
            int block_size, int64_t window, float scale, bool carry, int threads) {
    const DType type = dtype_of(dtype);
    const Kernel& kernel = kernel_of(isa, type);
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
    batch.window = window;
    batch.scale = scale;
    batch.carry = carry;
    const py::gil_scoped_release release;
    attention::attend(batch, kernel, threads);
}

}  // namespace

PYBIND11_MODULE(_cpu_attention, m) {
    m.doc() = "Attention of query rows over KV blocks on the CPU.";
    m.def("instruction_sets", &instruction_sets, "Instruction sets that this machine runs, best first.");
    m.def("attend", &attend, py::kw_only(), py::arg("isa"), py::arg("dtype"), py::arg("q"), py::arg("q_strides"),
          py::arg("out"), py::arg("out_strides"), py::arg("lse"), py::arg("lse_strides"), py::arg("blocks"),
          py::arg("sequences"), py::arg("sequence_count"), py::arg("heads"), py::arg("kv_heads"), py::arg("head_dim"),
          py::arg("block_size"), py::arg("window"), py::arg("scale"), py::arg("carry"), py::arg("threads"));
}
