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

// Computes the scores of n entries into s[entry][query]; -inf at or past limit[query]. Returns the lane maxima. scale: one
// number an entry, for codes.
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
            for (int e = 0; e < E; e++) key[e] = load_at(row[e], d);
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) sum[i] = fma(key[i / R], load(q + (i % R) * q_width + d), sum[i]);
        }
        if (d < dim) {
#pragma GCC unroll 16
            for (int i = 0; i < W; i++)
                sum[i] = fma(load_part(number(row[i / R], d), dim - d), load(q + (i % R) * q_width + d), sum[i]);
        }
        vf x = add_lanes<W>(sum);
        if constexpr (IS_CODE<S>) x *= scales<S, R>(scale + j, n - j);
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

// sum[query] = sum[query] * decay[query] + sum over entries of p[entry][query] * v[entry], for N vectors of columns from
// column first on.
template <class S, int R, int N, bool PART>
INLINE void add_columns(const float* p, const S* v, int64_t dim, int64_t n, int64_t part, const float* decay,
                        float* sum, int64_t width, const char* ahead, int64_t ahead_row, int64_t first) {
    constexpr int U = R * N >= 8 ? 1 : 8 / (R * N);  // entries at a time, to hide the latency of the multiply-add
    vf a[U][R][N] = {};
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int c = 0; c < N; c++) a[0][r][c] = load(sum + r * width + c * W) * decay[r];
    const auto add = [&](int64_t j, vf(&b)[R][N]) __attribute__((always_inline)) {
#pragma GCC unroll 16
        for (int c = 0; c < N; c++) {
            const int64_t at = j * dim + first + c * W;
            vf value;
            if constexpr (PART) {
                value = load_part(number(v, at), part);
            } else {
                value = load_at(v, at);
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
// are also stored to weights[query * weights_width + entry], unless weights is null. k_scale and v_scale are read only
// if entries are codes.
template <class S, int R>
void attend_block(const float* q, int64_t q_width, const S* k, const S* v, const float* k_scale, const float* v_scale,
                  int64_t key_dim, int64_t value_dim, int64_t value_row, int64_t n, const int64_t* limit, float cap,
                  float* s, float* top, float* mass, float* sum, int64_t width, bool first, float* weights,
                  int64_t weights_width) {
    const int64_t key_row = first ? key_dim * BITS<S> / 8 : 0, row_bytes = first ? value_dim * BITS<S> / 8 : 0;
    const char *values = (const char*)v, *next_keys = (const char*)number(k, n * key_dim);
    const vf before = load(top);
    const vf highest = score_block<S, R>(q, q_width, k, k_scale, key_dim, n, limit, cap, s, values, row_bytes);
    if (weights)
        for (int64_t j = 0; j < n; j++)
            for (int r = 0; r < R; r++) weights[r * weights_width + j] = s[j * R + r];
    const vf now = max(before, across_entries<R>(highest, [](vf a, vf b) { return max(a, b); }));
    const vf decay = exp_nonpositive(before - now);
    vf total = load(mass) * decay;
    for (int64_t i = 0; i < n * R; i += W) {
        const vf p = exp_nonpositive(load(s + i) - now);
        if constexpr (IS_CODE<S>) {
            store(s + i, p * scales<S, R>(v_scale + i / R, n - i / R));
        } else {
            store(s + i, p);
        }
        total += p;
    }
    store(top, now);
    store(mass, total);
    float decays[W];
    store(decays, decay);
    int64_t d = 0;
    const auto columns = [&](auto count, auto part) {
        constexpr int N = decltype(count)::value;
        add_columns<S, R, N, decltype(part)::value>(s, v, value_row, n, value_dim - d, decays, sum + d, width,
                                                    next_keys, d == 0 ? key_row : 0, d);
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
