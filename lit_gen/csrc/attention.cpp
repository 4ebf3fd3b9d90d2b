// One token after another: rotates its query and key, puts key and value into the cache, attends to what it may see.
//
// Each token is on its own: its result depends on its position and its own cache row, not on how many tokens come in
// one call. Columns are taken in chunks of CHUNK, counted from column 0, so that threads can share a long row; the
// chunks of a token are put together in order.

#include <memory>
#include <vector>
#include "vec.h"

namespace {

constexpr int64_t CHUNK = 512;
constexpr int AHEAD = 16;  // columns: keys are fetched so long before they are needed, and values meanwhile
constexpr int64_t ROOM = 1 << 22;  // floats for the chunks' results
constexpr int HEADS = 4;  // query heads that share the keys of one pass

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

template <class T>
void rotate(const T* x, const T* cos, const T* sin, int64_t n, int64_t hs, float* out) {
    // pairs (i, i + n / 2); the first half of `sin` is negated
    for (int64_t i = 0; i < n; i++)
        out[i] = to_float(x[i]) * to_float(cos[i]) + to_float(x[i < n / 2 ? i + n / 2 : i - n / 2]) * to_float(sin[i]);
    for (int64_t i = n; i < hs; i++) out[i] = to_float(x[i]);
}

// Elements 16 * d, ... of a head; E > 0: the head is 16 * E long, so that no end has to be looked for.
template <int E, class T>
inline V part(const T* p, int64_t d, int64_t hs) {
    return E ? load(p + LANES * d) : load(p + LANES * d, hs - LANES * d);
}

// Scores of G heads for columns t0, ..., t1 - 1 of k (S, hs), in out[g][t - t0], up to the next multiple of 16 -inf.
// most[g] is the largest.
template <class T, int G, int E>
void score(const Shape& s, const float* q, const T* k, const T* v, int64_t t0, int64_t t1, float* out, float* most) {
    const int64_t D = E ? E : (s.hs + LANES - 1) / LANES;
    V part_sums[G][LANES], largest[G];
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
            V x = sums(part_sums[g]) * s.scale;
            if (s.softcap)
                for (int i = 0; i < LANES; i++) x[i] = std::tanh(x[i] / s.softcap) * s.softcap;
            for (int64_t i = t1 - t; i < LANES; i++) x[i] = -INFINITY;
            largest[g] = x > largest[g] ? x : largest[g];
            *(V*)(out + g * CHUNK + t - t0) = x;
        }
    }
    for (int g = 0; g < G; g++) {
        most[g] = -INFINITY;
        for (int i = 0; i < LANES; i++) most[g] = std::max(most[g], largest[g][i]);
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
    float weight[G * CHUNK], most[G];
    score<T, G, E>(s, q, k, v, t0, t1, weight, most);
    for (int g = 0; g < G; g++) {
        V total = {};
        for (int64_t t = 0; t < t1 - t0; t += LANES) {
            V& w = *(V*)(weight + g * CHUNK + t);
            const V e = exp(w - most[g]);
            w = w == -INFINITY ? V{} : e;
            total += w;
        }
        out[g * stride] = most[g], out[g * stride + 1] = sum(total);
    }
    int64_t d = 0;
    for (; d + 4 <= D; d += 4) gather<T, G, E, 4>(weight, v, s.hs, t0, t1, d, out + 2, stride);
    for (; d < D; d++) gather<T, G, E, 1>(weight, v, s.hs, t0, t1, d, out + 2, stride);
}

template <class T, int G>
void chunk_of(const Shape& s, const float* q, const T* k, const T* v, int64_t t0, int64_t t1, float* out) {
    if (s.hs == 64) chunk<T, G, 4>(s, q, k, v, t0, t1, out);
    else if (s.hs == 128) chunk<T, G, 8>(s, q, k, v, t0, t1, out);
    else chunk<T, G, 0>(s, q, k, v, t0, t1, out);
}

// Puts the chunks of one head together: parts[i] is [2 + 16 * D], `stride` floats apart.
template <class T>
void merge(const float* parts, int64_t n, int64_t stride, int64_t hs, T* out) {
    float most = -INFINITY, total = 0;
    for (int64_t i = 0; i < n; i++) most = parts[i * stride] > most ? parts[i * stride] : most;
    std::vector<float> y(hs, 0.0f);
    for (int64_t i = 0; i < n; i++) {
        const float* part = parts + i * stride;
        const float factor = i == 0 && n == 1 ? 1.0f : std::exp(part[0] - most);
        total += part[1] * factor;
        for (int64_t j = 0; j < hs; j++) y[j] += part[2 + j] * factor;
    }
    for (int64_t j = 0; j < hs; j++) store(out + j, y[j] / total);
}

template <class T>
struct Tensors {
    const T *q, *k, *v, *cos, *sin;
    T *k_cache, *v_cache, *out;
};

// Puts the key, rotated, and the value of token n into the cache, unless all keys are there already.
template <class T>
void put(const Shape& s, const Tensors<T>& x, int64_t n, float* key) {
    const int64_t p = s.position[n];
    for (int64_t g = 0; g < s.ng && p >= 0 && x.k; g++) {
        const int64_t to = ((s.row[n] * s.ng + g) * s.S + p) * s.hs;
        rotate(x.k + n * s.k_stride + g * s.hs, x.cos + n * s.n_elem, x.sin + n * s.n_elem, s.n_elem, s.hs, key);
        for (int64_t i = 0; i < s.hs; i++) store(x.k_cache + to + i, key[i]);
        std::memcpy(x.v_cache + to, x.v + n * s.v_stride + g * s.hs, s.hs * sizeof(T));
    }
}

