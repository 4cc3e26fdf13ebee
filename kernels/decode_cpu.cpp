// Ragged decode attention on the CPU: few new tokens against a packed pool segment and a dense tail.
// Built by decode_cpu.py with the compiler and the flags of Inductor, once per ENTRY (float, bf16 or fp16).
//
// The entries of all (row, KV head) units form one line; every thread takes an equal stretch of it, whatever the
// lengths of the units. A unit cut between threads is put together by its log-sum-exp.

#include <omp.h>

#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "cpu_vectors.h"

namespace {

constexpr int BLOCK = 128;                   // entries whose scores are held at a time
constexpr int64_t GRAIN = int64_t(1) << 19;  // multiply-adds that are worth one more thread
constexpr float LOWEST = -1e30f;             // running maximum of nothing: finite, so that differences stay defined
constexpr float MINUS_INF = -std::numeric_limits<float>::infinity();

// Field order and widths are those of the struct format in decode_cpu.py.
struct Call {
    const void *q, *k, *v;
    const void *pool_k, *pool_v;
    const int32_t* offsets;
    void *tail_k, *tail_v;
    const int64_t* tail_start;
    const float* sinks;  // null: none
    void* out;
    int64_t rows, heads, kv_heads, tokens, key_dim, value_dim;
    int64_t pool_entries, offset_stride, slots, used, layer;
    int64_t q_stride[3], k_stride[3], v_stride[3];  // row, head, token, in elements
    double scale, softcap;                          // softcap 0: none
};

// ---- one block of entries, R queries that share them ----

// Asks for the cache lines of bytes from .. from + size - 1 that a later loop will read.
INLINE void fetch_ahead(const char* from, int64_t size) {
    for (int64_t i = 0; i < size; i += 64) __builtin_prefetch(from + i, 0, 2);
}

// Scores of n entries, laid out s[entry][query]; entries at or past limit[query] get -inf. Returns the lane maxima.
template <class S, int R>
INLINE vf score_block(const float* q, int64_t q_width, const S* k, int64_t dim, int64_t n, const int64_t* limit,
                      float cap, float* s, const char* ahead, int64_t ahead_row) {
    constexpr int E = W / R;
    const int64_t all_visible = *std::min_element(limit, limit + R);
    vf highest = splat(MINUS_INF);
    for (int64_t j = 0; j < n; j += E) {
        const S* row[E];
#pragma GCC unroll 16
        for (int e = 0; e < E; e++) row[e] = k + std::min(j + e, n - 1) * dim;
        fetch_ahead(ahead + j * ahead_row, E * ahead_row);
        vf sum[W] = {};
        int64_t d = 0;
        for (; d + W <= dim; d += W) {
            vf key[E];
#pragma GCC unroll 16
            for (int e = 0; e < E; e++) key[e] = load(row[e] + d);
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) sum[i] = fma(key[i / R], load(q + (i % R) * q_width + d), sum[i]);
        }
        if (d < dim) {
#pragma GCC unroll 16
            for (int i = 0; i < W; i++)
                sum[i] = fma(load_part(row[i / R] + d, dim - d), load(q + (i % R) * q_width + d), sum[i]);
        }
        vf x = add_lanes<W>(sum);
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

// sum[query] = sum[query] * decay[query] + sum over entries of p[entry][query] * v[entry], for N vectors of columns.
template <class S, int R, int N, bool PART>
INLINE void add_columns(const float* p, const S* v, int64_t dim, int64_t n, int64_t part, const float* decay,
                        float* sum, int64_t width, const char* ahead, int64_t ahead_row) {
    constexpr int U = R * N >= 8 ? 1 : 8 / (R * N);  // entries at a time: hides the latency of the multiply-add
    vf a[U][R][N] = {};
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int c = 0; c < N; c++) a[0][r][c] = load(sum + r * width + c * W) * decay[r];
    const auto step = [&](int64_t j, vf(&b)[R][N]) __attribute__((always_inline)) {
#pragma GCC unroll 16
        for (int c = 0; c < N; c++) {
            const S* at = v + j * dim + c * W;
            vf value;
            if constexpr (PART) {
                value = load_part(at, part);
            } else {
                value = load(at);
            }
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) b[r][c] = fma(splat(p[j * R + r]), value, b[r][c]);
        }
    };
    int64_t j = 0;
    for (; j + U <= n; j += U) {
        fetch_ahead(ahead + j * ahead_row, U * ahead_row);
#pragma GCC unroll 16
        for (int u = 0; u < U; u++) step(j + u, a[u]);
    }
    for (; j < n; j++) step(j, a[0]);
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

// One step of the online softmax. top and mass hold one vector per query tile: lane i belongs to query i % R.
template <class S, int R>
void attend_block(const float* q, int64_t q_width, const S* k, const S* v, int64_t key_dim, int64_t value_dim,
                  int64_t n, const int64_t* limit, float cap, float* s, float* top, float* mass, float* sum,
                  int64_t width, bool first) {
    const int64_t key_row = first ? key_dim * sizeof(S) : 0, value_row = first ? value_dim * sizeof(S) : 0;
    const char *values = (const char*)v, *next_keys = (const char*)(k + n * key_dim);
    const vf before = load(top);
    const vf highest = score_block<S, R>(q, q_width, k, key_dim, n, limit, cap, s, values, value_row);
    const vf now = max(before, across_entries<R>(highest, [](vf a, vf b) { return max(a, b); }));
    const vf decay = exp_nonpositive(before - now);
    vf total = load(mass) * decay;
    for (int64_t i = 0; i < n * R; i += W) {
        const vf p = exp_nonpositive(load(s + i) - now);
        store(s + i, p);
        total += p;
    }
    store(top, now);
    store(mass, total);
    float decays[W];
    store(decays, decay);
    int64_t d = 0;
    const auto columns = [&](auto count, auto part) {
        constexpr int N = decltype(count)::value;
        add_columns<S, R, N, decltype(part)::value>(s, v + d, value_dim, n, value_dim - d, decays, sum + d, width,
                                                    next_keys, d == 0 ? key_row : 0);
        d += N * W;
    };
    constexpr int WIDEST = W == 16 || R < 4 ? 4 : 2;  // as many sums as there are registers
    while (d + WIDEST * W <= value_dim) columns(std::integral_constant<int, WIDEST>{}, std::false_type{});
    if constexpr (WIDEST == 4)
        if (d + 2 * W <= value_dim) columns(std::integral_constant<int, 2>{}, std::false_type{});
    if (d + W <= value_dim) columns(std::integral_constant<int, 1>{}, std::false_type{});
    if (d < value_dim) columns(std::integral_constant<int, 1>{}, std::true_type{});
}

// ---- units and threads ----

INLINE int64_t rounded(int64_t n) { return (n + W - 1) / W * W; }

struct Decoder {
    using S = ENTRY;
    const Call& c;
    const int64_t group = c.heads / c.kv_heads;
    const int64_t queries = group * c.tokens;  // of one unit, in (query head, token) order
    const int64_t units = c.rows * c.kv_heads;
    const int64_t key_width = rounded(c.key_dim), value_width = rounded(c.value_dim);
    const int64_t partial_size = queries * (value_width + 2 * W);
    const int64_t scratch_size = queries * key_width + (BLOCK * 4 + W) + 2 * partial_size;

