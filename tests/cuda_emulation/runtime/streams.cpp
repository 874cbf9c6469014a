#include "streams.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <set>

#include "memory.h"

namespace emulation {

thread_local int muted = 0;
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

namespace {

std::mutex streams_mutex;
thread_local bool on_stream = false;  // whether this is a stream's thread

std::vector<Stream*>& streams() {
    static auto* all = new std::vector<Stream*>;  // with the streams, until the process is gone
    return *all;
}

std::atomic<unsigned> delays[kKinds];  // the longest of each kind, in microseconds
std::atomic<unsigned> seed{1};
std::atomic<void (*)(const char*)> default_stream_watch{nullptr};
std::atomic<bool> failed{false};

void* python(const char* name) { return dlsym(RTLD_DEFAULT, name); }

}  // namespace

FreeGil::FreeGil() {
    static const auto initialized = reinterpret_cast<int (*)()>(python("Py_IsInitialized"));
    static const auto holds_gil = reinterpret_cast<int (*)()>(python("PyGILState_Check"));
    static const auto release = reinterpret_cast<void* (*)()>(python("PyEval_SaveThread"));
    if (initialized != nullptr && initialized() && holds_gil()) state_ = release();
}

FreeGil::~FreeGil() {
    static const auto take = reinterpret_cast<void (*)(void*)>(python("PyEval_RestoreThread"));
    if (state_ != nullptr) take(state_);
}

void report(const std::string& what) {
    static std::mutex mutex;
    static auto* said = new std::set<std::string>;
    const std::lock_guard lock(mutex);
    if (said->insert(what).second) std::fprintf(stderr, "[emulated GPU] %s\n", what.c_str());
}

void fail(const std::string& what) {
    report(what);
    failed = true;
}

cudaError_t device_status() { return failed ? cudaErrorLaunchFailure : cudaSuccess; }

// ---- streams

Stream::Stream(unsigned flags, int priority) : priority(priority), flags(flags), number_([this] {
    const std::lock_guard lock(streams_mutex);
    streams().push_back(this);
    return static_cast<unsigned>(streams().size());
}()) {}

void Stream::push(Kind kind, std::function<void()> run) {
    if (recording) {
        recording->items.push_back({kind, std::move(run)});
        return;
    }
    const auto watch = default_stream_watch.load();
    if (watch != nullptr && kind != kEvent && this == &stream_of(nullptr)) {
        static const char* const names[] = {"a copy", "a kernel", "a host task"};
        watch(names[kind]);
    }
    const std::lock_guard lock(mutex_);
    items_.push_back({kind, std::move(run)});
    if (!started_) {
        started_ = true;
        std::thread([this] { work(); }).detach();
    }
    pushed_.notify_one();
}

void Stream::work() {
    on_stream = true;
    for (;;) {
        Item item;
        {
            std::unique_lock lock(mutex_);
            pushed_.wait(lock, [this] { return !items_.empty(); });
            item = std::move(items_.front());
            items_.pop_front();
            busy_ = true;
        }
        delay(item.kind);
        item.run();
        item.run = nullptr;  // what it holds is let go before the stream is idle
        const std::lock_guard lock(mutex_);
        busy_ = false;
        if (items_.empty()) idle_.notify_all();
    }
}

void Stream::delay(Kind kind) {
    const unsigned longest = delays[kind];
    if (longest == 0) return;
    if (seeded_ != seed) {
        seeded_ = seed;
        random_.seed(seeded_ * 1000 + number_);
    }
    usleep(random_() % longest);
}

bool Stream::idle() {
    const std::lock_guard lock(mutex_);
    return items_.empty() && !busy_;
}

void Stream::wait() {
    // Python may collect garbage on a stream's thread. What it finalizes there may wait for all streams, of which one
    // may wait for this one. With a GPU no Python runs on such a thread.
    if (on_stream || idle()) return;
    const FreeGil free;
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [this] { return items_.empty() && !busy_; });
}

Stream& stream_of(cudaStream_t handle) {
    static auto* legacy = new Stream(0, 0);
    return reinterpret_cast<std::uintptr_t>(handle) <= 2 ? *legacy : *reinterpret_cast<Stream*>(handle);
}

std::vector<Stream*> all_streams() {
    const std::lock_guard lock(streams_mutex);
    return streams();
}

void wait_for_all() {
    for (Stream* stream : all_streams()) {
        if (!stream->recording) stream->wait();
    }
}

void run_graph(Stream& stream, const Graph& graph) {
    for (const Item& item : graph.items) {
        stream.delay(item.kind);
        item.run();
    }
}

bool allowed_while_recording() {
    if (thread_mode == cudaStreamCaptureModeRelaxed) return true;
    bool allowed = true;
    for (Stream* stream : all_streams()) {
        const std::shared_ptr<Graph> graph = stream->recording;
        if (graph == nullptr || graph->mode == cudaStreamCaptureModeRelaxed) continue;
        const bool global = graph->mode == cudaStreamCaptureModeGlobal && thread_mode == cudaStreamCaptureModeGlobal;
        if (!global && graph->owner != std::this_thread::get_id()) continue;
        graph->broken = true;
        allowed = false;
    }
    return allowed;
}

// ---- events

void Record::pass() {
    const std::lock_guard lock(mutex_);
    time = std::chrono::steady_clock::now();
    passed_ = true;
    condition_.notify_all();
}

bool Record::passed() {
    const std::lock_guard lock(mutex_);
    return passed_;
}

void Record::wait() {
    if (passed()) return;
    const FreeGil free;
    std::unique_lock lock(mutex_);
    condition_.wait(lock, [this] { return passed_; });
}

std::shared_ptr<Record> Event::last() {
    const std::lock_guard lock(mutex_);
    return last_;
}

void Event::set(std::shared_ptr<Record> record) {
    const std::lock_guard lock(mutex_);
    last_ = std::move(record);
}

}  // namespace emulation

// ---- for the tests and for the operators of ATen

using namespace emulation;

extern "C" {

void* emulation_view(void* address) { return DeviceMemory::get().view(address); }
void emulation_wait(void* stream) { stream_of(static_cast<cudaStream_t>(stream)).wait(); }
int emulation_recording(void* stream) { return stream_of(static_cast<cudaStream_t>(stream)).recording != nullptr; }
void emulation_fail(const char* what) { fail(what); }
int emulation_failed() { return failed; }
void emulation_mute(int change) { muted += change; }
void emulation_watch_default_stream(void (*watch)(const char*)) { default_stream_watch = watch; }

// Each item of a kind waits for a random time below this before it runs.
void emulation_delay(int kind, unsigned microseconds) { delays[kind] = microseconds; }
void emulation_seed(unsigned number) { seed = number; }

// The stream runs `function(data)` as a kernel, as often as a graph with it is launched, and drops the data at the end.
void emulation_push(void* stream, void (*function)(void*), void* data, void (*drop)(void*)) {
    const std::shared_ptr<void> owned(data, drop);
    stream_of(static_cast<cudaStream_t>(stream)).push(kKernel, [=] { function(owned.get()); });
}
}
