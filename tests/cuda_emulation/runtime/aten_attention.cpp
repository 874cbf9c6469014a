// Attention of libraries: their host code does not run, its contract does.
#include <c10/core/InferenceMode.h>
#include <c10/cuda/CUDAStream.h>

#include <cmath>

#include "aten.h"

void* current_stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

namespace {

struct Attention {
    at::Tensor q, k, v, out, lse;  // [batch, heads, tokens, size] on the CPU; lse may be undefined
    double scale;
    std::int64_t left, right;  // of the window, -1 without
    bool top_left;             // the mask's alignment
    double empty_lse;
};

void attend(void* data) {
    const auto& a = *static_cast<Attention*>(data);
    const c10::InferenceMode inference;
    const auto groups = a.q.size(1) / a.k.size(1), rows = a.q.size(2), columns = a.k.size(2);
    const auto q = a.q.to(at::kFloat), k = a.k.to(at::kFloat).repeat_interleave(groups, 1);
    const auto v = a.v.to(at::kFloat).repeat_interleave(groups, 1);
    const auto row = at::arange(rows).unsqueeze(1) + (a.top_left ? 0 : columns - rows);
    const auto column = at::arange(columns).unsqueeze(0);
    auto hidden = at::zeros({rows, columns}, at::kBool);
    if (a.left >= 0) hidden = hidden | (column < row - a.left);
    if (a.right >= 0) hidden = hidden | (column > row + a.right);
    const auto scores = (at::matmul(q, k.transpose(-1, -2)) * a.scale).masked_fill(hidden, -INFINITY);
    a.out.copy_(at::matmul(at::softmax(scores, -1).nan_to_num(0.0), v));
    if (!a.lse.defined()) return;
    const auto lse = at::logsumexp(scores, {-1});
    a.lse.copy_(lse.masked_fill(lse == -INFINITY, a.empty_lse).view(a.lse.sizes()));
}

}  // namespace

bool library_attention(const std::string& name, const torch::jit::Stack& inputs, torch::jit::Stack& stack,
                       std::size_t count) {
    const bool flash = name == "aten::_flash_attention_forward";
    const bool cudnn = name == "aten::_scaled_dot_product_cudnn_attention";
    if (!flash && !cudnn && name != "aten::_scaled_dot_product_flash_attention") return false;
    const auto q = inputs[0].toTensor(), k = inputs[1].toTensor(), v = inputs[2].toTensor();
    for (const at::Tensor& each : {q, k, v}) {
        TORCH_CHECK(each.scalar_type() == at::kHalf || each.scalar_type() == at::kBFloat16,
                    "FlashAttention only support fp16 and bf16 data type");
        TORCH_CHECK(each.scalar_type() == q.scalar_type(), "query and key must have the same dtype");
        TORCH_CHECK(each.stride(-1) == 1, "Input tensor must have contiguous last dimension");
    }
    const bool causal = inputs[flash ? 8 : cudnn ? 6 : 4].toBool();
    const auto& scale = inputs[flash ? 10 : cudnn ? 8 : 6];
    const auto window = [&](std::size_t at) { return flash && !inputs[at].isNone() ? inputs[at].toInt() : -1; };
    const auto left = window(11), right = causal ? 0 : window(12);
    const auto floats = q.options().dtype(at::kFloat), integers = q.options().dtype(at::kLong);
    const auto heads = flash ? q.size(2) : q.size(1), rows = flash ? q.size(1) : q.size(2);
    const at::Tensor out = at::empty_like(q);
    at::Tensor lse;
    if (!cudnn) lse = at::empty({q.size(0), heads, rows}, floats);
    if (cudnn && inputs[4].toBool()) lse = at::empty({q.size(0), heads, rows, 1}, floats);
    const auto turned = [&](const at::Tensor& x) { return flash ? cpu_alias(x).transpose(1, 2) : cpu_alias(x); };
    const double factor = scale.isNone() ? 1.0 / std::sqrt(double(q.size(-1))) : scale.toDouble();
    auto* work = new Attention{turned(q), turned(k), turned(v), turned(out), cpu_alias(lse), factor, left,
                               right,     !flash,    flash ? INFINITY : -INFINITY};
    emulation_push(current_stream(), attend, work, [](void* data) { delete static_cast<Attention*>(data); });
    torch::jit::drop(stack, count);
    const at::Tensor nothing = at::empty({0}, q.options()), seed = at::empty({0}, integers);
    if (flash) {
        torch::jit::push(stack, out, lse, at::empty({2}, integers), seed, nothing);
    } else {
        torch::jit::push(stack, out, lse, at::Tensor(), at::Tensor(), rows, k.size(2), seed, seed, nothing);
    }
    return true;
}
