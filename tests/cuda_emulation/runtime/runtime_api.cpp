// The functions of CUDA's runtime. What it refuses is refused here, for the rules that the engine can break: sides and
// ranges of copies, registrations of host memory, recordings.
#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <unordered_map>

#include "device.h"
#include "memory.h"
#include "streams.h"

#define API extern "C" __attribute__((visibility("default"))) cudaError_t
#define REFUSE(error, why) return refuse(error, __func__, why)
#define UNLESS_RECORDING \
    if (!allowed_while_recording()) REFUSE(cudaErrorStreamCaptureUnsupported, "a recording forbids it")

using namespace emulation;

namespace {

thread_local cudaError_t last_error = cudaSuccess;

cudaError_t refuse(cudaError_t error, const char* function, const char* why) {
    last_error = error;
    if (setting("EMULATION_LOG", 0)) report(std::string(function) + " refused: " + why);
    return error;
}

Stream* as_stream(cudaStream_t handle) { return &stream_of(handle); }
Event* as_event(cudaEvent_t handle) { return reinterpret_cast<Event*>(handle); }
DeviceMemory& memory() { return DeviceMemory::get(); }

// ---- copies

struct Side {
    const void* start;
    std::size_t pitch, extent;
    bool device() const { return memory().holds(start); }
    const char* fault() const {
        if (device()) return memory().covers(start, extent) ? nullptr : "a range of the device that is not allocated";
        const bool crosses = LockedPages::get().state(start, extent) == Pages::partly_locked;
        return crosses ? "a range of the host that crosses registrations" : nullptr;
    }
    bool direct() const { return device() || LockedPages::get().state(start, extent) == Pages::locked; }
    char* view() const { return memory().view(start); }
};

void copy_rows(char* dst, std::size_t dpitch, const char* src, std::size_t spitch, std::size_t width,
               std::size_t height) {
    for (std::size_t row = 0; row < height; ++row) std::memcpy(dst + row * dpitch, src + row * spitch, width);
}

bool fits(cudaMemcpyKind kind, bool to_device, bool from_device) {
    switch (kind) {
        case cudaMemcpyHostToDevice: return to_device && !from_device;
        case cudaMemcpyDeviceToHost: return !to_device && from_device;
        case cudaMemcpyDeviceToDevice: return to_device && from_device;
        case cudaMemcpyHostToHost: return !to_device && !from_device;
        default: return true;
    }
}

cudaError_t copy(void* dst, std::size_t dpitch, const void* src, std::size_t spitch, std::size_t width,
                 std::size_t height, cudaMemcpyKind kind, cudaStream_t handle, const char* function, bool wait) {
    if (width == 0 || height == 0) return cudaSuccess;
    const Side to{dst, dpitch, (height - 1) * dpitch + width}, from{src, spitch, (height - 1) * spitch + width};
    if (!fits(kind, to.device(), from.device())) return refuse(cudaErrorInvalidValue, function, "the other side");
    for (const Side& side : {to, from}) {
        if (const char* fault = side.fault()) return refuse(cudaErrorInvalidValue, function, fault);
    }
    if (muted && (to.device() || !from.device())) return cudaSuccess;
    Stream& stream = stream_of(handle);
    char *target = to.view(), *source = from.view();
    const auto rows = [=] { copy_rows(target, dpitch, source, spitch, width, height); };
    if (stream.recording) {
        if (wait || !to.direct() || !from.direct()) {
            stream.recording->broken = true;
            return refuse(cudaErrorStreamCaptureUnsupported, function, "pageable memory, or a wait, in a recording");
        }
        stream.push(kCopy, rows);
        return cudaSuccess;
    }
    if (from.direct() || from.device()) {
        stream.push(kCopy, rows);
        if (wait || !to.direct()) stream.wait();
        return cudaSuccess;
    }
    // From pageable memory: it is staged before the call returns, so that the caller may change it.
    const auto staged = std::make_shared<std::vector<char>>(width * height);
    copy_rows(staged->data(), width, source, spitch, width, height);
    stream.push(kCopy, [=] { copy_rows(target, dpitch, staged->data(), width, width, height); });
    if (wait || !to.device()) stream.wait();
    return cudaSuccess;
}

}  // namespace

