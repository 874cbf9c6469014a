// A step of few rows over a pool that holds all of its blocks: prepared once, then one call for each layer, which writes
// the new K/V, attends, and leaves the outputs where the queries stood.
//
// The kernels and their order are those of the single operators, and so are the bits; saved is the way through Python
// between them, which takes longer than most of them.
//
// Included once, by cpu_attention_bindings.h.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu_addresses.h"
#include "cpu_attention.h"
#include "python_calls.h"

namespace nanovllm::attention {
namespace {

// The pool is [layers, blocks, 2, kv_heads, block_size, head_dim], each block dense; strides are bytes.
struct Pool {
    uintptr_t address;
    int64_t layer_stride, block_stride, layers, blocks;
};

class PagedStep {
  public:
    // slots: int64 [tokens], block * block_size + offset; blocks: int64, as the sequences [sequence_count, 7] name them.
    PagedStep(const std::string& isa, const std::string& dtype, const std::string& kv_dtype,
              const Pool& pool, const Batch& batch, std::vector<int64_t> slots, std::vector<int64_t> blocks,
              std::vector<Sequence> sequences, int threads)
        : kernel_(kernel_of(isa_of(isa), dtype_of(dtype), kv_format_of(kv_dtype, dtype))), dtype_(dtype), pool_(pool), batch_(batch),
          slots_(std::move(slots)), blocks_(std::move(blocks)), sequences_(std::move(sequences)), threads_(threads) {
        if (threads < 1 || std::min({batch.heads, batch.kv_heads, batch.head_dim, batch.block_size}) < 1)
            throw std::invalid_argument("Threads and sizes must be positive.");
        refuse_outside(slots_, pool.blocks * batch.block_size, "slot");
        refuse_outside(blocks_, pool.blocks, "block");
        for (int64_t& block : blocks_) block = int64_t(pool.address) + block * pool.block_stride;
        batch_.blocks = blocks_.data();
        batch_.sequences = sequences_.data();
        batch_.sequence_count = int64_t(sequences_.size());
        batch_.element_bytes = dtype_of(dtype) == DType::fp32 ? 4 : 2;
        batch_.format = kv_format_of(kv_dtype, dtype);
        check_sequences(batch_, tokens(), int64_t(blocks_.size()));
        const int64_t row = int64_t(batch.heads) * batch.head_dim;
        out_.resize(size_t(tokens() * row));
        lse_.resize(size_t(tokens() * batch.heads));
        batch_.rows.q_token_stride = batch_.rows.out_token_stride = row;
        batch_.rows.q_head_stride = batch_.rows.out_head_stride = batch.head_dim;
        batch_.rows.lse_token_stride = batch.heads;
        batch_.rows.lse_head_stride = 1;
        batch_.rows.out = out_.data();
        batch_.rows.lse = lse_.data();
    }

    // q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim], all dense. sinks: [heads] or null, from which the
    // LSE of a row begins.
    void attend(int64_t layer, uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t sinks) {
        if (layer < 0 || layer >= pool_.layers)
            throw std::invalid_argument("There is no layer " + std::to_string(layer) + " in the pool.");
        const python::WithoutGil without_gil;
        store(layer, pointer<const char>(k), pointer<const char>(v));
        std::fill(out_.begin(), out_.end(), 0.0f);  // what a row of no sequence attends to
        batch_.carry = sinks != 0;
        for (size_t i = 0; batch_.carry && i < lse_.size(); ++i)
            lse_[i] = pointer<const float>(sinks)[i % size_t(batch_.heads)];
        batch_.rows.q = pointer<const void>(q);
        batch_.block_offset = layer * pool_.layer_stride;
        nanovllm::attention::attend(batch_, kernel_, threads_);
        with_element(dtype_, [&](auto element) {
            using T = decltype(element);
            T* const target = pointer<T>(q);
            for (size_t i = 0; i < out_.size(); ++i) target[i] = narrow_scalar<T>(out_[i]);
        });
    }

