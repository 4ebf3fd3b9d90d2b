// The formats of weights, which lie in panels of 32 output columns: [N / 32][K][32].

#pragma once
#include "vec.h"

namespace {

constexpr int PANEL = 32;
constexpr int64_t GROUP = 32;  // k's of int4 that share a factor

template <class T>
INLINE RI widen(const char* p) {  // a register of 8-bit integers as 32-bit ones
#if defined(__AVX512F__)
    const __m128i x = _mm_loadu_si128((const __m128i*)p);
    return (RI)(std::is_signed<T>::value ? _mm512_cvtepi8_epi32(x) : _mm512_cvtepu8_epi32(x));
#elif defined(__AVX2__)
    const __m128i x = _mm_loadl_epi64((const __m128i*)p);
    return (RI)(std::is_signed<T>::value ? _mm256_cvtepi8_epi32(x) : _mm256_cvtepu8_epi32(x));
#else  // by way of 16 bits: of the direct conversion GCC 12 makes 50 instructions
    typedef T R8 __attribute__((vector_size(WIDTH)));
    typedef int16_t R16 __attribute__((vector_size(2 * WIDTH)));
    return __builtin_convertvector(__builtin_convertvector(read<R8>(p), R16), RI);
#endif
}

template <class F>
INLINE V floats(const F& integers) {  // of the register from lane i on
    return make<V>([&](int i) { return __builtin_convertvector(integers(i), RV); });
}

// The weights of 32 columns at one k, as two vectors of 16.
struct Float {
    static constexpr int bytes = 128, many = 2 * SUMS / 3;  // more rows than that are worth `pieces`
    void start(const char*) {}
    void group(int64_t) {}
    void get(const char* p, V& a, V& b) const { a = load((const float*)p), b = load((const float*)p + 16); }
};

struct BFloat {  // columns j and 16 + j in one 32-bit word
    static constexpr int bytes = 64, many = 2 * SUMS / 3;
    void start(const char*) {}
    void group(int64_t) {}
    void get(const char* p, V& a, V& b) const {
        const U both = make<U>([=](int i) { return read<RU>(p + 4 * i); });
        a = as<V>(both << 16), b = as<V>(both & 0xffff0000u);
    }
};

struct Int8 {  // the factor of each column is applied by the caller, to the whole sum
    static constexpr int bytes = 32, many = 4 * SUMS / 3;
    void start(const char*) {}
    void group(int64_t) {}
    void get(const char* p, V& a, V& b) const {
        a = floats([=](int i) { return widen<int8_t>(p + i); });
        b = floats([=](int i) { return widen<int8_t>(p + 16 + i); });
    }
};

struct Int4 {  // column j in the low half of a byte, 16 + j in the high half; factor and least value of 32 k's together
    static constexpr int bytes = 16, many = SUMS / 2;
    const char* scales = nullptr;  // [K / 32][2][32] bfloat16, in pairs of columns as in BFloat
    V factor[2], least[2];
    void start(const char* panel) { scales = panel; }
    void group(int64_t i) {
        const BFloat pairs;
        pairs.get(scales + i * 128, factor[0], factor[1]);
        pairs.get(scales + i * 128 + 64, least[0], least[1]);
    }
    void get(const char* p, V& a, V& b) const {
#ifdef __AVX512F__  // a table of the 16 numbers, which looks at the low half of a byte only
        const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512i both = (__m512i)widen<uint8_t>(p);
        const V low = (V)_mm512_permutexvar_ps(both, numbers);
        const V high = (V)_mm512_permutexvar_ps(_mm512_srli_epi32(both, 4), numbers);
#else
        const V low = floats([=](int i) { return widen<uint8_t>(p + i) & 15; });
        const V high = floats([=](int i) { return widen<uint8_t>(p + i) >> 4; });
#endif
        a = low * factor[0] + least[0];
        b = high * factor[1] + least[1];
    }
};

struct Weight {
    const char* w;       // [panels][K][32]
    const char* scales;  // Int4: [panels][K / 32][2][32] bfloat16
    const float* factor; // Int8: [N]
    const float* bias;   // [N]
    int64_t N, K;
};

}  // namespace
