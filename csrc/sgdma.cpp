// Pitched (2D) memory copies for the KV cache: `height` rows of `width` bytes, `pitch` bytes from one row to the next.
//
// The module does not link against torch: pointers, pitches and a stream handle go in, so that one build serves every
// torch version. All checking that needs to know a tensor is done before, in nanovllm/comm/sgdma.py.

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "sgdma.h"

namespace py = pybind11;

namespace {

#ifdef NANOVLLM_WITH_CUDA
constexpr bool kHasCuda = true;
#else
constexpr bool kHasCuda = false;
#endif

// Taking the GIL back can cost a whole switch interval (5 ms) while another thread runs Python, far more than a
// small copy does, so the GIL is kept below this many bytes; a row counts as a cache line at least.
constexpr std::size_t kKeepGilBelow = 64 * 1024;
constexpr std::size_t kCacheLine = 64;

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
    const char* error = sgdma::cuda_copy(copy, kind, stream);
    if (error != nullptr) {
        throw std::runtime_error("cudaMemcpy2DAsync failed for a " + std::string(kind) + " copy of " +
                                 std::to_string(copy.height) + " rows of " + std::to_string(copy.width) +
                                 " bytes: " + error + ".");
    }
#else
    (void)copy;
    (void)stream;
    throw std::runtime_error("This build of nanovllm.comm._sgdma has no CUDA, so a " + std::string(kind) +
                             " copy cannot run: rebuild with NANOVLLM_CUDA=1 on a machine that has nvcc.");
#endif
}

void memcpy_2d_async(std::uintptr_t dst, std::uintptr_t src, std::size_t dpitch, std::size_t spitch,
                     std::size_t width, std::size_t height, std::string_view kind, std::uintptr_t stream) {
    if (kind != "h2h" && kind != "h2d" && kind != "d2h" && kind != "d2d") {
        throw std::invalid_argument("kind must be h2h, h2d, d2h or d2d, got " + std::string(kind) + ".");
    }
    if (width == 0 || height == 0) return;
    const sgdma::Copy2D copy{reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), dpitch, spitch, width,
                             height};
    const bool on_host = kind == "h2h";
    std::optional<py::gil_scoped_release> released;
    if (!on_host || worth_releasing_gil(copy)) released.emplace();
    if (on_host) {
        copy_on_host(copy);
    } else {
        copy_on_device(copy, kind, stream);
    }
}

}  // namespace

PYBIND11_MODULE(_sgdma, m) {
    m.doc() = "Pitched memory copies on raw addresses; use nanovllm.comm.memcpy_2d_async, which checks its arguments.";
    m.attr("has_cuda") = py::bool_(kHasCuda);
    m.def("memcpy_2d_async", &memcpy_2d_async, py::arg("dst_ptr"), py::arg("src_ptr"), py::arg("dpitch"),
          py::arg("spitch"), py::arg("width"), py::arg("height"), py::arg("kind"), py::arg("stream"),
          "Copy `height` rows of `width` bytes. h2h is done on return; the other kinds are queued on `stream`.");
}
