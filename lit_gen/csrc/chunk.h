// Attention of one or several queries to one chunk of columns: scores, weights, and the weighted sum of values.

#pragma once
#include <memory>
#include "vec.h"

namespace {

constexpr int64_t CHUNK = 512;
constexpr int HEADS = 4;  // query heads that share the keys of one pass
constexpr int64_t TOKENS = 16, FEW = 4;  // so many tokens of a prompt share columns; fewer than FEW do not
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

constexpr int wide(int heads) {  // vectors of a value's elements of which as many heads form sums at once: 4, 2 or 1
    return SUMS >= 4 * heads ? 4 : SUMS >= 2 * heads ? 2 : 1;
}

// Elements 16 * d, ... of a head; E > 0: the head is 16 * E long, so that no end has to be looked for.
template <int E, class T>
inline V part(const T* p, int64_t d, int64_t hs) {
    return E ? load(p + LANES * d) : load(p + LANES * d, hs - LANES * d);
}

// Products of a query with 16 keys -> scores, of which n count; `most`: the largest so far, in each lane.
inline void finish_scores(const Shape& s, V& x, int64_t n, V& most) {
    x *= s.scale;
    if (s.softcap) x = map(x, [&](float y, int) { return std::tanh(y / s.softcap) * s.softcap; });
    x = keep(x, n, -INFINITY);
    most = select(x > most, x, most);
}

// n scores, up to the next multiple of 16, -> weights; result[0] is the largest score and result[1] the sum of weights.
inline void weigh(float* score, int64_t n, V largest_of, float* result) {
    const float most = largest(largest_of);
    V total = {};
    for (int64_t t = 0; t < n; t += LANES) {
        const V x = load(score + t), w = select(x == -INFINITY, V{}, exp(x - most));
        store(score + t, w);
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
        for (int w = 0; w < W; w++) store(out + g * stride + LANES * (d + w), acc[g][w]);
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
    constexpr int W = wide(G);
    for (; d + W <= D; d += W) gather<T, G, E, W>(weight, v, s.hs, t0, t1, d, out + 2, stride);
    for (; d < D; d++) gather<T, G, E, 1>(weight, v, s.hs, t0, t1, d, out + 2, stride);
}

// Columns of a chunk as floats, for the tokens of a block.
template <class T>
struct Columns {
    const T *k = nullptr, *v = nullptr;  // whose they are, from column 0
    int64_t t0 = 0, filled = 0, D;  // columns t0, ..., t0 + filled - 1
    std::unique_ptr<float[]> memory;
    float *keys, *values;  // [tile of 16 columns][16 * D][16]; [column][16 * D]
    float* weight;         // [query][column]

    explicit Columns(int64_t D) : D(D), memory(new float[CHUNK * (2 * D * LANES + TOKENS * HEADS) + LANES]) {
        keys = (float*)((uintptr_t(memory.get()) + 63) / 64 * 64);  // a vector lies in one line of the cache
        values = keys + CHUNK * D * LANES, weight = values + CHUNK * D * LANES;
    }

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

template <int R>
struct Vectors {
    V of[R];
};

// The scores of R queries for 16 columns: for each lane i the products of elements i, 16 + i, ..., and then `sums`.
template <int R, int E, int FIRST, int STEP>
inline __attribute__((always_inline)) Vectors<R> products(const float* const* q, const float* k, int64_t D) {
    Vectors<R> x = {};
    if constexpr (STEP == LANES) {
        for (int64_t d = 0; d < (E ? E : D); d++) {
            const V element = load(k + (LANES * d + FIRST) * LANES);
            for (int r = 0; r < R; r++) x.of[r] += q[r][LANES * d + FIRST] * element;
        }
    } else {
        x = products<R, E, FIRST, 2 * STEP>(q, k, D);
        const Vectors<R> other = products<R, E, FIRST + STEP, 2 * STEP>(q, k, D);
        for (int r = 0; r < R; r++) x.of[r] += other.of[r];
    }
    return x;
}

// out[r]: sum over the columns that query r sees, of the weight times elements 16 * d, ... of the value.
template <int R, int W>
void gather_shared(const float* weight, const float* values, int64_t D, int64_t d, const int64_t* n, float* const* out) {
    V sum[R][W] = {};
    const auto add = [&](int r, int64_t t) {
        for (int w = 0; w < W; w++) sum[r][w] += weight[r * CHUNK + t] * load(values + (t * D + d + w) * LANES);
    };
    const int64_t all = *std::min_element(n, n + R);  // see these columns
    for (int64_t t = 0; t < all; t++)
        for (int r = 0; r < R; r++) add(r, t);
    for (int r = 0; r < R; r++) {
        for (int64_t t = all; t < n[r]; t++) add(r, t);
        for (int w = 0; w < W; w++) store(out[r] + LANES * (d + w), sum[r][w]);
    }
}

// As `chunk`, for several queries: number r sees the first n[r] of the columns.
template <class T, int E>
void shared_chunk(const Shape& s, int64_t rows, const float* const* q, const Columns<T>& columns, const int64_t* n,
                  float* const* out) {
    const int64_t D = E ? E : columns.D, most = *std::max_element(n, n + rows);
    V largest[TOKENS * HEADS];
    float *weight = columns.weight, *values[TOKENS * HEADS];
    for (int64_t r = 0; r < rows; r++) largest[r] = splat(-INFINITY), values[r] = out[r] + 2;
#define FOUR_BY_FOUR(f)                                                       \
    for (int64_t r = 0; r < rows; r += 4) switch (std::min<int64_t>(rows - r, 4)) { \
            case 1: f(1); break;                                              \
            case 2: f(2); break;                                              \
            case 3: f(3); break;                                              \
            case 4: f(4); break;                                              \
        }
    for (int64_t t = 0; t < most; t += LANES) {
        V x[TOKENS * HEADS];
#define PRODUCTS(R) *(Vectors<R>*)(x + r) = products<R, E, 0, 1>(q + r, &columns.keys[t * D * LANES], D)
        FOUR_BY_FOUR(PRODUCTS)
        for (int64_t r = 0; r < rows; r++) {
            finish_scores(s, x[r], n[r] - t, largest[r]);
            store(weight + r * CHUNK + t, x[r]);
        }
    }
    for (int64_t r = 0; r < rows; r++) weigh(weight + r * CHUNK, n[r], largest[r], out[r]);
    constexpr int W = E ? wide(4) : 1;
    for (int64_t d = 0; d < D; d += W) {
#define GATHER(R) gather_shared<R, W>(weight + r * CHUNK, columns.values, D, d, n + r, values + r)
        FOUR_BY_FOUR(GATHER)
    }
#undef PRODUCTS
#undef GATHER
#undef FOUR_BY_FOUR
}

template <class T, int G>
void chunk_of(const Shape& s, const float* q, const T* k, const T* v, int64_t t0, int64_t t1, float* out) {
    if (s.hs == 64) chunk<T, G, 4>(s, q, k, v, t0, t1, out);
    else if (s.hs == 128) chunk<T, G, 8>(s, q, k, v, t0, t1, out);
    else chunk<T, G, 0>(s, q, k, v, t0, t1, out);
}

template <class T>
void shared_chunk(const Shape& s, int64_t rows, const float* const* q, const Columns<T>& columns, const int64_t* n,
                  float* const* out) {
    if (s.hs == 64) shared_chunk<T, 4>(s, rows, q, columns, n, out);
    else if (s.hs == 128) shared_chunk<T, 8>(s, rows, q, columns, n, out);
    else shared_chunk<T, 0>(s, rows, q, columns, n, out);
}

}  // namespace
