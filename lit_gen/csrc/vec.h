// Vectors of 16 floats, and the 16-bit formats in and out of them.
//
// GCC/Clang vector extensions: a compiler for a machine with smaller registers makes several instructions of one.

#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

typedef float V __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t U __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t I __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t U16 __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint8_t U8 __attribute__((vector_size(16), aligned(1), may_alias));
typedef int8_t I8 __attribute__((vector_size(16), aligned(1), may_alias));
constexpr int LANES = 16;

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

inline V splat(float x) { return x - V{}; }
inline V load(const float* p) { return *(const V*)p; }
inline V load(const bf16* p) { return (V)(__builtin_convertvector(*(const U16*)p, U) << 16); }
inline V load(const half* p) {
#ifdef __AVX512F__
    return (V)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#else
    V y;
    for (int i = 0; i < LANES; i++) y[i] = float(p[i]);
    return y;
#endif
}

inline void store(float* p, V x) { *(V*)p = x; }
inline void store(bf16* p, V x) {
    U bits = (U)x;
    bits = x != x ? U{} + 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    *(U16*)p = __builtin_convertvector(bits, U16);
}
inline void store(half* p, V x) {
#ifdef __AVX512F__
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    for (int i = 0; i < LANES; i++) p[i] = half(x[i]);
#endif
}

template <class T>
inline V load(const T* p, int64_t n) {  // the first n of 16, then zeros
    if (n >= LANES) return load(p);
    float y[LANES] = {};
    for (int i = 0; i < n; i++) y[i] = to_float(p[i]);
    return load(y);
}

template <class T>
inline void store(T* p, V x, int64_t n) {  // the first n of 16
    if (n >= LANES) return store(p, x);
    float y[LANES];
    std::memcpy(y, &x, sizeof y);
    for (int i = 0; i < n; i++) store(p + i, y[i]);
}

template <int S>
inline void exchange(V& a, V& b) {  // a's lanes with bit S go to b, and b's without it to a, where they lie S apart
#define LOW(l) ((l) & S ? 16 + ((l) ^ S) : (l))
#define HIGH(l) ((l) & S ? 16 + (l) : (l) | S)
#define ALL(f) f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), f(10), f(11), f(12), f(13), f(14), f(15)
    const V low = __builtin_shufflevector(a, b, ALL(LOW)), high = __builtin_shufflevector(a, b, ALL(HIGH));
    a = low, b = high;
#undef LOW
#undef HIGH
#undef ALL
}

template <int S>
inline void exchange_all(V* p) {
    for (int i = 0; i < LANES; i++)
        if (!(i & S)) exchange<S>(p[i], p[i + S]);
}
inline void transpose(V* p) {  // 16 vectors
    exchange_all<8>(p), exchange_all<4>(p), exchange_all<2>(p), exchange_all<1>(p);
}

// For each lane the sum of the 16 lanes of p[lane]: a tree of 15 additions, always the same one.
template <int S>
inline V pair_sums(V a, V b) {  // lanes without bit S: sums of a's lanes l and l + S; the others: of b's
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
    float s = 0;
    for (int i = 0; i < LANES; i++) s += x[i];
    return s;
}

// e**x to 2 units in the last place: 2**n * e**r with |r| <= ln(2) / 2, and the series of e**r. Below -87 it is e**-87,
// above 88 infinity; NaN stays NaN.
inline V exp(V x) {
    const V wanted = x;
    x = x < -87.0f ? splat(-87.0f) : x;
    x = x > 88.0f ? splat(88.0f) : x;
    const V magic = splat(12582912.0f);  // 1.5 * 2**23: adding it leaves the nearest integer in the last bits
    V n = x * 1.44269504f + magic;
    I power = (I)n - (I)magic;
    n -= magic;
    V r = x - n * 0.693145752f;  // ln 2 in two parts, the first one exact in products with n
    r -= n * 1.42860677e-6f;
    V y = splat(1.0f / 5040);
    for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) y = y * r + c;
    y = (V)((I)y + (power << 23));
    return wanted > 88.0f ? splat(INFINITY) : y;
}
