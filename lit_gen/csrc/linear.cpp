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
#include "weights.h"

namespace {

constexpr int AHEAD = 2048;  // bytes: weights are fetched so long before they are needed
constexpr int64_t PIECE = 128;  // k's of a panel that are made floats at once: 16 KB
constexpr int64_t ROWS = 192;   // rows whose sums are formed while a piece is at hand
constexpr int64_t STRIP = 2 * WIDTH;  // columns of a piece
constexpr int64_t MOST = REGISTERS / 2;  // rows whose sums for a strip fill the registers

// The sum of 16 columns from column n on -> out.
template <class T>
INLINE void finish(V y, const Weight& g, int64_t n, T* out) {
    const int64_t left = g.N - n;
    if (left <= 0) return;
    if (g.factor) y *= load(g.factor + n, left);
    if (g.bias) y += load(g.bias + n, left);
    store(out + n, y, left);
}

// f of the constant n, of at most `most`: loops over so many rows are then unrolled.
template <int64_t most, class F>
INLINE void with_constant(int64_t n, const F& f) {
    switch (n) {
#define CASE(i) case i: if constexpr (i <= most) f(std::integral_constant<int, i>()); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
    }
}

// MR rows x P panels. x is [K][MR].
template <class W, class T, int MR, int P>
void tile(const float* x, const Weight& g, int64_t panel, T* out) {
    V sum[MR][2 * P] = {};
    const int64_t K = g.K, step = K * W::bytes, groups = (K + GROUP - 1) / GROUP;
    const char* w = g.w + panel * step;
    W weights[P];
    for (int p = 0; p < P && g.scales; p++) weights[p].start(g.scales + (panel + p) * groups * 128);
    for (int64_t i = 0; i < groups; i++) {
        for (int p = 0; p < P; p++) weights[p].group(i);
        for (int64_t k = GROUP * i; k < std::min(GROUP * (i + 1), K); k++) {
            V b[2 * P];
            for (int p = 0; p < P; p++) __builtin_prefetch(w + p * step + k * W::bytes + AHEAD);
            for (int p = 0; p < P; p++) weights[p].get(w + p * step + k * W::bytes, b[2 * p], b[2 * p + 1]);
            for (int m = 0; m < MR; m++)
                for (int j = 0; j < 2 * P; j++) sum[m][j] += x[k * MR + m] * b[j];
        }
    }
    for (int m = 0; m < MR; m++)
        for (int j = 0; j < 2 * P; j++) finish(sum[m][j], g, panel * PANEL + j * LANES, out + m * g.N);
}

template <class W, class T, int P>
void tiles(int64_t M, const float* x, const Weight& g, int64_t panel, T* out) {
    constexpr int64_t most = SUMS / (2 * P);
    for (int64_t m = 0; m < M; m += most)
        with_constant<most>(std::min(most, M - m), [&](auto rows) {
            tile<W, T, rows, P>(x + m * g.K, g, panel, out + m * g.N);
        });
}

// As `tiles`, for more rows: a piece of the panel at a time is made floats, in strips that are two registers wide, and
// stays in the nearest cache while the rows pass by.

// Weights at k0, ..., k1 - 1 -> [strip][k][STRIP].
template <class W>
void unpack(const Weight& g, int64_t panel, int64_t k0, int64_t k1, float* out) {
    const int64_t step = g.K * W::bytes, groups = (g.K + GROUP - 1) / GROUP;
    const char* w = g.w + panel * step;
    W weights;
    if (g.scales) weights.start(g.scales + panel * groups * 128);
    for (int64_t k = k0; k < k1; k++) {
        if (k % GROUP == 0) weights.group(k / GROUP);
        V both[2];
        weights.get(w + k * W::bytes, both[0], both[1]);
        for (int j = 0; j < 2; j++)
            each(both[j], [&](RV y, int i) {
                const int64_t column = j * LANES + i;
                std::memcpy(out + column / STRIP * PIECE * STRIP + (k - k0) * STRIP + column % STRIP, &y, sizeof y);
            });
    }
}

// Adds the products of MR rows with a strip, of n k's, to sums [MR][STRIP]. x is [k][MR]. Meanwhile fetches every
// `stride` bytes of `next`.
template <int MR>
void add_strip(const float* x, const float* w, int64_t n, float* sums, const char* next, int64_t stride) {
    RV sum[MR][2];
    for (int m = 0; m < MR; m++)
        for (int j = 0; j < 2; j++) sum[m][j] = read<RV>(sums + m * STRIP + j * WIDTH);
    for (int64_t k = 0; k < n; k++) {
        __builtin_prefetch(next + k * stride);
        const RV b0 = read<RV>(w + k * STRIP), b1 = read<RV>(w + k * STRIP + WIDTH);
        for (int m = 0; m < MR; m++) sum[m][0] += x[k * MR + m] * b0, sum[m][1] += x[k * MR + m] * b1;
    }
    for (int m = 0; m < MR; m++)
        for (int j = 0; j < 2; j++) std::memcpy(sums + m * STRIP + j * WIDTH, &sum[m][j], sizeof(RV));
}

template <class W, class T>
void pieces(int64_t M, const float* x, int64_t most, const Weight& g, int64_t panel, float* sums, T* out) {
    alignas(64) float piece[PIECE * PANEL];
    std::fill(sums, sums + M * PANEL, 0.0f);  // [strip][row][STRIP]
    const int64_t stride = W::bytes * most / M / (PANEL / STRIP);
    for (int64_t k0 = 0; k0 < g.K; k0 += PIECE) {
        const int64_t n = std::min(PIECE, g.K - k0);
        unpack<W>(g, panel, k0, k0 + n, piece);
        const char* next = g.w + (panel * g.K + k0 + n) * W::bytes;  // the next piece, to be fetched bit by bit
        for (int64_t strip = 0; strip < PANEL / STRIP; strip++)
            for (int64_t m = 0; m < M; m += most, next += n * stride) {
                const int64_t tile = std::min(most, M - m);
                const float *from = x + m * g.K + k0 * tile, *w = piece + strip * PIECE * STRIP;
                float* to = sums + (strip * M + m) * STRIP;
                with_constant<MOST>(tile, [&](auto rows) { add_strip<rows>(from, w, n, to, next, stride); });
            }
    }
    for (int64_t m = 0; m < M; m++)
        for (int64_t column = 0; column < PANEL; column += LANES) {
            const V y = make<V>([&](int i) {
                const int64_t at = column + i;
                return read<RV>(sums + (at / STRIP * M + m) * STRIP + at % STRIP);
            });
            finish(y, g, panel * PANEL + column, out + m * g.N);
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
    const bool few = M <= SUMS / 4, many = M > W::many;
    const int64_t K = g.K, panels = (g.N + PANEL - 1) / PANEL, rounds = (M + MOST - 1) / MOST;
    const int64_t most = many ? (M + rounds - 1) / rounds : SUMS / (few ? 4 : 2);  // rows of a tile
    const int64_t block = ROWS / most * most;
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
            alignas(64) float sums[ROWS * PANEL];
#pragma omp for schedule(static)
            for (int64_t m = 0; m < M; m += most) arrange(x, m, M, K, most, buffer.get());
            for (int64_t m = 0; m < M; m += block) {
                const int64_t n = std::min(block, M - m);
#pragma omp for schedule(static) nowait
                for (int64_t p = 0; p < panels; p++)
                    if (many) pieces<W>(n, &buffer[m * K], most, g, p, sums, out + m * g.N);
                    else tiles<W, T, 1>(n, &buffer[m * K], g, p, out + m * g.N);
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
