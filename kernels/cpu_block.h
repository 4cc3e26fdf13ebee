// Attention of a few queries to one block of entries on the CPU: scores, one step of the online softmax, values.

#include <algorithm>
#include <limits>
#include <type_traits>

#include "cpu_vectors.h"

namespace {

constexpr float LOWEST = -1e30f;  // running maximum before any entry: finite, so that differences stay defined
constexpr float MINUS_INF = -std::numeric_limits<float>::infinity();

// Prefetches the cache lines of bytes from .. from + size - 1, which a later loop will read.
INLINE void fetch_ahead(const char* from, int64_t size) {
    for (int64_t i = 0; i < size; i += 64) __builtin_prefetch(from + i, 0, 2);
}

// Of a block of codes. k, v: the scale of each entry, for codes of 8 bits. For codes with groups: steps and minima in
// the dtype M of entries, of keys in rows of key_dim from the group of the first entry on, of values in rows of value_dim
// / GROUP from the first entry on; before: entries of that group that precede the block; scratch.
template <class M>
struct Scales {
    const float *k, *v;
    const M *k_step, *k_low, *v_step, *v_low;
    int64_t before;
    float* scratch;
};

// Room for the queries times the steps of a group, its share of their scores, steps and minima of the values of a block.
INLINE int64_t scales_scratch(int64_t key_width, int64_t value_dim, int64_t block) {
    return 4 * key_width + W + 2 * (block * (value_dim / GROUP) + W);
}

// Computes the scores of n entries into s[entry][query]; -inf at or past limit[query]. Returns the lane maxima. scale: one
// number an entry for codes of 8 bits; for codes with groups what to add to each lane.
template <class S, int R>
INLINE vf score_block(const float* q, int64_t q_width, const S* k, const float* scale, int64_t dim, int64_t n,
                      const int64_t* limit, float cap, float* s, const char* ahead, int64_t ahead_row) {
    constexpr int E = W / R;
    const int64_t all_visible = *std::min_element(limit, limit + R);
    vf highest = splat(MINUS_INF);
    for (int64_t j = 0; j < n; j += E) {
        const S* row[E];
#pragma GCC unroll 16
        for (int e = 0; e < E; e++) row[e] = number(k, std::min(j + e, n - 1) * dim);
        fetch_ahead(ahead + j * ahead_row, E * ahead_row);
        vf sum[W] = {};
        int64_t d = 0;
        for (; d + W <= dim; d += W) {
            vf key[E];
#pragma GCC unroll 16
            for (int e = 0; e < E; e++) key[e] = load(number(row[e], d));
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) sum[i] = fma(key[i / R], load(q + (i % R) * q_width + d), sum[i]);
        }
        if (PER<S> == 1 && d < dim) {
#pragma GCC unroll 16
            for (int i = 0; i < W; i++)
                sum[i] = fma(load_part(row[i / R] + d, dim - d), load(q + (i % R) * q_width + d), sum[i]);
        }
        vf x = add_lanes<W>(sum);
        if constexpr (IS_CODE<S>) x *= scales<S, R>(scale + j, n - j);
        if constexpr (PER<S> > 1) x += load(scale);
        if (cap != 0.0f) x = softcapped(x, cap);
        if (j + E > all_visible) {
            for (int i = 0; i < W; i++)
                if (j + i / R >= limit[i % R]) x[i] = MINUS_INF;
        }
        store(s + j * R, x);
        highest = max(highest, x);
    }
    return highest;
}

// score_block for codes with groups: q . (code * step + low) = (q * step) . code + q . low.
template <class S, int R, class M>
INLINE vf score_groups(const float* q, int64_t q_width, const S* k, const Scales<M>& of, int64_t dim, int64_t n,
                       const int64_t* limit, float cap, float* s, const char* ahead, int64_t ahead_row) {
    float *scaled = of.scratch, *added = of.scratch + 4 * q_width;
    const auto plus = [](vf a, vf b) { return a + b; };
    const vi lane = numbered(LANES);
    vf highest = splat(MINUS_INF);
    for (int64_t j = 0, stop = GROUP - of.before, group = 0; j < n; j = stop, stop += GROUP, group++) {
        const int64_t count = std::min(stop, n) - j;
        vf share = {};
        int64_t own[R];
        for (int r = 0; r < R; r++) {
            vf sum = {};
            for (int64_t d = 0; d < dim; d += W) {
                const vf x = load(q + r * q_width + d);
                store(scaled + r * q_width + d, x * load(of.k_step + group * dim + d));
                sum = fma(x, load(of.k_low + group * dim + d), sum);
            }
            share = (lane & (R - 1)) == r ? across_entries<1>(sum, plus) : share;
            own[r] = std::min(limit[r] - j, count);
        }
        store(added, share);
        highest = max(highest, score_block<S, R>(scaled, q_width, number(k, j * dim), added, dim, count, own, cap,
                                                 s + j * R, ahead + j * ahead_row, ahead_row));
    }
    return highest;
}

