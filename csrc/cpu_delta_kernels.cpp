// The gated delta rule in plain loops.
//
// The columns of a state are independent of each other, given k, q, beta and the decay. So a thread takes some columns of a
// head through all tokens of a run, kTokens tokens at a time: it copies their q and k side by side, then takes one tile of
// columns after the other through them. A tile stays in the first cache; the head's state, q and k stay in the second.
#include "cpu_delta.h"

#include <algorithm>

#include "cpu_rows_common.h"
#include "cpu_scratch.h"

namespace nanovllm::delta {
namespace {

using rows::for_each;
using rows::narrow_result;
using rows::rounded;
using rows::sigmoid_of;
using rows::silu_of;

constexpr int kBlock = 256;         // channels of a convolution whose sums stay in registers and the cache
constexpr int kTile = 32;           // columns of a state: four vectors of AVX2 hide the latency of a sum
constexpr int64_t kTokens = 32;     // through which one tile goes before the next
constexpr float kNormEps = 1e-6f;   // of the norms of q and k
constexpr int64_t kElementsOfPiece = 8192;

// log(1 + e) for e in [0, 1]: 2 atanh(s) with s = e / (2 + e), at most 1 / 3.
INLINE float log1p_of(float e) {
    const float s = e / (2.0f + e), z = s * s;
    float series = 1.0f / 15.0f;
    series = series * z + 1.0f / 13.0f;
    series = series * z + 1.0f / 11.0f;
    series = series * z + 1.0f / 9.0f;
    series = series * z + 1.0f / 7.0f;
    series = series * z + 1.0f / 5.0f;
    series = series * z + 1.0f / 3.0f;
    return 2.0f * s * (series * z + 1.0f);
}

// log(1 + e^x).
INLINE float softplus_of(float x) {
    return (x > 0.0f ? x : 0.0f) + log1p_of(rows::exponential(x > 0.0f ? -x : x));
}

// sums (+)= x * weight for inputs that lie `stride` apart.
template <class T>
INLINE void add_tap(const T* __restrict__ x, int64_t stride, const T* __restrict__ weight, float* __restrict__ sums,
                    int64_t size, bool first) {
    if (first)
        for (int64_t i = 0; i < size; ++i) sums[i] = 0.0f;
    if (stride == 1)
        for (int64_t i = 0; i < size; ++i) sums[i] += widen_scalar(x[i]) * widen_scalar(weight[i]);
    else
        for (int64_t i = 0; i < size; ++i) sums[i] += widen_scalar(x[i * stride]) * widen_scalar(weight[i]);
}

// silu of the convolution of a row's channels from `first` on, up to kBlock of them, oldest input first. Inputs from
// before the run are in its slot.
template <class T>
INLINE void convolve(const Inputs<T>& in, int64_t row, int64_t first, int64_t size, float* sums) {
    const int64_t run = in.runs.of_row[row], index = row - in.runs.starts[run], kept = in.sizes.kernel - 1;
    const T* slot = in.conv.at(in.runs.slots[run]) + first * kept;
    for (int64_t tap = 0; tap <= kept; ++tap) {
        const T* weight = in.weight + tap * in.sizes.channels() + first;
        if (index + tap >= kept)
            add_tap(in.x.at(row + tap - kept) + first, 1, weight, sums, size, tap == 0);
        else
            add_tap(slot + index + tap, kept, weight, sums, size, tap == 0);
    }
    for (int64_t c = 0; c < size; ++c) sums[c] = silu_of(sums[c]);
}

// target_clones takes no templates: one function for each element type. Queries, keys and values share this one.
#define CONVOLUTION(T)                                                                                          \
    FOR_ISAS_TO_AVX2 void convolve_block(const Inputs<T>& in, int64_t row, int64_t first, int64_t size,         \
                                         float* sums) {                                                         \
        convolve<T>(in, row, first, size, sums);                                                                \
    }
CONVOLUTION(Bf16)
CONVOLUTION(Fp16)
CONVOLUTION(float)

template <class T>
INLINE void query_or_key(const Inputs<T>& in, int64_t row, int64_t head) {
    const Sizes& sizes = in.sizes;
    const int64_t size = sizes.key_dim, first = head * size;
    float *y = in.qk + row * 2 * sizes.key_size() + first, sums[kBlock];
    for (int64_t i = 0; i < size; i += kBlock) {
        const int64_t count = std::min<int64_t>(kBlock, size - i);
        convolve_block(in, row, first + i, count, sums);
        for (int64_t c = 0; c < count; ++c) y[i + c] = rounded<T>(sums[c]);
    }
    const float scale = 1.0f / std::sqrt(rows::sum_of_squares(y, size) + kNormEps);
    const float factor = head < sizes.key_heads ? 1.0f / std::sqrt(float(size)) : 1.0f;
    for (int64_t i = 0; i < size; ++i) y[i] = y[i] * scale * factor;
}

template <class T>
INLINE void value_and_gates(const Inputs<T>& in, int64_t row, int64_t head) {
    const Sizes& sizes = in.sizes;
    const int64_t size = sizes.value_dim, first = 2 * sizes.key_size() + head * size;
    T* y = in.v + row * sizes.value_size() + head * size;
    float sums[kBlock];
    for (int64_t i = 0; i < size; i += kBlock) {
        const int64_t count = std::min<int64_t>(kBlock, size - i);
        convolve_block(in, row, first + i, count, sums);
        for (int64_t c = 0; c < count; ++c) y[i + c] = narrow_result<T>(sums[c]);
    }
    const float step = softplus_of(widen_scalar(in.a.at(row)[head]) + in.dt_bias[head]);
    in.decay[row * sizes.value_heads + head] = rows::exponential(-in.rate[head] * step);
    in.beta[row * sizes.value_heads + head] = rounded<T>(sigmoid_of(widen_scalar(in.b.at(row)[head])));
}

// Keeps the last inputs of a run, of channels from `first` on.
template <class T>
void keep(const Inputs<T>& in, int64_t run, int64_t first, int64_t size) {
    const int64_t begin = in.runs.starts[run], count = in.runs.starts[run + 1] - begin, kept = in.sizes.kernel - 1;
    T* slot = in.conv.at(in.runs.slots[run]) + first * kept;
    for (int64_t i = 0; i < kept; ++i) {  // what is overwritten has been read
        const int64_t from = count + i;
        if (from < kept)
            for (int64_t c = 0; c < size; ++c) slot[c * kept + i] = slot[c * kept + from];
        else
            for (int64_t c = 0; c < size; ++c) slot[c * kept + i] = in.x.at(begin + from - kept)[first + c];
    }
}

// Some columns of a head's state, [key_dim, kTile], through tokens.
template <class T>
struct Tile {
    float* state;
    int64_t stride;  // from a row of the state to the next one
    const float *q, *k;
    int64_t qk_stride;
    const T* v;
    T* y;
    int64_t v_stride;
    const float *decay, *beta;
    int64_t gate_stride, tokens, key_dim, columns;
};

template <class T>
INLINE void run_through(const Tile<T>& t) {
    float* __restrict__ state = t.state;
    const int64_t stride = t.stride;
    for (int64_t token = 0; token < t.tokens; ++token) {
        const float *__restrict__ q = t.q + token * t.qk_stride, *__restrict__ k = t.k + token * t.qk_stride;
        const float decay = t.decay[token * t.gate_stride], beta = t.beta[token * t.gate_stride];
        // Two sums of every second key element each, since an addition waits for the one before.
        float even[kTile] = {}, odd[kTile] = {}, delta[kTile] = {}, out[kTile] = {};
        int64_t i = 0;
        for (; i + 1 < t.key_dim; i += 2) {
            const float first = k[i], second = k[i + 1];
            for (int c = 0; c < kTile; ++c) even[c] += state[i * stride + c] * first;
            for (int c = 0; c < kTile; ++c) odd[c] += state[(i + 1) * stride + c] * second;
        }
        for (; i < t.key_dim; ++i)
            for (int c = 0; c < kTile; ++c) even[c] += state[i * stride + c] * k[i];
        const T* v = t.v + token * t.v_stride;
        for (int64_t c = 0; c < t.columns; ++c) delta[c] = widen_scalar(v[c]);
        for (int c = 0; c < kTile; ++c) delta[c] = beta * (delta[c] - decay * (even[c] + odd[c]));
        for (i = 0; i < t.key_dim; ++i) {
            const float key = k[i], query = q[i];
            for (int c = 0; c < kTile; ++c) {
                const float next = state[i * stride + c] * decay + key * delta[c];
                state[i * stride + c] = next;
                out[c] += next * query;
            }
        }
        T* y = t.y + token * t.v_stride;
        for (int64_t c = 0; c < t.columns; ++c) y[c] = narrow_result<T>(out[c]);
    }
}

template <class T>
INLINE void norm_and_gate(const T* __restrict__ x, const T* __restrict__ z, const T* __restrict__ weight,
                          T* __restrict__ y, int64_t size, float eps) {
    const float scale = rows::norm_scale(x, size, eps);
    for (int64_t i = 0; i < size; ++i) {
        const float normed = rounded<T>(rounded<T>(widen_scalar(x[i]) * scale) * widen_scalar(weight[i]));
        y[i] = narrow_result<T>(normed * silu_of(widen_scalar(z[i])));
    }
}

template <class T>
INLINE void gate_elements(T* __restrict__ x, const T* __restrict__ gate, int64_t size) {
    for (int64_t i = 0; i < size; ++i)
        x[i] = narrow_result<T>(widen_scalar(x[i]) * rounded<T>(sigmoid_of(widen_scalar(gate[i]))));
}

// The convolution before the recurrence takes less than a tenth of its arithmetic.
#define DELTA_FUNCTIONS(T)                                                                                    \
    FOR_ISAS_TO_AVX2 void query_or_key_head(const Inputs<T>& in, int64_t row, int64_t head) {                 \
        query_or_key<T>(in, row, head);                                                                       \
    }                                                                                                         \
    FOR_ISAS_TO_AVX2 void value_head(const Inputs<T>& in, int64_t row, int64_t head) {                        \
        value_and_gates<T>(in, row, head);                                                                    \
    }                                                                                                         \
    FOR_EACH_ISA void tile_of_head(const Tile<T>& tile) { run_through<T>(tile); }                             \
    FOR_EACH_ISA void gated_head(const T* x, const T* z, const T* weight, T* y, int64_t size, float eps) {    \
        norm_and_gate<T>(x, z, weight, y, size, eps);                                                         \
    }                                                                                                         \
    FOR_EACH_ISA void gate_row(T* x, const T* gate, int64_t size) { gate_elements<T>(x, gate, size); }
DELTA_FUNCTIONS(Bf16)
DELTA_FUNCTIONS(Fp16)
DELTA_FUNCTIONS(float)

// Copies of a tile's columns, with zeros beyond them, and back.
void load_tile(const float* state, int64_t stride, float* tile, int64_t key_dim, int64_t columns) {
    for (int64_t i = 0; i < key_dim; ++i) {
        std::copy_n(state + i * stride, columns, tile + i * kTile);
        std::fill(tile + i * kTile + columns, tile + (i + 1) * kTile, 0.0f);
    }
}

void store_tile(const float* tile, float* state, int64_t stride, int64_t key_dim, int64_t columns) {
    for (int64_t i = 0; i < key_dim; ++i) std::copy_n(tile + i * kTile, columns, state + i * stride);
}

// A head's state through the tokens of a run.
template <class T>
class HeadOfRun {
  public:
    HeadOfRun(const Recurrence<T>& r, int64_t run, int64_t head)
        : r_(r), sizes_(r.sizes), head_(head), first_(r.runs.starts[run]), end_(r.runs.starts[run + 1]),
          state_(r.states.at(r.runs.slots[run]) + head * sizes_.key_dim * sizes_.value_dim) {}

