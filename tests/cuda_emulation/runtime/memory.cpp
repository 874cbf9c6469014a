#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>

namespace emulation {

namespace {
constexpr std::size_t kGranule = 512;                // cudaMalloc aligns to 512 bytes
constexpr std::size_t kFilled = std::size_t{1} << 28;  // larger allocations are not filled: it would take their memory
}  // namespace

long setting(const char* name, long otherwise) {
    const char* value = std::getenv(name);
    return value != nullptr ? std::atol(value) : otherwise;
}

DeviceMemory& DeviceMemory::get() {
    static auto* memory = new DeviceMemory;  // never destroyed: streams may work until the process is gone
    return *memory;
}

DeviceMemory::DeviceMemory() : total_(static_cast<std::size_t>(setting("EMULATION_GPU_MIB", 12288)) << 20) {
    const int file = memfd_create("emulated-gpu", 0);
    const bool sized = file >= 0 && ftruncate(file, static_cast<off_t>(total_)) == 0;
    void* view = sized ? mmap(nullptr, total_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
    void* device = mmap(nullptr, total_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (view == MAP_FAILED || device == MAP_FAILED) std::abort();
    view_ = static_cast<char*>(view);
    device_ = static_cast<char*>(device);
}

bool DeviceMemory::holds(const void* address) const { return address >= device_ && address < device_ + total_; }

char* DeviceMemory::view(const void* address) const {
    auto* bytes = static_cast<char*>(const_cast<void*>(address));
    return holds(address) ? view_ + (bytes - device_) : bytes;
}

bool DeviceMemory::covers(const void* address, std::size_t size) {
    const std::lock_guard lock(mutex_);
    const auto start = reinterpret_cast<std::uintptr_t>(address);
    auto after = allocations_.upper_bound(start);
    if (after == allocations_.begin()) return false;
    const auto& [begin, length] = *std::prev(after);
    return start + size <= begin + length;
}

void* DeviceMemory::allocate(std::size_t size) {
    size = (std::max<std::size_t>(size, 1) + kGranule - 1) / kGranule * kGranule;
    const std::lock_guard lock(mutex_);
    auto start = reinterpret_cast<std::uintptr_t>(device_);
    for (const auto& [begin, length] : allocations_) {  // the first gap that is large enough
        if (begin - start >= size) break;
        start = begin + length;
    }
    if (start + size > reinterpret_cast<std::uintptr_t>(device_) + total_) return nullptr;
    allocations_[start] = size;
    used_ += size;
    void* address = reinterpret_cast<void*>(start);
    if (size <= kFilled) std::memset(view(address), 0xFF, size);
    return address;
}

bool DeviceMemory::release(void* address) {
    const std::lock_guard lock(mutex_);
    const auto found = allocations_.find(reinterpret_cast<std::uintptr_t>(address));
    if (found == allocations_.end()) return false;
    const auto inside = (found->first + 4095) / 4096 * 4096;
    const auto end = (found->first + found->second) / 4096 * 4096;
    if (inside < end) madvise(view(reinterpret_cast<void*>(inside)), end - inside, MADV_REMOVE);
    used_ -= found->second;
    allocations_.erase(found);
    return true;
}

std::size_t DeviceMemory::used() {
    const std::lock_guard lock(mutex_);
    return used_;
}

LockedPages& LockedPages::get() {
    static auto* pages = new LockedPages;
    return *pages;
}

Pages LockedPages::state(const void* address, std::size_t size) {
    const std::lock_guard lock(mutex_);
    const auto start = reinterpret_cast<std::uintptr_t>(address);
    const auto after = ranges_.upper_bound(start);
    if (after != ranges_.begin()) {
        const auto& [begin, range] = *std::prev(after);
        if (start < begin + range.size) {
            return start + size <= begin + range.size ? Pages::locked : Pages::partly_locked;
        }
    }
    return after != ranges_.end() && after->first < start + size ? Pages::partly_locked : Pages::pageable;
}

void LockedPages::add(void* address, std::size_t size, bool allocated) {
    const std::lock_guard lock(mutex_);
    ranges_[reinterpret_cast<std::uintptr_t>(address)] = {size, allocated};
}

bool LockedPages::remove(void* address, bool allocated) {
    const std::lock_guard lock(mutex_);
    const auto found = ranges_.find(reinterpret_cast<std::uintptr_t>(address));
    if (found == ranges_.end() || found->second.allocated != allocated) return false;
    ranges_.erase(found);
    return true;
}

}  // namespace emulation
