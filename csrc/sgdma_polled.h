// Host tasks on a stream without a thread of CUDA's: a thread of this process polls a word in host memory that the stream
// writes, runs the task, and writes a word for which the stream waits.
//
// The stream is released in any case: by the thread when the task has run, and by `close`, which ends the thread. What a
// stream never asked for, because its device has failed, is not run.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "sgdma.h"

namespace sgdma {

class PolledCalls {
public:
    // Two words of page-locked memory, kWordDistance bytes apart, at the host's and at the device's address.
    PolledCalls(std::uintptr_t words, std::uintptr_t on_device)
        : requested_(word(words)), done_(word(words + kWordDistance)), on_device_(on_device) {
        requested_.store(0);
        done_.store(0);
        thread_ = std::thread([this] { work(); });
    }
    ~PolledCalls() { close(); }

    // As `launch_host_task`. Nothing was taken if it throws.
    void launch(std::uintptr_t function, std::uintptr_t data, std::uintptr_t stream) {
        const std::lock_guard<std::mutex> guard(launching_);
        if (closed_) throw std::runtime_error("The thread that runs the tasks has ended.");
        const std::uint32_t number = ++launched_;
        check(cuda_write_word(on_device_, number, stream), "cuStreamWriteValue32");
        const char* failure = cuda_wait_for_word(on_device_ + kWordDistance, number, stream);
        if (failure == nullptr) push({function_at(function), pointer(data), number});
        check(failure, "cuStreamWaitValue32");
    }

    // Ends the thread and releases the stream. Safe to call twice. Afterwards nothing uses the words.
    void close() {
        const std::lock_guard<std::mutex> launches(launching_);
        if (!thread_.joinable()) return;
        {
            const std::lock_guard<std::mutex> guard(lock_);
            closed_ = true;
        }
        pushed_.notify_one();
        thread_.join();
        done_.store(launched_, std::memory_order_release);
    }

private:
    static constexpr std::uintptr_t kWordDistance = 64;  // each in a cache line of its own

    struct Call {
        HostFunction function;
        void* data;
        std::uint32_t number;
    };

    static std::atomic<std::uint32_t>& word(std::uintptr_t address) {
        return *reinterpret_cast<std::atomic<std::uint32_t>*>(address);
    }

    void push(const Call& call) {
        {
            const std::lock_guard<std::mutex> guard(lock_);
            calls_.push_back(call);
        }
        pushed_.notify_one();
    }

    void work() {
        Call call{};
        while (next(call) && is_requested(call.number)) {
            call.function(call.data);
            done_.store(call.number, std::memory_order_release);
        }
    }

    // The next call, once there is one; false if there will be none.
    bool next(Call& call) {
        std::unique_lock<std::mutex> lock(lock_);
        pushed_.wait(lock, [this] { return closed_ || !calls_.empty(); });
        if (closed_) return false;
        call = calls_.front();
        calls_.pop_front();
        return true;
    }

    bool is_requested(std::uint32_t number) {
        while (std::int32_t(requested_.load(std::memory_order_acquire) - number) < 0) {
            if (closed_) return false;
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
        return true;
    }

    std::atomic<std::uint32_t>& requested_;  // the last call that the stream has come to
    std::atomic<std::uint32_t>& done_;
    const std::uintptr_t on_device_;
    std::mutex launching_, lock_;
    std::uint32_t launched_ = 0;
    std::atomic<bool> closed_{false};
    std::condition_variable pushed_;
    std::deque<Call> calls_;
    std::thread thread_;
};

}  // namespace sgdma