// ---- the device

namespace emulation {

int attribute(int number) {
    static const std::unordered_map<int, int> known = {
        {cudaDevAttrMaxThreadsPerBlock, int(kMaxThreads)}, {cudaDevAttrMaxBlockDimX, 1024},
        {cudaDevAttrMaxBlockDimY, 1024}, {cudaDevAttrMaxBlockDimZ, 64}, {cudaDevAttrMaxGridDimX, 2147483647},
        {cudaDevAttrMaxGridDimY, int(kMaxGridYZ)}, {cudaDevAttrMaxGridDimZ, int(kMaxGridYZ)},
        {cudaDevAttrMaxSharedMemoryPerBlock, 49152}, {cudaDevAttrTotalConstantMemory, 65536},
        {cudaDevAttrWarpSize, 32}, {cudaDevAttrMaxPitch, kMaxPitch}, {cudaDevAttrMaxRegistersPerBlock, 65536},
        {cudaDevAttrMultiProcessorCount, 132}, {cudaDevAttrConcurrentKernels, 1}, {13 /* clock, kHz */, 1980000},
        {36 /* memory clock, kHz */, 2619000}, {cudaDevAttrGlobalMemoryBusWidth, 5120},
        {cudaDevAttrL2CacheSize, 50 << 20}, {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
        {cudaDevAttrAsyncEngineCount, 3}, {cudaDevAttrUnifiedAddressing, 1}, {cudaDevAttrComputeCapabilityMajor, 9},
        {cudaDevAttrComputeCapabilityMinor, 0}, {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 233472},
        {cudaDevAttrMaxRegistersPerMultiprocessor, 65536}, {cudaDevAttrCooperativeLaunch, 1},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin, int(kMaxSharedMemory)}, {106 /* blocks on a processor */, 32},
    };
    const auto found = known.find(number);
    return found != known.end() ? found->second : 0;
}

}  // namespace emulation

API cudaGetDeviceCount(int* count) { *count = 1; return cudaSuccess; }
API cudaGetDevice(int* device) { *device = 0; return cudaSuccess; }
API cudaSetDevice(int device) { if (device != 0) REFUSE(cudaErrorInvalidDevice, "one device"); return cudaSuccess; }
API cudaDriverGetVersion(int* version) { *version = kVersion; return cudaSuccess; }
API cudaRuntimeGetVersion(int* version) { *version = kVersion; return cudaSuccess; }
API cudaProfilerStart() { return cudaSuccess; }
API cudaProfilerStop() { return cudaSuccess; }
API cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
API cudaPeekAtLastError() { return last_error; }
API cudaDeviceCanAccessPeer(int* can, int, int) { *can = 0; return cudaSuccess; }

API cudaDeviceGetAttribute(int* value, cudaDeviceAttr number, int) {
    *value = attribute(int(number));
    return cudaSuccess;
}

API cudaDeviceGetPCIBusId(char* text, int size, int) {
    std::snprintf(text, std::size_t(size), "0000:01:00.0");
    return cudaSuccess;
}

API cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    if (least != nullptr) *least = 0;
    if (greatest != nullptr) *greatest = -5;
    return cudaSuccess;
}

