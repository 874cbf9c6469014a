// A decoder layer on few bf16 rows, but for its attention: what comes before in one call, what comes after in another.
// The kernels are those of cpu_linear and cpu_rows, in the order in which nanovllm/models/decoder.py calls them; saved
// is the way through Python between them. nanovllm/ops/cpu_layer.py checks shapes and dtypes before it comes here.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "cpu_addresses.h"
#include "cpu_linear.h"
#include "cpu_rows.h"

namespace py = pybind11;
namespace linear = nanovllm::linear;
namespace rows = nanovllm::rows;
using nanovllm::Address;
using nanovllm::pointer;
using nanovllm::rows_at;
using rows::Source;
using rows::Target;

namespace {

// Rows of a result that is needed within a call only.
class Scratch {
  public:
    Scratch(int64_t count, int64_t size) : data_(new uint16_t[size_t(count) * size_t(size)]), size_(size) {}

    operator Target() const { return {data_.get(), size_}; }

  private:
    std::unique_ptr<uint16_t[]> data_;
    int64_t size_;
};

Source source(Target target) { return {target.data, target.stride}; }

struct Linear {
    const uint16_t *weight, *bias;
    int64_t in, out, sum_block;

    Linear(uintptr_t weight, uintptr_t bias, int64_t in, int64_t out, int64_t sum_block)
        : weight(pointer<const uint16_t>(weight)), bias(pointer<const uint16_t>(bias)), in(in), out(out),
          sum_block(sum_block) {
        if (in < 1 || out < 1) throw std::invalid_argument("A product needs inputs and outputs.");
        if (sum_block < 1 || (sum_block < in && sum_block % linear::kStep))
            throw std::invalid_argument("sum_block must be a multiple of " + std::to_string(linear::kStep) +
                                        " or hold all inputs, got " + std::to_string(sum_block) + ".");
    }

    void run(Source x, Target y, int64_t count, int threads) const {
#if defined(__x86_64__)
        linear::run_avx512bf16({x.data, weight, bias, y.data, x.stride, y.stride, count, in, out, sum_block}, threads);
#else
        (void)x, (void)y, (void)count, (void)threads;
        throw std::runtime_error("The few-row linear layer needs AVX512-bf16.");
#endif
    }
};

struct Norms {
    const uint16_t *input, *heads, *post;  // heads: null where q and k are not normalised
    float eps;

    Norms(uintptr_t input, uintptr_t heads, uintptr_t post, float eps)
        : input(pointer<const uint16_t>(input)), heads(pointer<const uint16_t>(heads)),
          post(pointer<const uint16_t>(post)), eps(eps) {}
};

class Layer {
  public:
    Layer(Norms norms, Linear qkv, Linear o, Linear gate_up, Linear down, int64_t head_dim)
        : norms_(norms), qkv_(qkv), o_(o), gate_up_(gate_up), down_(down), head_dim_(head_dim) {}

    void project(const Address& x, const Address& cos, const Address& sin, const Address& q, const Address& k,
                 const Address& v, int64_t count, int64_t q_heads, int64_t kv_heads, int threads) const {
        if (count == 0) return;
        const py::gil_scoped_release release;
        const Scratch normed(count, qkv_.in), heads(count, qkv_.out);
        rows::rms_norm({rows_at<uint16_t>(x), {nullptr, 0}, norms_.input, normed, count, qkv_.in, norms_.eps}, threads);
        qkv_.run(source(normed), heads, count, threads);
        rows::place_heads({source(heads), norms_.heads, rows_at<const float>(cos), rows_at<const float>(sin),
                           rows_at<uint16_t>(q), rows_at<uint16_t>(k), rows_at<uint16_t>(v), count, q_heads, kv_heads,
                           head_dim_, norms_.eps}, threads);
    }

    void finish(const Address& x, const Address& attended, int64_t count, int threads) const {
        if (count == 0) return;
        const py::gil_scoped_release release;
        const Target residual = rows_at<uint16_t>(x);
        const Scratch projected(count, o_.out), normed(count, o_.out), gates(count, gate_up_.out),
            activated(count, down_.in);
        o_.run(rows_at<const uint16_t>(attended), projected, count, threads);
        rows::rms_norm({residual, source(projected), norms_.post, normed, count, o_.out, norms_.eps}, threads);
        gate_up_.run(source(normed), gates, count, threads);
        rows::silu_and_mul({source(gates), activated, count, down_.in}, threads);
        down_.run(source(activated), projected, count, threads);
        rows::add({residual, source(projected), count, o_.out}, threads);
    }

  private:
    Norms norms_;
    Linear qkv_, o_, gate_up_, down_;
    int64_t head_dim_;
};

}  // namespace

PYBIND11_MODULE(_cpu_layer, m) {
    m.doc() = "A decoder layer on few bf16 rows on the CPU, but for its attention.";
    py::class_<Linear>(m, "Linear")
        .def(py::init<uintptr_t, uintptr_t, int64_t, int64_t, int64_t>(), py::kw_only(), py::arg("weight"),
             py::arg("bias"), py::arg("in_features"), py::arg("out_features"), py::arg("sum_block"));
    py::class_<Norms>(m, "Norms")
        .def(py::init<uintptr_t, uintptr_t, uintptr_t, float>(), py::kw_only(), py::arg("input"), py::arg("heads"),
             py::arg("post"), py::arg("eps"));
    py::class_<Layer>(m, "Layer")
        .def(py::init<Norms, Linear, Linear, Linear, Linear, int64_t>(), py::kw_only(), py::arg("norms"),
             py::arg("qkv"), py::arg("o"), py::arg("gate_up"), py::arg("down"), py::arg("head_dim"))
        .def("project", &Layer::project, "The rows' q, k and v.")
        .def("finish", &Layer::finish, "Adds what comes of the attended rows to the residual stream.");
}
