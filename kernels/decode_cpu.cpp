// Ragged decode attention on the CPU: a few new tokens against a packed pool segment and a dense tail, or one new token
// against a cache of constant size, whose slots are reused.
// Built by cpu.py with the compiler and the flags of Inductor, once per ENTRY (float, bf16 or fp16: queries, new entries and
// outputs) and HELD, which is ENTRY or the type of the codes that the cache holds (int8_t, e4m3 or levels).
//
// The entries of all (row, KV head) units form one queue. Every thread takes an equal stretch of it, whatever the
// lengths of the units. The parts of a unit that is split between threads are merged by log-sum-exp.

#include <omp.h>

#include <vector>

#include "cpu_block.h"

namespace {

constexpr int BLOCK = 128;                   // entries scored at a time
constexpr int64_t GRAIN = int64_t(1) << 19;  // multiply-adds that justify one more thread

constexpr int32_t EMPTY = -1;                // position of a free slot

// Field order and widths must match the struct format of the call in cpu.py.
struct Call {
    const void *q, *k, *v;
    void *pool_k, *pool_v;
    const int32_t* offsets;
    void *tail_k, *tail_v;
    const int64_t* tail_start;
    const float* sinks;  // null: none
    void* out;
    // For slots that are reused; else null.
    int32_t* position;
    const int64_t* now;  // position of the new entry of each row; null: it is not recorded
    float* weights;
    // Rows of the buffers, if they are not those of the call, and tail slots in use of each; else null.
    const int64_t *row_index, *row_used;
    float *pool_k_scale, *pool_v_scale, *tail_k_scale, *tail_v_scale;  // of each entry, if they are codes
    const float *rotate_k, *rotate_v;  // parts of the rotations of q and k, and of v and outputs; null: none
    int64_t rows, heads, kv_heads, tokens, key_dim, value_dim;
    int64_t value_row;  // elements from one value row of pool and tail to the next: value_dim, or key_dim in keys
    int64_t pool_rows;  // rows, or 1: then its row serves all
    int64_t pool_entries, offset_stride, slots, used, layer;
    int64_t pool_stride, tail_stride[2];  // entries from row to row; of tails, from layer to layer and row to row
    int64_t q_stride[3], k_stride[3], v_stride[3];  // row, head, token, in elements
    int64_t position_stride[2], width;              // row, KV head; slots of a line
    double scale, softcap;                          // softcap 0: none
};

enum Fault { BAD_OFFSETS = 1, BAD_START, NO_SLOT };

// ---- units and threads ----

INLINE int64_t rounded(int64_t n) { return (n + W - 1) / W * W; }

struct Decoder {
    using S = ENTRY;
    using H = HELD;
    const Call& c;
    // Keys, values and scales of pool or tail.
    struct Side {
        H *k, *v;
        float *k_scale, *v_scale;
    };
    const Side pool{(H*)c.pool_k, (H*)c.pool_v, c.pool_k_scale, c.pool_v_scale};
    const Side tail{(H*)c.tail_k, (H*)c.tail_v, c.tail_k_scale, c.tail_v_scale};
    const int64_t group = c.heads / c.kv_heads;
    const int64_t queries = group * c.tokens;  // of one unit, in (query head, token) order
    const int64_t units = c.rows * c.kv_heads;
    const int64_t key_width = rounded(c.key_dim), value_width = rounded(c.value_dim);
    const int64_t partial_size = queries * (value_width + 2 * W);
    const int64_t scratch_size = queries * key_width + (BLOCK * 4 + W) + 2 * partial_size;

    // Unnormalised output, running maximum and mass of a part of a unit; one pair (top, mass) of vectors per tile.
    struct Partial {
        float *sum, *top, *mass;
    };

    Partial partial(float* scratch, int slot) const {
        float* at = scratch + queries * key_width + (BLOCK * 4 + W) + slot * partial_size;
        return {at, at + queries * value_width, at + queries * (value_width + W)};
    }

    static int64_t held_row(const Call& c, int64_t row) { return c.row_index ? c.row_index[row] : row; }
    static int64_t used(const Call& c, int64_t row) { return c.row_used ? c.row_used[held_row(c, row)] : c.used; }

    int64_t row_of(int64_t unit) const { return held_row(c, unit / c.kv_heads); }
    int64_t segment(int64_t unit, int64_t end) const {
        return c.offsets ? c.offsets[row_of(unit) * c.offset_stride + c.layer * c.kv_heads + unit % c.kv_heads + end] : 0;
    }
    int64_t used(int64_t unit) const { return used(c, unit / c.kv_heads); }
    int64_t pool_length(int64_t unit) const { return segment(unit, 1) - segment(unit, 0); }
    int64_t length(int64_t unit) const {
        return pool_length(unit) + (c.position ? c.slots : used(unit) + c.tokens - c.tail_start[row_of(unit)]);
    }
    int64_t pool_row(int64_t unit) const {
        return std::min(row_of(unit), c.pool_rows - 1) * c.pool_stride + segment(unit, 0);
    }
    int64_t tail_slot(int64_t unit, int64_t slot) const {
        return c.layer * c.tail_stride[0] + row_of(unit) * c.tail_stride[1] + unit % c.kv_heads * c.slots + slot;
    }

