// Memory copies for the KV cache: pitched (2D) ones, `height` rows of `width` bytes, `pitch` bytes from one row to the
// next, and batches of copies of any sizes. Also page-locked host memory, and host tasks on streams.
//
// The module takes addresses, pitches and stream handles and does not link against torch, so that one build serves every
// torch version. nanovllm/comm/sgdma.py does all checks that need a tensor.

#include "sgdma.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "sgdma_polled.h"

namespace py = pybind11;
using namespace pybind11::literals;
using WithoutGil = py::call_guard<py::gil_scoped_release>;

namespace {

using sgdma::check;
using sgdma::function_at;
using sgdma::HostFunction;
using sgdma::pointer;
using sgdma::PolledCalls;

// Copies within host memory release the GIL from this many bytes on, where a row counts as at least a cache line. Taking
// the GIL back can cost a whole switch interval (5 ms) while another thread runs Python, far more than a small copy.
// Device copies always release it, because they wait for the stream where CUDA's queue is full.
constexpr std::size_t kKeepGilBelow = 64 * 1024;
constexpr std::size_t kCacheLine = 64;

void check_kind(std::string_view kind) {
    if (kind != "h2h" && kind != "h2d" && kind != "d2h" && kind != "d2d") {
        throw std::invalid_argument("kind must be h2h, h2d, d2h or d2d, got " + std::string(kind) + ".");
    }
}

// ---- pitched copies

bool worth_releasing_gil(const sgdma::Copy2D& copy) {
    return copy.height * (copy.width > kCacheLine ? copy.width : kCacheLine) >= kKeepGilBelow;
}

void copy_on_host(const sgdma::Copy2D& copy) {
    if (copy.dpitch == copy.width && copy.spitch == copy.width) {
        std::memcpy(copy.dst, copy.src, copy.width * copy.height);
        return;
    }
    auto* dst = static_cast<std::byte*>(copy.dst);
    const auto* src = static_cast<const std::byte*>(copy.src);
    for (std::size_t row = 0; row < copy.height; ++row) {
        std::memcpy(dst + row * copy.dpitch, src + row * copy.spitch, copy.width);
    }
}

void copy_on_device(const sgdma::Copy2D& copy, std::string_view kind, std::uintptr_t stream) {
    check(sgdma::cuda_copy(copy, kind, stream), "A " + std::string(kind) + " copy of " + std::to_string(copy.height) +
                                                    " rows of " + std::to_string(copy.width) + " bytes");
}

void memcpy_2d_async(std::uintptr_t dst, std::uintptr_t src, std::size_t dpitch, std::size_t spitch,
                     std::size_t width, std::size_t height, std::string_view kind, std::uintptr_t stream) {
    check_kind(kind);
    if (width == 0 || height == 0) return;
    const sgdma::Copy2D copy{pointer(dst), pointer(src), dpitch, spitch, width, height};
    const bool on_host = kind == "h2h";
    std::optional<py::gil_scoped_release> released;
    if (!on_host || worth_releasing_gil(copy)) released.emplace();
    if (on_host) {
        copy_on_host(copy);
    } else {
        copy_on_device(copy, kind, stream);
    }
}

// ---- batches

// The copies in order, neighbours joined where they follow each other without a gap on both sides.
sgdma::CopyBatch joined(const std::vector<std::uintptr_t>& dst, const std::vector<std::uintptr_t>& src,
                        const std::vector<std::size_t>& size) {
    sgdma::CopyBatch batch;
    std::uintptr_t dst_end = 0, src_end = 0;
    for (std::size_t i = 0; i < size.size(); ++i) {
        if (size[i] == 0) continue;
        if (!batch.size.empty() && dst[i] == dst_end && src[i] == src_end) {
            batch.size.back() += size[i];
        } else {
            batch.dst.push_back(pointer(dst[i]));
            batch.src.push_back(pointer(src[i]));
            batch.size.push_back(size[i]);
        }
        dst_end = dst[i] + size[i];
        src_end = src[i] + size[i];
    }
    return batch;
}

std::size_t total(const sgdma::CopyBatch& batch) {
    return std::accumulate(batch.size.begin(), batch.size.end(), std::size_t{0});
}

void copy_batch_on_device(sgdma::CopyBatch& batch, std::string_view kind, std::uintptr_t stream) {
    check(sgdma::cuda_copy_batch(batch, kind, stream),
          "A batch of " + std::to_string(batch.size.size()) + " " + std::string(kind) + " copies");
}

std::size_t memcpy_batch_async(const std::vector<std::uintptr_t>& dst, const std::vector<std::uintptr_t>& src,
                               const std::vector<std::size_t>& size, std::string_view kind, std::uintptr_t stream) {
    check_kind(kind);
    if (dst.size() != size.size() || src.size() != size.size()) {
        throw std::invalid_argument("dst, src and size must be of one length, got " + std::to_string(dst.size()) +
                                    ", " + std::to_string(src.size()) + " and " + std::to_string(size.size()) + ".");
    }
    sgdma::CopyBatch batch = joined(dst, src, size);
    if (batch.size.empty()) return 0;
    const bool on_host = kind == "h2h";
    std::optional<py::gil_scoped_release> released;
    if (!on_host || total(batch) >= kKeepGilBelow) released.emplace();
    if (on_host) {
        for (std::size_t i = 0; i < batch.size.size(); ++i) std::memcpy(batch.dst[i], batch.src[i], batch.size[i]);
    } else {
        copy_batch_on_device(batch, kind, stream);
    }
    return batch.size.size();
}

// ---- host tasks: C++ functions with their data, that streams call as they come to them

void run_host_task(std::uintptr_t function, std::uintptr_t data) {
    function_at(function)(pointer(data));
}

void launch_host_task(std::uintptr_t function, std::uintptr_t data, std::uintptr_t stream) {
    check(sgdma::cuda_launch(function_at(function), pointer(data), stream), "cudaLaunchHostFunc");
}

// Owns the copy's arguments.
void run_host_copy(void* data) {
    const std::unique_ptr<sgdma::Copy2D> copy(static_cast<sgdma::Copy2D*>(data));
    copy_on_host(*copy);
}

void launch_host_copy(std::uintptr_t dst, std::uintptr_t src, std::size_t dpitch, std::size_t spitch,
                      std::size_t width, std::size_t height, std::uintptr_t stream) {
    auto copy = std::make_unique<sgdma::Copy2D>(
        sgdma::Copy2D{pointer(dst), pointer(src), dpitch, spitch, width, height});
    check(sgdma::cuda_launch(run_host_copy, copy.get(), stream), "cudaLaunchHostFunc");
    copy.release();
}

// ---- streams and memory

std::uintptr_t create_stream() {
    std::uintptr_t stream = 0;
    check(sgdma::cuda_create_stream(stream), "Making a stream");
    return stream;
}

void destroy_stream(std::uintptr_t stream) { check(sgdma::cuda_destroy_stream(stream), "Destroying a stream"); }

std::pair<std::string, int> memory_of(std::uintptr_t address) {
    const sgdma::Place place = sgdma::cuda_memory_of(pointer(address));
    return {place.memory, place.device};
}

std::uintptr_t device_address(std::uintptr_t address) {
    std::uintptr_t on_device = 0;
    check(sgdma::cuda_device_address(pointer(address), on_device), "cudaHostGetDevicePointer");
    return on_device;
}

void touch_pages(std::uintptr_t start, std::size_t size, unsigned threads) {
    sgdma::touch_pages(pointer(start), size, threads);
}

bool prefer_node(std::uintptr_t start, std::size_t size, int node) {
    return sgdma::prefer_node(pointer(start), size, node);
}

void lock_pages(std::uintptr_t start, std::size_t size) {
    check(sgdma::cuda_lock_pages(pointer(start), size), "cudaHostRegister of " + std::to_string(size) + " bytes");
}

void unlock_pages(std::uintptr_t start) { check(sgdma::cuda_unlock_pages(pointer(start)), "cudaHostUnregister"); }

std::size_t max_pitch(int device) {
    std::size_t pitch = 0;
    check(sgdma::cuda_max_pitch(device, pitch), "Asking device " + std::to_string(device) + " for its largest pitch");
    return pitch;
}

std::string pci_bus_id(int device) {
    std::string id;
    check(sgdma::cuda_pci_bus_id(device, id), "Asking device " + std::to_string(device) + " for its PCI address");
    return id;
}

void bind_copies(py::module_& module) {
    module.def("memcpy_2d_async", &memcpy_2d_async, "dst_ptr"_a, "src_ptr"_a, "dpitch"_a, "spitch"_a, "width"_a,
               "height"_a, "kind"_a, "stream"_a,
               "Copy `height` rows of `width` bytes. h2h is done on return; the other kinds are queued on `stream`.");
    module.def("memcpy_batch_async", &memcpy_batch_async, "dst_ptrs"_a, "src_ptrs"_a, "sizes"_a, "kind"_a, "stream"_a,
               "Copy sizes[i] bytes for each i, in any order. Returns the number of copies after joining neighbours.");
    module.def("run_host_task", &run_host_task, "function"_a, "data"_a, WithoutGil(),
               "Call the C function at `function` with `data`.");
    module.def("launch_host_task", &launch_host_task, "function"_a, "data"_a, "stream"_a, WithoutGil(),
               "The same on a thread of CUDA's when `stream` gets to it. The function must use neither CUDA nor Python.");
    module.def("launch_host_copy", &launch_host_copy, "dst_ptr"_a, "src_ptr"_a, "dpitch"_a, "spitch"_a, "width"_a,
               "height"_a, "stream"_a, WithoutGil(), "Copy rows within host memory when `stream` gets to it.");
    py::class_<PolledCalls>(module, "PolledCalls", "Host tasks on a stream, run by a thread that polls.")
        .def(py::init<std::uintptr_t, std::uintptr_t>(), "words"_a, "on_device"_a,
             "128 bytes of page-locked memory, at the host's address and at the device's.")
        .def("launch", &PolledCalls::launch, "function"_a, "data"_a, "stream"_a, WithoutGil(),
             "As `launch_host_task`, on a thread of its own.")
        .def("close", &PolledCalls::close, WithoutGil(), "End the thread. Streams no longer wait for it.");
}

void bind_memory(py::module_& module) {
    module.def("create_stream", &create_stream,
               "The handle of a new stream of the current device, for this caller alone. It ignores the default stream.");
    module.def("destroy_stream", &destroy_stream, "stream"_a, "The work on it still runs.");
    module.def("memory_of", &memory_of, "address"_a,
               "(kind of memory, device): pinned, device, managed, or (pageable, -1), also where there is no CUDA.");
    module.def("device_address", &device_address, "address"_a,
               "Where kernels of the current device find page-locked host memory.");
    module.def("touch_pages", &touch_pages, "start"_a, "size"_a, "threads"_a, WithoutGil(), "Write 0 into every page.");
    module.def("prefer_node", &prefer_node, "start"_a, "size"_a, "node"_a,
               "Place pages that are not there yet on a NUMA node. False where that cannot be had.");
    module.def("lock_pages", &lock_pages, "start"_a, "size"_a, WithoutGil(), "cudaHostRegister.");
    module.def("unlock_pages", &unlock_pages, "start"_a, WithoutGil(), "cudaHostUnregister, once the device is idle.");
    module.def("max_pitch", &max_pitch, "device"_a, "Bytes: the largest pitch that the device copies with.");
    module.def("pci_bus_id", &pci_bus_id, "device"_a, "Such as 0000:17:00.0.");
}

}  // namespace

PYBIND11_MODULE(_sgdma, module) {
    module.doc() = "Memory copies on raw addresses, sizes and pitches in bytes. Use nanovllm.comm, which checks them.";
    module.def("cuda_version", &sgdma::cuda_version,
               "Of the CUDA runtime that is linked in, 13000 for 13.0. 0 in a build without CUDA.");
    bind_copies(module);
    bind_memory(module);
}
