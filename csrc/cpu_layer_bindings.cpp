// Decoder layers for few rows as Python calls them.
#include <string>
#include <utility>

#include "bindings.h"
#include "cpu_layer.h"

namespace nanovllm {
namespace {

layer::Layer layer_of(const std::string& isa, const std::string& packed_isa, const std::string& dtype,
                      NormAddress input_norm, NormAddress heads_norm, NormAddress mlp_norm,
                      NormAddress attention_output_norm, NormAddress mlp_output_norm, float eps,
                      const layer::Linear& qkv, const layer::Linear& o, const layer::Linear& gate_up,
                      const layer::Linear& down, int64_t head_dim, int64_t rotary_dim, bool gated,
                      const std::string& activation) {
    const layer::Norms norms{input_norm, heads_norm, mlp_norm, attention_output_norm, mlp_output_norm, eps};
    return {isa, packed_isa, dtype, norms, qkv, o, gate_up, down, {head_dim, rotary_dim, gated}, activation};
}

}  // namespace

void bind_layer(py::module_& module) {
    py::class_<layer::DenseWeight>(module, "DenseWeight")
        .def(py::init<uintptr_t, int64_t, int64_t, bool>(), py::kw_only(), "address"_a, "in_features"_a,
             "out_features"_a, "interleaved"_a);
    py::class_<layer::Linear>(module, "Linear", "The product with weights one below the other, of the same inputs.")
        .def(py::init<std::vector<layer::Linear::Part>, uintptr_t>(), py::kw_only(), "parts"_a, "bias"_a);
    py::class_<layer::DeltaWeights>(module, "DeltaWeights", "rate and dt_bias are fp32, the others of the layer's dtype.")
        .def(py::init<delta::Sizes, uintptr_t, uintptr_t, uintptr_t, uintptr_t>(), py::kw_only(), "sizes"_a, "conv"_a,
             "rate"_a, "dt_bias"_a, "norm"_a);
    py::class_<layer::Layer>(module, "Layer", "A norm is its address and whether it is fp32.")
        .def(py::init(&layer_of), py::kw_only(), "isa"_a, "packed_isa"_a, "dtype"_a, "input_norm"_a, "heads_norm"_a,
             "mlp_norm"_a, "attention_output_norm"_a, "mlp_output_norm"_a, "eps"_a, "qkv"_a, "o"_a, "gate_up"_a,
             "down"_a, "head_dim"_a, "rotary_dim"_a, "gated"_a, "activation"_a)
        .def("project", &layer::Layer::project, "x"_a, "cos"_a, "sin"_a, "q"_a, "k"_a, "v"_a, "gate"_a, "count"_a,
             "q_heads"_a, "kv_heads"_a, "threads"_a, WithoutGil(), "Write the rows' q, k and v, and the gates of q.")
        .def("recur", &layer::Layer::recur, "weights"_a, "runs"_a, "x"_a, "conv"_a, "states"_a, "projected"_a, "y"_a,
             "threads"_a, WithoutGil(),
             "Write what the output projection of a recurrent layer reads, and advance its states.")
        .def("finish", &layer::Layer::finish, "x"_a, "attended"_a, "count"_a, "threads"_a, WithoutGil(),
             "Add the output projection of the attended rows and the MLP to the residual stream x.");
}

}  // namespace nanovllm