API cudaGetDeviceProperties(cudaDeviceProp* facts, int device) {
    if (device != 0) REFUSE(cudaErrorInvalidDevice, "one device");
    *facts = {};
    std::strcpy(facts->name, kName);
    facts->totalGlobalMem = memory().total();
    facts->major = 9;
    facts->warpSize = 32;
    facts->multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount);
    facts->maxThreadsPerBlock = int(kMaxThreads);
    facts->maxThreadsDim[0] = facts->maxThreadsDim[1] = 1024;
    facts->maxThreadsDim[2] = 64;
    facts->maxGridSize[0] = 2147483647;
    facts->maxGridSize[1] = facts->maxGridSize[2] = int(kMaxGridYZ);
    facts->maxThreadsPerMultiProcessor = 2048;
    facts->maxBlocksPerMultiProcessor = 32;
    facts->regsPerBlock = facts->regsPerMultiprocessor = 65536;
    facts->sharedMemPerBlock = 49152;
    facts->sharedMemPerBlockOptin = kMaxSharedMemory;
    facts->sharedMemPerMultiprocessor = 233472;
    facts->memPitch = kMaxPitch;
    facts->memoryBusWidth = 5120;
    facts->l2CacheSize = 50 << 20;
    facts->totalConstMem = 65536;
    facts->textureAlignment = 512;
    facts->pciBusID = 1;
    facts->asyncEngineCount = 3;
    facts->concurrentKernels = facts->unifiedAddressing = facts->canMapHostMemory = facts->hostRegisterSupported = 1;
    facts->streamPrioritiesSupported = facts->cooperativeLaunch = 1;
    return cudaSuccess;
}

API cudaDeviceSynchronize() {
    UNLESS_RECORDING;
    wait_for_all();
    return device_status();
}

extern "C" __attribute__((visibility("default"))) const char* cudaGetErrorString(cudaError_t error) {
    switch (int(error)) {
        case cudaSuccess: return "no error";
        case cudaErrorInvalidValue: return "invalid argument";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorNotReady: return "device not ready";
        case cudaErrorNotSupported: return "operation not supported";
        case cudaErrorHostMemoryAlreadyRegistered: return "part or all of the requested memory range is already mapped";
        case cudaErrorLaunchFailure: return "unspecified launch failure";
        case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
        case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
        default: return "an error of the emulated GPU";
    }
}

extern "C" __attribute__((visibility("default"))) const char* cudaGetErrorName(cudaError_t error) {
    return cudaGetErrorString(error);
}

// ---- memory

API cudaMemGetInfo(std::size_t* free, std::size_t* total) {
    *total = memory().total();
    *free = *total - memory().used();
    return cudaSuccess;
}

API cudaMalloc(void** address, std::size_t size) {
    UNLESS_RECORDING;
    *address = memory().allocate(size);
    if (*address == nullptr) REFUSE(cudaErrorMemoryAllocation, "no memory");
    return cudaSuccess;
}

API cudaFree(void* address) {
    if (address == nullptr) return cudaSuccess;
    UNLESS_RECORDING;
    wait_for_all();
    if (!memory().release(address)) REFUSE(cudaErrorInvalidValue, "not allocated");
    return cudaSuccess;
}

API cudaHostAlloc(void** address, std::size_t size, unsigned) {
    UNLESS_RECORDING;
    const std::size_t bytes = (std::max<std::size_t>(size, 1) + 4095) / 4096 * 4096;
    *address = std::aligned_alloc(4096, bytes);
    if (*address == nullptr) REFUSE(cudaErrorMemoryAllocation, "no memory");
    std::memset(*address, 0xFF, bytes);
    LockedPages::get().add(*address, size, true);
    return cudaSuccess;
}

API cudaFreeHost(void* address) {
    if (address == nullptr) return cudaSuccess;
    UNLESS_RECORDING;
    wait_for_all();
    if (!LockedPages::get().remove(address, true)) REFUSE(cudaErrorInvalidValue, "not allocated");
    std::free(address);
    return cudaSuccess;
}

