// Vectors of fp32 lanes for the CPU kernels. Uses the vector extensions of GCC and Clang, so that one source serves
// AVX-512, AVX2, SSE and NEON. Input types fp32, bf16, fp16; all arithmetic in fp32.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));

struct bf16 {
    uint16_t bits;
};
struct fp16 {
    uint16_t bits;
};
struct e4m3 {
    uint8_t bits;
};
template <int COUNT>
struct levels {  // part of codes of COUNT bits, the lowest first, which number the levels of entry_formats.py
    uint8_t bits;
};

// Codes; a scale belongs to each row of them, times UNIT of what load returns.
template <class S>
constexpr bool IS_CODE = false;
template <>
constexpr bool IS_CODE<int8_t> = true;
template <>
constexpr bool IS_CODE<e4m3> = true;
template <int COUNT>
constexpr bool IS_CODE<levels<COUNT>> = true;
template <class S>
constexpr float UNIT = 1.0f;
template <>
constexpr float UNIT<e4m3> = 256.0f;

template <class S>
constexpr int64_t BITS = 8 * sizeof(S);  // of a number
template <int COUNT>
constexpr int64_t BITS<levels<COUNT>> = COUNT;

// Number i from p on; of levels, i is a multiple of 8.
template <class S>
INLINE S* number(S* p, int64_t i) {
    return (S*)((char*)p + i * BITS<std::remove_const_t<S>> / 8);
}

template <class To, class From>
INLINE To bits_as(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To to;
    std::memcpy(&to, &from, sizeof(To));
    return to;
}

INLINE vf splat(float x) { return x - vf{}; }

INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

INLINE vf max(vf a, vf b) { return a > b ? a : b; }

INLINE vf load(const float* p) {
    vf x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

INLINE vf load(const bf16* p) {
    vh x;
    std::memcpy(&x, p, sizeof x);
    return bits_as<vf>(__builtin_convertvector(x, vu) << 16);
}

INLINE vf load(const fp16* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    vh raw;
    std::memcpy(&raw, p, sizeof raw);
    const vu x = __builtin_convertvector(raw, vu);
    const vf magnitude = bits_as<vf>((x & 0x7fff) << 13) * 0x1p112f;  // rebias the exponent; also right for subnormals
    const vu special = (vu)((x & 0x7c00) == 0x7c00) & 0x7f800000;     // infinity and NaN keep an all-ones exponent
    return bits_as<vf>(bits_as<vu>(magnitude) | special | ((x & 0x8000) << 16));
#endif
}

typedef int8_t vb __attribute__((vector_size(W)));
typedef uint8_t vub __attribute__((vector_size(W)));

INLINE vf load(const int8_t* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    vb x;
    std::memcpy(&x, p, sizeof x);
    return __builtin_convertvector(__builtin_convertvector(x, vi), vf);
#endif
}

// Returns the value / 256: the bits of an e4m3, without its sign, are those of an fp16 of that value, seven further left.
INLINE vf load(const e4m3* p) {
#if defined(__AVX512F__)
    const __m256i x = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
    return (vf)_mm512_maskz_cvtph_ps(0xffff, _mm256_and_si256(x, _mm256_set1_epi16(int16_t(0xbfff))));
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
    const __m128i x = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p)), 7);
    return (vf)_mm256_cvtph_ps(_mm_and_si128(x, _mm_set1_epi16(int16_t(0xbfff))));
#else
    vub raw;
    std::memcpy(&raw, p, sizeof raw);
    const vu x = __builtin_convertvector(raw, vu);
    const vf magnitude = __builtin_convertvector((x & 0x7f) < 8 ? (x & 7) : (x & 7) | 8, vf);  // times 2^-9, subnormal
    const vu exponent = (x >> 3) & 15;
    const vf power = bits_as<vf>(((exponent == 0 ? exponent + 1 : exponent) + (127 - 10 - 8)) << 23);
    return bits_as<vf>(bits_as<vu>(magnitude * power) | ((x & 0x80) << 24));
#endif
}

