// Threads that share the pieces of a region. A piece is taken by whichever thread is free, so a thread that the system
// does not run delays no other, and at the end only pieces that have been begun are waited for.
#pragma once

#include <cstdint>

namespace nanovllm {

using Work = void (*)(const void* context, int64_t piece, int worker);

enum class Order {
    runs,     // each thread takes a run of neighbouring pieces, and half of another's when its own is done
    in_turn,  // the next piece is taken by whichever thread comes first
};

// Calls work for each piece in [0, pieces), on the calling thread and on up to threads - 1 others. At most `threads` call
// it at a time, each with a worker of its own in [0, threads). Pieces must not wait for each other. What a piece throws is
// thrown here when no thread is at work on the others any more; if several throw, one of them.
void run_pieces(int64_t pieces, int threads, Order order, Work work, const void* context);

template <class F>
void for_pieces(int64_t pieces, int threads, Order order, const F& work) {
    if (threads <= 1 || pieces <= 1) {
        for (int64_t piece = 0; piece < pieces; ++piece) work(piece, 0);
        return;
    }
    run_pieces(pieces, threads, order,
               [](const void* f, int64_t piece, int worker) { (*static_cast<const F*>(f))(piece, worker); }, &work);
}

}  // namespace nanovllm
