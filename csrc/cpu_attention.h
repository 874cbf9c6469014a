// What the scheduler and the kernels of the CPU attention say to each other: plain data, no instruction set.
//
// All arithmetic works on KV tiles: up to kTileKeys keys of one block, counted from the block's start. A tile
// and a query row give a partial state (accumulator, maximum, sum), and partial states are merged into the row's
// normalised state (output, LSE) one tile after the other, in the order of the keys. Nothing else carries over from one
// tile to the next, so no result can depend on how blocks are grouped into calls, rows into tasks or tiles over
// threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu_attention_kv8.h"
#include "cpu_elements.h"
#include "cpu_isa.h"

namespace nanovllm::attention {

constexpr int kTileKeys = 128;

// The query rows of one sequence that share one KV head: `tokens` x `group`, a token's heads beside each other.
// Strides count elements, not bytes.
struct QueryRows {
    const void* q;
    float* out;
    float* lse;
    int64_t q_token_stride, q_head_stride;
    int64_t out_token_stride, out_head_stride;
    int64_t lse_token_stride, lse_head_stride;
    int tokens, group;
    int64_t position;  // of the first token

    int rows() const { return tokens * group; }
};

// The keys and values of one sequence as one KV head sees them.
struct KeyBlocks {
    const int64_t* blocks;  // base addresses of consecutive blocks, each [2, kv_heads, block_size] rows
    int block_size, head_dim;
    int64_t row_bytes;
    int64_t k_offset, v_offset;  // bytes from a block's base to this head's first key and first value
    int64_t first_position;      // of the first key of blocks[0]
    int64_t kv_end;              // keys at positions >= kv_end are not written

    int tiles_per_block() const { return (block_size + kTileKeys - 1) / kTileKeys; }

    // The first row of a tile's keys or values; `offset` is k_offset or v_offset.
    const char* tile_rows(int64_t tile, int64_t offset) const {
        const int64_t per_block = tiles_per_block(), start = tile % per_block * kTileKeys;
        return reinterpret_cast<const char*>(blocks[tile / per_block] + offset + start * row_bytes);
    }
};

// Partial states of a task whose tiles are merged later: per tile, `rows` accumulators of head_dim, then the maxima
// (base 2), then the sums.
inline size_t partial_floats(int rows, int head_dim) { return size_t(rows) * (size_t(head_dim) + 2); }

// Some rows, some tiles. Without `partials` the tiles are merged into the rows' state at once.
struct Task {
    QueryRows rows;
    KeyBlocks keys;
    int64_t window;  // keys in (p - window, p] are visible to position p; 0: all up to p
    float scale;
    bool carry;                       // the state to begin from is in out and lse; otherwise it is empty
    int64_t tile_begin, tile_end;     // counted over all blocks
    float* partials;                  // of tile_begin, one after the other, or null
    const char *keys_after, *values_after;  // rows that the thread probably reads next, or null
};

// The same functions for each instruction set, dtype of the queries and format of the blocks.
struct Kernel {
    size_t (*workspace_bytes)(int rows, int head_dim);
    // Runs a task. `workspace` is 64-byte aligned.
    void (*run)(const Task& task, void* workspace);
    // Merges the partial states of tiles [tile_begin, tile_end) of a task whose tiles were run into `partials`.
    void (*merge)(const Task& task, void* workspace);
};

const Kernel& portable_kernel(DType dtype, KvFormat format);
#if defined(__x86_64__)
const Kernel& avx2_kernel(DType dtype, KvFormat format);
const Kernel& avx512_kernel(DType dtype, KvFormat format);
const Kernel& avx512vnni_kernel(DType dtype);      // blocks in int8
const Kernel& avx512bf16_kernel(KvFormat format);  // queries in bf16

inline bool has_vnni() {
#if defined(NANOVLLM_EMULATE_BF16)
    return false;  // so that the emulation's tests also see how int8 is attended to without
#else
    return __builtin_cpu_supports("avx512vnni");
#endif
}
#endif

inline const Kernel& kernel_of(Isa isa, DType dtype, KvFormat format) {
#if defined(__x86_64__)
    if (isa == Isa::avx512bf16 && dtype == DType::bf16) return avx512bf16_kernel(format);
    const bool avx512 = isa == Isa::avx512bf16 || isa == Isa::avx512;
    if (avx512 && format == KvFormat::int8 && has_vnni()) return avx512vnni_kernel(dtype);
    if (avx512) return avx512_kernel(dtype, format);
    if (isa == Isa::avx2) return avx2_kernel(dtype, format);
#endif
    (void)isa;
    return portable_kernel(dtype, format);
}

// A batch: sequences whose query rows stand in one tensor.
struct Sequence {
    int64_t query_start, query_len;
    int64_t block_start, block_count;
    int64_t first_position, kv_end, query_position;
};

struct Batch {
    QueryRows rows;  // base pointers and strides of the whole tensors; tokens, group and position unused
    const int64_t* blocks;
    int64_t block_offset;  // bytes from each of these addresses to its block
    const Sequence* sequences;
    int64_t sequence_count;
    int heads, kv_heads, head_dim, block_size;
    int element_bytes;  // of q
    KvFormat format;
    int64_t window;
    float scale;
    bool carry;
};

void attend(const Batch& batch, const Kernel& kernel, int threads);

// Throws std::invalid_argument for sequences that would read or write outside of q's rows and the given blocks. Here and
// not in Python, because a batch may hold hundreds and each layer brings them again.
void check_sequences(const Batch& batch, int64_t tokens, int64_t block_count);

}  // namespace nanovllm::attention