    // Unnormalised output, running maximum and mass of a stretch of a unit; one pair (top, mass) of vectors per tile.
    struct Partial {
        float *sum, *top, *mass;
    };

    Partial partial(float* scratch, int slot) const {
        float* at = scratch + queries * key_width + (BLOCK * 4 + W) + slot * partial_size;
        return {at, at + queries * value_width, at + queries * (value_width + W)};
    }

    int64_t pool_begin(int64_t unit) const {
        return c.offsets[unit / c.kv_heads * c.offset_stride + c.layer * c.kv_heads + unit % c.kv_heads];
    }
    int64_t pool_length(int64_t unit) const {
        return c.offsets[unit / c.kv_heads * c.offset_stride + c.layer * c.kv_heads + unit % c.kv_heads + 1] -
               pool_begin(unit);
    }
    int64_t length(int64_t unit) const {
        return pool_length(unit) + c.used + c.tokens - c.tail_start[unit / c.kv_heads];
    }
    int64_t tail_slot(int64_t unit, int64_t slot) const { return (c.layer * units + unit) * c.slots + slot; }

    // Queries are taken four, two or one at a time.
    template <class F>
    void for_tiles(F f) const {
        int64_t i = 0, tile = 0;
        for (; i + 4 <= queries; i += 4) f(std::integral_constant<int, 4>{}, i, tile++);
        for (; i + 2 <= queries; i += 2) f(std::integral_constant<int, 2>{}, i, tile++);
        for (; i < queries; i++) f(std::integral_constant<int, 1>{}, i, tile++);
    }