// sum[query] = sum[query] * decay[query] + sum over entries of p[entry][query] * v[entry], for N vectors of columns from
// column first on. step, low: for codes with groups, rows of dim / GROUP.
template <class S, int R, int N, bool PART>
INLINE void add_columns(const float* p, const S* v, int64_t dim, int64_t n, int64_t part, const float* decay,
                        float* sum, int64_t width, const char* ahead, int64_t ahead_row, int64_t first,
                        const float* step, const float* low) {
    constexpr int U = R * N >= 8 ? 1 : 8 / (R * N);  // entries at a time, to hide the latency of the multiply-add
    vf a[U][R][N] = {};
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int c = 0; c < N; c++) a[0][r][c] = load(sum + r * width + c * W) * decay[r];
    const auto add = [&](int64_t j, vf(&b)[R][N]) __attribute__((always_inline)) {
#pragma GCC unroll 16
        for (int c = 0; c < N; c++) {
            const S* at = number(v, j * dim + first + c * W);
            vf value;
            if constexpr (PART) {
                value = load_part(at, part);
            } else {
                value = load(at);
            }
            if constexpr (PER<S> > 1) {
                const int64_t group = j * (dim / GROUP) + (first + c * W) / GROUP;
                value = fma(value, splat(step[group]), splat(low[group]));
            }
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) b[r][c] = fma(splat(p[j * R + r]), value, b[r][c]);
        }
    };
    int64_t j = 0;
    for (; j + U <= n; j += U) {
        fetch_ahead(ahead + j * ahead_row, U * ahead_row);
#pragma GCC unroll 16
        for (int u = 0; u < U; u++) add(j + u, a[u]);
    }
    for (; j < n; j++) add(j, a[0]);
#pragma GCC unroll 16
    for (int u = 1; u < U; u++)
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 16
            for (int c = 0; c < N; c++) a[0][r][c] += a[u][r][c];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int c = 0; c < N; c++) store(sum + r * width + c * W, a[0][r][c]);
}

// One step of the online softmax. top and mass hold one vector per query tile; lane i belongs to query i % R. Scores
// are also stored to weights[query * weights_width + entry], unless weights is null. of is read only if entries are
// codes.
template <class S, int R, class M>
void attend_block(const float* q, int64_t q_width, const S* k, const S* v, const Scales<M>& of, int64_t key_dim,
                  int64_t value_dim, int64_t value_row, int64_t n, const int64_t* limit, float cap, float* s, float* top,
                  float* mass, float* sum, int64_t width, bool first, float* weights, int64_t weights_width) {
    const int64_t key_row = first ? key_dim * sizeof(S) / PER<S> : 0;
    const int64_t row_bytes = first ? value_dim * sizeof(S) / PER<S> : 0;
    const char *values = (const char*)v, *next_keys = (const char*)number(k, n * key_dim);
    const vf before = load(top);
    vf highest;
    if constexpr (PER<S> > 1) {
        highest = score_groups<S, R>(q, q_width, k, of, key_dim, n, limit, cap, s, values, row_bytes);
    } else {
        highest = score_block<S, R>(q, q_width, k, of.k, key_dim, n, limit, cap, s, values, row_bytes);
    }
    if (weights)
        for (int64_t j = 0; j < n; j++)
            for (int r = 0; r < R; r++) weights[r * weights_width + j] = s[j * R + r];
    const vf now = max(before, across_entries<R>(highest, [](vf a, vf b) { return max(a, b); }));
    const vf decay = exp_nonpositive(before - now);
    vf total = load(mass) * decay;
    for (int64_t i = 0; i < n * R; i += W) {
        const vf p = exp_nonpositive(load(s + i) - now);
        if constexpr (IS_CODE<S>) {
            store(s + i, p * scales<S, R>(of.v + i / R, n - i / R));
        } else {
            store(s + i, p);
        }
        total += p;
    }
    store(top, now);
    store(mass, total);
    float decays[W];
    store(decays, decay);
    float *step = nullptr, *low = nullptr;
    if constexpr (PER<S> > 1) {
        const int64_t count = n * (value_dim / GROUP);
        step = of.scratch + 4 * q_width + W;
        low = step + count + W;
        for (int64_t i = 0; i < count; i += W) {
            const int64_t part = std::min<int64_t>(W, count - i);
            store(step + i, load_part(of.v_step + i, part));
            store(low + i, load_part(of.v_low + i, part));
        }
    }
    int64_t d = 0;
    const auto columns = [&](auto count, auto part) {
        constexpr int N = decltype(count)::value;
        add_columns<S, R, N, decltype(part)::value>(s, v, value_row, n, value_dim - d, decays, sum + d, width,
                                                    next_keys, d == 0 ? key_row : 0, d, step, low);
        d += N * W;
    };
    constexpr int WIDEST = W == 16 || R < 4 ? 4 : 2;  // as many sums as there are registers
    while (d + WIDEST * W <= value_dim) columns(std::integral_constant<int, WIDEST>{}, std::false_type{});
    if constexpr (WIDEST == 4)
        if (d + 2 * W <= value_dim) columns(std::integral_constant<int, 2>{}, std::false_type{});
    if (d + W <= value_dim) columns(std::integral_constant<int, 1>{}, std::false_type{});
    if (d < value_dim) columns(std::integral_constant<int, 1>{}, std::true_type{});
}

}  // namespace