    // Calls f for tiles of four, two or one queries.
    template <class F>
    void for_tiles(F f) const {
        int64_t i = 0, tile = 0;
        for (; i + 4 <= queries; i += 4) f(std::integral_constant<int, 4>{}, i, tile++);
        for (; i + 2 <= queries; i += 2) f(std::integral_constant<int, 2>{}, i, tile++);
        for (; i < queries; i++) f(std::integral_constant<int, 1>{}, i, tile++);
    }

    const S* new_value(int64_t unit, int64_t t) const {
        return (const S*)c.v + unit / c.kv_heads * c.v_stride[0] + unit % c.kv_heads * c.v_stride[1] + t * c.v_stride[2];
    }

    // Rotates a vector in place, or back. parts: of rotation.py, dim signs and the cosine transform of what is left.
    static void rotate(float* x, const float* parts, int64_t dim, bool back) {
        const int64_t odd = dim / (dim & -dim);
        const float* cosines = parts + dim;
        if (!back)
            for (int64_t d = 0; d < dim; d++) x[d] *= parts[d];
        if (odd > 1) {
            thread_local std::vector<float> before;
            before.assign(x, x + dim);
            for (int64_t i = 0; i < dim; i++) {
                const int64_t own = i % odd, first = i - own;
                x[i] = 0.0f;
                for (int64_t j = 0; j < odd; j++) x[i] += cosines[back ? j * odd + own : own * odd + j] * before[first + j];
            }
        }
        for (int64_t stride = odd; stride < dim; stride *= 2)
            for (int64_t first = 0; first < dim; first += 2 * stride)
                for (int64_t i = first; i < first + stride; i++) {
                    const float sum = x[i] + x[i + stride], difference = x[i] - x[i + stride];
                    x[i] = sum;
                    x[i + stride] = difference;
                }
        if (back)
            for (int64_t d = 0; d < dim; d++) x[d] *= parts[d];
    }

    // to = from * factor, in fp32; up to the end of a vector.
    static void widen(const S* from, int64_t dim, float factor, float* to) {
        int64_t d = 0;
        for (; d + W <= dim; d += W) store(to + d, load(from + d) * factor);
        if (d < dim) store(to + d, load_part(from + d, dim - d) * factor);
    }

    // Stores a new row as it is held, rotated where there are parts.
    template <class T>
    static void put_row(const S* from, const float* parts, int64_t dim, T* to, float* scale) {
        if constexpr (std::is_same_v<S, T>) {
            std::memcpy(to, from, dim * sizeof(S));
        } else {
            thread_local std::vector<float> row;
            row.assign(rounded(dim), 0.0f);
            widen(from, dim, 1.0f, row.data());
            if (parts) rotate(row.data(), parts, dim, false);
            encode(row.data(), dim, to, scale);
        }
    }

    void put(const Side& side, int64_t slot, int64_t unit, int64_t t) const {
        const int64_t row = unit / c.kv_heads, head = unit % c.kv_heads;
        const S* key = (const S*)c.k + row * c.k_stride[0] + head * c.k_stride[1] + t * c.k_stride[2];
        put_row(key, c.rotate_k, c.key_dim, number(side.k, slot * c.key_dim), side.k_scale + slot);
        if (side.v == side.k) return;  // values are stored in keys
        put_row(new_value(unit, t), c.rotate_v, c.value_dim, number(side.v, slot * c.value_row), side.v_scale + slot);
    }

    void append() const {
        for (int64_t unit = 0; unit < units; unit++) {
            for (int64_t t = 0; t < c.tokens; t++) put(tail, tail_slot(unit, used(unit) + t), unit, t);
        }
    }

    // ---- reused slots: the line of a unit is its pool segment, padded to width - slots, then its tail ----

    int32_t* line(int64_t unit) const {
        return c.position + unit / c.kv_heads * c.position_stride[0] + unit % c.kv_heads * c.position_stride[1];
    }

    // Finds the first empty slot of each line. Returns a unit that has none, or -1.
    int64_t find_empty(int64_t* taken) const {
        const int64_t behind = c.width - c.slots;
        for (int64_t unit = 0; unit < units; unit++) {
            const int32_t* at = line(unit);
            taken[unit] = std::find(at, at + c.width, EMPTY) - at;
            const bool is_in_no_segment = taken[unit] < behind && taken[unit] >= pool_length(unit);
            if (taken[unit] == c.width || is_in_no_segment) return unit;
        }
        return -1;
    }