    void append() const {
        for (int64_t unit = 0; unit < units; unit++) {
            const int64_t row = unit / c.kv_heads, head = unit % c.kv_heads;
            for (int64_t t = 0; t < c.tokens; t++) {
                const int64_t slot = tail_slot(unit, c.used + t);
                std::memcpy((S*)c.tail_k + slot * c.key_dim,
                            (const S*)c.k + row * c.k_stride[0] + head * c.k_stride[1] + t * c.k_stride[2],
                            c.key_dim * sizeof(S));
                std::memcpy((S*)c.tail_v + slot * c.value_dim,
                            (const S*)c.v + row * c.v_stride[0] + head * c.v_stride[1] + t * c.v_stride[2],
                            c.value_dim * sizeof(S));
            }
        }
    }

    void load_queries(int64_t unit, float* q) const {
        const int64_t row = unit / c.kv_heads, head = unit % c.kv_heads;
        for (int64_t i = 0; i < queries; i++) {
            const S* from = (const S*)c.q + row * c.q_stride[0] + (head * group + i / c.tokens) * c.q_stride[1] +
                            i % c.tokens * c.q_stride[2];
            int64_t d = 0;
            for (; d + W <= c.key_dim; d += W) store(q + i * key_width + d, load(from + d) * float(c.scale));
            if (d < c.key_dim) store(q + i * key_width + d, load_part(from + d, c.key_dim - d) * float(c.scale));
        }
    }

    // Attends to entries begin..end-1 of one side (pool segment or tail); token t sees the first visible + t of them.
    void attend_rows(const S* k, const S* v, int64_t begin, int64_t end, int64_t visible, float* scratch,
                     Partial out) const {
        float* s = scratch + queries * key_width;
        for (int64_t j = begin; j < end; j += BLOCK) {
            const int64_t n = std::min<int64_t>(BLOCK, end - j);
            for_tiles([&](auto r, int64_t i, int64_t tile) {
                constexpr int R = decltype(r)::value;
                int64_t limit[R];
                for (int x = 0; x < R; x++) limit[x] = std::min(n, visible + (i + x) % c.tokens - j);
                attend_block<S, R>(scratch + i * key_width, key_width, k + j * c.key_dim, v + j * c.value_dim,
                                   c.key_dim, c.value_dim, n, limit, float(c.softcap), s, out.top + tile * W,
                                   out.mass + tile * W, out.sum + i * value_width, value_width, tile == 0);
            });
        }
    }

    // Entries begin..end-1 of a unit: its pool segment, then its valid tail slots.
    void attend(int64_t unit, int64_t begin, int64_t end, float* scratch, Partial out) const {
        load_queries(unit, scratch);
        std::fill(out.sum, out.sum + queries * value_width, 0.0f);
        std::fill(out.top, out.top + queries * W, LOWEST);
        std::fill(out.mass, out.mass + queries * W, 0.0f);
        const int64_t row = unit / c.kv_heads, pool = pool_length(unit), start = c.tail_start[row];
        const int64_t kept = row * c.pool_entries + pool_begin(unit), slot = tail_slot(unit, start);
        attend_rows((const S*)c.pool_k + kept * c.key_dim, (const S*)c.pool_v + kept * c.value_dim, begin,
                    std::min(end, pool), pool, scratch, out);
        attend_rows((const S*)c.tail_k + slot * c.key_dim, (const S*)c.tail_v + slot * c.value_dim,
                    std::max(begin - pool, int64_t(0)), end - pool, c.used + 1 - start, scratch, out);
    }

