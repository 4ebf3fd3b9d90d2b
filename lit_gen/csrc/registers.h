// Vectors of 16 floats of which each is one register where the machine has such, and else a pair of halves: wider than
// the registers, GCC keeps a vector in memory, and products were thirty times as slow.

#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

constexpr int LANES = 16;
#if defined(__AVX512F__)
constexpr int WIDTH = 16;  // floats in a register
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
// What sums that are formed at once may fill, leaving some for what is added to them: in registers, and in vectors.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int REGISTERS = 24;
#else
constexpr int REGISTERS = 12;
#endif
constexpr int SUMS = REGISTERS * WIDTH / LANES;

// Registers.
typedef float RV __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t RU __attribute__((vector_size(4 * WIDTH)));
typedef int32_t RI __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t RU16 __attribute__((vector_size(2 * WIDTH)));

template <class H>
struct Pair {
    typedef H Half;
    H lo, hi;
};
template <class T> constexpr bool is_pair = false;
template <class H> constexpr bool is_pair<Pair<H>> = true;
template <class T> constexpr int lanes = sizeof(T) / 4;

#define BOTH(op)                                                                                   \
    template <class H, class G>                                                                    \
    INLINE auto operator op(Pair<H> a, Pair<G> b) { return Pair<decltype(a.lo op b.lo)>{a.lo op b.lo, a.hi op b.hi}; } \
    template <class H, class S, class = std::enable_if_t<std::is_arithmetic<S>::value>>           \
    INLINE auto operator op(Pair<H> a, S b) { return Pair<decltype(a.lo op b)>{a.lo op b, a.hi op b}; } \
    template <class H, class S, class = std::enable_if_t<std::is_arithmetic<S>::value>>           \
    INLINE auto operator op(S a, Pair<H> b) { return Pair<decltype(a op b.lo)>{a op b.lo, a op b.hi}; }
BOTH(+) BOTH(-) BOTH(*) BOTH(/) BOTH(<) BOTH(>) BOTH(==) BOTH(!=) BOTH(&) BOTH(<<) BOTH(>>)
#undef BOTH
template <class H> INLINE Pair<H> operator-(Pair<H> a) { return {-a.lo, -a.hi}; }
template <class H, class S> INLINE Pair<H>& operator+=(Pair<H>& a, S b) { return a = a + b; }
template <class H, class S> INLINE Pair<H>& operator-=(Pair<H>& a, S b) { return a = a - b; }
template <class H, class S> INLINE Pair<H>& operator*=(Pair<H>& a, S b) { return a = a * b; }

template <class R, int N> struct Join { typedef Pair<typename Join<R, N / 2>::type> type; };
template <class R> struct Join<R, 1> { typedef R type; };
typedef Join<RV, LANES / WIDTH>::type V;
typedef Join<RU, LANES / WIDTH>::type U;
typedef Join<RI, LANES / WIDTH>::type I;

// A vector whose register from lane i on is f(i).
template <class T, class F>
INLINE T make(const F& f, int i = 0) {
    if constexpr (is_pair<T>) return {make<typename T::Half>(f, i), make<typename T::Half>(f, i + lanes<T> / 2)};
    else return f(i);
}

// f(register, its first lane) for each register.
template <class T, class F>
INLINE void each(T x, const F& f, int i = 0) {
    if constexpr (is_pair<T>) each(x.lo, f, i), each(x.hi, f, i + lanes<T> / 2);
    else f(x, i);
}

// The same bits as numbers of another type.
template <class To, class From>
INLINE To as(From x) {
    if constexpr (is_pair<To>) return {as<typename To::Half>(x.lo), as<typename To::Half>(x.hi)};
    else return (To)x;
}

template <class M, class T>
INLINE T select(M which, T a, T b) {  // by lanes: a where `which` holds, else b
    if constexpr (is_pair<T>) return {select(which.lo, a.lo, b.lo), select(which.hi, a.hi, b.hi)};
    else return which ? a : b;
}

template <class R>
INLINE R read(const void* p) {
    R x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
