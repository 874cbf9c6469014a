// The tile kernel: query rows times KV tiles, for any instruction set X.
//
// Up to one register tile of rows reads keys and values in place. For more rows they are packed, once per tile.
//
// Included once by each instruction set's file, inside its anonymous namespace, after its X is defined.

constexpr int kSubRows = 48;   // rows whose scores and probabilities stay in the cache between the two products

// Cuts one allocation into the arrays of a task.
template <class X>
struct Workspace {
    uint32_t *query, *keys, *values, *probabilities;
    float *scores, *output, *lse, *maximum, *sum, *old_weight, *tile_weight;
    float *key_scales, *value_scales;  // of the current tile, for KV in 8 bits; 0 for missing keys
    size_t bytes = 0;

    Workspace(void* base, int rows, int head_dim) : base_(static_cast<char*>(base)) {
        const int padded = round_up(rows, 16), panel = X::kVectors * X::W;
        take(query, size_t(rows) * X::row_words(head_dim / X::kStep));
        take(keys, size_t(round_up(kTileKeys, panel)) * (head_dim / X::kStep));
        take(values, size_t(kTileKeys / X::kStep) * round_up(head_dim, panel));
        take(probabilities, size_t(kSubRows) * X::row_words(kTileKeys / X::kStep));
        take(scores, size_t(kSubRows) * kTileKeys);
        take(output, size_t(rows) * head_dim);
        take(lse, padded);
        take(maximum, padded);
        take(sum, padded);
        take(old_weight, padded);
        take(tile_weight, padded);
        take(key_scales, kTileKeys);
        take(value_scales, kTileKeys);
    }

  private:
    char* base_;

    template <class E>
    void take(E*& array, size_t count) {
        array = base_ == nullptr ? nullptr : reinterpret_cast<E*>(base_ + bytes);
        bytes += (count * sizeof(E) + 63) / 64 * 64;
    }
};

// The state of a task's rows. Here and in Tiles, X is X::Words: what the operands of all types of KV share.
template <class X>
class RowStates {
  public:
    static size_t workspace_bytes(int rows, int head_dim) { return Workspace<X>(nullptr, rows, head_dim).bytes; }

    static void merge(const Task& task, void* workspace) {
        RowStates states(task, workspace);
        states.load_state();
        for (int64_t tile = task.tile_begin; tile < task.tile_end; ++tile) states.merge_partial(tile);
        states.store_state();
    }

  protected:
    const Task& task_;
    const int rows_, head_dim_;
    Workspace<X> work_;
    // Of the current tile.
    float *accumulator_ = nullptr, *maximum_ = nullptr, *sum_ = nullptr;

    RowStates(const Task& task, void* workspace)
        : task_(task), rows_(task.rows.rows()), head_dim_(task.keys.head_dim), work_(workspace, rows_, head_dim_) {}

    void load_state() {
        const auto& r = task_.rows;
        for (int row = 0; row < rows_; ++row) {
            const int token = row / r.group, head = row % r.group;
            const float* out = r.out + token * r.out_token_stride + head * r.out_head_stride;
            float* state = work_.output + int64_t(row) * head_dim_;
            for (int d = 0; d < head_dim_; ++d) state[d] = task_.carry ? out[d] : 0.0f;
            work_.lse[row] = task_.carry ? r.lse[token * r.lse_token_stride + head * r.lse_head_stride]
                                         : -__builtin_inff();
        }
    }

    void store_state() const {
        const auto& r = task_.rows;
        for (int row = 0; row < rows_; ++row) {
            const int token = row / r.group, head = row % r.group;
            float* out = r.out + token * r.out_token_stride + head * r.out_head_stride;
            const float* state = work_.output + int64_t(row) * head_dim_;
            for (int d = 0; d < head_dim_; ++d) out[d] = state[d];
            r.lse[token * r.lse_token_stride + head * r.lse_head_stride] = work_.lse[row];
        }
    }

    void place_results(int64_t tile) {
        maximum_ = work_.maximum;
        sum_ = work_.sum;
        if (task_.partials == nullptr) return;
        accumulator_ = task_.partials + (tile - task_.tile_begin) * partial_floats(rows_, head_dim_);
        maximum_ = accumulator_ + int64_t(rows_) * head_dim_;
        sum_ = maximum_ + rows_;
    }

