// Vectors of 16 floats, in and out of memory in three formats, and what is done to them.

#pragma once
#include <algorithm>
#include <cmath>
#include "registers.h"

struct bf16 { uint16_t bits; };
typedef _Float16 half;

inline float to_float(float x) { return x; }
inline float to_float(half x) { return float(x); }
inline float to_float(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}

inline void store(float* p, float x) { *p = x; }
inline void store(half* p, float x) { *p = half(x); }
inline void store(bf16* p, float x) {  // to nearest, ties to even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    p->bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE V splat(float x) {
    return make<V>([=](int) { return x - RV{}; });
}
INLINE V load(const float* p) {
    return make<V>([=](int i) { return read<RV>(p + i); });
}
INLINE V load(const bf16* p) {
    return make<V>([=](int i) { return (RV)(__builtin_convertvector(read<RU16>(p + i), RU) << 16); });
}
INLINE V load(const half* p) {
    return make<V>([=](int i) {
#if defined(__AVX512F__)
        return (RV)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(p + i)));
#elif defined(__F16C__) && defined(__AVX2__)
        return (RV)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + i)));
#else
        RV y;
        for (int j = 0; j < WIDTH; j++) y[j] = float(p[i + j]);
        return y;
#endif
    });
}

INLINE void store(float* p, V x) {
    each(x, [=](RV y, int i) { std::memcpy(p + i, &y, sizeof y); });
}
INLINE void store(bf16* p, V x) {
    each(x, [=](RV y, int i) {
        RU bits = (RU)y;
        bits = y != y ? RU{} + 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        const RU16 low = __builtin_convertvector(bits, RU16);
        std::memcpy(p + i, &low, sizeof low);
    });
}
INLINE void store(half* p, V x) {
    each(x, [=](RV y, int i) {
#if defined(__AVX512F__)
        _mm256_storeu_si256((__m256i*)(p + i), _mm512_cvtps_ph((__m512)y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__) && defined(__AVX2__)
        _mm_storeu_si128((__m128i*)(p + i), _mm256_cvtps_ph((__m256)y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
        for (int j = 0; j < WIDTH; j++) p[i + j] = half(y[j]);
#endif
    });
}

template <class T>
INLINE V load(const T* p, int64_t n) {  // the first n of 16, then zeros
    if (n >= LANES) return load(p);
    float y[LANES] = {};
    for (int i = 0; i < n; i++) y[i] = to_float(p[i]);
    return load(y);
}

template <class T>
INLINE void store(T* p, V x, int64_t n) {  // the first n of 16
    if (n >= LANES) return store(p, x);
    float y[LANES];
    store(y, x);
    for (int i = 0; i < n; i++) store(p + i, y[i]);
}

template <class F>
INLINE V map(V x, const F& f) {  // f of each lane by itself, f(number, lane): for what there is no instruction
    float y[LANES];
    store(y, x);
    for (int i = 0; i < LANES; i++) y[i] = f(y[i], i);
    return load(y);
}
INLINE V keep(V x, int64_t n, float rest) {  // the first n lanes; `rest` in the others
    return n >= LANES ? x : map(x, [=](float y, int i) { return i < n ? y : rest; });
}

template <int S, class T>
INLINE void exchange(T& a, T& b) {  // a's lanes with bit S go to b, and b's without it to a, where they lie S apart
    if constexpr (is_pair<T>) {
        if constexpr (S == lanes<T> / 2) std::swap(a.hi, b.lo);
        else exchange<S>(a.lo, b.lo), exchange<S>(a.hi, b.hi);
    } else {
#define LOW(l) ((l) & S ? WIDTH + ((l) ^ S) : (l))
#define HIGH(l) ((l) & S ? WIDTH + (l) : (l) | S)
#define ALL4(f, i) f(i), f(i + 1), f(i + 2), f(i + 3)
#define ALL8(f, i) ALL4(f, i), ALL4(f, i + 4)
#if defined(__AVX512F__)
#define ALL(f) ALL8(f, 0), ALL8(f, 8)
#elif defined(__AVX2__)
#define ALL(f) ALL8(f, 0)
#else
#define ALL(f) ALL4(f, 0)
#endif
        const T low = __builtin_shufflevector(a, b, ALL(LOW)), high = __builtin_shufflevector(a, b, ALL(HIGH));
        a = low, b = high;
#undef LOW
#undef HIGH
#undef ALL
#undef ALL8
#undef ALL4
    }
}

template <int S>
INLINE void exchange_all(V* p) {
    for (int i = 0; i < LANES; i++)
        if (!(i & S)) exchange<S>(p[i], p[i + S]);
}
inline void transpose(V* p) {  // 16 vectors
    exchange_all<8>(p), exchange_all<4>(p), exchange_all<2>(p), exchange_all<1>(p);
}

// For each lane the sum of the 16 lanes of p[lane]: a tree of 15 additions, always the same one.
template <int S>
INLINE V pair_sums(V a, V b) {  // lanes without bit S: sums of a's lanes l and l + S; the others: of b's
    exchange<S>(a, b);
    return a + b;
}
inline V sums(V* p) {
    for (int i = 0; i < 8; i++) p[i] = pair_sums<8>(p[i], p[i + 8]);
    for (int i = 0; i < 4; i++) p[i] = pair_sums<4>(p[i], p[i + 4]);
    for (int i = 0; i < 2; i++) p[i] = pair_sums<2>(p[i], p[i + 2]);
    return pair_sums<1>(p[0], p[1]);
}
inline float sum(V x) {  // of its lanes, in order
    float y[LANES], s = 0;
    store(y, x);
    for (int i = 0; i < LANES; i++) s += y[i];
    return s;
}
inline float largest(V x) {
    float y[LANES];
    store(y, x);
    return *std::max_element(y, y + LANES);
}

// e**x to 2 units in the last place: 2**n * e**r with |r| <= ln(2) / 2, and the series of e**r. Below -87 it is e**-87,
// above 88 infinity; NaN stays NaN.
INLINE V exp(V x) {
    const V wanted = x;
    x = select(x < -87.0f, splat(-87.0f), x);
    x = select(x > 88.0f, splat(88.0f), x);
    const V magic = splat(12582912.0f);  // 1.5 * 2**23: adding it leaves the nearest integer in the last bits
    V n = x * 1.44269504f + magic;
    const I power = as<I>(n) - as<I>(magic);
    n -= magic;
    V r = x - n * 0.693145752f;  // ln 2 in two parts, the first one exact in products with n
    r -= n * 1.42860677e-6f;
    V y = splat(1.0f / 5040);
    for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) y = y * r + c;
    y = as<V>(as<I>(y) + (power << 23));
    return select(wanted > 88.0f, splat(INFINITY), y);
}
