// Rows of inputs to integers of 16 bits, or to fp32 where the weights are fp8. Included by cpu_packed_kernel.h.

template <class X>
class Inputs {
    using V = typename X::V;
    using F = typename X::F;
    using H = typename X::H;
    using B = typename X::B;
    static constexpr int W = X::W, M = X::kTileRows;

  public:
    static void quantise(const Problem& p, int64_t row, const InputRows& rows) {
        if (p.weight.layout().values == Values::floats) return widen_row(p, row, rows);
        p.weight.layout().group == 32 ? quantise_row<32>(p, row, rows) : quantise_row<16>(p, row, rows);
    }

  private:
    // Where the groups of a row are, counted in groups: at first + g * tile_rows + place.
    struct Row {
        int64_t first, tile_rows, place;

        Row(const InputRows& rows, int64_t row, int64_t groups)
            : first(row / M * M * groups), tile_rows(rows.count - row / M * M), place(row % M) {
            if (tile_rows > M) tile_rows = M;
        }
    };

    template <class T>
    static void widen_inputs(const Problem& p, int64_t at, int64_t count, float* v) {
        const T* x = static_cast<const T*>(p.x) + at;
        for (int64_t i = 0; i < count; ++i) v[i] = widen_scalar(x[i]);
    }

    // A group of a row in fp32, filled up with zeros. Not inlined: what follows is compiled once for all dtypes.
    [[gnu::noinline]] static void widen_group(const Problem& p, int64_t row, int64_t g, int64_t group, float* v) {
        const int64_t at = row * p.x_stride + g * group, left = p.weight.in - g * group;
        const int64_t count = left < group ? left : group;
        for (int64_t i = count; i < group; ++i) v[i] = 0.0f;
        switch (p.dtype) {
            case DType::bf16: return widen_inputs<Bf16>(p, at, count, v);
            case DType::fp16: return widen_inputs<Fp16>(p, at, count, v);
            case DType::fp32: return widen_inputs<float>(p, at, count, v);
        }
    }

    static void widen_row(const Problem& p, int64_t row, const InputRows& rows) {
        const Row to(rows, row, p.weight.groups());
        for (int64_t g = 0; g < p.weight.groups(); ++g) {
            float x[32];
            widen_group(p, row, g, 32, x);
            std::memcpy(rows.words + (to.first + g * to.tile_rows + to.place) * 32, x, sizeof(x));
        }
    }

    static float power_of_two(int exponent) { return widen_scalar(uint32_t(exponent + 127) << 23); }

    // To the nearest integers, ties to even, for |v| < 2^22: adding 1.5 * 2^23 leaves no room for a fraction.
    static V nearest(F v) { return V(v + 12582912.0f) - int32_t(bits_of(12582912.0f)); }

    // The bits of the number that is largest without its sign.
    template <int Group>
    static int32_t largest_magnitude(const float* v) {
        V most = {};
#pragma GCC unroll 8
        for (int i = 0; i < Group; i += W) {
            const V magnitudes = load_at<V>(v + i) & 0x7fffffff;
            most = magnitudes > most ? magnitudes : most;
        }
        int32_t largest = 0;
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) largest = most[i] > largest ? most[i] : largest;
        return largest;
    }

    template <int Group>
    static void quantise_row(const Problem& p, int64_t row, const InputRows& rows) {
        constexpr int kVectors = Group / W;
        const bool two = p.copies() == 2;
        const int bits = two ? 13 : 14;
        const Row to(rows, two ? 2 * row : row, p.weight.groups()), next(rows, 2 * row + 1, p.weight.groups());
        for (int64_t g = 0; g < p.weight.groups(); ++g) {
            float x[Group];
            widen_group(p, row, g, Group, x);
            const int32_t largest = largest_magnitude<Group>(x);
            const bool finite = largest < 0x7f800000;
            if (!finite) std::memset(x, 0, sizeof(x));
            // The exponent of the largest input, but so that neither unit nor its inverse leaves fp32's normal numbers.
            const int smallest = two ? -98 : -112, own = int(largest >> 23) - 127;
            const int exponent = !finite ? 0 : own > smallest ? own : smallest;
            const float scale = power_of_two(bits - exponent);
            const float unit = finite ? power_of_two(exponent - bits) : __builtin_nanf("");
            V high[kVectors], low[kVectors];
#pragma GCC unroll 8
            for (int i = 0; i < kVectors; ++i) {
                const F scaled = load_at<F>(x + i * W) * scale;
                high[i] = nearest(scaled);
                low[i] = nearest((scaled - __builtin_convertvector(high[i], F)) * 0x1p15f);
            }
            store_group<Group>(high, unit, p.weight, rows, to, g);
            if (two) store_group<Group>(low, unit * 0x1p-15f, p.weight, rows, next, g);
        }
    }

    static int32_t sum_of(V v) {
        int32_t lanes[W], sum = 0;
        std::memcpy(lanes, &v, sizeof(v));
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) sum += lanes[i];
        return sum;
    }

    template <int Group>
    static void store_group(const V* n, float unit, const Weight& weight, const InputRows& rows, const Row& to, int64_t g) {
        const int64_t tile = to.first + g * to.tile_rows, at = tile + to.place;
        V sums = n[0], highs = n[0] >> 8;
#pragma GCC unroll 8
        for (int i = 1; i < Group / W; ++i) sums += n[i], highs += n[i] >> 8;
        uint32_t* const words = rows.words + tile * Group / 2 + to.place * 8;
#pragma GCC unroll 2
        for (int i = 0; i < Group / 16; ++i) store_inputs(n + i * (16 / W), words + i * 8 * to.tile_rows);
        const int32_t sum = sum_of(sums);
        rows.units[at] = unit;
        rows.starts[at] = -weight.zero() * sum;
        // The high bytes are multiplied with signed weights that are 128 too large.
        if (X::kBytes && weight.layout().values == Values::signed_bytes) rows.starts[at] -= 256 * 128 * sum_of(highs);
        rows.sums[at] = unit * float(sum);
    }

    // 16 inputs: the low bytes, then the high bytes. Or pairs, of which each word of four 8-bit weights gives two: the inputs
    // 4i and 4i + 2, then 4i + 1 and 4i + 3.
    static void store_inputs(const V* n, uint32_t* words) {
        if constexpr (X::kBytes) {
            const B bytes[2] = {__builtin_convertvector(n[0], B), __builtin_convertvector(n[0] >> 8, B)};
            std::memcpy(words, bytes, sizeof(bytes));
        } else {
            H halves[16 / W];
#pragma GCC unroll 4
            for (int i = 0; i < 16 / W; ++i) halves[i] = __builtin_convertvector(n[i], H);
            uint16_t numbers[16], paired[16];
            std::memcpy(numbers, halves, sizeof(numbers));
#pragma GCC unroll 16
            for (int i = 0; i < 16; ++i) paired[i] = numbers[i / 4 * 4 + i % 2 * 2 + i / 2 % 2];
            std::memcpy(words, paired, sizeof(paired));
        }
    }
};