  private:
    void merge_partial(int64_t tile) {
        place_results(tile);
        for (int r = 0; r < rows_; ++r) {
            work_.maximum[r] = maximum_[r];
            work_.sum[r] = sum_[r];
        }
        merge_weights<X>(rows_, work_.maximum, work_.sum, work_.lse, work_.old_weight, work_.tile_weight);
        for (int r = 0; r < rows_; ++r) {
            if (maximum_[r] == -__builtin_inff()) continue;
            const auto old_weight = X::set1(work_.old_weight[r]), tile_weight = X::set1(work_.tile_weight[r]);
            float* state = work_.output + int64_t(r) * head_dim_;
            const float* accumulator = accumulator_ + int64_t(r) * head_dim_;
            for (int d = 0; d < head_dim_; d += X::W)
                X::store(state + d,
                         merged_output<X>(X::load(state + d), old_weight, X::load(accumulator + d), tile_weight));
        }
    }
};

// KV as Tiles sees it: where rows have scales, the values of 1 in a product with widened keys and values.
struct KvUnits {
    bool scales;
    float key, value;
};

// A task's rows times its tiles, compiled once for all types of KV: what reads keys and values is in TileKernel.
template <class X>
class Tiles : protected RowStates<X> {
  protected:
    using State = RowStates<X>;
    using State::head_dim_, State::rows_, State::task_, State::work_;
    using State::accumulator_, State::maximum_, State::sum_;
    static constexpr int kPanel = X::kVectors * X::W;  // columns of a packed panel
    static constexpr int kWeights = X::row_words(kTileKeys / X::kStep);  // words of a row of probabilities

    struct Range {
        int begin, end;
        bool empty() const { return begin >= end; }
    };

    const int words_;
    // The current tile.
    const char *key_ = nullptr, *value_ = nullptr;
    const char *next_key_ = nullptr, *next_value_ = nullptr;  // of the next tile, perhaps of another task
    Ahead ahead_keys_, ahead_values_;
    int tile_keys_ = 0;

    Tiles(const Task& task, void* workspace, const KvUnits& units)
        : State(task, workspace),
          words_(task.keys.head_dim / X::kStep),
          panels_((task.keys.head_dim + kPanel - 1) / kPanel),
          scale2_(task.scale * kLog2E),
          units_(units) {}

    template <class Q>
    void pack_queries() {
        const auto& r = task_.rows;
        const Q* q = static_cast<const Q*>(r.q);
        for (int row = 0; row < rows_; ++row) {
            const Q* source = q + row / r.group * r.q_token_stride + row % r.group * r.q_head_stride;
            X::pack_row(source, head_dim_, work_.query + int64_t(row) * X::row_words(words_));
        }
    }

    void run_tiles() {
        if (task_.partials == nullptr) this->load_state();
        for (int64_t tile = task_.tile_begin; tile < task_.tile_end; ++tile) run_tile(tile);
        if (task_.partials == nullptr) this->store_state();
    }

    // Keys of the tile that any of the rows sees, in whole vectors. Both ends grow with the position.
    Range visible_vectors(int row, int count) const {
        const Range first = visible(row), last = visible(row + count - 1);
        if (first.begin >= last.end) return {0, 0};
        return {first.begin / X::W * X::W, round_up(last.end, X::W)};
    }

    // Sums of rows from r on and columns from `column` on: merged into the state, or kept as a partial state.
    Results<X> results(int r, int column) const {
        const int64_t offset = int64_t(r) * head_dim_ + column;
        if (task_.partials != nullptr) return {accumulator_ + offset, head_dim_};
        return {work_.output + offset, head_dim_, maximum_ + r, work_.old_weight + r, work_.tile_weight + r};
    }

    // With up to kDirectRows rows: the products of all rows with the keys, and with the values.
    virtual void score_direct() = 0;
    virtual void weigh_direct() = 0;
    // With more: a panel of keys, [words, kPanel keys], and the values, per panel of columns [steps, kPanel columns].
    // Rows past kv_end count as zero.
    virtual void pack_keys(int panel, uint32_t* packed) = 0;
    virtual void pack_values() = 0;

  private:
    const int panels_;
    const float scale2_;
    const KvUnits units_;
    int64_t tile_position_ = 0;
    uint64_t packed_keys_ = 0;  // a bit per panel
    bool packed_values_ = false;

    // Keys of the tile that the row sees.
    Range visible(int row) const {
        const int64_t past = task_.rows.position + row / task_.rows.group - tile_position_ + 1;
        const int64_t begin = task_.window > 0 && past > task_.window ? past - task_.window : 0;
        return {smaller(begin, tile_keys_), past < 0 ? 0 : smaller(past, tile_keys_)};
    }