API cudaHostRegister(void* start, std::size_t size, unsigned) {
    UNLESS_RECORDING;
    if (start == nullptr || size == 0) REFUSE(cudaErrorInvalidValue, "nothing to lock");
    const auto first = reinterpret_cast<std::uintptr_t>(start) / 4096 * 4096;
    const std::size_t pages = (reinterpret_cast<std::uintptr_t>(start) + size - first + 4095) / 4096;
    std::vector<unsigned char> resident(pages);
    if (mincore(reinterpret_cast<void*>(first), pages * 4096, resident.data()) != 0) {
        REFUSE(cudaErrorInvalidValue, "not mapped");
    }
    if (LockedPages::get().state(start, size) != Pages::pageable) {
        REFUSE(cudaErrorHostMemoryAlreadyRegistered, "locked already");
    }
    LockedPages::get().add(start, size, false);
    return cudaSuccess;
}

API cudaHostUnregister(void* start) {
    UNLESS_RECORDING;
    wait_for_all();
    if (!LockedPages::get().remove(start, false)) REFUSE(cudaErrorHostMemoryNotRegistered, "not registered");
    return cudaSuccess;
}

API cudaHostGetDevicePointer(void** address, void* host, unsigned) {
    if (LockedPages::get().state(host, 1) != Pages::locked) REFUSE(cudaErrorInvalidValue, "not locked");
    *address = host;
    return cudaSuccess;
}

API cudaPointerGetAttributes(cudaPointerAttributes* facts, const void* address) {
    *facts = {};
    facts->device = -2;  // what a driver says of memory that it does not know
    facts->type = cudaMemoryTypeUnregistered;
    auto* pointer = const_cast<void*>(address);
    if (memory().holds(address) && memory().covers(address, 1)) {
        facts->type = cudaMemoryTypeDevice;
        facts->device = 0;
        facts->devicePointer = pointer;
    } else if (LockedPages::get().state(address, 1) == Pages::locked) {
        facts->type = cudaMemoryTypeHost;
        facts->device = 0;
        facts->devicePointer = facts->hostPointer = pointer;
    } else {
        facts->hostPointer = pointer;
    }
    return cudaSuccess;
}

API cudaGetSymbolAddress(void** address, const void*) {
    static void* zeros = memory().allocate(1 << 16);
    *address = zeros;
    return cudaSuccess;
}

// ---- copies

API cudaMemcpyAsync(void* dst, const void* src, std::size_t size, cudaMemcpyKind kind, cudaStream_t stream) {
    return copy(dst, size, src, size, size, 1, kind, stream, __func__, false);
}

API cudaMemcpy(void* dst, const void* src, std::size_t size, cudaMemcpyKind kind) {
    UNLESS_RECORDING;
    return copy(dst, size, src, size, size, 1, kind, nullptr, __func__, true);
}

API cudaMemcpyPeerAsync(void* dst, int, const void* src, int, std::size_t size, cudaStream_t stream) {
    return copy(dst, size, src, size, size, 1, cudaMemcpyDeviceToDevice, stream, __func__, false);
}

API cudaMemcpy2DAsync(void* dst, std::size_t dpitch, const void* src, std::size_t spitch, std::size_t width,
                      std::size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
    if (std::max(dpitch, spitch) > std::size_t(kMaxPitch) || std::min(dpitch, spitch) < width) {
        REFUSE(cudaErrorInvalidPitchValue, "a pitch below the width or above the largest");
    }
    return copy(dst, dpitch, src, spitch, width, height, kind, stream, __func__, false);
}

API cudaMemcpyBatchAsync(void* const* dsts, const void* const* srcs, const std::size_t* sizes, std::size_t count,
                         cudaMemcpyAttributes* attributes, std::size_t* first, std::size_t kinds,
                         cudaStream_t stream) {
    if (reinterpret_cast<std::uintptr_t>(stream) <= 1) REFUSE(cudaErrorInvalidValue, "the default stream");
    const bool described = count > 0 && kinds > 0 && kinds <= count && first[0] == 0 &&
                           attributes[0].srcAccessOrder != cudaMemcpySrcAccessOrderInvalid;
    if (!described) REFUSE(cudaErrorInvalidValue, "attributes");
    for (std::size_t i = 0; i < count; ++i) {
        if (sizes[i] == 0) REFUSE(cudaErrorInvalidValue, "a copy of nothing");
        const cudaError_t status =
            copy(dsts[i], sizes[i], srcs[i], sizes[i], sizes[i], 1, cudaMemcpyDefault, stream, __func__, false);
        if (status != cudaSuccess) return status;
    }
    return cudaSuccess;
}