  private:
    const Kernel& kernel_;
    std::string dtype_;
    Pool pool_;
    Batch batch_;
    std::vector<int64_t> slots_, blocks_;  // blocks: their addresses in layer 0
    std::vector<Sequence> sequences_;
    std::vector<float> out_, lse_;
    int threads_;

    int64_t tokens() const { return int64_t(slots_.size()); }

    static void refuse_outside(const std::vector<int64_t>& places, int64_t end, const char* name) {
        for (const int64_t place : places)
            if (place < 0 || place >= end)
                throw std::invalid_argument("There is no " + std::string(name) + " " + std::to_string(place) +
                                            " in the pool.");
    }

    void store(int64_t layer, const char* k, const char* v) const {
        const int64_t head = int64_t(batch_.head_dim) * batch_.element_bytes;
        const int64_t row = kv_row_bytes(batch_.format, batch_.head_dim, batch_.element_bytes);
        const int64_t rows = row * batch_.block_size;
        char* const base = pointer<char>(pool_.address) + layer * pool_.layer_stride;
        for (const int64_t slot : slots_) {
            char* target = base + slot / batch_.block_size * pool_.block_stride + slot % batch_.block_size * row;
            for (int i = 0; i < batch_.kv_heads; ++i, target += rows, k += head, v += head) {
                store_row(k, target);
                store_row(v, target + batch_.kv_heads * rows);
            }
        }
    }

    void store_row(const char* from, char* to) const {
        if (batch_.format == KvFormat::plain) {
            std::memcpy(to, from, size_t(batch_.head_dim) * batch_.element_bytes);
            return;
        }
        with_element(dtype_, [&](auto element) {
            quantize_row(batch_.format, reinterpret_cast<const decltype(element)*>(from), batch_.head_dim, to);
        });
    }
};

template <class T>
std::vector<T> copied(uintptr_t address, int64_t count) {
    const T* const first = pointer<const T>(address);
    return {first, first + count};
}

// Made where it stays, since its batch points to its other parts.
std::shared_ptr<PagedStep> paged_step(const std::string& isa, const std::string& dtype, const std::string& kv_dtype,
                                      uintptr_t pool, int64_t layer_stride, int64_t block_stride, int64_t layers,
                                      int64_t pool_blocks, uintptr_t slots, int64_t tokens, uintptr_t blocks,
                                      int64_t block_count, uintptr_t sequences, int64_t sequence_count, int heads,
                                      int kv_heads, int head_dim, int block_size, int64_t window, float scale,
                                      int threads) {
    Batch batch{};
    batch.heads = heads;
    batch.kv_heads = kv_heads;
    batch.head_dim = head_dim;
    batch.block_size = block_size;
    batch.window = window;
    batch.scale = scale;
    return std::make_shared<PagedStep>(isa, dtype, kv_dtype, Pool{pool, layer_stride, block_stride, layers, pool_blocks},
                                       batch, copied<int64_t>(slots, tokens), copied<int64_t>(blocks, block_count),
                                       copied<Sequence>(sequences, sequence_count), threads);
}

constexpr auto kPagedStep = python::names("isa", "dtype", "kv_dtype", "pool", "layer_stride", "block_stride", "layers",
                                          "pool_blocks", "slots", "tokens", "blocks", "block_count", "sequences",
                                          "sequence_count", "heads", "kv_heads", "head_dim", "block_size", "window",
                                          "scale", "threads");
constexpr auto kAttendLayer = python::names("layer", "q", "k", "v", "sinks");

}  // namespace

void define_steps(PyObject* module) {
    static PyMethodDef methods[] = {
        python::method<&PagedStep::attend, kAttendLayer>(
            "attend", "Write k and v into the layer's slots, attend, and write the outputs over q."),
        {}};
    python::add_class<PagedStep, &paged_step, kPagedStep>(module, "_cpu_kernels.PagedStep", methods);
}

}  // namespace nanovllm::attention