    void enter_tile(int64_t tile) {
        const auto& k = task_.keys;
        const int64_t block = tile / k.tiles_per_block(), start = tile % k.tiles_per_block() * kTileKeys;
        tile_position_ = k.first_position + block * k.block_size + start;
        tile_keys_ = smaller(smaller(kTileKeys, k.block_size - start), k.kv_end - tile_position_);
        key_ = k.tile_rows(tile, k.k_offset);
        value_ = k.tile_rows(tile, k.v_offset);
        if (tile + 1 < task_.tile_end) {
            next_key_ = k.tile_rows(tile + 1, k.k_offset);
            next_value_ = k.tile_rows(tile + 1, k.v_offset);
        } else {
            next_key_ = task_.keys_after == nullptr ? key_ : task_.keys_after;
            next_value_ = task_.values_after == nullptr ? value_ : task_.values_after;
        }
        if (units_.scales) {
            gather_scales(key_, units_.key, work_.key_scales);
            gather_scales(value_, units_.value, work_.value_scales);
        }
        ahead_keys_ = {next_key_};
        ahead_values_ = {next_value_};
        packed_keys_ = 0;
        packed_values_ = false;
    }

    // Missing keys may hold anything.
    void gather_scales(const char* rows, float unit, float* scales) const {
        for (int key = 0; key < tile_keys_; ++key)
            scales[key] = raw_scale(rows + key * task_.keys.row_bytes, head_dim_);
        for (int key = tile_keys_; key < kTileKeys; ++key) scales[key] = 0.0f;
        for (int key = 0; key < kTileKeys; ++key) scales[key] = nan_if_infinite(scales[key]) * unit;
    }

    bool direct() const { return rows_ <= X::kDirectRows; }

    void run_tile(int64_t tile) {
        enter_tile(tile);
        this->place_results(tile);
        for (int row = 0; row < rows_; row += kSubRows) {
            const int count = smaller(kSubRows, rows_ - row);
            if (visible_vectors(row, count).empty()) {
                mark_unseen(row, count);
                continue;
            }
            if (direct())
                score_direct();
            else
                score(row, count);
            const int together = direct() ? count : X::kMicroRows;  // as the product with the values takes them
            for (int group = row; group < row + count; group += together)
                soften(row, group, smaller(together, row + count - group));
            if (task_.partials == nullptr)
                merge_weights<X>(count, maximum_ + row, sum_ + row, work_.lse + row, work_.old_weight + row,
                                 work_.tile_weight + row);
            if (direct())
                weigh_direct();
            else
                weigh_values(row, count);
        }
    }

    void mark_unseen(int row, int count) {
        for (int r = row; r < row + count; ++r) {
            maximum_[r] = -__builtin_inff();
            sum_[r] = 0.0f;
        }
    }

    // Packed when they are first needed.
    const uint32_t* packed_keys(int panel) {
        uint32_t* const packed = work_.keys + int64_t(panel) * words_ * kPanel;
        if (!(packed_keys_ >> panel & 1)) pack_keys(panel, packed);
        packed_keys_ |= uint64_t(1) << panel;
        return packed;
    }

    // Q K^T for the rows of a sub-block, panel by panel, so that a panel stays in the nearest cache.
    void score(int row, int count) {
        const Range all = visible_vectors(row, count);
        for (int panel = all.begin / kPanel; panel * kPanel < all.end; ++panel) {
            const uint32_t* packed = packed_keys(panel);
            for (int r = row; r < row + count; r += X::kMicroRows) {
                const int micro = smaller(X::kMicroRows, row + count - r);
                const Range seen = visible_vectors(r, micro);
                const int begin = seen.begin > panel * kPanel ? seen.begin : panel * kPanel;
                const int end = seen.end < (panel + 1) * kPanel ? seen.end : (panel + 1) * kPanel;
                if (begin >= end) continue;
                float* scores = work_.scores + int64_t(r - row) * kTileKeys + begin;
                const int64_t stride = X::row_words(words_);
                multiply<X>(micro, (end - begin) / X::W, work_.query + r * stride, stride, 0,
                            packed + (begin - panel * kPanel), words_, Results<X>{scores, kTileKeys});
            }
        }
    }

