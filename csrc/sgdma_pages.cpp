// Host pages before they are locked. Several threads touch them, since one alone fills a few GB/s, and they are placed on
// the NUMA node that is nearest to the device.

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <system_error>
#include <thread>
#include <vector>

#include "sgdma.h"

namespace sgdma {

namespace {

constexpr int kPreferred = 1;  // MPOL_PREFERRED of <linux/mempolicy.h>: another node serves when this one is full
constexpr std::size_t kMaxNodes = 1024;
constexpr std::size_t kBitsPerWord = 8 * sizeof(unsigned long);

void touch_range(volatile char* start, std::size_t begin, std::size_t end, std::size_t page) {
    for (std::size_t offset = begin; offset < end; offset += page) start[offset] = 0;
}

}  // namespace

void touch_pages(void* start, std::size_t size, unsigned threads) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t pages = (size + page - 1) / page;
    const std::size_t parts = std::clamp<std::size_t>(threads, 1, std::max<std::size_t>(pages, 1));
    const std::size_t part = (pages + parts - 1) / parts * page;
    auto* bytes = static_cast<volatile char*>(start);
    std::vector<std::thread> workers;
    workers.reserve(parts - 1);  // growing later could fail while threads run
    std::size_t begin = part;  // the first part is this thread's
    for (; begin < size; begin += part) {
        try {
            workers.emplace_back(touch_range, bytes, begin, std::min(begin + part, size), page);
        } catch (const std::system_error&) {  // no more threads to be had: this one does the rest
            break;
        }
    }
    touch_range(bytes, 0, std::min(part, size), page);
    if (begin < size) touch_range(bytes, begin, size, page);
    for (std::thread& worker : workers) worker.join();
}

bool prefer_node(void* start, std::size_t size, int node) {
    if (node < 0 || static_cast<std::size_t>(node) >= kMaxNodes) return false;
    unsigned long mask[kMaxNodes / kBitsPerWord] = {};
    mask[static_cast<std::size_t>(node) / kBitsPerWord] = 1UL << (static_cast<std::size_t>(node) % kBitsPerWord);
    // The kernel reads one bit less than it is told.
    return syscall(SYS_mbind, start, size, kPreferred, mask, kMaxNodes + 1, 0) == 0;
}

}  // namespace sgdma
