// Attention of one or several queries to one chunk of columns: scores, weights, and the weighted sum of values.

#pragma once
#include <memory>
#include "vec.h"

namespace {

constexpr int64_t CHUNK = 512;
constexpr int AHEAD = 16;  // columns: keys are fetched so long before they are needed, and values meanwhile

struct Shape {
    int64_t N, nh, ng, hs, S, n_elem;            // tokens; heads; head size; cache columns; rotated elements
    int64_t q_stride, k_stride, v_stride;        // elements from one token to the next
    const int64_t *row, *position;               // (N,) each
    int64_t kind, window;                        // 0 full, 1 sliding, 2 chunked
    float scale, softcap;                        // softcap 0: none
    int64_t first(int64_t p) const {             // first column that position p sees
        return kind == 0 ? 0 : kind == 1 ? std::max<int64_t>(0, p - window + 1) : p / window * window;
    }
};

// Elements 16 * d, ... of a head; E > 0: the head is 16 * E long, so that no end has to be looked for.
template <int E, class T>
inline V part(const T* p, int64_t d, int64_t hs) {
    return E ? load(p + LANES * d) : load(p + LANES * d, hs - LANES * d);
}

// Products of a query with 16 keys -> scores, of which n count; `largest` so far.
inline void finish_scores(const Shape& s, V& x, int64_t n, V& largest) {
    x *= s.scale;
    if (s.softcap)
        for (int i = 0; i < LANES; i++) x[i] = std::tanh(x[i] / s.softcap) * s.softcap;
    for (int64_t i = std::max<int64_t>(n, 0); i < LANES; i++) x[i] = -INFINITY;
    largest = x > largest ? x : largest;
}

// n scores, up to the next multiple of 16, -> weights; result[0] is the largest score and result[1] the sum of weights.
inline void weigh(float* score, int64_t n, V largest, float* result) {
    float most = -INFINITY;
    for (int i = 0; i < LANES; i++) most = std::max(most, largest[i]);
    V total = {};
    for (int64_t t = 0; t < n; t += LANES) {
        V& w = *(V*)(score + t);
        const V e = exp(w - most);
        w = w == -INFINITY ? V{} : e;
        total += w;
    }
    result[0] = most, result[1] = sum(total);
}

// Scores of G heads for columns t0, ..., t1 - 1 of k (S, hs), in out[g][t - t0], up to the next multiple of 16 -inf.
// The lanes of largest[g] hold the largest.
template <class T, int G, int E>
void score(const Shape& s, const float* q, const T* k, const T* v, int64_t t0, int64_t t1, float* out, V* largest) {
    const int64_t D = E ? E : (s.hs + LANES - 1) / LANES;
    V part_sums[G][LANES];
    for (int g = 0; g < G; g++) largest[g] = splat(-INFINITY);
    for (int64_t t = t0; t < t1; t += LANES) {
        for (int i = 0; i < LANES; i++) {
            V acc[G] = {};
            for (int64_t b = 0; b < s.hs * int64_t(sizeof(T)); b += 64) {
                __builtin_prefetch((const char*)(k + (t + i + AHEAD) * s.hs) + b);
                __builtin_prefetch((const char*)(v + (t + i) * s.hs) + b);
            }
            const T* key = k + std::min(t + i, t1 - 1) * s.hs;  // behind the end: the last one again
            for (int64_t d = 0; d < D; d++) {
                const V element = part<E>(key, d, s.hs);
                for (int g = 0; g < G; g++) acc[g] += load(q + LANES * (g * D + d)) * element;
            }
            for (int g = 0; g < G; g++) part_sums[g][i] = acc[g];
        }
        for (int g = 0; g < G; g++) {
            V x = sums(part_sums[g]);
            finish_scores(s, x, t1 - t, largest[g]);
            store(out + g * CHUNK + t - t0, x);
        }
    }
}

// out[g] = sum over columns of weight[g][t - t0] * v[t], elements 16 * d, ..., 16 * (d + W) - 1.
template <class T, int G, int E, int W>
void gather(const float* weight, const T* v, int64_t hs, int64_t t0, int64_t t1, int64_t d, float* out, int64_t stride) {
    V acc[G][W] = {};
    for (int64_t t = t0; t < t1; t++) {
        V value[W];
        for (int w = 0; w < W; w++) value[w] = part<E>(v + t * hs, d + w, hs);
        for (int g = 0; g < G; g++)
            for (int w = 0; w < W; w++) acc[g][w] += weight[g * CHUNK + t - t0] * value[w];
    }
    for (int g = 0; g < G; g++)
        for (int w = 0; w < W; w++) *(V*)(out + g * stride + LANES * (d + w)) = acc[g][w];
}

// One chunk of one token for G heads: out[g] is the largest score, the sum of weights and their values, 2 + 16 * D.
template <class T, int G, int E>
void chunk(const Shape& s, const float* q, const T* k, const T* v, int64_t t0, int64_t t1, float* out) {
    const int64_t D = E ? E : (s.hs + LANES - 1) / LANES, stride = 2 + LANES * D;
    float weight[G * CHUNK];
    V largest[G];
    score<T, G, E>(s, q, k, v, t0, t1, weight, largest);
    for (int g = 0; g < G; g++) weigh(weight + g * CHUNK, t1 - t0, largest[g], out + g * stride);
    int64_t d = 0;
    for (; d + 4 <= D; d += 4) gather<T, G, E, 4>(weight, v, s.hs, t0, t1, d, out + 2, stride);
    for (; d < D; d++) gather<T, G, E, 1>(weight, v, s.hs, t0, t1, d, out + 2, stride);
}

// Columns of a chunk as floats, for the tokens of a block.
template <class T>
struct Columns {
    const T *k = nullptr, *v = nullptr;  // whose they are, from column 0
    int64_t t0 = 0, filled = 0, D;  // columns t0, ..., t0 + filled - 1
    std::unique_ptr<float[]> keys, values;  // [tile of 16 columns][16 * D][16]; [column][16 * D]

