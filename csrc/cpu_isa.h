// The instruction sets that the kernels of csrc are written for, and the choice of one: a single rule for all of them.
#pragma once

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

namespace nanovllm {

enum class Isa { portable, avx2, avx512, avx512bf16 };

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

}  // namespace nanovllm
