// The CUDA half: copies that the copy engines carry out at link speed, and page-locked host memory.
//
// Every error is reported by the call that met it and taken out of CUDA's own record, so that no later, unrelated CUDA
// call of this thread finds it.

#include <cuda_runtime.h>

#include <climits>

#include "sgdma.h"

namespace sgdma {

namespace {

const char* report(cudaError_t status) {
    if (status == cudaSuccess) return nullptr;
    cudaGetLastError();
    return cudaGetErrorString(status);
}

cudaMemcpyKind direction(std::string_view kind) {
    if (kind == "h2d") return cudaMemcpyHostToDevice;
    if (kind == "d2h") return cudaMemcpyDeviceToHost;
    return cudaMemcpyDeviceToDevice;
}

#if CUDART_VERSION >= 12080
// The batch call is in drivers from CUDA 12.8 on, and refuses the legacy default stream.
bool can_batch(cudaStream_t stream) {
    static const bool driver_has_it = [] {
        int version = 0;
        const bool known = cudaDriverGetVersion(&version) == cudaSuccess;
        if (!known) cudaGetLastError();
        return known && version >= 12080;
    }();
    return driver_has_it && stream != nullptr && stream != cudaStreamLegacy;
}

cudaError_t queue_batch(CopyBatch& batch, cudaStream_t stream) {
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
    std::size_t first = 0;  // the attributes hold from the first copy on
#if CUDART_VERSION >= 13000
    return cudaMemcpyBatchAsync(batch.dst.data(), batch.src.data(), batch.size.data(), batch.size.size(), &attributes,
                                &first, 1, stream);
#else
    std::size_t failed = 0;
    return cudaMemcpyBatchAsync(batch.dst.data(), batch.src.data(), batch.size.data(), batch.size.size(), &attributes,
                                &first, 1, &failed, stream);
#endif
}
#endif

// The operations on words are functions of the driver, which is not linked: (stream, address, value, flags).
using WordOperation = int (*)(cudaStream_t, unsigned long long, std::uint32_t, unsigned);

WordOperation word_operation(const char* name) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
    constexpr unsigned kVersion = 12000;  // from which on every stream has these operations
    const auto status = cudaGetDriverEntryPointByVersion(name, &found, kVersion, cudaEnableDefault, &result);
#else
    const auto status = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
    if (status != cudaSuccess) cudaGetLastError();
    const bool has_it = status == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return has_it ? reinterpret_cast<WordOperation>(found) : nullptr;
}

const char* operate(WordOperation operation, std::uintptr_t address, std::uint32_t value, std::uintptr_t stream) {
    constexpr unsigned kDefault = 0;  // of a write: after a fence; of a wait: for a value that is at least the given one
    if (operation == nullptr) return "the driver has no such operation";
    const int status = operation(reinterpret_cast<cudaStream_t>(stream), address, value, kDefault);
    return status == 0 ? nullptr : "the driver refused";
}

}  // namespace

int cuda_version() { return CUDART_VERSION; }

const char* cuda_copy(const Copy2D& copy, std::string_view kind, std::uintptr_t stream) {
    // CUDA refuses a pitch below the width even for a single row, where the pitch is never used.
    const std::size_t dpitch = copy.height == 1 ? copy.width : copy.dpitch;
    const std::size_t spitch = copy.height == 1 ? copy.width : copy.spitch;
    if (dpitch == copy.width && spitch == copy.width) {  // 1D has no limit on the width
        return report(cudaMemcpyAsync(copy.dst, copy.src, copy.width * copy.height, direction(kind),
                                      reinterpret_cast<cudaStream_t>(stream)));
    }
    return report(cudaMemcpy2DAsync(copy.dst, dpitch, copy.src, spitch, copy.width, copy.height, direction(kind),
                                    reinterpret_cast<cudaStream_t>(stream)));
}

const char* cuda_copy_batch(CopyBatch& batch, std::string_view kind, std::uintptr_t stream) {
    const auto handle = reinterpret_cast<cudaStream_t>(stream);
#if CUDART_VERSION >= 12080
    if (batch.size.size() > 1 && can_batch(handle)) {
        const cudaError_t status = queue_batch(batch, handle);
        const bool refused = status == cudaErrorNotSupported || status == cudaErrorCallRequiresNewerDriver;
        if (!refused) return report(status);
        cudaGetLastError();
    }
#endif
    for (std::size_t i = 0; i < batch.size.size(); ++i) {
        const cudaError_t status =
            cudaMemcpyAsync(batch.dst[i], batch.src[i], batch.size[i], direction(kind), handle);
        if (status != cudaSuccess) return report(status);
    }
    return nullptr;
}

const char* cuda_launch(void (*call)(void*), void* data, std::uintptr_t stream) {
    return report(cudaLaunchHostFunc(reinterpret_cast<cudaStream_t>(stream), call, data));
}

const char* cuda_create_stream(std::uintptr_t& stream) {
    cudaStream_t handle = nullptr;
    const char* error = report(cudaStreamCreateWithPriority(&handle, cudaStreamNonBlocking, 0));
    stream = reinterpret_cast<std::uintptr_t>(handle);
    return error;
}

const char* cuda_destroy_stream(std::uintptr_t stream) {
    return report(cudaStreamDestroy(reinterpret_cast<cudaStream_t>(stream)));
}

const char* cuda_write_word(std::uintptr_t address, std::uint32_t value, std::uintptr_t stream) {
    static const WordOperation operation = word_operation("cuStreamWriteValue32");
    return operate(operation, address, value, stream);
}

const char* cuda_wait_for_word(std::uintptr_t address, std::uint32_t value, std::uintptr_t stream) {
    static const WordOperation operation = word_operation("cuStreamWaitValue32");
    return operate(operation, address, value, stream);
}

Place cuda_memory_of(const void* address) {
    cudaPointerAttributes attributes{};
    if (cudaPointerGetAttributes(&attributes, address) != cudaSuccess) {
        cudaGetLastError();
        return {"pageable", -1};
    }
    switch (attributes.type) {
        case cudaMemoryTypeDevice:
            return {"device", attributes.device};
        case cudaMemoryTypeManaged:
            return {"managed", attributes.device};
        case cudaMemoryTypeHost:
            return {"pinned", attributes.device};
        default:
            return {"pageable", -1};
    }
}

const char* cuda_lock_pages(void* start, std::size_t size) {
    return report(cudaHostRegister(start, size, cudaHostRegisterPortable | cudaHostRegisterMapped));
}

const char* cuda_device_address(void* host, std::uintptr_t& address) {
    void* found = nullptr;
    const char* error = report(cudaHostGetDevicePointer(&found, host, 0));
    address = reinterpret_cast<std::uintptr_t>(found);
    return error;
}

const char* cuda_unlock_pages(void* start) {
    const char* failed = report(cudaDeviceSynchronize());
    const char* kept = report(cudaHostUnregister(start));
    return kept != nullptr ? kept : failed;
}

const char* cuda_max_pitch(int device, std::size_t& pitch) {
    int value = 0;
    const char* error = report(cudaDeviceGetAttribute(&value, cudaDevAttrMaxPitch, device));
    pitch = value > 0 ? static_cast<std::size_t>(value) : INT_MAX;
    return error;
}

const char* cuda_pci_bus_id(int device, std::string& id) {
    char text[64] = {};
    const char* error = report(cudaDeviceGetPCIBusId(text, static_cast<int>(sizeof(text)), device));
    id = text;
    return error;
}

}  // namespace sgdma