constexpr auto LANES = std::make_integer_sequence<int, W>{};

template <int... I>
INLINE vi numbered(std::integer_sequence<int, I...>) {
    return vi{I...};
}

constexpr float LEVELS2[16] = {-1.5104f, -0.4528f, 0.4528f, 1.5104f};
constexpr float LEVELS3[16] = {-2.1520f, -1.3439f, -0.7560f, -0.2451f, 0.2451f, 0.7560f, 1.3439f, 2.1520f};
constexpr float LEVELS4[16] = {-2.7326f, -2.0690f, -1.6181f, -1.2562f, -0.9424f, -0.6568f, -0.3881f, -0.1284f,
                               0.1284f,  0.3881f,  0.6568f,  0.9424f,  1.2562f,  1.6181f,  2.0690f,  2.7326f};

template <int COUNT>
constexpr const float* table_of() {
    return COUNT == 2 ? LEVELS2 : COUNT == 3 ? LEVELS3 : LEVELS4;
}

// Levels number code[i], from 0 to 15.
INLINE vf lookup(const float* table, vu code) {
#if defined(__AVX512F__)
    return (vf)_mm512_permutexvar_ps((__m512i)code, _mm512_loadu_ps(table));
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), (__m256i)code);
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), (__m256i)code);
    return (vf)_mm256_blendv_ps(low, high, (__m256)(code << 28));  // by bit 3
#else
    vf x;
    for (int i = 0; i < W; i++) x[i] = table[code[i]];
    return x;
#endif
}

// Numbers i..i + W - 1 from p on. Codes of lanes 0..7 are in the first word, those of 8..15 in the second, which begins
// as many bytes later as it can without reading on.
template <int COUNT, int... I>
INLINE vf load_levels(const levels<COUNT>* p, int64_t i, std::integer_sequence<int, I...>) {
    const int64_t bit = i * COUNT;
    constexpr int BYTES = (W * COUNT + 7) / 8 > 4 ? 4 : (W * COUNT + 7) / 8;  // of a word
    constexpr int SECOND = W > 8 ? W * COUNT / 8 - BYTES : 0;
    uint32_t first = 0, second = 0;
    std::memcpy(&first, p + bit / 8, BYTES);
    if constexpr (W > 8) std::memcpy(&second, p + bit / 8 + SECOND, BYTES);
#if defined(__AVX512F__)
    const vu word = (vu)_mm512_mask_set1_epi32(_mm512_set1_epi32(int(first)), 0xff00, int(second));
#else
    const vu word = first - vu{};  // eight lanes or fewer
#endif
    const vu shift = {uint32_t(I * COUNT - (I < 8 ? 0 : 8 * SECOND))...};
    const uint32_t phase = W * COUNT % 8 ? bit % 8 : 0;
    return lookup(table_of<COUNT>(), word >> (shift + phase) & ((1u << COUNT) - 1));
}

// load(number(p, i)), also of levels where i is no multiple of 8, but of W.
template <class S>
INLINE vf load_at(const S* p, int64_t i) {
    return load(p + i);
}

template <int COUNT>
INLINE vf load_at(const levels<COUNT>* p, int64_t i) {
    return load_levels(p, i, LANES);
}

template <class S>
INLINE vf load_part(const S* p, int64_t n) {
    S padded[W] = {};
    std::memcpy(padded, p, n * BITS<S> / 8);
    return load_at(padded, 0);
}

INLINE void store(float* p, vf x) { std::memcpy(p, &x, sizeof x); }

// Lane i becomes lane index(i) of a (below W) or of b (W and above).
#if defined(__clang__)
#define SHUFFLE(a, b, index) __builtin_shufflevector(a, b, index(I)...)
#else
#define SHUFFLE(a, b, index) __builtin_shuffle(a, b, vi{index(I)...})
#endif

template <int STEP, int... I>
INLINE vf swap_lanes(vf a, std::integer_sequence<int, I...>) {
#define SWAPPED(i) ((i) ^ STEP)
    return SHUFFLE(a, a, SWAPPED);
#undef SWAPPED
}