    void take(int64_t first_tile, int64_t end_tile) const {
        thread_local Scratch scratch;
        float* const tile = reinterpret_cast<float*>(scratch.words(sizes_.key_dim * (kTile + 2 * kTokens)));
        for (int64_t row = first_; row < end_; row += kTokens) {
            const Tokens tokens = gather(row, std::min(kTokens, end_ - row), tile + sizes_.key_dim * kTile);
            for (int64_t i = first_tile; i < end_tile; ++i) take_tile(tokens, i * kTile, tile);
        }
    }

  private:
    struct Tokens {
        int64_t row, count;
        const float *q, *k;
        int64_t stride;
    };
    const Recurrence<T>& r_;
    const Sizes& sizes_;
    const int64_t head_, first_, end_;
    float* const state_;

    // q and k of some tokens, side by side: all tiles read them, and in their rows they share few sets of a cache.
    Tokens gather(int64_t row, int64_t count, float* target) const {
        const int64_t stride = 2 * sizes_.key_size(), size = sizes_.key_dim;
        const float* q = r_.qk + row * stride + head_ / (sizes_.value_heads / sizes_.key_heads) * size;
        if (count == 1) return {row, count, q, q + sizes_.key_size(), stride};
        for (int64_t i = 0; i < count; ++i, q += stride) {
            std::copy_n(q, size, target + 2 * i * size);
            std::copy_n(q + sizes_.key_size(), size, target + (2 * i + 1) * size);
        }
        return {row, count, target, target + size, 2 * size};
    }

