// Causal attention of a whole prompt over selected tiles of keys, on the CPU; and over single columns besides.
// Built by cpu.py with the compiler and the flags of Inductor, once per ENTRY (float, bf16 or fp16).
//
// One KV head at a time: its keys and values are packed for products of tiles, then threads take tiles of queries of its
// query heads, the longest first. Products are sums of outer products in registers, on words of 32 bits: a float, or two
// bf16 where the processor multiplies those.

#include <omp.h>

#include <algorithm>
#include <memory>

#include "cpu_vectors.h"

namespace {

constexpr int TILE = 64;  // queries, and keys
constexpr float LOWEST = -1e30f;  // running maximum before any key, and hidden logits

#if defined(__AVX512BF16__)
template <class S>
constexpr bool PAIRS = std::is_same_v<S, bf16>;
#else
template <class S>
constexpr bool PAIRS = false;
#endif

// Field order and widths must match _BLOCKS_CALL in cpu.py.
struct Call {
    const void *q, *k, *v;
    void* out;
    float* lse;              // [rows, heads, queries]
    const bool* blocks;      // [rows, heads, blocks, blocks]: of queries, of keys; null: all are attended
    const int32_t* columns;  // [rows, heads, columns] ascending; those from tokens on are none
    int64_t rows, heads, kv_heads, tokens, key_dim, value_dim;
    int64_t block, num_blocks, num_columns;
    int64_t queries, window;  // the last tokens; with blocks all. window: keys that a query sees, tokens or fewer
    int64_t q_stride[3], k_stride[3], v_stride[3];  // row, head, token, in elements
    double scale, softcap;                          // softcap 0: none
};

// acc + a * b, of words: one product of floats each, or two of bf16.
template <bool TWO>
INLINE vf add_product(vf acc, uint32_t a, const uint32_t* b) {
#if defined(__AVX512BF16__)
    if constexpr (TWO) return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32(int(a)), (__m512bh)_mm512_loadu_si512(b));
#endif
    return fma(splat(bits_as<float>(a)), load((const float*)b), acc);
}

// c[TILE, width] = or += a[TILE, depth] * b[depth, width]; width is a multiple of 2 W.
template <bool TWO, bool ADD>
INLINE void multiply(const uint32_t* a, int64_t depth, const uint32_t* b, int64_t width, float* c) {
    constexpr int R = W == 16 ? 8 : 4;
    for (int64_t d = 0; d < width; d += 2 * W) {
        for (int64_t i = 0; i < TILE; i += R) {
            vf acc[R][2];
            for (int r = 0; r < R; r++)
                for (int x = 0; x < 2; x++) acc[r][x] = ADD ? load(c + (i + r) * width + d + x * W) : vf{};
            for (int64_t n = 0; n < depth; n++) {
                const uint32_t* row = b + n * width + d;
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    const uint32_t word = a[(i + r) * depth + n];
                    acc[r][0] = add_product<TWO>(acc[r][0], word, row);
                    acc[r][1] = add_product<TWO>(acc[r][1], word, row + W);
                }
            }
            for (int r = 0; r < R; r++)
                for (int x = 0; x < 2; x++) store(c + (i + r) * width + d + x * W, acc[r][x]);
        }
    }
}

INLINE uint32_t pair(bf16 low, bf16 high) { return low.bits | uint32_t(high.bits) << 16; }

INLINE float as_float(float x) { return x; }
INLINE float as_float(bf16 x) { return bits_as<float>(uint32_t(x.bits) << 16); }
INLINE float as_float(fp16 x) { return load_part(&x, 1)[0]; }

// The word of one number or, of PAIRS, of two; null is zero.
template <class S>
INLINE uint32_t word(const S* low, const S* high) {
    if constexpr (PAIRS<S>) return pair(low ? *low : S{}, high ? *high : S{});
    return low ? bits_as<uint32_t>(as_float(*low)) : 0;
}

struct Prompt {
    using S = ENTRY;
    static constexpr int STEP = PAIRS<S> ? 2 : 1;  // elements of a word
    const Call& c;
    const int64_t group = c.heads / c.kv_heads, before = c.tokens - c.queries;
    const int64_t tiles = (c.tokens + TILE - 1) / TILE, query_tiles = (c.queries + TILE - 1) / TILE;
    const int64_t depth = (c.key_dim + STEP - 1) / STEP, width = (c.value_dim + 2 * W - 1) / (2 * W) * (2 * W);
    const int64_t key_size = depth * TILE, value_size = TILE / STEP * width;  // words of a tile