    void enter(const int64_t* taken) const {
        const int64_t behind = c.width - c.slots;
        for (int64_t unit = 0; unit < units; unit++) {
            const int64_t slot = taken[unit];
            if (slot < behind) {
                put(pool, pool_row(unit) + slot, unit, 0);
            } else {
                put(tail, tail_slot(unit, slot - behind), unit, 0);
            }
            if (!c.now) continue;
            line(unit)[slot] = int32_t(c.now[unit / c.kv_heads]);
            std::fill_n(c.weights + unit * group * c.width, group * c.width, MINUS_INF);
        }
    }

    // Attends the slots begin..end-1 of a unit's pool segment and tail that hold an entry, one run at a time.
    void attend_slots(int64_t unit, int64_t begin, int64_t end, int64_t taken, float* scratch, Partial out) const {
        start(unit, scratch, out);
        const int64_t kept = pool_length(unit), behind = c.width - c.slots;
        const int32_t* position = line(unit);
        float* weights = c.weights ? c.weights + unit * group * c.width : nullptr;
        const auto attend_side = [&](const Side& side, int64_t row, int64_t first, int64_t from, int64_t to) {
            const auto occupied = [&](int64_t j) { return position[first + j] >= 0 || first + j == taken; };
            while (from < to) {
                while (from < to && !occupied(from)) from++;
                int64_t stop = from;
                while (stop < to && occupied(stop)) stop++;
                attend_rows(side, row, from, stop, stop, scratch, out, weights ? weights + first : nullptr);
                from = stop;
            }
        };
        attend_side(pool, pool_row(unit), 0, begin, std::min(end, kept));
        attend_side(tail, tail_slot(unit, 0), behind, std::max(begin - kept, int64_t(0)), end - kept);
    }

    void load_queries(int64_t unit, float* q) const {
        const int64_t row = unit / c.kv_heads, head = unit % c.kv_heads;
        for (int64_t i = 0; i < queries; i++) {
            const S* from = (const S*)c.q + row * c.q_stride[0] + (head * group + i / c.tokens) * c.q_stride[1] +
                            i % c.tokens * c.q_stride[2];
            widen(from, c.key_dim, float(c.scale), q + i * key_width);
            if (c.rotate_k) rotate(q + i * key_width, c.rotate_k, c.key_dim, false);
        }
    }

    // Attends entries begin..end-1 behind a row of one side; token t attends the first visible + t of them. If weights is
    // not null, the scores are also stored there.
    void attend_rows(const Side& side, int64_t row, int64_t begin, int64_t end, int64_t visible, float* scratch,
                     Partial out, float* weights = nullptr) const {
        float* s = scratch + queries * key_width;
        for (int64_t j = begin; j < end; j += BLOCK) {
            const int64_t n = std::min<int64_t>(BLOCK, end - j);
            for_tiles([&](auto r, int64_t i, int64_t tile) {
                constexpr int R = decltype(r)::value;
                int64_t limit[R];
                for (int x = 0; x < R; x++) limit[x] = std::min(n, visible + (i + x) % c.tokens - j);
                attend_block<H, R>(scratch + i * key_width, key_width, number(side.k, (row + j) * c.key_dim),
                                   number(side.v, (row + j) * c.value_row), side.k_scale + row + j,
                                   side.v_scale + row + j, c.key_dim, c.value_dim, c.value_row, n, limit,
                                   float(c.softcap), s, out.top + tile * W, out.mass + tile * W,
                                   out.sum + i * value_width, value_width, tile == 0,
                                   weights ? weights + i * c.width + j : nullptr, c.width);
            });
        }
    }

    void start(int64_t unit, float* scratch, Partial out) const {
        load_queries(unit, scratch);
        std::fill(out.sum, out.sum + queries * value_width, 0.0f);
        std::fill(out.top, out.top + queries * W, LOWEST);
        std::fill(out.mass, out.mass + queries * W, 0.0f);
    }

    // Attends entries begin..end-1 of a unit: its pool segment, then its valid tail slots.
    void attend(int64_t unit, int64_t begin, int64_t end, float* scratch, Partial out) const {
        start(unit, scratch, out);
        const int64_t kept = pool_length(unit), first = c.tail_start[row_of(unit)];
        attend_rows(pool, pool_row(unit), begin, std::min(end, kept), kept, scratch, out);
        attend_rows(tail, tail_slot(unit, first), std::max(begin - kept, int64_t(0)), end - kept,
                    used(unit) + 1 - first, scratch, out);
    }