API cudaMemsetAsync(void* address, int value, std::size_t size, cudaStream_t stream) {
    if (size == 0 || muted) return cudaSuccess;
    if (!memory().covers(address, size)) REFUSE(cudaErrorInvalidValue, "not allocated");
    char* target = memory().view(address);
    stream_of(stream).push(kKernel, [=] { std::memset(target, value, size); });
    return cudaSuccess;
}

API cudaMemset(void* address, int value, std::size_t size) {
    UNLESS_RECORDING;
    return cudaMemsetAsync(address, value, size, nullptr);
}

// ---- streams and events

API cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned flags, int priority) {
    *handle = reinterpret_cast<cudaStream_t>(new Stream(flags, priority));
    return cudaSuccess;
}

API cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }  // it may be working; there are few

API cudaStreamGetPriority(cudaStream_t handle, int* priority) {
    *priority = as_stream(handle)->priority;
    return cudaSuccess;
}

API cudaStreamSynchronize(cudaStream_t handle) {
    if (const auto graph = as_stream(handle)->recording) {
        graph->broken = true;
        REFUSE(cudaErrorStreamCaptureUnsupported, "the stream is recorded");
    }
    UNLESS_RECORDING;
    as_stream(handle)->wait();
    return device_status();
}

API cudaStreamQuery(cudaStream_t handle) {
    UNLESS_RECORDING;
    return as_stream(handle)->idle() ? device_status() : cudaErrorNotReady;
}

API cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
    as_stream(handle)->push(kHostTask, [=] { function(data); });
    return cudaSuccess;
}

API cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned flags) {
    *handle = reinterpret_cast<cudaEvent_t>(new Event(flags));
    return cudaSuccess;
}

API cudaEventCreate(cudaEvent_t* handle) { return cudaEventCreateWithFlags(handle, 0); }
API cudaEventDestroy(cudaEvent_t handle) { delete as_event(handle); return cudaSuccess; }

API cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
    const auto record = std::make_shared<Record>();
    as_event(handle)->set(record);
    record->recorded = as_stream(stream)->recording != nullptr;
    if (!record->recorded) as_stream(stream)->push(kEvent, [record] { record->pass(); });
    return cudaSuccess;
}

API cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned) {
    return cudaEventRecord(handle, stream);
}

API cudaEventQuery(cudaEvent_t handle) {
    UNLESS_RECORDING;
    const auto record = as_event(handle)->last();
    if (record == nullptr) return cudaSuccess;
    if (record->recorded) REFUSE(cudaErrorCapturedEvent, "the event was recorded in a graph");
    return record->passed() ? cudaSuccess : cudaErrorNotReady;
}

API cudaEventSynchronize(cudaEvent_t handle) {
    UNLESS_RECORDING;
    if (const auto record = as_event(handle)->last()) record->wait();
    return device_status();
}

API cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
    if ((as_event(begin)->flags | as_event(end)->flags) & cudaEventDisableTiming) {
        REFUSE(cudaErrorInvalidResourceHandle, "an event without time");
    }
    const auto from = as_event(begin)->last(), to = as_event(end)->last();
    if (from == nullptr || to == nullptr) REFUSE(cudaErrorInvalidResourceHandle, "an event that was not recorded");
    if (!from->passed() || !to->passed()) return cudaErrorNotReady;
    *milliseconds = std::chrono::duration<float, std::milli>(to->time - from->time).count();
    return cudaSuccess;
}

API cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
    const auto record = as_event(event)->last();
    if (record == nullptr) return cudaSuccess;
    Stream& stream = *as_stream(handle);
    if (stream.recording || record->recorded) {  // nor does a recording fork to other streams here
        if (stream.recording) stream.recording->broken = true;
        REFUSE(cudaErrorStreamCaptureIsolation, "a wait between a recording and other work");
    }
    stream.push(kEvent, [record] { record->wait(); });
    return cudaSuccess;
}

// ---- recordings

namespace {

std::mutex graphs_mutex;
std::map<void*, std::shared_ptr<Graph>> graphs;  // by handle, until they are destroyed

}  // namespace

namespace emulation {
void run_graph(Stream& stream, const Graph& graph);
}

API cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
    std::swap(*mode, thread_mode);
    return cudaSuccess;
}

API cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
    static std::atomic<unsigned long long> number{0};
    Stream& stream = *as_stream(handle);
    if (&stream == &stream_of(nullptr)) REFUSE(cudaErrorStreamCaptureUnsupported, "the default stream");
    if (stream.recording) REFUSE(cudaErrorIllegalState, "the stream is recorded already");
    stream.recording = std::make_shared<Graph>(Graph{++number, mode, std::this_thread::get_id(), false, {}});
    return cudaSuccess;
}

API cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
    *graph = nullptr;
    const auto recorded = std::exchange(as_stream(handle)->recording, nullptr);
    if (recorded == nullptr) REFUSE(cudaErrorIllegalState, "the stream is not recorded");
    if (recorded->broken) REFUSE(cudaErrorStreamCaptureInvalidated, "the recording is spoilt");
    const std::lock_guard lock(graphs_mutex);
    graphs[recorded.get()] = recorded;
    *graph = reinterpret_cast<cudaGraph_t>(recorded.get());
    return cudaSuccess;
}

API cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
    const auto graph = as_stream(handle)->recording;
    *status = graph == nullptr ? cudaStreamCaptureStatusNone
              : graph->broken  ? cudaStreamCaptureStatusInvalidated
                               : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}

API cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id,
                             cudaGraph_t* graph, const cudaGraphNode_t** dependencies, const cudaGraphEdgeData** edges,
                             std::size_t* count) {
    cudaStreamIsCapturing(handle, status);
    const auto recording = as_stream(handle)->recording;
    if (id != nullptr) *id = recording ? recording->id : 0;
    if (graph != nullptr) *graph = reinterpret_cast<cudaGraph_t>(recording.get());
    if (dependencies != nullptr) *dependencies = nullptr;
    if (edges != nullptr) *edges = nullptr;
    if (count != nullptr) *count = 0;
    return cudaSuccess;
}

API cudaGraphInstantiateWithFlags(cudaGraphExec_t* runnable, cudaGraph_t graph, unsigned long long) {
    *runnable = reinterpret_cast<cudaGraphExec_t>(graph);
    return cudaSuccess;
}

API cudaGraphInstantiate(cudaGraphExec_t* runnable, cudaGraph_t graph, unsigned long long flags) {
    return cudaGraphInstantiateWithFlags(runnable, graph, flags);
}

API cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, std::size_t* count) {
    *count = reinterpret_cast<Graph*>(graph)->items.size();
    return cudaSuccess;
}

API cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }

API cudaGraphExecDestroy(cudaGraphExec_t runnable) {
    wait_for_all();
    std::shared_ptr<Graph> dropped;  // outside the lock: its items may hold tensors
    const std::lock_guard lock(graphs_mutex);
    const auto found = graphs.find(runnable);
    if (found != graphs.end()) {
        dropped = found->second;
        graphs.erase(found);
    }
    return cudaSuccess;
}

API cudaGraphLaunch(cudaGraphExec_t runnable, cudaStream_t handle) {
    std::shared_ptr<Graph> graph;
    {
        const std::lock_guard lock(graphs_mutex);
        const auto found = graphs.find(runnable);
        if (found == graphs.end()) REFUSE(cudaErrorInvalidValue, "no such graph");
        graph = found->second;
    }
    Stream& stream = *as_stream(handle);
    stream.push(kKernel, [&stream, graph] { run_graph(stream, *graph); });
    return cudaSuccess;
}

