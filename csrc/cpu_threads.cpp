// The threads of the process. They are not OpenMP's, which wait at the end of a region for threads without work and spin
// for milliseconds: beside a busy process every region would take as long as the system lets that process run.
#include "cpu_threads.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace nanovllm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

constexpr int kRegions = 8;       // at a time: those that compute, and those that a late thread has not left yet
constexpr int kMostThreads = 256;  // of a region
constexpr int kPauses = 32;       // between two looks at the clock
constexpr microseconds kWaitForPieces{50};  // for pieces that others have begun, before the caller gives up its core
constexpr microseconds kWaitForWork{2000};  // of a thread without work: longer than Python takes between two regions
constexpr microseconds kBriefWait{5};       // the same while other processes want the core
constexpr microseconds kContended{20000};   // how long a core counts as wanted after the system took it away

void pause_core() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Some pauses, fewer if the word changes.
void pause_while(const std::atomic<uint32_t>& word, uint32_t value) {
    for (int i = 0; i < kPauses && word.load(std::memory_order_relaxed) == value; ++i) pause_core();
}

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake(std::atomic<uint32_t>& word, int count) {
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

// How often the system took the core away from this thread.
long times_preempted() {
    rusage usage;
    return getrusage(RUSAGE_THREAD, &usage) == 0 ? usage.ru_nivcsw : 0;
}

// Pieces [begin, end) that no thread has taken yet, as one word.
class alignas(64) Run {
  public:
    void set(uint32_t begin, uint32_t end) { word_.store(pack(begin, end), std::memory_order_relaxed); }

    bool take_first(uint32_t& piece) {
        uint64_t word = word_.load(std::memory_order_relaxed);
        do {
            if (begin_of(word) >= end_of(word)) return false;
            piece = begin_of(word);
        } while (!word_.compare_exchange_weak(word, pack(piece + 1, end_of(word)), std::memory_order_relaxed));
        return true;
    }

    // Moves the last half to `taker`, which is empty and the calling thread's own.
    bool give_half(Run& taker) {
        uint64_t word = word_.load(std::memory_order_relaxed);
        uint32_t middle;
        do {
            if (begin_of(word) >= end_of(word)) return false;
            middle = begin_of(word) + (end_of(word) - begin_of(word)) / 2;
        } while (!word_.compare_exchange_weak(word, pack(begin_of(word), middle), std::memory_order_relaxed));
        taker.set(middle, end_of(word));
        return true;
    }

  private:
    std::atomic<uint64_t> word_{0};

    static uint64_t pack(uint32_t begin, uint32_t end) { return uint64_t(begin) << 32 | end; }
    static uint32_t begin_of(uint64_t word) { return uint32_t(word >> 32); }
    static uint32_t end_of(uint64_t word) { return uint32_t(word); }
};

// One call of run_pieces. Regions live as long as the process, because a thread may look at one that is over. A region is
// used again only when no thread is inside.
class Region {
  public:
    bool reserve() {
        if (reserved_.exchange(true, std::memory_order_acquire)) return false;
        if (inside_.load() == 0) return true;
        reserved_.store(false, std::memory_order_release);
        return false;
    }

    void open(uint32_t pieces, int threads, Order order, Work work, const void* context) {
        work_ = work, context_ = context, threads_ = threads, order_ = order;
        for (int i = 0; i < threads; ++i) {
            const uint64_t begin = uint64_t(pieces) * i / threads, end = uint64_t(pieces) * (i + 1) / threads;
            if (order == Order::runs) runs_[i].set(uint32_t(begin), uint32_t(end));
        }
        if (order == Order::in_turn) runs_[0].set(0, pieces);
        left_.store(pieces, std::memory_order_relaxed);
        joined_.store(1, std::memory_order_relaxed);  // the caller is worker 0
        open_.store(true);
    }

    // The caller's part: its share, and what no other thread has begun. When all pieces are done it returns, or throws
    // what one of them has thrown.
    void finish() {
        take_part(0);
        const Clock::time_point give_up = Clock::now() + kWaitForPieces;
        for (uint32_t left; (left = left_.load(std::memory_order_acquire)) != 0;) {
            if (Clock::now() > give_up) {
                asleep_.store(true);
                if (left_.load() == left) sleep_while(left_, left);
                asleep_.store(false, std::memory_order_relaxed);
            } else {
                pause_while(left_, left);
            }
        }
        open_.store(false);
        const std::exception_ptr error = std::exchange(error_, nullptr);
        failed_.store(false, std::memory_order_relaxed);
        reserved_.store(false, std::memory_order_release);
        if (error) std::rethrow_exception(error);
    }

    // Another thread's part. Returns whether it did a piece.
    bool help() {
        if (!open_.load(std::memory_order_relaxed)) return false;
        inside_.fetch_add(1);
        bool helped = false;
        if (open_.load() && joined_.load(std::memory_order_relaxed) < threads_) {
            const int worker = joined_.fetch_add(1, std::memory_order_relaxed);
            if (worker < threads_) helped = take_part(worker);
        }
        inside_.fetch_sub(1, std::memory_order_release);
        return helped;
    }

  private:
    std::atomic<bool> reserved_{false}, open_{false}, asleep_{false}, failed_{false};
    std::atomic<int> inside_{0}, joined_{0};
    std::atomic<uint32_t> left_{0};  // pieces that are not done
    Work work_;
    const void* context_;
    int threads_;
    Order order_;
    Run runs_[kMostThreads];
    std::exception_ptr error_;  // the first one of a piece

    // A piece that fails counts as done: the others use what the caller keeps until it leaves.
    bool take_part(int worker) {
        bool helped = false;
        for (uint32_t piece; take(worker, piece); helped = true) {
            try {
                work_(context_, piece, worker);
            } catch (...) {
                if (!failed_.exchange(true)) error_ = std::current_exception();
            }
            if (left_.fetch_sub(1) == 1 && worker != 0 && asleep_.load()) wake(left_, 1);
        }
        return helped;
    }

    bool take(int worker, uint32_t& piece) {
        if (order_ == Order::in_turn) return runs_[0].take_first(piece);
        while (!runs_[worker].take_first(piece))
            if (!take_over(worker)) return false;
        return true;
    }

    bool take_over(int worker) {
        for (int i = 1; i < threads_; ++i)
            if (runs_[(worker + i) % threads_].give_half(runs_[worker])) return true;
        return false;
    }
};

class Pool {
  public:
    void run(int64_t pieces, int threads, Order order, Work work, const void* context) {
        Region* region = nullptr;
        for (Region& candidate : regions_)
            if (candidate.reserve()) {
                region = &candidate;
                break;
            }
        if (!region) {
            for (int64_t piece = 0; piece < pieces; ++piece) work(context, piece, 0);
            return;
        }
        start_workers(threads - 1);
        region->open(uint32_t(pieces), threads, order, work, context);
        regions_begun_.fetch_add(1);
        if (asleep_.load() > 0) wake(regions_begun_, threads - 1);
        region->finish();
    }

  private:
    Region regions_[kRegions];
    std::atomic<uint32_t> regions_begun_{0};
    std::atomic<int> asleep_{0}, workers_{0};
    std::mutex starting_;

    // Where the system gives no more threads, those that there are do the work.
    void start_workers(int count) {
        if (workers_.load(std::memory_order_acquire) >= count) return;
        const std::lock_guard<std::mutex> lock(starting_);
        try {
            for (int started = workers_.load(); started < count; ++started) {
                std::thread([this, started] { work_for_ever(started); }).detach();
                workers_.store(started + 1, std::memory_order_release);
            }
        } catch (const std::system_error&) {
        }
    }

    bool help_any_region(int first) {
        bool helped = false;
        for (int i = 0; i < kRegions; ++i) helped |= regions_[(first + i) % kRegions].help();
        return helped;
    }

    // Returns whether a region has begun.
    bool wait_for_work(uint32_t seen, Clock::time_point end) {
        do pause_while(regions_begun_, seen);
        while (regions_begun_.load(std::memory_order_relaxed) == seen && Clock::now() < end);
        return regions_begun_.load(std::memory_order_relaxed) != seen;
    }

    void work_for_ever(int first) {
        long preempted = times_preempted();
        Clock::time_point free_again = Clock::now();  // of processes that want the core
        for (;;) {
            const uint32_t seen = regions_begun_.load();
            if (help_any_region(first)) continue;
            const Clock::time_point begin = Clock::now();
            if (wait_for_work(seen, begin + kBriefWait)) continue;
            if (const long now = times_preempted(); now != preempted) preempted = now, free_again = begin + kContended;
            if (begin > free_again && wait_for_work(seen, begin + kWaitForWork)) continue;
            asleep_.fetch_add(1);
            sleep_while(regions_begun_, seen);
            asleep_.fetch_sub(1);
        }
    }
};

std::atomic<Pool*> pool{nullptr};

Pool& the_pool() {
    static std::once_flag once;
    std::call_once(once, [] {
        pool.store(new Pool);
        pthread_atfork(nullptr, nullptr, [] { pool.store(new Pool); });  // threads do not follow into a forked process
    });
    return *pool.load();
}

}  // namespace

void run_pieces(int64_t pieces, int threads, Order order, Work work, const void* context) {
    threads = int(std::min<int64_t>({threads, pieces, kMostThreads}));
    if (threads <= 1 || pieces > INT_MAX) {
        for (int64_t piece = 0; piece < pieces; ++piece) work(context, piece, 0);
        return;
    }
    the_pool().run(pieces, threads, order, work, context);
}

}  // namespace nanovllm
