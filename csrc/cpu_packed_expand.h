// Blocks of quantised weights to bytes or fp32, scales and minimums, W outputs at a time. Included by cpu_packed_kernel.h.
//
// A block goes to a target, group after group: `group<Signed, Words>(n)` is the nth group from here, whose `add(i, v)` takes
// word i, four weights of each output in a byte each, and `finish(scale)` or `finish(scale, minimum)` what it is multiplied
// with. `floats()` is a group whose `add(i, w)` takes input i in fp32. Then `next` passes on. A group is a local variable, so
// that its sums stay in registers.

template <class X>
class Expand {
    using V = typename X::V;
    using F = typename X::F;
    using S = typename X::S;
    using H = typename X::H;
    using B = typename X::B;
    static constexpr int W = X::W;
    static constexpr int kFetched = 4096;  // bytes ahead of where weights are read

  public:
    // Blocks [block, block + blocks) of the outputs of a panel from `lane` on.
    template <class Target>
    static void run(const Weight& w, int64_t panel, int64_t block, int64_t blocks, int lane, Target& to) {
        const uint8_t* tile = w.data + (panel * w.blocks() + block) * w.layout().tile_bytes;
        OwnScales own(w, panel, block, lane);
        switch (w.scheme) {
            case Scheme::int4:
            case Scheme::q4_0:
            case Scheme::q4_1: return integers<Kind::nibbles>(w, tile, blocks, lane, own, to);
            case Scheme::q5_0:
            case Scheme::q5_1: return integers<Kind::nibbles_and_fifths>(w, tile, blocks, lane, own, to);
            case Scheme::int8: return integers<Kind::bytes>(w, tile, blocks, lane, own, to);
            case Scheme::q8_0: return integers<Kind::scaled_bytes>(w, tile, blocks, lane, own, to);
            case Scheme::fp8: return each<Scheme::fp8>(tile, blocks, lane, own, to);
            case Scheme::mxfp4: return each<Scheme::mxfp4>(tile, blocks, lane, own, to);
            case Scheme::q4_k: return each<Scheme::q4_k>(tile, blocks, lane, own, to);
            case Scheme::q5_k: return each<Scheme::q5_k>(tile, blocks, lane, own, to);
            case Scheme::q6_k: return each<Scheme::q6_k>(tile, blocks, lane, own, to);
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
            if (shared()) return static_cast<const float*>(w_.scales)[at_] - F{};
            if (w_.scale_dtype == DType::fp32) return load_at<F>(static_cast<const float*>(w_.scales) + at_);
            const uint16_t* scales = static_cast<const uint16_t*>(w_.scales) + at_;
            if (w_.scale_dtype == DType::fp16) return X::halves(scales);
            return F(__builtin_convertvector(load_at<H>(scales), V) << 16);
        }
        // 2^(code - 128) of a byte: half of the scale that it stands for. Of codes 0 and 1 the power is subnormal.
        F half_of_power() const {
            const V code = __builtin_convertvector(load_at<B>(static_cast<const uint8_t*>(w_.scales) + at_), V) & 255;
            const V is_normal = code > 1;
            return F((is_normal & (code - 1) << 23) | (~is_normal & (code + 1) * 0x00200000));
        }
        // Of integers with zeros: what their zeros are multiplied with.
        F minimum(F scale) const {
            const V zero = __builtin_convertvector(load_at<B>(w_.zeros + at_), V);
            return -(__builtin_convertvector(zero, F) * scale);
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

    // This and `integers` are not inlined, since a function of twice the size takes more than twice as long to compile.
    // Scales and target are copied: only local variables are kept in registers.
    template <Scheme K, class Target>
    [[gnu::noinline]] static void each(const uint8_t* tile, int64_t blocks, int lane, OwnScales own, Target& target) {
        constexpr Layout kLayout = kLayouts[int(K)];
        Target to = target;
        for (int64_t b = 0; b < blocks; ++b, tile += kLayout.tile_bytes) {
            if constexpr (K == Scheme::fp8)
                fp8(tile, lane, own, to);
            else if constexpr (K == Scheme::mxfp4)
                mxfp4(tile, lane, own, to);
            else if constexpr (K == Scheme::q4_k || K == Scheme::q5_k)
                q45_k<K == Scheme::q5_k>(tile, lane, to);
            else
                q6_k(tile, lane, to);
        }
        target = to;
    }

    // Word i of the outputs from `lane` on; a tile has 64 bytes for word i of all its outputs.
    static V word(const uint8_t* words, int i, int lane) { return load_at<V>(words + i * 64 + lane * 4); }

    // Fetches part n of so many bytes of those to come, in turn with the work on these. The processor itself reads ahead to
    // the end of a page only, and begins anew with the next one. `words` is what these are read by: the compiler would
    // otherwise collect all fetches at one place, where they wait for each other.
    template <int Bytes, int Parts>
    [[gnu::always_inline]] static void fetch(const uint8_t*& words, const uint8_t* at, int n, int lane) {
        constexpr int kLines = (Bytes + 63) / 64;
        if (lane > 0) return;  // they were fetched for the first lanes
#pragma GCC unroll 8
        for (int line = n * kLines / Parts; line < (n + 1) * kLines / Parts; ++line) {
#if defined(__x86_64__)
            asm("prefetcht0 %1" : "+r"(words) : "m"(at[kFetched + line * 64]));
#else
            __builtin_prefetch(at + kFetched + line * 64);
#endif
        }
    }
    // Bits move up, or down if `by` is negative; those of other bytes are to be masked.
    static V moved(V v, int by) { return by >= 0 ? v << by : v >> -by; }
    static constexpr int32_t kNibbles = 0x0f0f0f0f, kFifthBits = 0x10101010;

    // ---- groups of 32 weights

    // The last words of a tile are bytes; or of 4 bits four words, whose low halves are the first 16 weights. Of 5 bits a
    // word before these has the fifth bits: bit i of byte j is that of weight 4i + j. Whether nibbles have scales or
    // minimums before these words, or apart, is asked once for each group. Bytes with scales before them have code of their
    // own: being asked makes a single row of them a quarter slower.
    enum class Kind { bytes, scaled_bytes, nibbles, nibbles_and_fifths };

    template <Kind K, class Target>
    [[gnu::noinline]] static void integers(const Weight& w, const uint8_t* tile, int64_t blocks, int lane,
                                           OwnScales own, Target& target) {
        constexpr bool kScaledBytes = K == Kind::scaled_bytes, kBytes = kScaledBytes || K == Kind::bytes;
        constexpr bool kFifths = K == Kind::nibbles_and_fifths;
        constexpr int kWords = kBytes ? 8 : 4, kMostBytes = kScaledBytes ? 544 : kBytes ? 512 : kFifths ? 384 : 320;
        const int64_t tile_bytes = kScaledBytes ? kLayouts[int(Scheme::q8_0)].tile_bytes : w.layout().tile_bytes;
        const bool apart = K == Kind::bytes || (K == Kind::nibbles && w.scales);
        const bool minimums = !kScaledBytes && w.has_minimums();
        Target to = target;
        const uint8_t* words = tile + tile_bytes - kWords * 64;
        for (int64_t b = 0; b < blocks; ++b, words += tile_bytes) {
            const uint8_t* const scales = words - (kFifths ? 64 : 0);  // where they end
            const V fifths = kFifths ? word(scales, 0, lane) : V{};
            auto group = to.template group<kBytes, 8>(0);
#pragma GCC unroll 8
            for (int i = 0; i < kWords; ++i) {
                fetch<kMostBytes, kWords>(words, words, i, lane);
                const V v = word(words, i, lane);
                const V low = kBytes ? v : v & kNibbles;
                group.add(i, kFifths ? low | (moved(fifths, 4 - i) & kFifthBits) : low);
                if constexpr (!kBytes) {
                    const V high = v >> 4 & kNibbles;
                    group.add(4 + i, kFifths ? high | (moved(fifths, -i) & kFifthBits) : high);
                }
            }
            F scale, minimum{};
            if (apart) {
                scale = own.scale();
                if (minimums) minimum = own.minimum(scale);
                own.next();
            } else if (!kBytes && minimums) {
                const V both = word(scales - 64, 0, lane);
                scale = X::half(both & 0xffff), minimum = X::half(both >> 16 & 0xffff);
            } else {
                scale = X::halves(scales - 32 + 2 * lane);
            }
            minimums ? group.finish(scale, minimum) : group.finish(scale);
            to.template next<8>(1);
        }
        target = to;
    }

    // As int4, but four bits are a number of fp4 (e2m1). Its double plus 12 is an integer from a table.
    template <class Target>
    [[gnu::always_inline]] static void mxfp4(const uint8_t* tile, int lane, OwnScales& own, Target& to) {
        static constexpr uint8_t kDoubled[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
        auto group = to.template group<false, 8>(0);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            fetch<256, 4>(tile, tile, i, lane);
            const V v = word(tile, i, lane);
            group.add(i, X::lookup(kDoubled, v & kNibbles));
            group.add(4 + i, X::lookup(kDoubled, v >> 4 & kNibbles));
        }
        group.finish(own.half_of_power());
        own.next();
        to.template next<8>(1);
    }

    // Eight times 64 bytes, of four inputs each: inputs 0 and 2 of each output in turn, then inputs 1 and 3. The sign and the
    // other seven bits of an fp8 number, six places further down, are 2^-8 times as large as a number in fp16.
    template <class Target>
    [[gnu::always_inline]] static void fp8(const uint8_t* tile, int lane, OwnScales& own, Target& to) {
        auto group = to.floats();
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            const uint8_t* line = tile + i * 64 + lane * 2;
            fetch<512, 8>(tile, tile, i, lane);
            S v;
            if constexpr (W == kOutputs) {
                v = load_at<S>(line);
            } else {
                const H halves[2] = {load_at<H>(line), load_at<H>(line + 32)};
                v = load_at<S>(halves);
            }
            S numbers[2] = {S(S(v << 8) >> 1) & kFp8, S(v >> 1) & kFp8};
            asm("" : "+m"(numbers));  // read back from memory they need not be taken apart
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) group.add(4 * i + j, X::halves(reinterpret_cast<const uint16_t*>(numbers) + j * W));
        }
        group.finish(own.scale() * 0x1p8f);
        own.next();
        to.next_floats();
    }
    static constexpr int16_t kFp8 = int16_t(0xbf80);

