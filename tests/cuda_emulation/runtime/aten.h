// What the operators of the emulated GPU share.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/stack.h>

#include <string>

extern "C" {
void* emulation_view(void* address);
void emulation_wait(void* stream);
int emulation_recording(void* stream);
void emulation_fail(const char* what);
void emulation_mute(int change);
void emulation_push(void* stream, void (*function)(void*), void* data, void (*drop)(void*));
}

void* current_stream();

// A CPU tensor over the memory of a tensor of the device.
at::Tensor cpu_alias(const at::Tensor& tensor);

template <typename Function>
void each_tensor(const torch::jit::Stack& values, const Function& function) {
    for (const c10::IValue& value : values) {
        if (value.isTensor()) function(value.toTensor());
        if (value.isTensorList()) {
            for (const at::Tensor& each : value.toTensorVector()) function(each);
        }
    }
}

// FlashAttention as torch calls it, with the checks that callers meet; false for other operators.
bool library_attention(const std::string& name, const torch::jit::Stack& inputs, torch::jit::Stack& stack,
                       std::size_t count);
