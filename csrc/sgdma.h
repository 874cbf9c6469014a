// What sgdma.cpp (compiled by the host compiler) and sgdma_kernel.cu (compiled by nvcc) share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace sgdma {

// All sizes in bytes.
struct Copy2D {
    void* dst;
    const void* src;
    std::size_t dpitch;
    std::size_t spitch;
    std::size_t width;
    std::size_t height;
};

// Queues an h2d, d2h or d2d copy on `stream` (a cudaStream_t; 0 is the default stream). Returns nullptr, or what
// CUDA says went wrong.
const char* cuda_copy(const Copy2D& copy, std::string_view kind, std::uintptr_t stream);

}  // namespace sgdma