    void soften(int row, int group, int count) {
        const Range keys = visible_vectors(group, count);
        if (keys.empty()) return mark_unseen(group, count);
        const auto soften_row = units_.scales ? softmax_row<X, true> : softmax_row<X, false>;
        for (int r = group; r < group + count; ++r) {
            const Range seen = visible(r);
            soften_row(work_.scores + int64_t(r - row) * kTileKeys, work_.probabilities + int64_t(r - row) * kWeights,
                       work_.key_scales, work_.value_scales, keys.begin, keys.end, seen.begin, seen.end, scale2_,
                       maximum_ + r, sum_ + r);
        }
    }

    // P V for the rows of a sub-block.
    void weigh_values(int row, int count) {
        if (!packed_values_) pack_values();
        packed_values_ = true;
        for (int panel = 0; panel < panels_; ++panel) {
            const int column = panel * kPanel;
            const int vectors = smaller(kPanel, head_dim_ - column) / X::W;
            for (int r = row; r < row + count; r += X::kMicroRows)
                weigh_panel(panel, vectors, row, r, smaller(X::kMicroRows, row + count - r));
        }
    }

    void weigh_panel(int panel, int vectors, int row, int r, int count) {
        const Range keys = visible_vectors(r, count);
        if (keys.empty()) return;
        const int first = keys.begin / X::kStep, steps = (keys.end - keys.begin) / X::kStep;
        const uint32_t* p = work_.probabilities + int64_t(r - row) * kWeights;
        const uint32_t* v = work_.values + (int64_t(panel) * (kTileKeys / X::kStep) + first) * kPanel;
        multiply<X>(count, vectors, p, kWeights, first, v, steps, results(r, panel * kPanel));
    }
};

// What reads keys and values of the type X::T.
template <class X>
class TileKernel final : Tiles<typename X::Words> {
    using T = typename X::T;
    using Base = Tiles<typename X::Words>;
    using Base::ahead_keys_, Base::ahead_values_, Base::next_key_, Base::next_value_;
    using Base::head_dim_, Base::rows_, Base::task_, Base::words_, Base::work_;
    using Base::key_, Base::tile_keys_, Base::value_;
    using Base::kPanel, Base::kWeights;
    using typename Base::Range;
    static constexpr bool kScales = has_scales<T>;

  public:
    template <class Q>
    static void run(const Task& task, void* workspace) {
        TileKernel kernel(task, workspace);
        kernel.template pack_queries<Q>();
        kernel.run_tiles();
    }

  private:
    const int64_t stride_;  // from a token's row to the next one's, in elements

    TileKernel(const Task& task, void* workspace)
        : Base(task, workspace, units()), stride_(task.keys.row_bytes / int64_t(sizeof(T))) {}

    static constexpr KvUnits units() {
        if constexpr (kScales) return {true, X::kKeyUnit, X::kValueUnit};
        return {false, 1, 1};
    }

    const T* keys() const { return reinterpret_cast<const T*>(key_); }
    const T* values() const { return reinterpret_cast<const T*>(value_); }

    void score_direct() override { score_by_count<X::kDirectRows>(); }
    void weigh_direct() override { weigh_by_count<X::kDirectRows>(); }

    template <int M>
    void score_by_count() {
        if constexpr (M > 1)
            if (rows_ < M) return score_by_count<M - 1>();
        score_rows<M>();
    }

    // Vectors whose sums with M rows fit the registers.
    template <int M>
    static constexpr int most_vectors() {
        int vectors = X::kVectors;
        while (M * vectors * X::kSums > 24) vectors /= 2;
        return vectors;
    }

    template <int M>
    static constexpr int score_bytes_vectors() {
        constexpr int kFit = most_vectors<M>();
        return M > 2 && kFit == X::kVectors ? kFit / 2 : kFit;
    }

    template <int M>
    void score_rows() {
        // Several vectors only where there are sums to wait for: transposed keys take registers as well.
        constexpr int kMost = X::kSums > 1 ? 1 : kScales ? score_bytes_vectors<M>() : M > 2 ? 1 : 2;
        constexpr int kKeys = kMost * X::W;
        static_assert(kTileKeys % kKeys == 0);
        const Range seen = this->visible_vectors(0, M);
        // Whole steps. Scores before the first visible key and after the last one are not read.
        for (int key = seen.begin / kKeys * kKeys; key < seen.end; key += kKeys) score_at<M, kMost>(key);
    }

    template <int M, int N>
    void score_at(int key) {
        const auto product = kScales && X::kSums == 1 ? score_bytes<X, M, N> : score_keys<X, M, N>;
        product(work_.query, words_, keys() + key * stride_, stride_, tile_keys_ - key, work_.scores + key, kTileKeys,
                ahead_keys_, ahead_values_);
    }

