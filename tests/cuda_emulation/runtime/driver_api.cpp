// The functions of CUDA's driver that torch and Triton's launcher use.
#include <cuda.h>
#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <string>

#include "device.h"
#include "memory.h"
#include "streams.h"

#undef cuGetProcAddress
#define API extern "C" __attribute__((visibility("default"))) CUresult

using namespace emulation;

namespace {

thread_local CUcontext context = reinterpret_cast<CUcontext>(0x1000);  // an address without anything there

CUresult launch(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned shared) {
    const bool fits = x && y && z && y <= kMaxGridYZ && z <= kMaxGridYZ && threads <= kMaxThreads;
    if (fits && shared <= kMaxSharedMemory) return CUDA_SUCCESS;
    report(std::string("a launch of ") + reinterpret_cast<char*>(function) + " was refused");
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult not_emulated() {
    report("a function of the driver was called that is not emulated");
    return CUDA_ERROR_NOT_SUPPORTED;
}

void* function_named(const std::string& name) {
    static void* const library = [] {
        Dl_info own;
        dladdr(reinterpret_cast<void*>(&not_emulated), &own);
        return dlopen(own.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    }();
    for (const std::string& each : {name + "_v2", name}) {
        if (void* found = dlsym(library, each.c_str())) return found;
    }
    return reinterpret_cast<void*>(&not_emulated);
}

}  // namespace

API cuInit(unsigned) { return CUDA_SUCCESS; }
API cuDriverGetVersion(int* version) { *version = kVersion; return CUDA_SUCCESS; }
API cuDeviceGetCount(int* count) { *count = 1; return CUDA_SUCCESS; }
API cuDeviceGet(CUdevice* device, int) { *device = 0; return CUDA_SUCCESS; }
API cuDeviceGetAttribute(int* value, CUdevice_attribute number, CUdevice) {
    *value = attribute(int(number));
    return CUDA_SUCCESS;
}
API cuDeviceGetName(char* text, int size, CUdevice) {
    std::snprintf(text, std::size_t(size), "%s", kName);
    return CUDA_SUCCESS;
}
API cuDevicePrimaryCtxRetain(CUcontext* found, CUdevice) { *found = context; return CUDA_SUCCESS; }
API cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
    if (flags != nullptr) *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}
API cuCtxGetCurrent(CUcontext* found) { *found = context; return CUDA_SUCCESS; }
API cuCtxSetCurrent(CUcontext next) { context = next; return CUDA_SUCCESS; }
API cuCtxPushCurrent_v2(CUcontext next) { context = next; return CUDA_SUCCESS; }
API cuCtxPopCurrent_v2(CUcontext* found) { if (found != nullptr) *found = context; return CUDA_SUCCESS; }
API cuCtxGetDevice(CUdevice* device) { *device = 0; return CUDA_SUCCESS; }
API cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned) {
    auto* word = reinterpret_cast<std::uint32_t*>(DeviceMemory::get().view(reinterpret_cast<void*>(address)));
    stream_of(stream).push(kEvent, [=] { __atomic_store_n(word, value, __ATOMIC_RELEASE); });
    return CUDA_SUCCESS;
}
API cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags) {
    if (flags != CU_STREAM_WAIT_VALUE_GEQ) return CUDA_ERROR_NOT_SUPPORTED;
    auto* word = reinterpret_cast<std::uint32_t*>(DeviceMemory::get().view(reinterpret_cast<void*>(address)));
    stream_of(stream).push(kEvent, [=] {
        while (std::int32_t(__atomic_load_n(word, __ATOMIC_ACQUIRE) - value) < 0) usleep(20);
    });
    return CUDA_SUCCESS;
}
API cuStreamGetCtx(CUstream, CUcontext* found) { *found = context; return CUDA_SUCCESS; }
API cuGetErrorString(CUresult, const char** text) { *text = "an error of the emulated driver"; return CUDA_SUCCESS; }
API cuGetErrorName(CUresult error, const char** text) { return cuGetErrorString(error, text); }
API cuPointerGetAttribute(void* value, CUpointer_attribute wanted, CUdeviceptr address) {
    const auto* pointer = reinterpret_cast<void*>(address);
    if (wanted != CU_POINTER_ATTRIBUTE_DEVICE_POINTER) return CUDA_ERROR_INVALID_VALUE;
    const bool locked = LockedPages::get().state(pointer, 1) == Pages::locked;
    if (!DeviceMemory::get().holds(pointer) && !locked) return CUDA_ERROR_INVALID_VALUE;
    *static_cast<CUdeviceptr*>(value) = address;
    return CUDA_SUCCESS;
}

// ---- Triton's kernels: a module is its image, a function its name

API cuModuleLoadData(CUmodule* module, const void* image) {
    *module = reinterpret_cast<CUmodule>(const_cast<void*>(image));
    return CUDA_SUCCESS;
}
API cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
API cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
    *function = reinterpret_cast<CUfunction>(strdup(name));
    return CUDA_SUCCESS;
}
API cuFuncGetAttribute(int* value, CUfunction_attribute wanted, CUfunction) {
    *value = wanted == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? int(kMaxThreads)
             : wanted == CU_FUNC_ATTRIBUTE_NUM_REGS            ? 64
                                                               : 0;
    return CUDA_SUCCESS;
}
API cuFuncSetAttribute(CUfunction, CUfunction_attribute wanted, int value) {
    const bool shared = wanted == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    return shared && unsigned(value) > kMaxSharedMemory ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
API cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
API cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig*) {
    *clusters = 8;
    return CUDA_SUCCESS;
}
API cuLaunchKernel(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, CUstream, void**, void**) {
    return launch(function, x, y, z, bx * by * bz, shared);
}
API cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void**, void**) {
    return launch(function, config->gridDimX, config->gridDimY, config->gridDimZ,
                  config->blockDimX * config->blockDimY * config->blockDimZ, config->sharedMemBytes);
}

// ---- functions by name

API cuGetProcAddress_v2(const char* name, void** function, int, cuuint64_t, CUdriverProcAddressQueryResult* found) {
    *function = function_named(name);
    if (found != nullptr) *found = CU_GET_PROC_ADDRESS_SUCCESS;
    return CUDA_SUCCESS;
}
API cuGetProcAddress(const char* name, void** function, int version, cuuint64_t flags) {
    return cuGetProcAddress_v2(name, function, version, flags, nullptr);
}

extern "C" __attribute__((visibility("default"))) cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* found) {
    *function = function_named(name);
    if (found != nullptr) *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
