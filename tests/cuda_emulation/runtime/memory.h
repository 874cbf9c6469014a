// The memory of the emulated GPU, and what CUDA knows of page-locked host memory.
//
// Device memory is a file in memory that is mapped twice. Addresses of the device are in a mapping without any access,
// so that host code which follows a pointer of the device crashes, as it does with a GPU. The device's own work reads and
// writes the same bytes through the other mapping (`host_view`).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

namespace emulation {

// The number in an environment variable, or `otherwise`.
long setting(const char* name, long otherwise);

class DeviceMemory {
  public:
    static DeviceMemory& get();
    bool holds(const void* address) const;
    // Whether [address, address + size) is part of one allocation.
    bool covers(const void* address, std::size_t size);
    // Bytes of 0xFF, which are NaN in every float type; nullptr if there is no space.
    void* allocate(std::size_t size);
    bool release(void* address);
    std::size_t total() const { return total_; }
    std::size_t used();
    // Where the device's work finds the bytes at an address; the address itself in host memory.
    char* view(const void* address) const;

  private:
    DeviceMemory();
    std::size_t total_, used_ = 0;
    char *device_, *view_;
    std::mutex mutex_;
    std::map<std::uintptr_t, std::size_t> allocations_;
};

enum class Pages { pageable, locked, partly_locked };

class LockedPages {
  public:
    static LockedPages& get();
    // Of [address, address + size). A range that two registrations cover together is only partly locked.
    Pages state(const void* address, std::size_t size);
    // Allocated and locked at once (cudaHostAlloc), or locked only (cudaHostRegister).
    void add(void* address, std::size_t size, bool allocated);
    bool remove(void* address, bool allocated);

  private:
    struct Range {
        std::size_t size;
        bool allocated;
    };
    std::mutex mutex_;
    std::map<std::uintptr_t, Range> ranges_;
};

}  // namespace emulation