    explicit Columns(int64_t D) : D(D), keys(new float[CHUNK * D * LANES]), values(new float[CHUNK * D * LANES]) {}

    void fill(const Shape& s, const T* new_k, const T* new_v, int64_t from, int64_t to) {
        if (k != new_k || v != new_v || t0 != from) k = new_k, v = new_v, t0 = from, filled = 0;
        if (filled >= to - t0) return;
        for (int64_t t = filled / LANES * LANES; t < to - t0; t += LANES)
            for (int64_t d = 0; d < D; d++) {
                V part[LANES];
                for (int64_t i = 0; i < LANES; i++) {
                    const int64_t at = std::min(t0 + t + i, to - 1) * s.hs + LANES * d, left = s.hs - LANES * d;
                    part[i] = load(k + at, left);
                    store(&values[((t + i) * D + d) * LANES], load(v + at, left));
                }
                transpose(part);
                for (int i = 0; i < LANES; i++) store(&keys[(t * D + d * LANES + i) * LANES], part[i]);
            }
        filled = to - t0;
    }
};

// The scores of R queries for 16 columns: for each lane i the products of elements i, 16 + i, ..., and then `sums`.
template <int R, int E, int FIRST, int STEP>
inline void products(const float* const* q, const float* k, int64_t D, V* out) {
    if constexpr (STEP == LANES) {
        for (int r = 0; r < R; r++) out[r] = V{};
        for (int64_t d = 0; d < (E ? E : D); d++) {
            const V element = load(k + (LANES * d + FIRST) * LANES);
            for (int r = 0; r < R; r++) out[r] += q[r][LANES * d + FIRST] * element;
        }
    } else {
        V other[R];
        products<R, E, FIRST, 2 * STEP>(q, k, D, out);
        products<R, E, FIRST + STEP, 2 * STEP>(q, k, D, other);
        for (int r = 0; r < R; r++) out[r] += other[r];
    }
}

// As `chunk`, for R queries that see the columns from t0 to their own t1[r].
template <class T, int R, int E>
void shared_chunk(const Shape& s, const float* const* q, const Columns<T>& columns, const int64_t* t1, float* const* out) {
    const int64_t D = E ? E : columns.D, t0 = columns.t0;
    const int64_t least = *std::min_element(t1, t1 + R) - t0, most = *std::max_element(t1, t1 + R) - t0;
    float weight[R * CHUNK];
    V largest[R];
    for (int r = 0; r < R; r++) largest[r] = splat(-INFINITY);
    for (int64_t t = 0; t < most; t += LANES) {
        V x[R];
        products<R, E, 0, 1>(q, &columns.keys[t * D * LANES], D, x);
        for (int r = 0; r < R; r++) finish_scores(s, x[r], t1[r] - t0 - t, largest[r]);
        for (int r = 0; r < R; r++) store(weight + r * CHUNK + t, x[r]);
    }
    for (int r = 0; r < R; r++) weigh(weight + r * CHUNK, t1[r] - t0, largest[r], out[r]);
    const auto add = [&](int r, int64_t t, int64_t d, V& sum) {
        sum += weight[r * CHUNK + t] * load(&columns.values[(t * D + d) * LANES]);
    };
    constexpr int W = E ? 4 : 1;
    for (int64_t d = 0; d < D; d += W) {
        V sum[R][W] = {};
        for (int64_t t = 0; t < least; t++)
            for (int w = 0; w < W; w++)
                for (int r = 0; r < R; r++) add(r, t, d + w, sum[r][w]);
        for (int r = 0; r < R; r++) {
            for (int64_t t = least; t < t1[r] - t0; t++)
                for (int w = 0; w < W; w++) add(r, t, d + w, sum[r][w]);
            for (int w = 0; w < W; w++) store(out[r] + 2 + LANES * (d + w), sum[r][w]);
        }
    }
}

template <class T, int R>
void shared_of(const Shape& s, const float* const* q, const Columns<T>& columns, const int64_t* t1, float* const* out) {
    if (s.hs == 64) shared_chunk<T, R, 4>(s, q, columns, t1, out);
    else if (s.hs == 128) shared_chunk<T, R, 8>(s, q, columns, t1, out);
    else shared_chunk<T, R, 0>(s, q, columns, t1, out);
}

template <class T, int G>
void chunk_of(const Shape& s, const float* q, const T* k, const T* v, int64_t t0, int64_t t1, float* out) {
    if (s.hs == 64) chunk<T, G, 4>(s, q, k, v, t0, t1, out);
    else if (s.hs == 128) chunk<T, G, 8>(s, q, k, v, t0, t1, out);
    else chunk<T, G, 0>(s, q, k, v, t0, t1, out);
}

}  // namespace
