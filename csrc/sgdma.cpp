// Memory copies for the KV cache: pitched (2D) ones, `height` rows of `width` bytes, `pitch` bytes from one row to the
// next, and batches of copies of any sizes. Besides, what it takes to page-lock host memory, and host tasks on streams.
//
// The module does not link against torch: pointers, pitches and a stream handle go in, so that one build serves every
// torch version. All checking that needs to know a tensor is done before, in nanovllm/comm/sgdma.py.

#include "python_calls.h"

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

#include "sgdma.h"

namespace python = nanovllm::python;

namespace {

#ifdef NANOVLLM_WITH_CUDA
constexpr bool kHasCuda = true;
#else
constexpr bool kHasCuda = false;
#endif

// Taking the GIL back can cost a whole switch interval (5 ms) while another thread runs Python, far more than a
// small copy does, so the GIL is kept below this many bytes; a row counts as a cache line at least. It is never kept for
// device copies: where CUDA's queue is full they wait for the stream.
constexpr std::size_t kKeepGilBelow = 64 * 1024;
constexpr std::size_t kCacheLine = 64;

void* pointer(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

[[noreturn, maybe_unused]] void refuse_without_cuda(const std::string& what) {
    throw std::runtime_error("This build of nanovllm.comm._sgdma has no CUDA, so " + what +
                             ": rebuild with NANOVLLM_CUDA=1 on a machine that has nvcc.");
}

void check_kind(std::string_view kind) {
    if (kind != "h2h" && kind != "h2d" && kind != "d2h" && kind != "d2d") {
        throw std::invalid_argument("kind must be h2h, h2d, d2h or d2d, got " + std::string(kind) + ".");
    }
}

[[maybe_unused]] void check(const char* error, const std::string& what) {
    if (error != nullptr) throw std::runtime_error(what + " failed: " + error + ".");
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
#ifdef NANOVLLM_WITH_CUDA
    check(sgdma::cuda_copy(copy, kind, stream), "A " + std::string(kind) + " copy of " + std::to_string(copy.height) +
                                                    " rows of " + std::to_string(copy.width) + " bytes");
#else
    (void)copy;
    (void)stream;
    refuse_without_cuda("a " + std::string(kind) + " copy cannot run");
#endif
}

void memcpy_2d_async(std::uintptr_t dst, std::uintptr_t src, std::size_t dpitch, std::size_t spitch,
                     std::size_t width, std::size_t height, std::string_view kind, std::uintptr_t stream) {
    check_kind(kind);
    if (width == 0 || height == 0) return;
    const sgdma::Copy2D copy{pointer(dst), pointer(src), dpitch, spitch, width, height};
    const bool on_host = kind == "h2h";
    std::optional<python::WithoutGil> released;
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
#ifdef NANOVLLM_WITH_CUDA
    check(sgdma::cuda_copy_batch(batch, kind, stream),
          "A batch of " + std::to_string(batch.size.size()) + " " + std::string(kind) + " copies");
#else
    (void)batch;
    (void)stream;
    refuse_without_cuda("a " + std::string(kind) + " copy cannot run");
#endif
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
    std::optional<python::WithoutGil> released;
    if (!on_host || total(batch) >= kKeepGilBelow) released.emplace();
    if (on_host) {
        for (std::size_t i = 0; i < batch.size.size(); ++i) std::memcpy(batch.dst[i], batch.src[i], batch.size[i]);
    } else {
        copy_batch_on_device(batch, kind, stream);
    }
    return batch.size.size();
}

// ---- host tasks: C++ functions with their data, that streams call as they come to them

using HostFunction = void (*)(void*);

HostFunction function_at(std::uintptr_t address) { return reinterpret_cast<HostFunction>(address); }

void run_host_task(std::uintptr_t function, std::uintptr_t data) {
    const python::WithoutGil released;
    function_at(function)(pointer(data));
}

void launch_host_task(std::uintptr_t function, std::uintptr_t data, std::uintptr_t stream) {
#ifdef NANOVLLM_WITH_CUDA
    const python::WithoutGil released;
    check(sgdma::cuda_launch(function_at(function), pointer(data), stream), "cudaLaunchHostFunc");
#else
    (void)function;
    (void)data;
    (void)stream;
    refuse_without_cuda("no task can be put on a stream");
#endif
}

// Owns the copy's arguments.
[[maybe_unused]] void run_host_copy(void* data) {
    const std::unique_ptr<sgdma::Copy2D> copy(static_cast<sgdma::Copy2D*>(data));
    copy_on_host(*copy);
}

void launch_host_copy(std::uintptr_t dst, std::uintptr_t src, std::size_t dpitch, std::size_t spitch,
                      std::size_t width, std::size_t height, std::uintptr_t stream) {
#ifdef NANOVLLM_WITH_CUDA
    const python::WithoutGil released;
    auto copy = std::make_unique<sgdma::Copy2D>(
        sgdma::Copy2D{pointer(dst), pointer(src), dpitch, spitch, width, height});
    check(sgdma::cuda_launch(run_host_copy, copy.get(), stream), "cudaLaunchHostFunc");
    copy.release();
#else
    (void)dst, (void)src, (void)dpitch, (void)spitch, (void)width, (void)height, (void)stream;
    refuse_without_cuda("no h2h copy can be put on a stream");
#endif
}

}  // namespace

#ifdef NANOVLLM_WITH_CUDA
#include "sgdma_polled.h"
#endif

namespace {

// ---- streams

std::uintptr_t create_stream() {
    std::uintptr_t stream = 0;
#ifdef NANOVLLM_WITH_CUDA
    check(sgdma::cuda_create_stream(stream), "Making a stream");
#else
    refuse_without_cuda("there are no streams");
#endif
    return stream;
}

void destroy_stream(std::uintptr_t stream) {
#ifdef NANOVLLM_WITH_CUDA
    check(sgdma::cuda_destroy_stream(stream), "Destroying a stream");
#else
    (void)stream;
    refuse_without_cuda("there are no streams");
#endif
}

// ---- memory

std::pair<std::string, int> memory_of(std::uintptr_t address) {
#ifdef NANOVLLM_WITH_CUDA
    const sgdma::Place place = sgdma::cuda_memory_of(pointer(address));
    return {place.memory, place.device};
#else
    (void)address;
    return {"pageable", -1};
#endif
}

std::uintptr_t device_address(std::uintptr_t address) {
    std::uintptr_t found = 0;
#ifdef NANOVLLM_WITH_CUDA
    check(sgdma::cuda_device_address(pointer(address), found), "cudaHostGetDevicePointer");
#else
    (void)address;
    refuse_without_cuda("no device sees host memory");
#endif
    return found;
}

void lock_pages(std::uintptr_t start, std::size_t size) {
#ifdef NANOVLLM_WITH_CUDA
    const python::WithoutGil released;
    check(sgdma::cuda_lock_pages(pointer(start), size), "cudaHostRegister of " + std::to_string(size) + " bytes");
#else
    (void)start;
    refuse_without_cuda(std::to_string(size) + " bytes cannot be page-locked");
#endif
}

void unlock_pages(std::uintptr_t start) {
#ifdef NANOVLLM_WITH_CUDA
    const python::WithoutGil released;
    check(sgdma::cuda_unlock_pages(pointer(start)), "cudaHostUnregister");
#else
    (void)start;
    refuse_without_cuda("no memory is page-locked");
#endif
}

std::size_t max_pitch(int device) {
    std::size_t pitch = 0;
#ifdef NANOVLLM_WITH_CUDA
    check(sgdma::cuda_max_pitch(device, pitch), "Asking device " + std::to_string(device) + " for its largest pitch");
#else
    refuse_without_cuda("device " + std::to_string(device) + " cannot be asked");
#endif
    return pitch;
}

std::string pci_bus_id(int device) {
    std::string id;
#ifdef NANOVLLM_WITH_CUDA
    check(sgdma::cuda_pci_bus_id(device, id), "Asking device " + std::to_string(device) + " for its PCI address");
#else
    refuse_without_cuda("device " + std::to_string(device) + " cannot be asked");
#endif
    return id;
}

int cuda_version() {
#ifdef NANOVLLM_WITH_CUDA
    return sgdma::cuda_version();
#else
    return 0;
#endif
}

// ---- the module

void touch_pages(std::uintptr_t start, std::size_t size, unsigned threads) {
    const python::WithoutGil released;
    sgdma::touch_pages(pointer(start), size, threads);
}

bool prefer_node(std::uintptr_t start, std::size_t size, int node) {
    return sgdma::prefer_node(pointer(start), size, node);
}

constexpr auto kCopy2D = python::names("dst_ptr", "src_ptr", "dpitch", "spitch", "width", "height", "kind", "stream");
constexpr auto kCopyBatch = python::names("dst_ptrs", "src_ptrs", "sizes", "kind", "stream");
constexpr auto kHostTask = python::names("function", "data");
constexpr auto kHostTaskOnStream = python::names("function", "data", "stream");
constexpr auto kHostCopy = python::names("dst_ptr", "src_ptr", "dpitch", "spitch", "width", "height", "stream");
constexpr auto kStream = python::names("stream");
constexpr auto kAddress = python::names("address");
constexpr auto kTouch = python::names("start", "size", "threads");
constexpr auto kPrefer = python::names("start", "size", "node");
constexpr auto kPages = python::names("start", "size");
constexpr auto kStart = python::names("start");
constexpr auto kDevice = python::names("device");

#ifdef NANOVLLM_WITH_CUDA
constexpr auto kPolledCalls = python::names("words", "on_device");

PyMethodDef kOfPolledCalls[] = {
    python::method<&PolledCalls::launch, kHostTaskOnStream>("launch", "As launch_host_task, on a thread of its own."),
    python::method<&PolledCalls::close>("close", "End the thread; streams wait for it no more."),
    {}};
#endif

PyMethodDef kFunctions[] = {
    python::function<&memcpy_2d_async, kCopy2D>(
        "memcpy_2d_async",
        "Copy `height` rows of `width` bytes. h2h is done on return; the other kinds are queued on `stream`."),
    python::function<&memcpy_batch_async, kCopyBatch>(
        "memcpy_batch_async",
        "Copy sizes[i] bytes for each i, in any order; returns the number of copies after joining neighbours."),
    python::function<&run_host_task, kHostTask>(
        "run_host_task", "Call the C function at `function` with `data`, without the GIL."),
    python::function<&launch_host_task, kHostTaskOnStream>(
        "launch_host_task",
        "The same on a thread of CUDA's when `stream` gets to it. The function must use neither CUDA nor Python."),
    python::function<&launch_host_copy, kHostCopy>(
        "launch_host_copy", "Copy rows within host memory when `stream` gets to it."),
    python::function<&create_stream>(
        "create_stream",
        "The handle of a new stream of the current device, for this caller alone; it ignores the default stream."),
    python::function<&destroy_stream, kStream>("destroy_stream", "The work on it still runs."),
    python::function<&memory_of, kAddress>(
        "memory_of",
        "(kind of memory, device): pinned, device, managed, or (pageable, -1), also where there is no CUDA."),
    python::function<&device_address, kAddress>(
        "device_address", "Where kernels of the current device find page-locked host memory."),
    python::function<&touch_pages, kTouch>("touch_pages", "Write 0 into every page."),
    python::function<&prefer_node, kPrefer>(
        "prefer_node", "Place pages that are not there yet on a NUMA node; False where that cannot be had."),
    python::function<&lock_pages, kPages>("lock_pages", "cudaHostRegister."),
    python::function<&unlock_pages, kStart>("unlock_pages", "cudaHostUnregister, once the device is idle."),
    python::function<&max_pitch, kDevice>("max_pitch", "Bytes: the largest pitch that the device copies with."),
    python::function<&pci_bus_id, kDevice>("pci_bus_id", "Such as 0000:17:00.0."),
    {}};

PyModuleDef kModule = {PyModuleDef_HEAD_INIT, "_sgdma",
                       "Memory copies on raw addresses; use nanovllm.comm, which checks its arguments.", -1, kFunctions,
                       nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__sgdma() {
    return python::import_module(kModule, [](PyObject* module) {
        python::add(module, "has_cuda", PyBool_FromLong(kHasCuda));
        python::add(module, "cuda_version", PyLong_FromLong(cuda_version()));
#ifdef NANOVLLM_WITH_CUDA
        python::add_class<PolledCalls, &new_polled_calls, kPolledCalls>(module, "_sgdma.PolledCalls", kOfPolledCalls);
#endif
    });
}
