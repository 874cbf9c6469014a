// Blocks of quantised weights to 16-bit integers, scales and minimums. Included by cpu_packed_kernel.h.
//
// The order of a group's pairs is that of PackedKernel::store_group: words of four bytes give the pair of bytes 0 and 2, then
// of bytes 1 and 3; of 4-bit weights the low halves and the high halves each do so.

template <class X>
class Expand {
    using V = typename X::V;
    using F = typename X::F;
    using S = typename X::S;
    using H = typename X::H;
    using B = typename X::B;
    static constexpr int W = X::W;

  public:
    static void run(const Weight& w, int64_t panel, int64_t block, int64_t blocks, const Part& part, int64_t at) {
        const Layout& layout = w.layout();
        const int64_t groups = layout.block_inputs / layout.group, first = at * part.groups;
        const uint8_t* tile = w.data + (panel * w.blocks() + block) * layout.tile_bytes;
        for (int64_t b = 0; b < blocks; ++b, tile += layout.tile_bytes) {
            const int64_t group = first + b * groups;
            const Target target{part.words + group * part.planes * part.pairs * kOutputs,
                                part.scales + group * part.planes * kOutputs,
                                part.minimums ? part.minimums + group * kOutputs : nullptr};
            __builtin_prefetch(tile + kFetchAhead, 0, 2);
            for (int lane = 0; lane < kOutputs; lane += W)
                expand_block(w, tile, {panel, block + b, lane}, target);
        }
    }

  private:
    static constexpr int64_t kFetchAhead = 2048;

    struct Target {
        uint32_t* words;
        float *scales, *minimums;
    };
    struct Position {
        int64_t panel, block;
        int lane;
    };

    static void expand_block(const Weight& w, const uint8_t* tile, const Position& at, const Target& to) {
        switch (w.scheme) {
            case Scheme::int4: nibbles(tile, at.lane, to.words); return own_scales(w, at, to);
            case Scheme::int8: bytes(tile, at.lane, to.words); return own_scales(w, at, to);
            case Scheme::fp8: fp8_values(tile, at.lane, to.words); return own_scales(w, at, to);
            case Scheme::q4_0: nibbles(tile + 32, at.lane, to.words); return halves(tile, at.lane, to);
            case Scheme::q8_0: bytes(tile + 32, at.lane, to.words); return halves(tile, at.lane, to);
            case Scheme::q4_1: return q4_1(tile, at.lane, to);
            case Scheme::q4_k: q4_k(tile + 4 * 64, at.lane, to.words); return k_scales(tile, at.lane, to);
            case Scheme::q5_k: q5_k(tile + 4 * 64, at.lane, to.words); return k_scales(tile, at.lane, to);
            case Scheme::q6_k: return q6_k(tile, at.lane, to);
        }
    }

    // ---- integers

    // Word i of the outputs from `lane` on; a tile has 64 bytes for word i of all its outputs.
    static V word(const uint8_t* words, int i, int lane) { return load_at<V>(words + i * 64 + lane * 4); }
    static void store(uint32_t* words, int pair, int lane, V v) {
        std::memcpy(words + pair * kOutputs + lane, &v, sizeof(v));
    }
    static constexpr int32_t kNibbles = 0x000f000f;