    const S* key(int64_t row, int64_t head, int64_t j) const {
        return (const S*)c.k + row * c.k_stride[0] + head * c.k_stride[1] + j * c.k_stride[2];
    }
    const S* value(int64_t row, int64_t head, int64_t j) const {
        return (const S*)c.v + row * c.v_stride[0] + head * c.v_stride[1] + j * c.v_stride[2];
    }

    // Packs the keys and values of some columns: keys [depth, TILE], values [TILE, width]. columns: TILE of them, from
    // c.tokens on zeros.
    void pack(int64_t row, int64_t head, const int32_t* columns, uint32_t* keys, uint32_t* values) const {
        for (int64_t j = 0; j < TILE; j++) {
            const S* from = columns[j] < c.tokens ? key(row, head, columns[j]) : nullptr;
            for (int64_t d = 0; d < depth; d++) {
                const bool both = STEP * d + STEP - 1 < c.key_dim;
                keys[d * TILE + j] = from ? word(from + STEP * d, both ? from + STEP * d + 1 : nullptr) : 0;
            }
        }
        for (int64_t j = 0; j < TILE / STEP; j++) {
            const S* rows[2] = {};
            for (int x = 0; x < STEP; x++) {
                const int64_t column = columns[STEP * j + x];
                rows[x] = column < c.tokens ? value(row, head, column) : nullptr;
            }
            for (int64_t d = 0; d < width; d++) {
                const bool real = d < c.value_dim;
                values[j * width + d] =
                    word(real && rows[0] ? rows[0] + d : nullptr, real && rows[1] ? rows[1] + d : nullptr);
            }
        }
    }

    struct Scratch {
        uint32_t *q, *weights, *keys, *values;
        float *logits, *sum, *top, *mass;
        int32_t* columns;
    };

    // Attends one packed tile; query i sees the keys j < i + end that are not before i + end - c.window, and < limit.
    void attend(const Scratch& s, const uint32_t* keys, const uint32_t* values, int64_t end, int64_t limit) const {
        multiply<PAIRS<S>, false>(s.q, depth, keys, TILE, s.logits);
        for (int64_t i = 0; i < TILE; i++) {
            float* x = s.logits + i * TILE;
            const int64_t seen = std::min(i + end, limit), from = i + end - c.window;
            vf most = splat(LOWEST);
            for (int64_t j = 0; j < TILE; j += W) {
                vf logits = load(x + j) * float(c.scale);
                if (c.softcap != 0.0) logits = softcapped(logits, float(c.softcap));
                logits = numbered(LANES) < int32_t(seen - j) ? logits : splat(LOWEST);
                if (from > j) logits = numbered(LANES) < int32_t(from - j) ? splat(LOWEST) : logits;
                most = max(most, logits);
                store(x + j, logits);
            }
            float lanes[W], top = s.top[i];
            store(lanes, most);
            for (float lane : lanes) top = std::max(top, lane);
            const float rescale = std::exp(s.top[i] - top);
            s.top[i] = top;
            vf mass = {};
            for (int64_t j = 0; j < TILE; j += W) {
                const vf weight = exp_nonpositive(load(x + j) - top);
                mass += weight;
                store(x + j, weight);
            }
            s.mass[i] = s.mass[i] * rescale + sum_of_lanes(mass);
            if (rescale != 1.0f)
                for (int64_t d = 0; d < width; d += W) store(s.sum + i * width + d, load(s.sum + i * width + d) * rescale);
        }
        const uint32_t* weights = (const uint32_t*)s.logits;
#if defined(__AVX512BF16__)
        if constexpr (PAIRS<S>) {
            for (int64_t i = 0; i < TILE * TILE; i += 2 * W) {
                const __m512bh two = _mm512_cvtne2ps_pbh((__m512)load(s.logits + i + W), (__m512)load(s.logits + i));
                std::memcpy(s.weights + i / 2, &two, sizeof two);
            }
            weights = s.weights;
        }
#endif
        multiply<PAIRS<S>, true>(weights, TILE / STEP, values, width, s.sum);
    }