// Lane i is the sum of lanes i and i ^ STEP: of b if bit STEP of i is set, else of a.
template <int STEP, int... I>
INLINE vf add_pairs(vf a, vf b, std::integer_sequence<int, I...>) {
#define SAME(i) ((i) + ((i) & STEP ? W : 0))
#define OTHER(i) (((i) ^ STEP) + ((i) & STEP ? W : 0))
    return SHUFFLE(a, b, SAME) + SHUFFLE(a, b, OTHER);
#undef SAME
#undef OTHER
}

template <int R, int... I>
INLINE vf repeat_lanes(vf a, std::integer_sequence<int, I...>) {
#define REPEATED(i) ((i) / R)
    return SHUFFLE(a, a, REPEATED);
#undef REPEATED
}

// Lane i is the scale of entry i / R of the next n; 0 from n on.
template <class S, int R>
INLINE vf scales(const float* scale, int64_t n) {
    const vf x = n >= W ? load(scale) : load_part(scale, n);
    return repeat_lanes<R>(x, LANES) * UNIT<S>;
}

// Lane i is the sum of all lanes of a[i]. N vectors are left to add; a is overwritten.
template <int N>
INLINE vf add_lanes(vf* a) {
    if constexpr (N == 1) {
        return a[0];
    } else {
#pragma GCC unroll 16
        for (int i = 0; i < N / 2; i++) a[i] = add_pairs<W / N>(a[2 * i], a[2 * i + 1], LANES);
        return add_lanes<N / 2>(a);
    }
}

// Reduces over the lanes that belong to the same query (equal index modulo R); every lane gets the result.
template <int R, class F>
INLINE vf across_entries(vf x, F f) {
    if constexpr (R < W) {
        return across_entries<2 * R>(f(x, swap_lanes<R>(x, LANES)), f);
    } else {
        return x;
    }
}

// exp(x) for x <= 0, to about 1e-7; 0 below the normal range, NaN stays NaN. Taylor polynomial on |r| <= ln(2) / 2.
INLINE vf exp_nonpositive(vf x) {
    const float smallest = -87.3f, shift = 12582912.0f;
    const vf clamped = x < smallest ? splat(smallest) : x;
    const vf shifted = fma(clamped, splat(1.44269504089f), splat(shift));
    const vf n = shifted - shift;
    vf r = fma(n, splat(-0.693359375f), clamped);
    r = fma(n, splat(2.12194440e-4f), r);
    vf y = splat(1.0f / 5040);
    y = fma(y, r, splat(1.0f / 720));
    y = fma(y, r, splat(1.0f / 120));
    y = fma(y, r, splat(1.0f / 24));
    y = fma(y, r, splat(1.0f / 6));
    y = fma(y, r, splat(0.5f));
    y = fma(y, r, splat(1.0f));
    y = fma(y, r, splat(1.0f));
    const vf power = bits_as<vf>((bits_as<vu>(shifted) << 23) + 0x3f800000);
    return x < smallest ? vf{} : y * power;
}

INLINE vf magnitude(vf x) { return x < 0.0f ? -x : x; }

INLINE vf softcapped(vf x, float cap) {
    const vf e = exp_nonpositive(magnitude(x) * (-2.0f / cap));
    const vf y = cap * (1.0f - e) / (1.0f + e);
    return x < 0.0f ? -y : y;
}

// ---- rounding of outputs, to nearest even ----

INLINE void round_to(float x, float* out) { *out = x; }

INLINE void round_to(float x, bf16* out) {
    const uint32_t u = bits_as<uint32_t>(x);
    out->bits = std::isnan(x) ? (u >> 16) | 0x40 : (u + 0x7fff + ((u >> 16) & 1)) >> 16;
}