    // ---- blocks of 256 weights

    // Six bits each of scale and minimum of eight groups: nanovllm/ops/packed_weights.py says where they lie.
    struct KScales {
        F scales[8], minimums[8];

        KScales(const uint8_t* tile, int lane) {
            constexpr int32_t kSix = 0x3f3f3f3f, kHigh = 0x30303030;
            const V both = word(tile, 0, lane), first = word(tile, 1, lane), second = word(tile, 2, lane),
                    low = word(tile, 3, lane);
            const F d = X::half(both & 0xffff), dmin = -X::half(both >> 16 & 0xffff);
            each_byte(first & kSix, d, scales);
            each_byte((low & kNibbles) | (first >> 2 & kHigh), d, scales + 4);
            each_byte(second & kSix, dmin, minimums);
            each_byte((low >> 4 & kNibbles) | (second >> 2 & kHigh), dmin, minimums + 4);
        }
        static void each_byte(V bytes, F factor, F* to) {
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) to[i] = factor * __builtin_convertvector(bytes >> 8 * i & 63, F);
        }
    };

    // Eight groups of 32: the low halves of each 32 bytes are a group, the high halves the next. Of Q5_K, bit j of 32 bytes
    // before them is the fifth bit of group j, whose place is known where the loop over the groups is unrolled.
    template <bool Fifth, class Target>
    [[gnu::always_inline]] static void q45_k(const uint8_t* tile, int lane, Target& to) {
        const KScales of(tile, lane);
        if constexpr (Fifth) {
#pragma GCC unroll 4
            for (int c = 0; c < 4; ++c) two_groups<true>(of, tile, c, lane, to);
        } else {
#pragma GCC unroll 1
            for (int c = 0; c < 4; ++c) two_groups<false>(of, tile, c, lane, to);
        }
    }
    template <bool Fifth, class Target>
    [[gnu::always_inline]] static void two_groups(const KScales& of, const uint8_t* tile, int c, int lane, Target& to) {
        constexpr int kBytes = Fifth ? 2816 / 4 : 2304 / 4;  // a quarter of the tile
        auto low = to.template group<false, 8>(0), high = to.template group<false, 8>(1);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            fetch<kBytes, 8>(tile, tile + c * kBytes, i, lane);
            const V v = word(tile, (Fifth ? 12 : 4) + 8 * c + i, lane);
            V fifths[2] = {};
            if constexpr (Fifth) {
                const V bits = word(tile, 4 + i, lane);
                fifths[0] = moved(bits, 4 - 2 * c) & kFifthBits, fifths[1] = moved(bits, 3 - 2 * c) & kFifthBits;
            }
            low.add(i, (v & kNibbles) | fifths[0]);
            high.add(i, (v >> 4 & kNibbles) | fifths[1]);
        }
        low.finish(of.scales[2 * c], of.minimums[2 * c]);
        high.finish(of.scales[2 * c + 1], of.minimums[2 * c + 1]);
        to.template next<8>(2);
    }

    // Two halves of 128 weights: quarters of 32, the first two in the low halves of 64 bytes, the others in the high
    // halves; the fifth and sixth bits of quarter r are bits 2r and 2r + 1 of 32 bytes. Scales are of 16 weights.
    template <class Target>
    [[gnu::always_inline]] static void q6_k(const uint8_t* tile, int lane, Target& to) {
        const F d = X::halves(tile + 2 * lane);
        tile += 32;
        for (int h = 0; h < 2; ++h)
#pragma GCC unroll 8
            for (int g = 0; g < 8; ++g) {
                const int r = g / 2, first = g % 2 * 4;
                fetch<3360 / 2, 8>(tile, tile + h * (3360 / 2), g, lane);
                auto group = to.template group<false, 4>(0);
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i) {
                    const V low = word(tile, 16 * h + 8 * (r % 2) + first + i, lane) >> (r / 2 * 4) & kNibbles;
                    const V high = moved(word(tile, 32 + 8 * h + first + i, lane), 4 - 2 * r) & 0x30303030;
                    group.add(i, low | high);
                }
                const V scale = word(tile, 48 + 2 * h + g / 4, lane) << (24 - g % 4 * 8) >> 24;
                group.finish(d * __builtin_convertvector(scale, F));
                to.template next<4>(1);
            }
    }
};
