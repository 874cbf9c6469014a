// What the parts of the sgdma extension share: sgdma.cpp (the module), sgdma_pages.cpp (host pages) and the CUDA half,
// which is sgdma_kernel.cu, compiled by nvcc, or sgdma_without_cuda.cpp in builds without it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

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

// Copies of size[i] bytes from src[i] to dst[i], none of them empty. They may run in any order.
struct CopyBatch {
    std::vector<void*> dst;
    std::vector<void*> src;  // read only; CUDA 12 declares them without const
    std::vector<std::size_t> size;
};

// Where an address lies. `device` is -1 for pageable memory.
struct Place {
    const char* memory;  // "device", "managed", "pinned" or "pageable"
    int device;
};

// ---- host pages; addresses and sizes of whole mappings

// Writes to every page of [start, start + size), split over `threads` threads, so that the pages exist.
void touch_pages(void* start, std::size_t size, unsigned threads);

// Asks for the pages of a mapping to be placed on a NUMA node when they are touched; false where that cannot be had.
bool prefer_node(void* start, std::size_t size, int node);

using HostFunction = void (*)(void*);

inline void* pointer(std::uintptr_t address) { return reinterpret_cast<void*>(address); }
inline HostFunction function_at(std::uintptr_t address) { return reinterpret_cast<HostFunction>(address); }

// ---- the CUDA half. A `const char*` is nullptr, or what CUDA says went wrong; no error is left behind for later calls.

// Throws where a function of the CUDA half has failed.
inline void check(const char* error, const std::string& what) {
    if (error != nullptr) throw std::runtime_error(what + " failed: " + error + ".");
}

int cuda_version();  // of the runtime that is linked in, 13000 for 13.0; 0 in builds without CUDA

// Queues an h2d, d2h or d2d copy on `stream` (a cudaStream_t; 0 is the default stream).
const char* cuda_copy(const Copy2D& copy, std::string_view kind, std::uintptr_t stream);

// The same for a batch: one call where toolkit, driver and stream allow it, else one for each copy.
const char* cuda_copy_batch(CopyBatch& batch, std::string_view kind, std::uintptr_t stream);

// Calls `call(data)` on a thread of CUDA's when `stream` gets to it. `call` must not use CUDA, nor wait for a thread
// that may: CUDA holds locks meanwhile. Python's GIL is such a wait, so no Python runs there.
const char* cuda_launch(HostFunction call, void* data, std::uintptr_t stream);

// A stream of the current device that waits for no other, not even for the default stream. Destroying it drops no work.
const char* cuda_create_stream(std::uintptr_t& stream);
const char* cuda_destroy_stream(std::uintptr_t stream);

// The stream writes a word of device memory or of host memory that the device sees, after all its earlier work; or it
// waits until the word is at least `value`, as a signed difference. Addresses are the device's.
const char* cuda_write_word(std::uintptr_t address, std::uint32_t value, std::uintptr_t stream);
const char* cuda_wait_for_word(std::uintptr_t address, std::uint32_t value, std::uintptr_t stream);

Place cuda_memory_of(const void* address);  // pageable where CUDA cannot be asked

// Where kernels of the current device find page-locked host memory.
const char* cuda_device_address(void* host, std::uintptr_t& address);

const char* cuda_lock_pages(void* start, std::size_t size);
const char* cuda_unlock_pages(void* start);  // waits for the device first: nothing may be using them

const char* cuda_max_pitch(int device, std::size_t& pitch);
const char* cuda_pci_bus_id(int device, std::string& id);  // such as 0000:17:00.0

}  // namespace sgdma