INLINE void round_to(float x, fp16* out) {
    const uint32_t u = bits_as<uint32_t>(x), sign = (u >> 16) & 0x8000, size = u & 0x7fffffff;
    uint32_t h;
    if (size > 0x7f800000) {
        h = 0x7e00;
    } else if (size >= 0x47800000) {  // 65536 and above; values that round up to it carry into infinity below
        h = 0x7c00;
    } else if (size < 0x38800000) {  // subnormal: adding 0.5 leaves multiples of 2^-24 in the mantissa
        h = bits_as<uint32_t>(bits_as<float>(size) + 0.5f) - 0x3f000000;
    } else {
        h = (size - 0x38000000 + 0xfff + ((size >> 13) & 1)) >> 13;
    }
    out->bits = uint16_t(sign | h);
}

// ---- codes of rows, as entry_formats.py has them ----
// x: n numbers, then zeros up to the end of a vector.

INLINE bool is_nan(float x) { return (bits_as<uint32_t>(x) & 0x7fffffff) > 0x7f800000; }

// Returns the largest magnitude, or NaN.
INLINE float largest(const float* x, int64_t n) {
    float top = 0.0f;
    for (int64_t d = 0; d < n; d++) {
        if (is_nan(x[d])) return x[d];
        top = std::fabs(x[d]) > top ? std::fabs(x[d]) : top;
    }
    return top;
}

INLINE void encode(const float* x, int64_t n, int8_t* to, float* scale) {
    *scale = largest(x, n) / 127.0f;
    const float step = *scale != 0.0f ? *scale : 1.0f;
    for (int64_t d = 0; d < n; d++) to[d] = int8_t(std::nearbyint(std::fmin(std::fmax(x[d] / step, -127.0f), 127.0f)));
}

INLINE void round_to(float x, e4m3* out) {  // of magnitude 448 at most
    const uint32_t u = bits_as<uint32_t>(x), sign = (u >> 24) & 0x80, size = u & 0x7fffffff;
    if (size < 0x3c800000) {  // subnormal: a multiple of 2^-9
        out->bits = uint8_t(sign | uint32_t(std::nearbyint(bits_as<float>(size) * 512.0f)));
    } else {
        out->bits = uint8_t(sign | (((size + 0x7ffff + ((size >> 20) & 1)) >> 20) - (120 << 3)));
    }
}

INLINE void encode(const float* x, int64_t n, e4m3* to, float* scale) {
    *scale = largest(x, n) / 448.0f;
    const float step = *scale != 0.0f ? *scale : 1.0f;
    for (int64_t d = 0; d < n; d++) round_to(std::fmin(std::fmax(x[d] / step, -448.0f), 448.0f), to + d);
}

INLINE float sum_of_lanes(vf x) {
    float lanes[W], sum = 0.0f;
    store(lanes, x);
    for (float lane : lanes) sum += lane;
    return sum;
}

template <int COUNT>
INLINE void encode(const float* x, int64_t n, levels<COUNT>* to, float* scale) {
    constexpr const float* TABLE = table_of<COUNT>();
    vf squares = {};
    for (int64_t d = 0; d < n; d += W) squares += load(x + d) * load(x + d);
    const float size = std::sqrt(sum_of_lanes(squares) / float(n));
    const float unit = size != 0.0f ? size : 1.0f;
    vf dot = {}, norm = {};
    uint32_t word = 0;
    int filled = 0;  // bits of it
    for (int64_t d = 0; d < n; d += W) {
        const vf y = load(x + d), z = y / unit;
        vi code = {};
#pragma GCC unroll 16
        for (int i = 0; i + 1 < 1 << COUNT; i++) code -= (vi)(z > (TABLE[i] + TABLE[i + 1]) / 2);
        int32_t codes[W];
        std::memcpy(codes, &code, sizeof codes);
        const vf near = numbered(LANES) < int32_t(n - d) ? lookup(TABLE, (vu)code) : vf{};
        dot += y * near;
        norm += near * near;
        for (int64_t i = 0; i < W && d + i < n; i++) {
            word |= uint32_t(codes[i]) << filled;
            filled += COUNT;
            if (filled >= 8) {
                (to++)->bits = uint8_t(word);
                word >>= 8;
                filled -= 8;
            }
        }
    }
    *scale = sum_of_lanes(dot) / sum_of_lanes(norm);
}

}  // namespace