    // Output of a unit from the partials of its stretches.
    void finish(int64_t unit, const Partial* parts, int64_t count) const {
        const int64_t row = unit / c.kv_heads, head = unit % c.kv_heads;
        for_tiles([&](auto r, int64_t first, int64_t tile) {
            constexpr int R = decltype(r)::value;
            for (int x = 0; x < R; x++) {
                const int64_t i = first + x, query_head = head * group + i / c.tokens;
                float top = c.sinks ? c.sinks[query_head] : LOWEST;
                for (int64_t p = 0; p < count; p++) top = std::max(top, parts[p].top[tile * W + x]);
                float mass = c.sinks ? std::exp(c.sinks[query_head] - top) : 0.0f;
                float* sum = parts[0].sum + i * value_width;
                for (int64_t p = 0; p < count; p++) {
                    const float weight = std::exp(parts[p].top[tile * W + x] - top);
                    for (int lane = x; lane < W; lane += R) mass += weight * parts[p].mass[tile * W + lane];
                    const float* from = parts[p].sum + i * value_width;
                    for (int64_t d = 0; d < value_width; d += W)
                        store(sum + d, p == 0 ? load(from + d) * weight : load(sum + d) + load(from + d) * weight);
                }
                S* out = (S*)c.out + ((row * c.tokens + i % c.tokens) * c.heads + query_head) * c.value_dim;
                for (int64_t d = 0; d < c.value_dim; d++) round_to(sum[d] / mass, out + d);
            }
        });
    }

    void run() const {
        if (units * queries == 0) return;
        append();
        thread_local std::vector<int64_t> line;  // where each unit begins on the line of all entries
        line.assign(units + 1, 0);
        for (int64_t unit = 0; unit < units; unit++) line[unit + 1] = line[unit] + length(unit);
        const int64_t work = line[units] * (c.key_dim + c.value_dim) * queries;
        const int wanted = int(std::clamp<int64_t>(work / GRAIN, 1, omp_in_parallel() ? 1 : omp_get_max_threads()));
        thread_local std::vector<vf> memory;
        if (int64_t(memory.size()) < wanted * scratch_size / W) memory.resize(wanted * scratch_size / W);
        const int64_t* begins = line.data();
        float* scratch = reinterpret_cast<float*>(memory.data());
        if (wanted == 1) {
            stretch(begins, scratch, 0, 1);
            return;
        }
        std::vector<int64_t> cut(wanted);
        int threads = wanted;
#pragma omp parallel num_threads(wanted)
        {
            const int me = omp_get_thread_num();
            if (me == 0) threads = omp_get_num_threads();
            cut[me] = stretch(begins, scratch, me, omp_get_num_threads());
        }
        for (int me = 0; me < threads; me++)
            if (cut[me] >= 0) join(begins, scratch, me, threads, cut[me]);
    }

    int64_t bound(const int64_t* begins, int thread, int threads) const { return begins[units] * thread / threads; }

    // Attends to one thread's stretch of the line. Slot 0 takes what an earlier thread began, slot 1 the rest.
    // Returns the unit that this thread began and a later one ends, or -1.
    int64_t stretch(const int64_t* begins, float* scratch, int me, int threads) const {
        float* mine = scratch + me * scratch_size;
        const int64_t end = bound(begins, me + 1, threads);
        int64_t at = bound(begins, me, threads);
        int64_t unit = std::upper_bound(begins, begins + units + 1, at) - begins - 1;
        for (; at < end; unit++) {
            const bool began = at == begins[unit], ends = begins[unit + 1] <= end;
            const Partial part = partial(mine, began);
            const int64_t stop = std::min(end, begins[unit + 1]);
            attend(unit, at - begins[unit], stop - begins[unit], mine, part);
            if (began && ends) finish(unit, &part, 1);
            if (began && !ends) return unit;
            at = stop;
        }
        return -1;
    }

    void join(const int64_t* begins, float* scratch, int me, int threads, int64_t unit) const {
        std::vector<Partial> parts{partial(scratch + me * scratch_size, 1)};
        for (int other = me + 1; other < threads && bound(begins, other, threads) < begins[unit + 1]; other++)
            parts.push_back(partial(scratch + other * scratch_size, 0));
        finish(unit, parts.data(), int64_t(parts.size()));
    }
};

}  // namespace

// Returns 0, or 1 + row where the offsets of a row are outside the pool, or -1 - row where its tail_start is outside
// 0..used; then nothing was written.
extern "C" int64_t kvpass_attend_decode(const Call* call) {
    const Call& c = *call;
    for (int64_t row = 0; row < c.rows; row++) {
        const int32_t* offsets = c.offsets + row * c.offset_stride + c.layer * c.kv_heads;
        if (offsets[0] < 0 || offsets[c.kv_heads] > c.pool_entries) return 1 + row;
        for (int64_t head = 0; head < c.kv_heads; head++)
            if (offsets[head] > offsets[head + 1]) return 1 + row;
        if (c.tail_start[row] < 0 || c.tail_start[row] > c.used) return -1 - row;
    }
    Decoder{c}.run();
    return 0;
}
