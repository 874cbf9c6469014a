// FlashAttention as torch calls it: its host code does not run, its contract does.
#include <c10/core/InferenceMode.h>
#include <c10/cuda/CUDAStream.h>

#include <cmath>

#include "aten.h"

void* current_stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

namespace {

struct Attention {
    at::Tensor q, k, v, out, lse;  // [batch, heads, tokens, size] on the CPU; the mask is aligned bottom-right
    double scale;
    std::int64_t left, right;  // of the window, -1 without
};

void attend(void* data) {
    const auto& a = *static_cast<Attention*>(data);
    const c10::InferenceMode inference;
    const auto groups = a.q.size(1) / a.k.size(1), rows = a.q.size(2), columns = a.k.size(2);
    const auto q = a.q.to(at::kFloat), k = a.k.to(at::kFloat).repeat_interleave(groups, 1);
    const auto v = a.v.to(at::kFloat).repeat_interleave(groups, 1);
    const auto row = at::arange(rows).unsqueeze(1) + columns - rows;
    const auto column = at::arange(columns).unsqueeze(0);
    auto hidden = at::zeros({rows, columns}, at::kBool);
    if (a.left >= 0) hidden = hidden | (column < row - a.left);
    if (a.right >= 0) hidden = hidden | (column > row + a.right);
    const auto scores = (at::matmul(q, k.transpose(-1, -2)) * a.scale).masked_fill(hidden, -INFINITY);
    a.out.copy_(at::matmul(at::softmax(scores, -1).nan_to_num(0.0), v));
    const auto lse = at::logsumexp(scores, {-1});
    a.lse.copy_(lse.masked_fill(lse == -INFINITY, INFINITY));
}

}  // namespace

bool library_attention(const std::string& name, const torch::jit::Stack& inputs, torch::jit::Stack& stack,
                       std::size_t count) {
    if (name != "aten::_flash_attention_forward") return false;
    const auto q = inputs[0].toTensor(), k = inputs[1].toTensor(), v = inputs[2].toTensor();
    for (const at::Tensor& each : {q, k, v}) {
        TORCH_CHECK(each.scalar_type() == at::kHalf || each.scalar_type() == at::kBFloat16,
                    "FlashAttention only support fp16 and bf16 data type");
        TORCH_CHECK(each.scalar_type() == q.scalar_type(), "query and key must have the same dtype");
        TORCH_CHECK(each.stride(-1) == 1, "Input tensor must have contiguous last dimension");
    }
    const bool causal = inputs[8].toBool();
    const auto window = [&](std::size_t at) { return inputs[at].isNone() ? -1 : inputs[at].toInt(); };
    const double scale = inputs[10].isNone() ? 1.0 / std::sqrt(double(q.size(-1))) : inputs[10].toDouble();
    const at::Tensor out = at::empty_like(q);
    const at::Tensor lse = at::empty({q.size(0), q.size(2), q.size(1)}, q.options().dtype(at::kFloat));
    const auto turned = [](const at::Tensor& x) { return cpu_alias(x).transpose(1, 2); };
    auto* work = new Attention{turned(q), turned(k), turned(v),  turned(out),
                               cpu_alias(lse), scale, window(11), causal ? 0 : window(12)};
    emulation_push(current_stream(), attend, work, [](void* data) { delete static_cast<Attention*>(data); });
    torch::jit::drop(stack, count);
    const auto integers = q.options().dtype(at::kLong);
    torch::jit::push(stack, out, lse, at::empty({2}, integers), at::empty({0}, integers), at::empty({0}, q.options()));
    return true;
}