    // Computes the output of a unit from the partial results of its parts.
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
                if (c.rotate_v) rotate(sum, c.rotate_v, c.value_dim, true);
                for (int64_t d = 0; d < c.value_dim; d++) round_to(sum[d] / mass, out + d);
                if (c.weights) {
                    float* weights = c.weights + (unit * group + i) * c.width;
                    for (int64_t j = 0; j < c.width; j += W) {
                        const int64_t n = std::min<int64_t>(W, c.width - j);
                        float lanes[W];
                        store(lanes, exp_nonpositive(load_part(weights + j, n) - top) / mass);
                        std::memcpy(weights + j, lanes, n * sizeof(float));
                    }
                }
            }
        });
    }

    // taken: the slot of each unit's new entry; null if slots are not reused.
    void run(const int64_t* taken) const {
        thread_local std::vector<int64_t> queue;  // where each unit begins in the queue of all entries
        queue.assign(units + 1, 0);
        for (int64_t unit = 0; unit < units; unit++) queue[unit + 1] = queue[unit] + length(unit);
        const int64_t work = queue[units] * (c.key_dim + c.value_dim) * queries;
        const int wanted = int(std::clamp<int64_t>(work / GRAIN, 1, omp_in_parallel() ? 1 : omp_get_max_threads()));
        thread_local std::vector<vf> memory;
        if (int64_t(memory.size()) < wanted * scratch_size / W) memory.resize(wanted * scratch_size / W);
        const int64_t* begins = queue.data();
        float* scratch = reinterpret_cast<float*>(memory.data());
        if (wanted == 1) {
            stretch(begins, taken, scratch, 0, 1);
            return;
        }
        std::vector<int64_t> cut(wanted);
        int threads = wanted;
#pragma omp parallel num_threads(wanted)
        {
            const int me = omp_get_thread_num();
            if (me == 0) threads = omp_get_num_threads();
            cut[me] = stretch(begins, taken, scratch, me, omp_get_num_threads());
        }
        for (int me = 0; me < threads; me++)
            if (cut[me] >= 0) join(begins, scratch, me, threads, cut[me]);
    }

    int64_t bound(const int64_t* begins, int thread, int threads) const { return begins[units] * thread / threads; }

    // Attends one thread's stretch of the queue. A unit begun by an earlier thread goes to partial 0, the others to 1.
    // Returns the unit that this thread begins and a later one ends, or -1.
    int64_t stretch(const int64_t* begins, const int64_t* taken, float* scratch, int me, int threads) const {
        float* mine = scratch + me * scratch_size;
        const int64_t end = bound(begins, me + 1, threads);
        int64_t at = bound(begins, me, threads);
        int64_t unit = std::upper_bound(begins, begins + units + 1, at) - begins - 1;
        for (; at < end; unit++) {
            const bool began = at == begins[unit], ends = begins[unit + 1] <= end;
            const Partial part = partial(mine, began);
            const int64_t stop = std::min(end, begins[unit + 1]);
            if (taken) {
                attend_slots(unit, at - begins[unit], stop - begins[unit], taken[unit], mine, part);
            } else {
                attend(unit, at - begins[unit], stop - begins[unit], mine, part);
            }
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

// Returns 0, or 4 * row + a Fault; after a fault nothing was written.
extern "C" int64_t kvpass_attend_decode(const Call* call) {
    const Call& c = *call;
    for (int64_t row = 0; row < c.rows; row++) {
        if (c.offsets) {
            const int32_t* offsets = c.offsets + Decoder::held_row(c, row) * c.offset_stride + c.layer * c.kv_heads;
            if (offsets[0] < 0 || offsets[c.kv_heads] > c.pool_entries) return 4 * row + BAD_OFFSETS;
            const int64_t longest = c.position ? c.width - c.slots : c.pool_entries;
            for (int64_t head = 0; head < c.kv_heads; head++)
                if (offsets[head] > offsets[head + 1] || offsets[head + 1] - offsets[head] > longest)
                    return 4 * row + BAD_OFFSETS;
        }
        const int64_t used = Decoder::used(c, row), start = c.position ? 0 : c.tail_start[Decoder::held_row(c, row)];
        if (!c.position && (start < 0 || start > used)) return 4 * row + BAD_START;
        if (!c.position && used + c.tokens > c.slots) return 4 * row + NO_SLOT;
    }
    const Decoder decoder{c};
    if (decoder.units * decoder.queries == 0) return 0;
    if (!c.position) {
        decoder.append();
        decoder.run(nullptr);
        return 0;
    }
    thread_local std::vector<int64_t> taken;
    taken.resize(decoder.units);
    const int64_t full = decoder.find_empty(taken.data());
    if (full >= 0) return 4 * (full / c.kv_heads) + NO_SLOT;
    decoder.enter(taken.data());
    decoder.run(taken.data());
    return 0;
}
