// Eviction from a cache of constant size, on the CPU: each KV head keeps its best and its newest entries. Also pooling
// of attention over neighbours, for the scores. Built by cpu.py with the compiler and flags of Inductor.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int32_t EMPTY = -1;

// Rises with the score; at equal scores, falls with the position. The entry with the lowest key is evicted first.
inline int64_t key(float score, int32_t position) {
    int32_t bits;
    std::memcpy(&bits, &score, sizeof bits);
    if (bits == INT32_MIN) bits = 0;  // -0.0 equals 0.0
    if (bits < 0) bits ^= 0x7fffffff;
    return int64_t(bits) * (int64_t(1) << 32) + (0x7fffffff - position);
}

}  // namespace

// Evicts entries from each line of slots. Those not among the newest `window` positions compete for `quota` slots; the
// position of an evicted entry becomes EMPTY. keep receives which slots still hold an entry.
extern "C" void kvpass_evict_lowest(const float* worth, int32_t* position, const int64_t* quota, bool* keep,
                                    int64_t lines, int64_t width, int64_t window) {
    thread_local std::vector<int64_t> keys, order;
    keys.resize(width);
    for (int64_t line = 0; line < lines; line++, worth += width, position += width, keep += width) {
        const int32_t newest = width ? *std::max_element(position, position + width) : EMPTY;
        order.clear();
        for (int64_t j = 0; j < width; j++) {
            keep[j] = position[j] >= 0;
            if (!keep[j] || position[j] > newest - window) continue;
            keys[j] = key(worth[j], position[j]);
            order.push_back(j);
        }
        const int64_t surplus = int64_t(order.size()) - quota[line];
        if (surplus <= 0) continue;
        const auto worse = [&](int64_t a, int64_t b) { return keys[a] < keys[b]; };
        const auto last = order.begin() + std::min<int64_t>(surplus, order.size());
        if (last != order.end()) std::nth_element(order.begin(), last, order.end(), worse);
        for (auto slot = order.begin(); slot != last; slot++) {
            keep[*slot] = false;
            position[*slot] = EMPTY;
        }
    }
}

enum Pool { NONE, AVERAGE, MAXIMUM };
enum Group { MEAN, LARGEST, SUM };

// Pools attention [lines, group, width] over neighbours by storage_order and reduces it over the group. The newest `window`
// positions of a line are left out; their slots and empty ones get 0.
extern "C" void kvpass_pool_in_order(const float* attention, const int32_t* position, const int32_t* storage_order,
                                     float* worth, int64_t lines, int64_t group, int64_t width, int64_t window,
                                     int64_t pool, int64_t kernel_size, int64_t reduction) {
    thread_local std::vector<int64_t> order;
    thread_local std::vector<float> row;
    const int64_t reach = pool == NONE ? 0 : kernel_size / 2;
    for (int64_t line = 0; line < lines; line++, position += width, storage_order += width, worth += width) {
        const int32_t newest = width ? *std::max_element(position, position + width) : EMPTY;
        order.clear();
        for (int64_t j = 0; j < width; j++)
            if (position[j] >= 0 && position[j] <= newest - window) order.push_back(int64_t(storage_order[j]) << 32 | j);
        std::sort(order.begin(), order.end());
        std::fill_n(worth, width, 0.0f);
        const int64_t count = order.size();
        row.assign(count + 2 * reach, 0.0f);
        for (int64_t head = 0; head < group; head++, attention += width) {
            for (int64_t i = 0; i < count; i++) row[reach + i] = attention[order[i] & 0xffffffff];
            for (int64_t i = 0; i < count; i++) {
                float pooled = row[i];
                for (int64_t near = 1; near <= 2 * reach; near++)
                    pooled = pool == MAXIMUM ? std::max(pooled, row[i + near]) : pooled + row[i + near];
                if (pool == AVERAGE) pooled /= float(kernel_size);
                float& total = worth[order[i] & 0xffffffff];
                total = reduction == LARGEST && head > 0 ? std::max(total, pooled) : total + pooled;
            }
        }
        if (reduction == MEAN)
            for (int64_t i = 0; i < count; i++) worth[order[i] & 0xffffffff] /= float(group);
    }
}
