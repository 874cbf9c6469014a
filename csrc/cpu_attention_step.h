// The attention of a step with few rows, over a pool that holds all of its blocks. It is prepared once. Then one call for
// each layer writes the new K/V, attends, and leaves the outputs where the queries were.
//
// The kernels and their order are those of the single operators, and so are the bits. With few rows, the Python code
// between two operators takes longer than most operators.
#pragma once

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cpu_addresses.h"
#include "cpu_attention.h"

namespace nanovllm::attention {

// The pool is [layers, blocks, 2, kv_heads, block_size, head_dim], each block dense; strides are bytes.
struct Pool {
    uintptr_t address;
    int64_t layer_stride, block_stride, blocks;
};

class PagedStep {
  public:
    // slots: of each token, block * block_size + offset; blocks: the blocks of the sequences, one after the other.
    PagedStep(const Kernel& kernel, std::string dtype, const Pool& pool, const Batch& batch,
              std::vector<int64_t> slots, std::vector<int64_t> blocks, std::vector<Sequence> sequences, int threads)
        : kernel_(kernel), dtype_(std::move(dtype)), pool_(pool), batch_(batch), slots_(std::move(slots)),
          blocks_(std::move(blocks)), sequences_(std::move(sequences)), threads_(threads) {
        refuse_outside(slots_, pool.blocks * batch.block_size, "slot");
        refuse_outside(blocks_, pool.blocks, "block");
        for (int64_t& block : blocks_) block = int64_t(pool.address) + block * pool.block_stride;
        batch_.blocks = blocks_.data();
        batch_.sequences = sequences_.data();
        batch_.sequence_count = int64_t(sequences_.size());
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

}  // namespace nanovllm::attention
