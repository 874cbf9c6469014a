// ATen's operators on the emulated GPU. An operator's CUDA code runs first, for its checks and the tensors of its results;
// its kernels and copies have no effect (`muted`). Then the CPU's code of the operator is queued on the current stream,
// over the same memory.
#include "aten.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

namespace {

using Names = std::set<std::string>;

// Operators on what a tensor is, not on what it holds, those whose work is a copy or a wait of the runtime, and one that
// calls other operators.
const Names kLeft = {
    "aten::as_strided", "aten::view", "aten::view.dtype", "aten::_reshape_alias", "aten::unfold", "aten::resize_",
    "aten::empty.memory_format", "aten::empty_strided", "aten::record_stream", "aten::_pin_memory", "aten::is_pinned",
    "aten::_local_scalar_dense", "aten::_efficientzerotensor", "aten::view_as_real", "aten::view_as_complex",
    "aten::is_set_to", "aten::_resize_output_", "aten::_fused_sdp_choice", "aten::_has_same_storage_numel",
    "aten::_copy_from", "aten::_copy_from_and_resize", "aten::_scaled_dot_product_flash_attention"};
// The shape of the result depends on values, so the host waits for it, as with a GPU.
const Names kDependOnValues = {
    "aten::nonzero", "aten::nonzero.out", "aten::masked_select", "aten::masked_select.out", "aten::_unique",
    "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::unique_dim_consecutive",
    "aten::repeat_interleave.Tensor", "aten::bincount", "aten::histc", "aten::equal"};

std::unordered_map<std::string, c10::SafeKernelFunction>& originals() {
    static auto* all = new std::unordered_map<std::string, c10::SafeKernelFunction>;
    return *all;
}

thread_local int depth = 0;  // of originals that call operators

struct Muted {
    Muted() { ++depth; emulation_mute(1); }
    ~Muted() { --depth; emulation_mute(-1); }
};

std::string full_name(const c10::OperatorName& name) {
    return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

bool is_left(const std::string& name) {
    const auto starts = [&](const char* with) { return name.rfind(with, 0) == 0; };
    return kLeft.count(name) || !starts("aten::") || starts("aten::set_") || starts("aten::cudnn") ||
           starts("aten::_cudnn") || starts("aten::_use_cudnn");
}

// A CPU generator for a CUDA one: other numbers than a GPU's, the same ones for the same seed.
at::Generator cpu_generator(const at::Generator& generator) {
    static auto* known = new std::map<void*, std::pair<std::uint64_t, at::Generator>>;
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    auto& [seed, own] = (*known)[generator.unsafeGetGeneratorImpl()];
    // One without an offset is new, though it may be where another was, with the same seed.
    const bool fresh = !emulation_recording(current_stream()) && generator.get_offset() == 0;
    if (!own.defined() || fresh || seed != generator.current_seed()) {
        seed = generator.current_seed();
        own = at::detail::createCPUGenerator(seed);
    }
    return own;
}

// An operator's call on the CPU; afterwards its results are copied into those that the caller has already.
struct Job {
    OperatorHandle op;
    Stack arguments;
    std::vector<at::Tensor> results;
    std::vector<std::pair<at::Tensor, at::Tensor>> resized;  // (own, CPU's): written, of no elements

    Stack run() const {
        Stack stack = arguments;
        op.callBoxed(stack);
        return stack;
    }
    void keep(const at::Tensor& found, const at::Tensor& result) const {
        if (!found.defined() || !result.defined() || result.numel() == 0) return;
        if (found.unsafeGetTensorImpl()->data() == result.unsafeGetTensorImpl()->data()) return;  // in place
        TORCH_CHECK(found.sizes() == result.sizes(), "the CPU's result has another shape");
        result.copy_(found);
    }
    void run_on_stream() const {
        std::size_t next = 0;
        each_tensor(run(), [&](const at::Tensor& found) {
            if (next < results.size()) keep(found, results[next++]);
        });
    }
};

void run_job(void* data) {
    const Job& job = *static_cast<Job*>(data);
    const c10::InferenceMode inference;  // writes into tensors that were made in this mode as into others
    try {
        job.run_on_stream();
    } catch (const std::exception& error) {
        const std::string text = error.what();
        emulation_fail((full_name(job.op.operator_name()) + ": " + text.substr(0, text.find('\n'))).c_str());
    }
}

at::Tensor cpu_argument(Job& job, const at::Tensor& tensor, bool written) {
    if (tensor.defined() && tensor.is_cpu()) return tensor.clone();  // a scalar or an index: as it is now
    if (!written || !tensor.defined() || tensor.numel() != 0) return cpu_alias(tensor);
    at::Tensor own = at::empty(tensor.sizes(), tensor.options().device(at::kCPU));
    job.resized.emplace_back(tensor, own);
    return own;
}

IValue cpu_value(Job& job, const IValue& value, bool written) {
    if (value.isTensor()) return cpu_argument(job, value.toTensor(), written);
    if (value.isDevice()) return c10::Device(at::kCPU);
    if (value.isGenerator()) return cpu_generator(value.toGenerator());
    if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor& each : value.toTensorVector()) list.push_back(cpu_argument(job, each, written));
        return list;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> list;
        for (const IValue& each : value.toListRef()) {
            list.push_back(each.isTensor() ? std::optional(cpu_argument(job, each.toTensor(), false)) : std::nullopt);
        }
        return list;
    }
    return value;
}

