// Streams, events and graphs of the emulated GPU. A stream is a thread with a queue; a graph is a list of its items.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace emulation {

enum Kind { kCopy, kKernel, kHostTask, kEvent, kKinds };

struct Item {
    Kind kind;
    std::function<void()> run;
};

// Work that is recorded instead of run, and the rules of its recording.
struct Graph {
    unsigned long long id;
    cudaStreamCaptureMode mode;
    std::thread::id owner;
    bool broken = false;
    std::vector<Item> items;
};

class Stream {
  public:
    Stream(unsigned flags, int priority);
    void push(Kind kind, std::function<void()> run);
    void wait();  // until all items have run; lets go of Python's GIL
    bool idle();
    const int priority;
    const unsigned flags;
    std::shared_ptr<Graph> recording;

  private:
    void work();
    void delay(Kind kind);
    const unsigned number_;
    bool started_ = false, busy_ = false;
    std::mutex mutex_;
    std::condition_variable pushed_, idle_;
    std::deque<Item> items_;
    std::mt19937 random_;
    unsigned seeded_ = 0;
    friend void run_graph(Stream& stream, const Graph& graph);
};

// The time at which a stream passes a record of an event.
struct Record {
    void pass();
    void wait();
    bool passed();
    bool recorded = false;  // in a graph: no stream passes it
    std::chrono::steady_clock::time_point time;

  private:
    std::mutex mutex_;
    std::condition_variable condition_;
    bool passed_ = false;
};

struct Event {
    explicit Event(unsigned flags) : flags(flags) {}
    std::shared_ptr<Record> last();
    void set(std::shared_ptr<Record> record);
    const unsigned flags;

  private:
    std::mutex mutex_;
    std::shared_ptr<Record> last_;
};

Stream& stream_of(cudaStream_t handle);  // the legacy default stream for the handles 0, 1 and 2
std::vector<Stream*> all_streams();
void wait_for_all();

// Python's GIL is free while this object lives, if the thread held it: items of a stream may need it.
class FreeGil {
  public:
    FreeGil();
    ~FreeGil();

  private:
    void* state_ = nullptr;
};

// The work of operators on this thread has no effect: the operators' originals run only for their checks.
extern thread_local int muted;

// A failed item breaks the device for the process, as in CUDA.
void fail(const std::string& what);
cudaError_t device_status();
void report(const std::string& what);  // once

// Prepares `stream` for a call that CUDA forbids during recordings; false, and the recording is spoilt, if one forbids it.
bool allowed_while_recording();
extern thread_local cudaStreamCaptureMode thread_mode;

}  // namespace emulation
