// FlashAttention and cuDNN's attention as torch calls them: their host code does not run, their contracts do.
#include <c10/core/InferenceMode.h>
#include <c10/cuda/CUDAStream.h>

#include <cmath>

#include "aten.h"

void* current_stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

namespace {

struct Attention {
    at::Tensor q, k, v, out, lse;  // [batch, heads, tokens, size] on the CPU
    double scale;
    std::int64_t left, right;  // of the window, -1 without
    std::int64_t shift;        // of the mask: the key that the first query is aligned with
};

void attend(void* data) {
    const auto& a = *static_cast<Attention*>(data);
    const c10::InferenceMode inference;
    const auto groups = a.q.size(1) / a.k.size(1), rows = a.q.size(2), columns = a.k.size(2);
    const auto q = a.q.to(at::kFloat), k = a.k.to(at::kFloat).repeat_interleave(groups, 1);
    const auto v = a.v.to(at::kFloat).repeat_interleave(groups, 1);
    const auto row = at::arange(rows).unsqueeze(1) + a.shift;
    const auto column = at::arange(columns).unsqueeze(0);
    auto hidden = at::zeros({rows, columns}, at::kBool);
    if (a.left >= 0) hidden = hidden | (column < row - a.left);
    if (a.right >= 0) hidden = hidden | (column > row + a.right);
    const auto scores = (at::matmul(q, k.transpose(-1, -2)) * a.scale).masked_fill(hidden, -INFINITY);
    a.out.copy_(at::matmul(at::softmax(scores, -1).nan_to_num(0.0), v));
    const auto lse = at::logsumexp(scores, {-1});
    a.lse.copy_(lse.masked_fill(lse == -INFINITY, INFINITY));
}

void check(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
    for (const at::Tensor& each : {q, k, v}) {
        TORCH_CHECK(each.scalar_type() == at::kHalf || each.scalar_type() == at::kBFloat16,
                    "FlashAttention only support fp16 and bf16 data type");
        TORCH_CHECK(each.scalar_type() == q.scalar_type(), "query and key must have the same dtype");
        TORCH_CHECK(each.stride(-1) == 1, "Input tensor must have contiguous last dimension");
    }
}

double scale_of(const torch::jit::IValue& value, const at::Tensor& q) {
    return value.isNone() ? 1.0 / std::sqrt(double(q.size(-1))) : value.toDouble();
}

void start(Attention work) {
    emulation_push(current_stream(), attend, new Attention(std::move(work)),
                   [](void* data) { delete static_cast<Attention*>(data); });
}

// [batch, heads, tokens, size]; the mask is aligned top-left. The output has the layout of the queries.
void cudnn(const torch::jit::Stack& inputs, torch::jit::Stack& stack, std::size_t count) {
    const auto q = inputs[0].toTensor(), k = inputs[1].toTensor(), v = inputs[2].toTensor();
    check(q, k, v);
    TORCH_CHECK(inputs[3].isNone() && inputs[5].toDouble() == 0.0, "a bias or dropout is not emulated");
    TORCH_CHECK(q.size(1) % k.size(1) == 0 && k.sizes() == v.sizes(), "heads of keys must divide those of queries");
    const at::Tensor out = at::empty_like(q);
    const at::Tensor lse = at::empty({q.size(0), q.size(1), q.size(2), 1}, q.options().dtype(at::kFloat));
    start({cpu_alias(q), cpu_alias(k), cpu_alias(v), cpu_alias(out), cpu_alias(lse).squeeze(-1),
           scale_of(inputs[8], q), -1, inputs[6].toBool() ? 0 : -1, 0});
    torch::jit::drop(stack, count);
    const auto integers = q.options().dtype(at::kLong);
    torch::jit::push(stack, out, lse, at::Tensor(), at::Tensor(), q.size(2), k.size(2), at::empty({}, integers),
                     at::empty({}, integers), at::Tensor());
}

}  // namespace

bool library_attention(const std::string& name, const torch::jit::Stack& inputs, torch::jit::Stack& stack,
                       std::size_t count) {
    if (name == "aten::_scaled_dot_product_cudnn_attention") {
        cudnn(inputs, stack, count);
        return true;
    }
    if (name != "aten::_flash_attention_forward") return false;
    const auto q = inputs[0].toTensor(), k = inputs[1].toTensor(), v = inputs[2].toTensor();
    check(q, k, v);
    const bool causal = inputs[8].toBool();
    const auto window = [&](std::size_t at) { return inputs[at].isNone() ? -1 : inputs[at].toInt(); };
    const at::Tensor out = at::empty_like(q);
    const at::Tensor lse = at::empty({q.size(0), q.size(2), q.size(1)}, q.options().dtype(at::kFloat));
    const auto turned = [](const at::Tensor& x) { return cpu_alias(x).transpose(1, 2); };
    start({turned(q), turned(k), turned(v), turned(out), cpu_alias(lse), scale_of(inputs[10], q), window(11),
           causal ? 0 : window(12), k.size(1) - q.size(1)});
    torch::jit::drop(stack, count);
    const auto integers = q.options().dtype(at::kLong);
    torch::jit::push(stack, out, lse, at::empty({2}, integers), at::empty({0}, integers), at::empty({0}, q.options()));
    return true;
}