// What the CPU computed at once, as tensors of the device.
at::Tensor device_result(const Job& job, const Stack& inputs, const at::Tensor& found) {
    if (!found.defined()) return found;
    for (const auto& [own, resized] : job.resized) {
        if (resized.is_same(found)) {
            own.resize_(found.sizes());
            if (found.numel()) cpu_alias(own).copy_(found);
        }
    }
    for (std::size_t i = 0; i < inputs.size(); ++i) {
        const IValue& argument = job.arguments[i];
        if (argument.isTensor() && argument.toTensor().is_same(found)) return inputs[i].toTensor();
    }
    at::Tensor result = at::empty_strided(found.sizes(), found.strides(), found.options().device(at::kCUDA));
    if (found.numel()) cpu_alias(result).copy_(found);
    return result;
}

bool between_devices(const std::string& name, const Stack& inputs) {
    return name == "aten::copy_" && !(inputs[0].toTensor().is_cuda() && inputs[1].toTensor().is_cuda());
}

void call(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    const std::string name = full_name(op.operator_name());
    const std::size_t count = op.schema().arguments().size();
    const Stack inputs(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
    if (library_attention(name, inputs, *stack, count)) return;
    void* stream = current_stream();
    const bool at_once = kDependOnValues.count(name) && !emulation_recording(stream);
    if (!at_once && (depth > 0 || between_devices(name, inputs))) {
        originals().at(name).callBoxed(op, keys, stack);
        return;
    }
    auto job = std::make_unique<Job>(Job{op, {}, {}, {}});
    for (std::size_t i = 0; i < count; ++i) {
        const auto* alias = op.schema().arguments()[i].alias_info();
        job->arguments.push_back(cpu_value(*job, inputs[i], alias != nullptr && alias->isWrite()));
    }
    if (!at_once) {
        {
            const Muted muted;
            originals().at(name).callBoxed(op, keys, stack);
        }
        const std::size_t results = op.schema().returns().size();
        each_tensor(Stack(stack->end() - static_cast<std::ptrdiff_t>(results), stack->end()),
                    [&](const at::Tensor& result) { job->results.push_back(cpu_alias(result)); });
        emulation_push(stream, run_job, job.release(), [](void* data) { delete static_cast<Job*>(data); });
        return;
    }
    torch::jit::drop(*stack, count);
    emulation_wait(stream);
    const Stack results = [&] {
        const c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
        return job->run();
    }();
    for (const IValue& found : results) {
        if (found.isTensor()) {
            stack->push_back(device_result(*job, inputs, found.toTensor()));
        } else {
            stack->push_back(found);
        }
    }
}

}  // namespace

at::Tensor cpu_alias(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.is_cpu() || tensor.layout() != at::kStrided) return tensor;
    const auto options = tensor.options().device(at::kCPU).pinned_memory(false);
    if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
    void* data = const_cast<void*>(tensor.unsafeGetTensorImpl()->data());
    return at::from_blob(emulation_view(data), tensor.sizes(), tensor.strides(), options);
}

// Takes over every operator that has CUDA code. Returns their number.
extern "C" int emulation_install() {
    static auto* handles = new std::vector<c10::RegistrationHandleRAII>;
    auto& dispatcher = c10::Dispatcher::singleton();
    auto names = dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA);
    names.emplace_back("aten::copy_", "");
    for (const c10::OperatorName& operator_name : names) {
        const auto op = dispatcher.findOp(operator_name);
        const std::string name = full_name(operator_name);
        if (!op || !op->hasSchema() || is_left(name) || originals().count(name)) continue;
        originals().emplace(name, op->getComputedKernelForDispatchKey(c10::DispatchKey::CUDA));
        auto kernel = c10::KernelFunction::makeFromBoxedFunction<&call>();
        handles->push_back(dispatcher.registerImpl(operator_name, c10::DispatchKey::CUDA, std::move(kernel),
                                                   std::nullopt, nullptr, "emulated GPU"));
    }
    return static_cast<int>(handles->size());
}
