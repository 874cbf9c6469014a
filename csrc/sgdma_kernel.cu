// The CUDA half of the pitched copy: one cudaMemcpy2DAsync, which the copy engine carries out at link speed.

#include <cuda_runtime.h>

#include "sgdma.h"

namespace sgdma {

const char* cuda_copy(const Copy2D& copy, std::string_view kind, std::uintptr_t stream) {
    const cudaMemcpyKind direction = kind == "h2d"   ? cudaMemcpyHostToDevice
                                     : kind == "d2h" ? cudaMemcpyDeviceToHost
                                                     : cudaMemcpyDeviceToDevice;
    // CUDA refuses a pitch below the width even for a single row, where the pitch is never used.
    const std::size_t dpitch = copy.height == 1 ? copy.width : copy.dpitch;
    const std::size_t spitch = copy.height == 1 ? copy.width : copy.spitch;
    const cudaError_t status = cudaMemcpy2DAsync(copy.dst, dpitch, copy.src, spitch, copy.width, copy.height,
                                                 direction, reinterpret_cast<cudaStream_t>(stream));
    if (status == cudaSuccess) return nullptr;
    // Reported here, so it must not be found again by the next unrelated CUDA call of this thread.
    cudaGetLastError();
    return cudaGetErrorString(status);
}

}  // namespace sgdma