    void take_tile(const Tokens& tokens, int64_t column, float* copy) const {
        const int64_t columns = std::min<int64_t>(kTile, sizes_.value_dim - column), size = sizes_.value_dim;
        const bool in_place = tokens.count == 1 && columns == kTile;  // copying takes as long as a token
        const int64_t at = tokens.row * sizes_.value_size() + head_ * size + column;
        const int64_t gates = tokens.row * sizes_.value_heads + head_;
        float *const held = state_ + column, *const own = in_place ? held : copy;
        if (!in_place) load_tile(held, size, own, sizes_.key_dim, columns);
        tile_of_head(Tile<T>{own, in_place ? size : kTile, tokens.q, tokens.k, tokens.stride, r_.v + at, r_.y + at,
                             sizes_.value_size(), r_.decay + gates, r_.beta + gates, sizes_.value_heads, tokens.count,
                             sizes_.key_dim, columns});
        if (!in_place) store_tile(own, held, size, sizes_.key_dim, columns);
    }
};

}  // namespace

template <class T>
void prepare(const Inputs<T>& in, int threads) {
    const int64_t keys = 2 * in.sizes.key_heads, heads = keys + in.sizes.value_heads;
    const int64_t elements = 2 * in.sizes.kernel * std::max(in.sizes.key_dim, in.sizes.value_dim);
    for_each(in.runs.rows * heads, elements, threads, [&](int64_t piece) {
        const int64_t row = piece / heads, head = piece % heads;
        if (head < keys)
            query_or_key_head(in, row, head);
        else
            value_head(in, row, head - keys);
    });
    const int64_t channels = in.sizes.channels(), blocks = (channels + kBlock - 1) / kBlock;
    for_each(in.runs.count * blocks, kBlock * in.sizes.kernel, threads, [&](int64_t piece) {
        const int64_t first = piece % blocks * kBlock;
        keep(in, piece / blocks, first, std::min<int64_t>(kBlock, channels - first));
    });
}

template <class T>
void recur(const Recurrence<T>& r, int threads) {
    const Sizes& sizes = r.sizes;
    const int64_t tiles = (sizes.value_dim + kTile - 1) / kTile, heads = r.runs.count * sizes.value_heads;
    const int64_t elements = r.runs.rows * sizes.value_heads * sizes.key_dim * sizes.value_dim;
    const int used = int(std::min<int64_t>(threads, 1 + elements / (4 * kElementsOfPiece)));
    // Parts of a head only where there are too few heads for the threads: each part copies q and k.
    const int64_t parts = std::clamp<int64_t>((4 * used + heads - 1) / heads, 1, tiles);
    for_pieces(heads * parts, used, Order::in_turn, [&](int64_t piece, int) {
        const int64_t head = piece / parts, part = piece % parts;
        HeadOfRun<T>(r, head / sizes.value_heads, head % sizes.value_heads)
            .take(tiles * part / parts, tiles * (part + 1) / parts);
    });
}

template <class T>
void gated_norm(const GatedNorm<T>& n, int threads) {
    for_each(n.rows * n.heads, 2 * n.size, threads, [&](int64_t piece) {
        const int64_t row = piece / n.heads, first = piece % n.heads * n.size;
        gated_head(n.x.at(row) + first, n.z.at(row) + first, n.weight, n.y.at(row) + first, n.size, n.eps);
    });
}

template <class T>
void gate(const Gate<T>& g, int threads) {
    for_each(g.rows, 2 * g.size, threads, [&](int64_t row) { gate_row(g.x.at(row), g.gate.at(row), g.size); });
}

#define INSTANTIATE(T)                                 \
    template void prepare<T>(const Inputs<T>&, int);   \
    template void recur<T>(const Recurrence<T>&, int); \
    template void gated_norm<T>(const GatedNorm<T>&, int); \
    template void gate<T>(const Gate<T>&, int);
INSTANTIATE(Bf16)
INSTANTIATE(Fp16)
INSTANTIATE(float)

}  // namespace nanovllm::delta
