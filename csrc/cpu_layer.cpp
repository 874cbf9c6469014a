// A decoder layer on few rows, but for its attention: what comes before in one call, what comes after in another. The
// kernels are those of cpu_linear and cpu_rows, in the order in which nanovllm/models/decoder.py calls them; saved is the
// way through Python between them. nanovllm/ops/cpu_kernels.py checks shapes and dtypes before it comes here.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "cpu_addresses.h"
#include "cpu_kernels.h"
#include "cpu_linear.h"
#include "cpu_rows.h"

namespace py = pybind11;
namespace linear = nanovllm::linear;
namespace rows = nanovllm::rows;
using nanovllm::Address;
using nanovllm::pointer;
using nanovllm::rows_at;

namespace {

// Rows of a result that is needed within a call only.
template <class T>
class Scratch {
  public:
    Scratch(int64_t count, int64_t size) : data_(new T[size_t(count) * size_t(size)]), size_(size) {}

    operator rows::Rows<T>() const { return {data_.get(), size_}; }
    operator rows::Rows<const T>() const { return {data_.get(), size_}; }

  private:
    std::unique_ptr<T[]> data_;
    int64_t size_;
};

struct Linear {
    uintptr_t weight, bias;  // bias: 0 where there is none
    int64_t in, out;

    Linear(uintptr_t weight, uintptr_t bias, int64_t in, int64_t out) : weight(weight), bias(bias), in(in), out(out) {
        if (in < 1 || out < 1) throw std::invalid_argument("A product needs inputs and outputs.");
    }

    template <class T>
    void run(const linear::Kernel& kernel, rows::Rows<const T> x, rows::Rows<T> y, int64_t count, int threads) const {
        linear::run({x.data, pointer<const void>(weight), pointer<const void>(bias), y.data, x.stride, y.stride, count,
                     in, out}, kernel, threads);
    }
};

struct Norms {
    uintptr_t input, heads, post;  // heads: 0 where q and k are not normalised
    float eps;
};

class Layer {
  public:
    Layer(const std::string& isa, std::string dtype, Norms norms, Linear qkv, Linear o, Linear gate_up, Linear down,
          int64_t head_dim)
        : kernel_(linear::kernel_of(nanovllm::isa_of(isa), nanovllm::dtype_of(dtype))), dtype_(std::move(dtype)),
          norms_(norms), qkv_(qkv), o_(o), gate_up_(gate_up), down_(down), head_dim_(head_dim) {}

    void project(const Address& x, const Address& cos, const Address& sin, const Address& q, const Address& k,
                 const Address& v, int64_t count, int64_t q_heads, int64_t kv_heads, int threads) const {
        if (count == 0) return;
        const py::gil_scoped_release release;
        nanovllm::with_element(dtype_, [&](auto element) {
            using T = decltype(element);
            const Scratch<T> normed(count, qkv_.in), heads(count, qkv_.out);
            rows::rms_norm<T>({rows_at<T>(x), {nullptr, 0}, pointer<const T>(norms_.input), normed, count, qkv_.in,
                               norms_.eps}, threads);
            qkv_.run<T>(kernel_, normed, heads, count, threads);
            rows::place_heads<T>({heads, pointer<const T>(norms_.heads), rows_at<const float>(cos),
                                  rows_at<const float>(sin), rows_at<T>(q), rows_at<T>(k), rows_at<T>(v), count,
                                  q_heads, kv_heads, head_dim_, norms_.eps}, threads);
        });
    }

    void finish(const Address& x, const Address& attended, int64_t count, int threads) const {
        if (count == 0) return;
        const py::gil_scoped_release release;
        nanovllm::with_element(dtype_, [&](auto element) {
            using T = decltype(element);
            const rows::Rows<T> residual = rows_at<T>(x);
            const Scratch<T> projected(count, o_.out), normed(count, o_.out), gates(count, gate_up_.out),
                activated(count, down_.in);
            o_.run<T>(kernel_, rows_at<const T>(attended), projected, count, threads);
            rows::rms_norm<T>({residual, projected, pointer<const T>(norms_.post), normed, count, o_.out, norms_.eps},
                              threads);
            gate_up_.run<T>(kernel_, normed, gates, count, threads);
            rows::silu_and_mul<T>({gates, activated, count, down_.in}, threads);
            down_.run<T>(kernel_, activated, projected, count, threads);
            rows::add<T>({residual, projected, count, o_.out}, threads);
        });
    }

  private:
    const linear::Kernel& kernel_;
    std::string dtype_;
    Norms norms_;
    Linear qkv_, o_, gate_up_, down_;
    int64_t head_dim_;
};

}  // namespace

namespace nanovllm {

void define_layer(py::module_& m) {
    py::class_<Linear>(m, "Linear")
        .def(py::init<uintptr_t, uintptr_t, int64_t, int64_t>(), py::kw_only(), py::arg("weight"), py::arg("bias"),
             py::arg("in_features"), py::arg("out_features"));
    py::class_<Norms>(m, "Norms")
        .def(py::init([](uintptr_t input, uintptr_t heads, uintptr_t post, float eps) {
                 return Norms{input, heads, post, eps};
             }), py::kw_only(), py::arg("input"), py::arg("heads"), py::arg("post"), py::arg("eps"));
    py::class_<Layer>(m, "Layer")
        .def(py::init<const std::string&, std::string, Norms, Linear, Linear, Linear, Linear, int64_t>(),
             py::kw_only(), py::arg("isa"), py::arg("dtype"), py::arg("norms"), py::arg("qkv"), py::arg("o"),
             py::arg("gate_up"), py::arg("down"), py::arg("head_dim"))
        .def("project", &Layer::project, "The rows' q, k and v.")
        .def("finish", &Layer::finish, "Adds what comes of the attended rows to the residual stream.");
}

}  // namespace nanovllm
