// Blocks of quantised weights to 16-bit integers, scales and minimums, W outputs at a time. Included by cpu_packed_kernel.h.
//
// A block goes to a target, which has two places for groups: `begin<place>`, then `add<place>(pair, v)` for each pair of the
// group, then `finish<place>(scale)` or `finish<place>(scale, minimum)`; then `next<places>(pairs)`. `add<place, x_place>`
// names the place of the group's inputs where that is another.
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

  public:
    // Blocks [block, block + blocks) of the outputs of a panel from `lane` on.
    template <class Target>
    static void run(const Weight& w, int64_t panel, int64_t block, int64_t blocks, int lane, Target& to) {
        const uint8_t* tile = w.data + (panel * w.blocks() + block) * w.layout().tile_bytes;
        const auto each = [&](const auto& expand) {
            for (int64_t b = 0; b < blocks; ++b, tile += w.layout().tile_bytes) expand(tile);
        };
        OwnScales own(w, panel, block, lane);
        switch (w.scheme) {
            case Scheme::int4: return each([&](const uint8_t* t) { int4(t, lane, own, to); });
            case Scheme::int8: return each([&](const uint8_t* t) { int8(t, lane, own, to); });
            case Scheme::fp8: return each([&](const uint8_t* t) { fp8(t, lane, own, to); });
            case Scheme::q4_0: return each([&](const uint8_t* t) { q4_0(t, lane, to); });
            case Scheme::q4_1: return each([&](const uint8_t* t) { q4_1(t, lane, to); });
            case Scheme::q8_0: return each([&](const uint8_t* t) { q8_0(t, lane, to); });
            case Scheme::q4_k: return each([&](const uint8_t* t) { q4_k(t, lane, to); });
            case Scheme::q5_k: return each([&](const uint8_t* t) { q5_k(t, lane, to); });
            case Scheme::q6_k: return each([&](const uint8_t* t) { q6_k(t, lane, to); });
        }
    }

  private:
    // Scales, and zeros if there are any, that lie apart from the data.
    class OwnScales {
      public:
        OwnScales(const Weight& w, int64_t panel, int64_t block, int lane) : w_(w) {
            if (!w.scales) return;
            const int64_t groups = (w.in + w.group_size - 1) / w.group_size, group = block * 32 / w.group_size;
            at_ = shared() ? panel * kOutputs / w.outputs_per_scale * groups + group
                           : (panel * groups + group) * kOutputs + lane;
            left_ = (group + 1) * w.group_size - block * 32;
        }
        F scale() const {
            if (shared()) return F{} + static_cast<const float*>(w_.scales)[at_];
            if (w_.scale_dtype == DType::fp32) return load_at<F>(static_cast<const float*>(w_.scales) + at_);
            const uint16_t* scales = static_cast<const uint16_t*>(w_.scales) + at_;
            if (w_.scale_dtype == DType::fp16) return X::halves(scales);
            return F(__builtin_convertvector(load_at<H>(scales), V) << 16);
        }
        template <class Target>
        void finish(Target& to) {
            const F scale = this->scale();
            if (!w_.zeros) return to.template finish<0>(scale);
            const V zero = __builtin_convertvector(load_at<B>(w_.zeros + at_), V);
            to.template finish<0>(scale, -(__builtin_convertvector(zero, F) * scale));
        }
        void next() {
            left_ -= 32;
            if (left_ <= 0) at_ += shared() ? 1 : kOutputs, left_ += w_.group_size;
        }

      private:
        bool shared() const { return w_.outputs_per_scale > 1; }

        const Weight& w_;
        int64_t at_ = 0, left_ = 0;  // inputs until the next scale
    };

    // Word i of the outputs from `lane` on; a tile has 64 bytes for word i of all its outputs.
    static V word(const uint8_t* words, int i, int lane) { return load_at<V>(words + i * 64 + lane * 4); }
    static constexpr int32_t kNibbles = 0x000f000f;

    // ---- groups of 32 weights

    // Four words: low halves are the first 16 weights, high halves the others.
    template <class Target>
    static void nibbles(const uint8_t* source, int lane, Target& to) {
        to.template begin<0>();
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const V v = word(source, i, lane);
            to.template add<0>(2 * i, v & kNibbles);
            to.template add<0>(2 * i + 1, v >> 8 & kNibbles);
            to.template add<0>(8 + 2 * i, v >> 4 & kNibbles);
            to.template add<0>(8 + 2 * i + 1, v >> 12 & kNibbles);
        }
    }

    template <class Target>
    static void bytes(const uint8_t* source, int lane, Target& to) {
        to.template begin<0>();
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            const S v = S(word(source, i, lane));
            to.template add<0>(2 * i, V(S(v << 8) >> 8));
            to.template add<0>(2 * i + 1, V(v >> 8));
        }
    }

    template <class Target>
    static void int4(const uint8_t* tile, int lane, OwnScales& own, Target& to) {
        nibbles(tile, lane, to);
        own.finish(to);
        own.next();
        to.template next<1>(16);
    }

    template <class Target>
    static void int8(const uint8_t* tile, int lane, OwnScales& own, Target& to) {
        bytes(tile, lane, to);
        own.finish(to);
        own.next();
        to.template next<1>(16);
    }

    // A weight is 2^-9 * (2048 * high + low), integers of at most 8 and 11 bits, which count as two weights of the same input.
    // low is not negative, so rounding is relative to the weight's size plus 8.
    template <class Target>
    static void fp8(const uint8_t* tile, int lane, OwnScales& own, Target& to) {
        to.template begin<0>();
        to.template begin<1, 0>();
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            const V v = word(tile, i, lane);
            fp8_pair(fp8_integer(v << 24), fp8_integer(v << 8), 2 * i, to);
            fp8_pair(fp8_integer(v << 16), fp8_integer(v), 2 * i + 1, to);
        }
        const F scale = own.scale();
        own.next();
        to.template finish<0>(scale * 0x1p2f);
        to.template finish<1, 0>(scale * 0x1p-9f);
        to.template next<2, 1>(16);
    }
    // 2^9 times the number in the highest byte of each lane, an integer of at most 18 bits and the sign.
    static V fp8_integer(V v) {
        const V magnitude = v >> 24 & 127, sign = v >> 31;
        const V large = ((magnitude & 7) | 8) << ((magnitude >> 3) - 1);
        const V value = magnitude < 16 ? magnitude : large;
        return (value ^ sign) - sign;
    }
    template <class Target>
    static void fp8_pair(V first, V second, int pair, Target& to) {
        to.template add<0>(pair, (first >> 11 & 0xffff) | (second >> 11 << 16));
        to.template add<1, 0>(pair, (first & 2047) | (second & 2047) << 16);
    }

    template <class Target>
    static void q4_0(const uint8_t* tile, int lane, Target& to) {
        nibbles(tile + 32, lane, to);
        to.template finish<0>(X::halves(tile + 2 * lane));
        to.template next<1>(16);
    }

    template <class Target>
    static void q8_0(const uint8_t* tile, int lane, Target& to) {
        bytes(tile + 32, lane, to);
        to.template finish<0>(X::halves(tile + 2 * lane));
        to.template next<1>(16);
    }

    template <class Target>
    static void q4_1(const uint8_t* tile, int lane, Target& to) {
        nibbles(tile + 64, lane, to);
        const V both = word(tile, 0, lane);
        to.template finish<0>(X::half(both & 0xffff), X::half(both >> 16 & 0xffff));
        to.template next<1>(16);
    }

    // ---- blocks of 256 weights

    // Six bits each of scale and minimum of eight groups: nanovllm/ops/packed_weights.py says where they lie.
    struct KScales {
        F scales[8], minimums[8];

        KScales(const uint8_t* tile, int lane) {
            const V both = word(tile, 0, lane), first = word(tile, 1, lane), second = word(tile, 2, lane),
                    low = word(tile, 3, lane);
            const F d = X::half(both & 0xffff), dmin = -X::half(both >> 16 & 0xffff);
#pragma GCC unroll 8
            for (int g = 0; g < 8; ++g) {
                const int at = g % 4 * 8;
                const V scale = g < 4 ? first >> at & 63 : (low >> at & 15) | (first >> (at + 2) & 48);
                const V minimum = g < 4 ? second >> at & 63 : (low >> (at + 4) & 15) | (second >> (at + 2) & 48);
                scales[g] = d * __builtin_convertvector(scale, F);
                minimums[g] = dmin * __builtin_convertvector(minimum, F);
            }
        }
    };

    // Eight groups of 32: the low halves of each 32 bytes are a group, the high halves the next.
    template <class Target>
    static void q4_k(const uint8_t* tile, int lane, Target& to) {
        const KScales of(tile, lane);
        for (int c = 0; c < 4; ++c) {
            to.template begin<0>();
            to.template begin<1>();
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) {
                const V v = word(tile, 4 + 8 * c + i, lane);
                to.template add<0>(2 * i, v & kNibbles);
                to.template add<0>(2 * i + 1, v >> 8 & kNibbles);
                to.template add<1>(2 * i, v >> 4 & kNibbles);
                to.template add<1>(2 * i + 1, v >> 12 & kNibbles);
            }
            to.template finish<0>(of.scales[2 * c], of.minimums[2 * c]);
            to.template finish<1>(of.scales[2 * c + 1], of.minimums[2 * c + 1]);
            to.template next<2>(16);
        }
    }

    // As q4_k, with bit j of 32 bytes before them as the fifth bit of group j.
    template <class Target>
    static void q5_k(const uint8_t* tile, int lane, Target& to) {
        constexpr int32_t kFifth = 0x00100010;
        const KScales of(tile, lane);
        for (int c = 0; c < 4; ++c) {
            to.template begin<0>();
            to.template begin<1>();
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) {
                const V v = word(tile, 12 + 8 * c + i, lane), fifth = word(tile, 4 + i, lane) >> (2 * c);
                to.template add<0>(2 * i, (v & kNibbles) | (fifth << 4 & kFifth));
                to.template add<0>(2 * i + 1, (v >> 8 & kNibbles) | (fifth >> 4 & kFifth));
                to.template add<1>(2 * i, (v >> 4 & kNibbles) | (fifth << 3 & kFifth));
                to.template add<1>(2 * i + 1, (v >> 12 & kNibbles) | (fifth >> 5 & kFifth));
            }
            to.template finish<0>(of.scales[2 * c], of.minimums[2 * c]);
            to.template finish<1>(of.scales[2 * c + 1], of.minimums[2 * c + 1]);
            to.template next<2>(16);
        }
    }

    // Two halves of 128 weights: quarters of 32, the first two in the low halves of 64 bytes, the others in the high
    // halves; the fifth and sixth bits of quarter r are bits 2r and 2r + 1 of 32 bytes. Scales are of 16 weights.
    template <class Target>
    static void q6_k(const uint8_t* tile, int lane, Target& to) {
        constexpr int32_t kHigh = 0x00300030;
        const F d = X::halves(tile + 2 * lane);
        tile += 32;
        for (int g = 0; g < 16; ++g) {
            const int h = g / 8, r = g % 8 / 2, first = g % 2 * 4;
            to.template begin<0>();
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                const V v = word(tile, 16 * h + 8 * (r % 2) + first + i, lane) >> (r / 2 * 4);
                const V high = word(tile, 32 + 8 * h + first + i, lane) >> (2 * r);
                to.template add<0>(2 * i, (v & kNibbles) | (high << 4 & kHigh));
                to.template add<0>(2 * i + 1, (v >> 8 & kNibbles) | (high >> 4 & kHigh));
            }
            const V scale = word(tile, 48 + g / 4, lane) << (24 - g % 4 * 8) >> 24;
            to.template finish<0>(d * __builtin_convertvector(scale, F));
            to.template next<1>(8);
        }
    }
};