// ---- kernels: compiled code does nothing, its work is queued by ATen's and Triton's halves of the emulation

namespace {

struct Launch {
    dim3 grid, block;
    std::size_t shared;
    cudaStream_t stream;
};
thread_local std::vector<Launch> launches;
std::unordered_map<const void*, std::string>& kernels() {
    static auto* names = new std::unordered_map<const void*, std::string>;
    return *names;
}

cudaError_t launch(const void* function, dim3 grid, dim3 block, void** arguments, cudaStream_t stream) {
    const auto found = kernels().find(function);
    const std::string& name = found != kernels().end() ? found->second : "";
    if (name.find("spin_kernel") != std::string::npos) {  // torch.cuda._sleep
        const auto microseconds = *static_cast<std::int64_t*>(arguments[0]) / 1980;
        stream_of(stream).push(kKernel, [=] { usleep(useconds_t(microseconds)); });
        return cudaSuccess;
    }
    const bool empty = !grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z;
    if (empty || grid.y > kMaxGridYZ || grid.z > kMaxGridYZ || block.x * block.y * block.z > kMaxThreads) {
        return refuse(cudaErrorInvalidConfiguration, "a launch", name.c_str());
    }
    return cudaSuccess;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void** __cudaRegisterFatBinary(void*) {
    static void* handle;
    return &handle;
}
extern "C" __attribute__((visibility("default"))) void __cudaRegisterFatBinaryEnd(void**) {}
extern "C" __attribute__((visibility("default"))) void __cudaUnregisterFatBinary(void**) {}
extern "C" __attribute__((visibility("default"))) void __cudaRegisterVar(void**, char*, char*, const char*, int,
                                                                         std::size_t, int, int) {}
extern "C" __attribute__((visibility("default"))) char __cudaInitModule(void**) { return 0; }
extern "C" __attribute__((visibility("default"))) void __cudaRegisterFunction(void**, const char* function, char*,
                                                                              const char* name, int, void*, void*,
                                                                              void*, void*, int*) {
    kernels()[function] = name;
}
extern "C" __attribute__((visibility("default"))) unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block,
                                                                                       std::size_t shared,
                                                                                       cudaStream_t stream) {
    launches.push_back({grid, block, shared, stream});
    return 0;
}
API __cudaPopCallConfiguration(dim3* grid, dim3* block, std::size_t* shared, void* stream) {
    const Launch last = launches.back();
    launches.pop_back();
    *grid = last.grid;
    *block = last.block;
    *shared = last.shared;
    *static_cast<cudaStream_t*>(stream) = last.stream;
    return cudaSuccess;
}
API __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
    *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
    return cudaSuccess;
}
API cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments, std::size_t, cudaStream_t stream) {
    return launch(function, grid, block, arguments, stream);
}
API __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, std::size_t, cudaStream_t stream) {
    return launch(kernel, grid, block, arguments, stream);
}
API cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments) {
    return launch(function, config->gridDim, config->blockDim, arguments, config->stream);
}
API cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block, void** arguments, std::size_t,
                                cudaStream_t stream) {
    return launch(function, grid, block, arguments, stream);
}
API cudaFuncGetAttributes(cudaFuncAttributes* facts, const void*) {
    *facts = {};
    facts->maxThreadsPerBlock = int(kMaxThreads);
    facts->numRegs = 32;
    facts->ptxVersion = facts->binaryVersion = 90;
    facts->maxDynamicSharedSizeBytes = int(kMaxSharedMemory);
    return cudaSuccess;
}
API cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, std::size_t) {
    *blocks = 8;
    return cudaSuccess;
}
API cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, std::size_t, unsigned) {
    *blocks = 8;
    return cudaSuccess;
}
