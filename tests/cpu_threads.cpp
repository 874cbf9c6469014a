// Regions of random sizes from several threads at once: each piece is done once, no worker does two at a time, and what
// pieces throw comes to the caller when all are done.
#include "cpu_threads.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

using nanovllm::Order;

int faults_of_caller(unsigned seed, int regions) {
    std::mt19937 random(seed);
    std::atomic<int> faults{0};
    for (int region = 0; region < regions; ++region) {
        const int threads = 1 + int(random() % 6), work = int(random() % 300);
        std::vector<int> done(1 + random() % 200);
        std::vector<std::atomic<int>> inside(threads);
        const Order order = random() % 2 ? Order::runs : Order::in_turn;
        const bool fails = threads > 1 && done.size() > 3 && random() % 4 == 0;
        int64_t failed = -1;
        try {
            nanovllm::for_pieces(int64_t(done.size()), threads, order, [&](int64_t piece, int worker) {
                if (inside[size_t(worker)].fetch_add(1) != 0) ++faults;
                for (volatile int i = 0; i < work; i = i + 1) {}
                ++done[size_t(piece)];  // not atomic: a second thread here is a race that the sanitizer reports
                inside[size_t(worker)].fetch_sub(1);
                if (fails && piece % 7 == 3) throw piece;
            });
        } catch (const int64_t piece) {
            failed = piece;
        }
        faults += fails ? failed % 7 != 3 : failed != -1;
        for (const int times : done) faults += times != 1;
        // Longer than threads look for work, so that some regions have to wake them.
        if (random() % 50 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(3));
    }
    return faults;
}

int main(int, char** arguments) {
    const int callers = std::atoi(arguments[1]), regions = std::atoi(arguments[2]);
    std::atomic<int> faults{0};
    std::vector<std::thread> threads;
    for (int caller = 0; caller < callers; ++caller)
        threads.emplace_back([&, caller] { faults += faults_of_caller(unsigned(caller), regions); });
    for (std::thread& thread : threads) thread.join();
    std::printf("%d faults\n", faults.load());
    return faults != 0;
}