template <class T>
void attend(const Shape& s, const Tensors<T>& x) {
    const int64_t G = s.nh / s.ng, D = (s.hs + LANES - 1) / LANES, blocks = (G + HEADS - 1) / HEADS;
    const int64_t part = 2 + LANES * D;
    std::vector<int64_t> start(s.N + 1, 0), token;  // of each token its first chunk among all, and the reverse
    for (int64_t n = 0; n < s.N; n++) {
        const int64_t p = s.position[n];
        start[n + 1] = start[n] + (p < 0 ? 0 : p / CHUNK - s.first(p) / CHUNK + 1);
        token.resize(start[n + 1], n);
    }
    // As many tokens at a time as have room for their chunks: those of a long prompt grow with its length squared.
    std::vector<int64_t> ends{0};
    int64_t most = 0, longest = 0;
    while (ends.back() < s.N) {
        const int64_t from = ends.back();
        int64_t n = from + 1;
        while (n < s.N && (start[n + 1] - start[from]) * s.nh * part <= ROOM) n++;
        most = std::max(most, start[n] - start[from]), longest = std::max(longest, n - from);
        ends.push_back(n);
    }
    std::unique_ptr<float[]> queries(new float[longest * s.nh * LANES * D]()), parts(new float[most * s.nh * part]);
#pragma omp parallel
    {
        std::unique_ptr<float[]> key(new float[s.hs]);
#pragma omp for schedule(static)
        for (int64_t n = 0; n < s.N; n++) put(s, x, n, key.get());
        for (size_t b = 0; b + 1 < ends.size(); b++) {
            const int64_t from = ends[b], to = ends[b + 1], base_chunk = start[from], chunks = start[to] - base_chunk;
#pragma omp for schedule(static)
            for (int64_t i = from * s.nh; i < to * s.nh; i++) {
                const int64_t n = i / s.nh, h = i % s.nh, r = n * s.n_elem;
                float* query = &queries[(i - from * s.nh) * LANES * D];
                rotate(x.q + n * s.q_stride + h * s.hs, x.cos + r, x.sin + r, s.n_elem, s.hs, query);
            }
            // Neighbours in this order mostly share keys and values: a group, then tokens, then chunks.
#pragma omp for schedule(dynamic)
            for (int64_t i = 0; i < s.ng * blocks * chunks; i++) {
                const int64_t c = i % chunks, h = i / chunks % blocks * HEADS, g = i / chunks / blocks;
                const int64_t n = token[base_chunk + c], p = s.position[n], first = s.first(p), head = g * G + h;
                const int64_t base = (first / CHUNK + base_chunk + c - start[n]) * CHUNK;
                const int64_t t0 = std::max(base, first), t1 = std::min(base + CHUNK, p + 1);
                const int64_t columns = (s.row[n] * s.ng + g) * s.S * s.hs;
                const T *keys = x.k_cache + columns, *values = x.v_cache + columns;
                const float* own = &queries[((n - from) * s.nh + head) * LANES * D];
                float* result = &parts[(c * s.nh + head) * part];
                switch (std::min<int64_t>(HEADS, G - h)) {
                    case 1: chunk_of<T, 1>(s, own, keys, values, t0, t1, result); break;
                    case 2: chunk_of<T, 2>(s, own, keys, values, t0, t1, result); break;
                    case 3: chunk_of<T, 3>(s, own, keys, values, t0, t1, result); break;
                    case 4: chunk_of<T, 4>(s, own, keys, values, t0, t1, result); break;
                }
            }
#pragma omp for schedule(static)
            for (int64_t i = from * s.nh; i < to * s.nh; i++) {
                const int64_t n = i / s.nh, h = i % s.nh, count = start[n + 1] - start[n];
                T* out = x.out + i * s.hs;
                if (count == 0) std::memset((void*)out, 0, s.hs * sizeof(T));  // padding sees nothing
                else merge(&parts[((start[n] - base_chunk) * s.nh + h) * part], count, s.nh * part, s.hs, out);
            }
        }
    }
}

}  // namespace

// q (N, nh, hs), k and v (N, ng, hs) or null, with strides between tokens; cos and sin (N, n_elem); caches (rows, ng, S, hs);
// out (N, nh, hs). All of one dtype: 0 float32, 1 bfloat16, 2 float16. Returns 1 if there is no memory, else 0.
extern "C" int lit_attend(int dtype, const int64_t* sizes, float scale, float softcap, const int64_t* row,
                          const int64_t* position, const void* q, const void* k, const void* v, const void* cos,
                          const void* sin, void* k_cache, void* v_cache, void* out) {
    const Shape s{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7], sizes[8], row, position,
                  sizes[9], sizes[10], scale, softcap};
#define CALL(T) \
    attend<T>(s, {(const T*)q, (const T*)k, (const T*)v, (const T*)cos, (const T*)sin, (T*)k_cache, (T*)v_cache, \
                  (T*)out})
    try {
        if (dtype == 0) CALL(float);
        if (dtype == 1) CALL(bf16);
        if (dtype == 2) CALL(half);
    } catch (const std::bad_alloc&) {
        return 1;
    }
#undef CALL
    return 0;
}
