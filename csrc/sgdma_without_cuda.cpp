// The CUDA half in builds without CUDA: there is no device memory, and every call fails.
#ifndef NANOVLLM_WITH_CUDA

#include "sgdma.h"

namespace sgdma {
namespace {

constexpr const char* kNoCuda =
    "this build of nanovllm.comm._sgdma has no CUDA; rebuild with NANOVLLM_CUDA=1 on a machine that has nvcc";

}  // namespace

int cuda_version() { return 0; }
const char* cuda_copy(const Copy2D&, std::string_view, std::uintptr_t) { return kNoCuda; }
const char* cuda_copy_batch(CopyBatch&, std::string_view, std::uintptr_t) { return kNoCuda; }
const char* cuda_launch(HostFunction, void*, std::uintptr_t) { return kNoCuda; }
const char* cuda_create_stream(std::uintptr_t&) { return kNoCuda; }
const char* cuda_destroy_stream(std::uintptr_t) { return kNoCuda; }
const char* cuda_write_word(std::uintptr_t, std::uint32_t, std::uintptr_t) { return kNoCuda; }
const char* cuda_wait_for_word(std::uintptr_t, std::uint32_t, std::uintptr_t) { return kNoCuda; }
Place cuda_memory_of(const void*) { return {"pageable", -1}; }
const char* cuda_device_address(void*, std::uintptr_t&) { return kNoCuda; }
const char* cuda_lock_pages(void*, std::size_t) { return kNoCuda; }
const char* cuda_unlock_pages(void*) { return kNoCuda; }
const char* cuda_max_pitch(int, std::size_t&) { return kNoCuda; }
const char* cuda_pci_bus_id(int, std::string&) { return kNoCuda; }

}  // namespace sgdma

#endif
