// x @ w.T for a few or many rows x, with a weight laid out once by kernels.py.
//
// Every output is one sum, formed in float32 in the order of its index k. How many rows there are, how they are blocked
// and which thread runs them changes when a sum is formed, never how: a row gets the same bits beside any others.

#include <memory>
#ifdef _OPENMP
#include <omp.h>
#else
inline int omp_get_thread_num() { return 0; }
inline int omp_get_num_threads() { return 1; }
#endif
#include "vec.h"

namespace {

constexpr int PANEL = 32;  // output columns whose weights lie together: w is [N / 32][K][32]
#ifdef __AVX512F__
constexpr int TILE = 24;   // sums that are formed at once, in vectors: as many as there are registers for
#else
constexpr int TILE = 6;
#endif
constexpr int AHEAD = 2048;  // bytes: weights are fetched so long before they are needed
constexpr int DEPTH = 8;   // tiles whose x stays in the cache while w passes by

typedef int16_t I16 __attribute__((vector_size(32), aligned(2), may_alias));

// The weights of 32 columns at one k, as two vectors of 16.
struct Float {
    static constexpr int bytes = 128;
    void start(const char*) {}
    void group(int64_t) {}
    void get(const char* p, V& a, V& b) const { a = load((const float*)p), b = load((const float*)p + 16); }
};

struct BFloat {  // columns j and 16 + j in one 32-bit word
    static constexpr int bytes = 64;
    void start(const char*) {}
    void group(int64_t) {}
    void get(const char* p, V& a, V& b) const {
        const U both = *(const U*)p;
        a = (V)(both << 16), b = (V)(both & 0xffff0000u);
    }
};

struct Int8 {  // the factor of each column is applied by the caller, to the whole sum
    static constexpr int bytes = 32;
    void start(const char*) {}
    void group(int64_t) {}
    static V widen(const char* p) {
#ifdef __AVX512F__
        return (V)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#else  // by way of 16 bits: of the direct conversion GCC 12 makes 50 instructions
        return __builtin_convertvector(__builtin_convertvector(__builtin_convertvector(*(const I8*)p, I16), I), V);
#endif
    }
    void get(const char* p, V& a, V& b) const { a = widen(p), b = widen(p + 16); }
};

struct Int4 {  // column j in the low half of a byte, 16 + j in the high half; factor and least value of 32 k's together
    static constexpr int bytes = 16;
    const char* scales;  // [K / 32][2][32] bfloat16, in pairs of columns as in BFloat
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
        const __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
        const V low = (V)_mm512_permutexvar_ps(both, numbers);
        const V high = (V)_mm512_permutexvar_ps(_mm512_srli_epi32(both, 4), numbers);
#else
        const U8 both = *(const U8*)p;
        const V low = Int8::widen((const char*)&(const U8&)(both & 15));
        const V high = Int8::widen((const char*)&(const U8&)(both >> 4));
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

// MR rows x P panels. x is [K][MR].
template <class W, class T, int MR, int P>
void tile(const float* x, const Weight& g, int64_t panel, T* out) {
    V acc[MR][2 * P] = {};
    const int64_t K = g.K, step = K * W::bytes, groups = (K + 31) / 32;
    const char* w = g.w + panel * step;
    W weights[P];
    for (int p = 0; p < P && g.scales; p++) weights[p].start(g.scales + (panel + p) * groups * 128);
    for (int64_t i = 0; i < groups; i++) {
        for (int p = 0; p < P; p++) weights[p].group(i);
        for (int64_t k = 32 * i; k < std::min(32 * i + 32, K); k++) {
            V b[2 * P];
            for (int p = 0; p < P; p++) __builtin_prefetch(w + p * step + k * W::bytes + AHEAD);
            for (int p = 0; p < P; p++) weights[p].get(w + p * step + k * W::bytes, b[2 * p], b[2 * p + 1]);
            for (int m = 0; m < MR; m++)
                for (int j = 0; j < 2 * P; j++) acc[m][j] += x[k * MR + m] * b[j];
        }
    }
    const int64_t first = panel * PANEL, columns = std::min<int64_t>(P * PANEL, g.N - first);
    for (int m = 0; m < MR; m++)
        for (int64_t j = 0; j * LANES < columns; j++) {
            const int64_t n = first + j * LANES, left = g.N - n;
            V y = acc[m][j];
            if (g.factor) y *= load(g.factor + n, left);
            if (g.bias) y += load(g.bias + n, left);
            store(out + m * g.N + n, y, left);
        }
}

template <class W, class T, int P>
void tiles(int64_t M, const float* x, const Weight& g, int64_t panel, T* out) {
    constexpr int64_t most = TILE / (2 * P);
    for (int64_t m = 0; m < M; m += most) {
        const float* from = x + m * g.K;
        T* to = out + m * g.N;
        switch (std::min(most, M - m)) {
#define CASE(i) case i: if constexpr (i <= most) tile<W, T, i, P>(from, g, panel, to); break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
        }
    }
}

// x (M, K) as float32 [tile][K][rows of the tile]: the tile of row m, of at most 16 rows.
template <class T>
void arrange(const T* x, int64_t m, int64_t M, int64_t K, int64_t most, float* out) {
    const int64_t n = std::min(most, M - m);
    float* to = out + m * K;
    for (int64_t k = 0; k < K; k += LANES) {
        V rows[LANES] = {};
        for (int64_t i = 0; i < n; i++) rows[i] = load(x + (m + i) * K + k, K - k);
        transpose(rows);  // a vector for each k, of which n elements count
        const int64_t left = std::min<int64_t>(K - k, LANES);
        for (int64_t i = 0; i < left; i++, to += n)
            if (k + i + LANES < K) store(to, rows[i]);  // what is too much is overwritten by the next
            else store(to, rows[i], n);
    }
}

template <class W, class T>
void linear(const T* x, int64_t M, const Weight& g, T* out) {
    if (M == 0) return;
    // Few rows: two panels at a time, so that there are enough independent sums.
    const bool few = M <= TILE / 4;
    const int64_t most = TILE / (few ? 4 : 2), K = g.K, panels = (g.N + PANEL - 1) / PANEL;
    std::unique_ptr<float[]> buffer(new float[M * K]);
    if (few) arrange(x, 0, M, K, most, buffer.get());  // not worth waiting for other threads
#pragma omp parallel
    {
        if (few) {
            const int64_t t = omp_get_thread_num(), threads = omp_get_num_threads();
            int64_t p = panels * t / threads;
            const int64_t end = panels * (t + 1) / threads;
            for (; p + 2 <= end; p += 2) tiles<W, T, 2>(M, buffer.get(), g, p, out);
            if (p < end) tiles<W, T, 1>(M, buffer.get(), g, p, out);
        } else {
#pragma omp for schedule(static)
            for (int64_t m = 0; m < M; m += most) arrange(x, m, M, K, most, buffer.get());
            for (int64_t m = 0; m < M; m += DEPTH * most) {
                const int64_t n = std::min(DEPTH * most, M - m);
#pragma omp for schedule(static) nowait
                for (int64_t p = 0; p < panels; p++) tiles<W, T, 1>(n, &buffer[m * K], g, p, out + m * g.N);
            }
        }
    }
}

template <class T>
void choose(const T* x, int64_t M, int format, const Weight& g, T* out) {
    if (format == 0) linear<Float>(x, M, g, out);
    if (format == 1) linear<BFloat>(x, M, g, out);
    if (format == 2) linear<Int8>(x, M, g, out);
    if (format == 3) linear<Int4>(x, M, g, out);
}

}  // namespace

// dtype of x (M, K) and out (M, N): 0 float32, 1 bfloat16, 2 float16. format of w: 0 float32, 1 bfloat16, 2 int8,
// 3 int4. Returns 1 if there is no memory, else 0.
int lit_linear(int dtype, const void* x, int64_t M, int format, const char* w, const char* scales,
               const float* factor, const float* bias, int64_t N, int64_t K, void* out) {
    const Weight g{w, scales, factor, bias, N, K};
    try {
        if (dtype == 0) choose((const float*)x, M, format, g, (float*)out);
        if (dtype == 1) choose((const bf16*)x, M, format, g, (bf16*)out);
        if (dtype == 2) choose((const half*)x, M, format, g, (half*)out);
    } catch (const std::bad_alloc&) {
        return 1;
    }
    return 0;
}
