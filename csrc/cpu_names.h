// What the names that Python passes mean. The kernels do not include this, because its headers take long to compile.
#pragma once

#include <cstdlib>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu_attention_kv8.h"
#include "cpu_elements.h"
#include "cpu_isa.h"
#include "cpu_packed.h"

namespace nanovllm {

inline DType dtype_of(const std::string& name) {
    if (name == "bfloat16") return DType::bf16;
    if (name == "float16") return DType::fp16;
    if (name == "float32") return DType::fp32;
    throw std::invalid_argument("There are no CPU kernels for the dtype " + name + ".");
}

// PyTorch's names of the blocks' dtype and of the queries' dtype.
inline KvFormat kv_format_of(const std::string& kv_dtype, const std::string& dtype) {
    if (kv_dtype == "int8") return KvFormat::int8;
    if (kv_dtype == "float8_e4m3fn") return KvFormat::fp8;
    if (kv_dtype == dtype) return KvFormat::plain;
    throw std::invalid_argument("Queries of " + dtype + " do not attend to KV blocks of " + kv_dtype + ".");
}

// Instruction sets that the processor runs, best first. NANOVLLM_CPU_ISA leaves out those that are better than it says.
inline std::vector<std::string> instruction_sets() {
    std::vector<std::string> found;
#if defined(__x86_64__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#if defined(NANOVLLM_EMULATE_BF16)
    if (avx512) found.push_back("avx512bf16");
#else
    if (avx512 && __builtin_cpu_supports("avx512bf16")) found.push_back("avx512bf16");
#endif
    if (avx512) found.push_back("avx512");
    if (avx2) found.push_back("avx2");
#endif
    found.push_back("portable");
    const char* chosen = std::getenv("NANOVLLM_CPU_ISA");
    if (chosen == nullptr || *chosen == '\0') return found;
    std::string known;
    for (size_t i = 0; i < found.size(); ++i) {
        if (found[i] == chosen) return {found.begin() + long(i), found.end()};
        known += (i > 0 ? ", " : "") + found[i];
    }
    throw std::invalid_argument("NANOVLLM_CPU_ISA=" + std::string(chosen) + " does not run on this machine; choose one of " +
                                known + ".");
}

inline Isa isa_of(const std::string& name) {
#if defined(__x86_64__)
    if (name == "avx512bf16") return Isa::avx512bf16;
    if (name == "avx512") return Isa::avx512;
    if (name == "avx2") return Isa::avx2;
#endif
    if (name == "portable") return Isa::portable;
    throw std::invalid_argument("There are no kernels for the instruction set " + name + ".");
}

namespace packed {

inline Scheme scheme_of(const std::string& name) {
    constexpr const char* kNames[] = {"int4", "int8", "fp8",  "mxfp4", "q4_0", "q4_1",
                                      "q5_0", "q5_1", "q8_0", "q4_k",  "q5_k", "q6_k"};
    for (int i = 0; i < int(std::size(kNames)); ++i)
        if (name == kNames[i]) return Scheme(i);
    throw std::invalid_argument("There are no CPU kernels for the scheme " + name + ".");
}

}  // namespace packed

}  // namespace nanovllm