    // Attends tile t of the queries of a head.
    void run(int64_t row, int64_t head, int64_t t, const uint32_t* keys, const uint32_t* values, const Scratch& s) const {
        const int64_t first = t * TILE, count = std::min<int64_t>(TILE, c.queries - first), column = before + first;
        for (int64_t i = 0; i < TILE; i++) {
            const S* from = (const S*)c.q + row * c.q_stride[0] + head * c.q_stride[1] + (first + i) * c.q_stride[2];
            for (int64_t d = 0; d < depth; d++) {
                const bool both = STEP * d + STEP - 1 < c.key_dim;
                s.q[i * depth + d] = i < count ? word(from + STEP * d, both ? from + STEP * d + 1 : nullptr) : 0;
            }
        }
        std::fill(s.sum, s.sum + TILE * width, 0.0f);
        std::fill(s.top, s.top + TILE, LOWEST);
        std::fill(s.mass, s.mass + TILE, 0.0f);
        const int64_t of_head = row * c.heads + head;
        const bool* selected = c.blocks ? c.blocks + (of_head * c.num_blocks + first / c.block) * c.num_blocks : nullptr;
        for (int64_t u = std::max<int64_t>(column + 1 - c.window, 0) / TILE; u * TILE < column + count; u++)
            if (!selected || selected[u * TILE / c.block])
                attend(s, keys + u * key_size, values + u * value_size, column + 1 - u * TILE, TILE);
        int64_t filled = 0;
        const auto attend_columns = [&] {
            std::fill(s.columns + filled, s.columns + TILE, int32_t(c.tokens));
            pack(row, head / group, s.columns, s.keys, s.values);
            attend(s, s.keys, s.values, TILE, filled);  // before all queries of the tile
            filled = 0;
        };
        const int32_t* columns = c.columns + of_head * c.num_columns;
        for (int64_t j = 0; j < c.num_columns && columns[j] < first; j++) {
            if (selected[columns[j] / c.block]) continue;
            s.columns[filled++] = columns[j];
            if (filled == TILE) attend_columns();
        }
        if (filled) attend_columns();
        for (int64_t i = 0; i < count; i++) {
            S* out = (S*)c.out + ((row * c.queries + first + i) * c.heads + head) * c.value_dim;
            for (int64_t d = 0; d < c.value_dim; d++) round_to(s.sum[i * width + d] / s.mass[i], out + d);
            c.lse[of_head * c.queries + first + i] = s.top[i] + std::log(s.mass[i]);
        }
    }

    void attend_all() const {
        const std::unique_ptr<uint32_t[]> keys(new uint32_t[tiles * key_size]), values(new uint32_t[tiles * value_size]);
#pragma omp parallel
        {
            const int64_t words[] = {TILE * depth, TILE * TILE / 2, key_size, value_size, TILE * TILE, TILE * width,
                                     TILE, TILE, TILE};
            int64_t total = 0;
            for (int64_t count : words) total += count;
            const std::unique_ptr<uint32_t[]> memory(new uint32_t[total]);
            uint32_t* parts[9];
            int64_t at = 0;
            for (int x = 0; x < 9; at += words[x++]) parts[x] = memory.get() + at;
            const Scratch s{parts[0], parts[1], parts[2], parts[3], (float*)parts[4], (float*)parts[5],
                            (float*)parts[6], (float*)parts[7], (int32_t*)parts[8]};
            for (int64_t unit = 0; unit < c.rows * c.kv_heads; unit++) {
                const int64_t row = unit / c.kv_heads, head = unit % c.kv_heads;
#pragma omp for schedule(static)
                for (int64_t t = 0; t < tiles; t++) {
                    for (int64_t j = 0; j < TILE; j++) s.columns[j] = int32_t(t * TILE + j);
                    pack(row, head, s.columns, keys.get() + t * key_size, values.get() + t * value_size);
                }
#pragma omp for schedule(dynamic)
                for (int64_t task = 0; task < query_tiles * group; task++)
                    run(row, head * group + task % group, query_tiles - 1 - task / group, keys.get(), values.get(), s);
            }
        }
    }
};

}  // namespace

extern "C" void kvpass_attend_blocks(const Call* call) { Prompt{*call}.attend_all(); }
