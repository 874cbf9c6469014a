// The instruction sets that the kernels of csrc are written for.
#pragma once

namespace nanovllm {

enum class Isa { portable, avx2, avx512, avx512bf16 };

}  // namespace nanovllm