    // 32 weights in four words: low halves are the first 16, high halves the others.
    static void nibbles(const uint8_t* source, int lane, uint32_t* words) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const V v = word(source, i, lane);
            store(words, 2 * i, lane, v & kNibbles);
            store(words, 2 * i + 1, lane, v >> 8 & kNibbles);
            store(words, 8 + 2 * i, lane, v >> 4 & kNibbles);
            store(words, 8 + 2 * i + 1, lane, v >> 12 & kNibbles);
        }
    }

    static void bytes(const uint8_t* source, int lane, uint32_t* words) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            const S v = S(word(source, i, lane));
            store(words, 2 * i, lane, V(S(v << 8) >> 8));
            store(words, 2 * i + 1, lane, V(v >> 8));
        }
    }

    // A weight is 2^-9 * (2048 * high + low), integers of at most 7 and 11 bits: the high plane, then the low one.
    static void fp8_values(const uint8_t* source, int lane, uint32_t* words) {
        for (int i = 0; i < 8; ++i) {
            const V v = word(source, i, lane);
            fp8_pair(v & 0x00ff00ff, words + 2 * i * kOutputs, lane);
            fp8_pair(v >> 8 & 0x00ff00ff, words + (2 * i + 1) * kOutputs, lane);
        }
    }
    static void fp8_pair(V v, uint32_t* words, int lane) {
        const S bits = S(v), exponent = bits >> 3 & 15, sign = S(bits << 8) >> 15;
        const S normal = exponent > 0, shift = exponent + normal;  // normal: -1 where it is, else 0
        const S fraction = (bits & 7) + (normal & 8);
        const S high = (fraction << 3) >> (14 - shift), low = (fraction << shift) & 2047;
        store(words, 0, lane, V((high ^ sign) - sign));
        store(words, 16, lane, V((low ^ sign) - sign));
    }

    // Eight groups of 32: the low halves of each 32 bytes are a group, the high halves the next.
    static void q4_k(const uint8_t* source, int lane, uint32_t* words) {
        for (int c = 0; c < 4; ++c, words += 32 * kOutputs)
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) {
                const V v = word(source, 8 * c + i, lane);
                store(words, 2 * i, lane, v & kNibbles);
                store(words, 2 * i + 1, lane, v >> 8 & kNibbles);
                store(words, 16 + 2 * i, lane, v >> 4 & kNibbles);
                store(words, 16 + 2 * i + 1, lane, v >> 12 & kNibbles);
            }
    }

    // As q4_k, with bit j of 32 bytes before them as the fifth bit of group j.
    static void q5_k(const uint8_t* source, int lane, uint32_t* words) {
        constexpr int32_t kFifth = 0x00100010;
        for (int c = 0; c < 4; ++c, words += 32 * kOutputs)
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) {
                const V v = word(source, 8 + 8 * c + i, lane), fifth = word(source, i, lane) >> (2 * c);
                store(words, 2 * i, lane, (v & kNibbles) | (fifth << 4 & kFifth));
                store(words, 2 * i + 1, lane, (v >> 8 & kNibbles) | (fifth >> 4 & kFifth));
                store(words, 16 + 2 * i, lane, (v >> 4 & kNibbles) | (fifth << 3 & kFifth));
                store(words, 16 + 2 * i + 1, lane, (v >> 12 & kNibbles) | (fifth >> 5 & kFifth));
            }
    }

    // Two halves of 128 weights: quarters of 32, the first two in the low halves of 64 bytes, the others in the high
    // halves; the fifth and sixth bits of quarter r are bits 2r and 2r + 1 of 32 bytes. Scales are of 16 weights.
    static void q6_k(const uint8_t* tile, int lane, const Target& to) {
        constexpr int32_t kHigh = 0x00300030;
        const uint8_t* source = tile + 32;
        for (int h = 0; h < 2; ++h)
            for (int r = 0; r < 4; ++r)
#pragma GCC unroll 8
                for (int i = 0; i < 8; ++i) {
                    const V v = word(source, 16 * h + 8 * (r % 2) + i, lane) >> (r / 2 * 4);
                    const V high = word(source, 32 + 8 * h + i, lane) >> (2 * r);
                    uint32_t* words = to.words + (64 * h + 16 * r) * kOutputs;
                    store(words, 2 * i, lane, (v & kNibbles) | (high << 4 & kHigh));
                    store(words, 2 * i + 1, lane, (v >> 8 & kNibbles) | (high >> 4 & kHigh));
                }
        const F d = half_at(tile, lane);
        for (int g = 0; g < 16; ++g) {
            const V scale = word(source, 48 + g / 4, lane) << (24 - g % 4 * 8) >> 24;
            put(to.scales + g * kOutputs, lane, d * __builtin_convertvector(scale, F));
        }
    }

    // ---- scales

    static void put(float* target, int lane, F v) { std::memcpy(target + lane, &v, sizeof(v)); }
    static F half_at(const void* halves, int lane) {
        return X::half(__builtin_convertvector(load_at<H>(static_cast<const uint16_t*>(halves) + lane), V));
    }
    static void halves(const uint8_t* tile, int lane, const Target& to) { put(to.scales, lane, half_at(tile, lane)); }

    static void q4_1(const uint8_t* tile, int lane, const Target& to) {
        const V both = word(tile, 0, lane);
        put(to.scales, lane, X::half(both & 0xffff));
        put(to.minimums, lane, X::half(both >> 16 & 0xffff));
        nibbles(tile + 64, lane, to.words);
    }

    // Six bits each of scale and minimum: nanovllm/ops/packed_weights.py says where they lie.
    static void k_scales(const uint8_t* tile, int lane, const Target& to) {
        const V both = word(tile, 0, lane), first = word(tile, 1, lane), second = word(tile, 2, lane),
                low = word(tile, 3, lane);
        const F d = X::half(both & 0xffff), dmin = X::half(both >> 16 & 0xffff);
        for (int g = 0; g < 8; ++g) {
            const int at = g % 4 * 8;
            const V scale = g < 4 ? first >> at & 63 : (low >> at & 15) | (first >> (at + 2) & 48);
            const V minimum = g < 4 ? second >> at & 63 : (low >> (at + 4) & 15) | (second >> (at + 2) & 48);
            put(to.scales + g * kOutputs, lane, d * __builtin_convertvector(scale, F));
            put(to.minimums + g * kOutputs, lane, -(dmin * __builtin_convertvector(minimum, F)));
        }
    }

    // Scales, and zeros if there are any, that lie apart from the data.
    static void own_scales(const Weight& w, const Position& at, const Target& to) {
        const int64_t scale_groups = (w.in + w.group_size - 1) / w.group_size;
        const int64_t first = (at.panel * scale_groups + at.block * 32 / w.group_size) * kOutputs + at.lane;
        F scale;
        if (w.scale_dtype == DType::fp32)
            scale = load_at<F>(static_cast<const float*>(w.scales) + first);
        else if (w.scale_dtype == DType::fp16)
            scale = half_at(static_cast<const uint16_t*>(w.scales) + first, 0);
        else
            scale = bf16_at(static_cast<const uint16_t*>(w.scales) + first);
        if (w.scheme == Scheme::fp8) {
            put(to.scales, at.lane, scale * 0x1p2f);
            put(to.scales + kOutputs, at.lane, scale * 0x1p-9f);
            return;
        }
        put(to.scales, at.lane, scale);
        if (!w.zeros) return;
        const V zero = __builtin_convertvector(load_at<B>(w.zeros + first), V);
        put(to.minimums, at.lane, -(__builtin_convertvector(zero, F) * scale));
    }
    static F bf16_at(const uint16_t* p) {
        return F(__builtin_convertvector(load_at<H>(p), V) << 16);
    }
};
