// The few-row linear layer with AVX512-bf16: each lane sums one output, so weights are transposed in registers, 16
// outputs x 16 pairs at a time, and serve up to kMostRows rows.
#include "cpu_linear.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <vector>

// GCC 12 takes the undefined operand inside its own intrinsics for a mistake of ours.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")

namespace nanovllm::linear {
namespace {

constexpr int kLanes = 16;                // outputs of a vector
constexpr int kTileOutputs = 2 * kLanes;  // outputs that a thread takes at a time
constexpr int kMostRows = 12;             // their sums fit the registers beside 16 columns of weights
constexpr int64_t kOwnCacheBytes = 256 << 10;  // of weights that a core keeps for itself until their turn comes
constexpr int64_t kNearInputs = 512;

// Some rows of x, as pairs of inputs: [rows, pair_stride], an odd last input paired with zero.
struct Rows {
    const uint32_t* pairs;
    int64_t pair_stride;
    int64_t first;
    int64_t fetch_ahead;  // weights, in elements
};

// 16x16 transpose of 32-bit units.
inline void transpose(__m512i v[kLanes]) {
    __m512i t[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes; i += 2) {
        t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kLanes; i += 4) {
        v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        v[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        v[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        v[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        v[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

// Adds the products of the `inputs` from k on, at most kStep, to the sums of R rows and 16 outputs.
template <int R, bool Whole>
inline void add_products(const Problem& p, const Rows& rows, int64_t output, int64_t outputs, int64_t k, int64_t inputs,
                         __m512 sums[R]) {
    __m512i columns[kLanes];
    const uint16_t* weight = p.weight + output * p.in + k;
    const __mmask32 mask = __mmask32((uint64_t(1) << std::min<int64_t>(kStep, inputs)) - 1);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
        const uint16_t* row = weight + std::min<int64_t>(i, outputs - 1) * p.in;  // a row too many is not stored
        if constexpr (Whole) {
            columns[i] = _mm512_loadu_si512(row);
            _mm_prefetch(reinterpret_cast<const char*>(row + rows.fetch_ahead), _MM_HINT_T1);
        } else {
            columns[i] = _mm512_maskz_loadu_epi16(mask, row);
        }
    }
    transpose(columns);
    const uint32_t* x = rows.pairs + k / 2;
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
        if (!Whole && 2 * i >= inputs) break;
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r)
            sums[r] = _mm512_dpbf16_ps(sums[r], (__m512bh)columns[i],
                                       (__m512bh)_mm512_set1_epi32(int(x[r * rows.pair_stride + i])));
    }
}

template <int R>
inline void store(const Problem& p, int64_t first_row, int64_t output, int64_t outputs, const __m512 sums[R]) {
    const __mmask16 mask = __mmask16((1u << std::min<int64_t>(outputs, kLanes)) - 1);
    for (int r = 0; r < R; ++r) {
        __m512 sum = sums[r];
        if (p.bias) {
            const __m512i bias = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p.bias + output));
            sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_slli_epi32(bias, 16)));
        }
        uint16_t* y = p.y + (first_row + r) * p.y_stride + output;
        _mm256_mask_storeu_epi16(y, mask, (__m256i)_mm512_cvtneps_pbh(sum));
    }
}

// R rows and 16 outputs, of which `outputs` are there.
template <int R>
void run_vector(const Problem& p, const Rows& rows, int64_t output, int64_t outputs) {
    __m512 totals[R];
    for (int64_t begin = 0; begin < p.in; begin += p.sum_block) {
        const int64_t end = std::min(p.in, begin + p.sum_block);
        __m512 sums[R];
        for (int r = 0; r < R; ++r) sums[r] = _mm512_setzero_ps();
        int64_t k = begin;
        if (outputs >= kLanes)
            for (; k + kStep <= end; k += kStep) add_products<R, true>(p, rows, output, kLanes, k, kStep, sums);
        for (; k < end; k += kStep) add_products<R, false>(p, rows, output, outputs, k, end - k, sums);
        for (int r = 0; r < R; ++r) totals[r] = begin == 0 ? sums[r] : _mm512_add_ps(totals[r], sums[r]);
    }
    store<R>(p, rows.first, output, outputs, totals);
}

template <int R>
void run_outputs(const Problem& p, const Rows& rows, int64_t begin, int64_t end) {
    for (int64_t output = begin; output < end; output += kLanes) run_vector<R>(p, rows, output, end - output);
}

void run_rows(const Problem& p, const Rows& rows, int64_t count, int64_t begin, int64_t end) {
    switch (count) {
        case 1: return run_outputs<1>(p, rows, begin, end);
        case 2: return run_outputs<2>(p, rows, begin, end);
        case 3: return run_outputs<3>(p, rows, begin, end);
        case 4: return run_outputs<4>(p, rows, begin, end);
        case 5: return run_outputs<5>(p, rows, begin, end);
        case 6: return run_outputs<6>(p, rows, begin, end);
        case 7: return run_outputs<7>(p, rows, begin, end);
        case 8: return run_outputs<8>(p, rows, begin, end);
        case 9: return run_outputs<9>(p, rows, begin, end);
        case 10: return run_outputs<10>(p, rows, begin, end);
        case 11: return run_outputs<11>(p, rows, begin, end);
        default: return run_outputs<kMostRows>(p, rows, begin, end);
    }
}

}  // namespace

void run_avx512bf16(const Problem& p, int threads) {
    const int64_t pair_stride = (p.in + 1) / 2;
    std::vector<uint32_t> pairs(size_t(p.rows) * size_t(pair_stride));
    for (int64_t row = 0; row < p.rows; ++row)
        __builtin_memcpy(pairs.data() + row * pair_stride, p.x + row * p.x_stride, size_t(p.in) * sizeof(uint16_t));
    const int64_t passes = (p.rows + kMostRows - 1) / kMostRows, most = (p.rows + passes - 1) / passes;
    // The next tile's weights are fetched meanwhile, or the next inputs' where the core could not keep a tile.
    const int64_t tile_weights = kTileOutputs * p.in, tile_bytes = tile_weights * int64_t(sizeof(uint16_t));
    const int64_t fetch_ahead = tile_bytes <= kOwnCacheBytes ? tile_weights : kNearInputs;
    const int64_t tiles = (p.out + kTileOutputs - 1) / kTileOutputs;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t begin = tile * kTileOutputs, end = std::min(p.out, begin + kTileOutputs);
        // A later pass finds the tile's weights in the cache.
        for (int64_t row = 0; row < p.rows; row += most)
            run_rows(p, {pairs.data() + row * pair_stride, pair_stride, row, fetch_ahead},
                     std::min(most, p.rows - row), begin, end);
    }
}

}  // namespace nanovllm::linear
#endif