    template <int M>
    void weigh_by_count() {
        if constexpr (M > 1)
            if (rows_ < M) return weigh_by_count<M - 1>();
        weigh_rows<M>();
    }

    template <int M>
    void weigh_rows() {
        const int vectors = head_dim_ / X::W;
        constexpr int kMost = most_vectors<M>();
        int vector = 0;
        for (; vector + kMost <= vectors; vector += kMost) weigh_at<M, kMost>(0, vector * X::W);
        if constexpr (kMost * X::W > kHeadMultiple)  // few heads leave a rest: row by row, not worth more code
            for (; vector < vectors; ++vector)
                for (int row = 0; row < M; ++row) weigh_at<1, 1>(row, vector * X::W);
    }

    // Rows from `row` on; the first ones prefetch.
    template <int M, int N>
    void weigh_at(int row, int column) {
        const Range keys = this->visible_vectors(0, rows_);
        const int count = keys.end - keys.begin;
        const T* v = values() + keys.begin * stride_ + column;
        const int step_bytes = row > 0 ? 0 : int(X::kStep * task_.keys.row_bytes * N * X::W / head_dim_);
        weigh_columns<X, M, N>(work_.probabilities + row * kWeights, kWeights, keys.begin / X::kStep, count / X::kStep,
                               v, stride_, tile_keys_ - keys.begin, step_bytes, ahead_values_,
                               this->results(row, column));
    }

    void pack_keys(int panel, uint32_t* packed) override {
        const T* next = reinterpret_cast<const T*>(next_key_);
        const int end = smaller((panel + 1) * kPanel, tile_keys_);
        for (int key = panel * kPanel; key < end; key += X::W) {
            prefetch(next + key * stride_, int(X::W * stride_));
            for (int word = 0; word < words_; word += kKeyWords<X>) {
                const int count = key_words<X>(words_ - word);
                typename X::Keys columns[X::W];
                X::load_keys(keys() + key * stride_ + word * X::kStep, stride_, tile_keys_ - key, count, columns);
                uint32_t* to = packed + int64_t(word) * kPanel + (key - panel * kPanel);
#pragma GCC unroll 16
                for (int i = 0; i < X::W; ++i, to += X::kExpand * kPanel) {
                    if (i * X::kExpand >= count) break;
                    each_key_word<X>(columns[i],
                                     [=](int e, typename X::U word) { X::store_words(to + e * kPanel, word); });
                }
            }
        }
    }

    void pack_values() override {
        const T* next = reinterpret_cast<const T*>(next_value_);
        const int end = round_up(tile_keys_, X::W);
        for (int key = 0; key < end; key += X::kStep) {
            prefetch(next + key * stride_, int(X::kStep * stride_));
            for (int column = 0; column < head_dim_; column += X::W) {
                const int64_t step = int64_t(column / kPanel) * (kTileKeys / X::kStep) + key / X::kStep;
                const T* v = values() + key * stride_ + column;
                X::store_words(work_.values + step * kPanel + column % kPanel,
                               X::value_columns(v, stride_, tile_keys_ - key));
            }
        }
    }
};

// X with queries of the elements Q.
template <class X, class Q>
constexpr Kernel kernel_of() {
    using States = RowStates<typename X::Words>;
    return {States::workspace_bytes, TileKernel<X>::template run<Q>, States::merge};
}

// X with queries of any dtype.
template <class X>
const Kernel& kernel_of(DType dtype) {
    static constexpr Kernel kernels[] = {kernel_of<X, Bf16>(), kernel_of<X, Fp16>(), kernel_of<X, float>()};
    return kernels[int(dtype)];
}

// Plain<T> multiplies with elements of the queries' dtype T, Bytes<T> with elements of 8 bits.
template <template <class> class Plain, template <class> class Bytes>
const Kernel& kernel_of(DType dtype, KvFormat format) {
    static constexpr Kernel kernels[] = {kernel_of<Plain<Bf16>, Bf16>(), kernel_of<Plain<Fp16>, Fp16>(),
                                         kernel_of<Plain<float>, float>()};
    if (format == KvFormat::int8) return kernel_of<Bytes<Int8>>(dtype);
    if (format == KvFormat::fp8) return kernel_of<Bytes<E4m3>>(dtype);
    return kernels[int(dtype)];
}
