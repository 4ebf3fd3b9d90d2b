// One token after another: rotates its query and key, puts key and value into the cache, attends to what it may see.
//
// Each token is on its own: its result depends on its position and its own cache row, not on how many tokens come in
// one call. Columns are taken in chunks of CHUNK, counted from column 0, so that threads can share a long row; the
// chunks of a token are put together in order.
//
// Neighbours in a prompt see mostly the same columns. They share these as floats, with keys transposed, and every number
// is still formed by the same operations in the same order as for a token by itself.

#include <vector>
#ifdef _OPENMP
#include <omp.h>
#else
inline int omp_get_thread_num() { return 0; }
inline int omp_get_max_threads() { return 1; }
#endif
#include "chunk.h"

namespace {

constexpr int64_t ROOM = 1 << 22;  // floats for the chunks' results

template <class T>
void rotate(const T* x, const T* cos, const T* sin, int64_t n, int64_t hs, float* out) {
    // pairs (i, i + n / 2); the first half of `sin` is negated
    for (int64_t i = 0; i < n; i++)
        out[i] = to_float(x[i]) * to_float(cos[i]) + to_float(x[i < n / 2 ? i + n / 2 : i - n / 2]) * to_float(sin[i]);
    for (int64_t i = n; i < hs; i++) out[i] = to_float(x[i]);
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

// Tokens n0, ..., n1 - 1, which all see their chunk number j from its first column on, or one token.
struct Block {
    int64_t n0, n1, j;
};

int64_t n_chunks(const Shape& s, int64_t n) {
    const int64_t p = s.position[n];
    return p < 0 ? 0 : p / CHUNK - s.first(p) / CHUNK + 1;
}

// The work on tokens from, ..., to - 1, so that neighbours share columns.
std::vector<Block> blocks_of(const Shape& s, int64_t from, int64_t to) {
    std::vector<Block> blocks;
    for (int64_t n0 = from, n1; n0 < to; n0 = n1) {
        const auto same = [&](int64_t n) {
            const int64_t p = s.position[n];
            return p >= 0 && s.row[n] == s.row[n0] && s.first(p) == s.first(s.position[n0]);
        };
        for (n1 = n0 + 1; n1 < to && n1 < n0 + TOKENS && s.position[n0] >= 0 && same(n1);) n1++;
        if (n1 - n0 < FEW) n1 = n0 + 1;
        int64_t most = 0;
        for (int64_t n = n0; n < n1; n++) most = std::max(most, n_chunks(s, n));
        for (int64_t j = 0; j < most; j++) blocks.push_back({n0, n1, j});
    }
    // Those that share a chunk follow each other.
    std::stable_sort(blocks.begin(), blocks.end(), [&](const Block& a, const Block& b) {
        return s.row[a.n0] != s.row[b.n0] ? s.row[a.n0] < s.row[b.n0] : a.j < b.j;
    });
    return blocks;
}

template <class T>
struct Attention {
    const Shape& s;
    const Tensors<T>& x;
    const int64_t G = s.nh / s.ng, D = (s.hs + LANES - 1) / LANES, part = 2 + LANES * D;
    std::vector<int64_t> start;  // of each token its first chunk among all
    std::unique_ptr<float[]> queries, parts;

    float* query(int64_t n, int64_t head, int64_t from) { return &queries[((n - from) * s.nh + head) * LANES * D]; }
    float* result(int64_t chunk, int64_t head, int64_t from) { return &parts[((chunk - start[from]) * s.nh + head) * part]; }

    // One chunk of heads h, ..., of group g, for the tokens of a block; `from`: the first token of this round.
    void run(const Block& block, int64_t g, int64_t h, int64_t from, Columns<T>* columns) {
        const int64_t n0 = block.n0, first = s.first(s.position[n0]), base = (first / CHUNK + block.j) * CHUNK;
        const int64_t t0 = std::max(base, first), heads = std::min<int64_t>(HEADS, G - h), head = g * G + h;
        const int64_t offset = (s.row[n0] * s.ng + g) * s.S * s.hs;
        const T *keys = x.k_cache + offset, *values = x.v_cache + offset;
        const auto end = [&](int64_t n) { return std::min(base + CHUNK, s.position[n] + 1); };
        if (block.n1 == n0 + 1) {
            const float* q = query(n0, head, from);
            float* out = result(start[n0] + block.j, head, from);
            switch (heads) {
                case 1: return chunk_of<T, 1>(s, q, keys, values, t0, end(n0), out);
                case 2: return chunk_of<T, 2>(s, q, keys, values, t0, end(n0), out);
                case 3: return chunk_of<T, 3>(s, q, keys, values, t0, end(n0), out);
                case 4: return chunk_of<T, 4>(s, q, keys, values, t0, end(n0), out);
            }
        }
        const float* q[TOKENS * HEADS];
        float* out[TOKENS * HEADS];
        int64_t seen[TOKENS * HEADS], rows = 0, most = 0;
        for (int64_t n = n0; n < block.n1; n++)
            for (int64_t i = 0; i < heads && block.j < n_chunks(s, n); i++, rows++) {
                q[rows] = query(n, head + i, from), out[rows] = result(start[n] + block.j, head + i, from);
                most = std::max(most, seen[rows] = end(n) - t0);
            }
        columns->fill(s, keys, values, t0, t0 + most);
        shared_chunk(s, rows, q, *columns, seen, out);
    }

    void run() {
        start.assign(s.N + 1, 0);
        for (int64_t n = 0; n < s.N; n++) start[n + 1] = start[n] + n_chunks(s, n);
        // As many tokens at a time as have room for their chunks: those of a long prompt grow with its length squared.
        std::vector<int64_t> ends{0};
        std::vector<std::vector<Block>> rounds;
        int64_t most = 0, longest = 0;
        bool shared = false;
        while (ends.back() < s.N) {
            const int64_t from = ends.back();
            int64_t n = from + 1;
            while (n < s.N && (start[n + 1] - start[from]) * s.nh * part <= ROOM) n++;
            most = std::max(most, start[n] - start[from]), longest = std::max(longest, n - from);
            ends.push_back(n), rounds.push_back(blocks_of(s, from, n));
            for (const Block& block : rounds.back()) shared |= block.n1 > block.n0 + 1;
        }
        queries.reset(new float[longest * s.nh * LANES * D]()), parts.reset(new float[most * s.nh * part]);
        const int64_t per_group = (G + HEADS - 1) / HEADS;
        std::vector<Columns<T>> columns;  // one for each thread, if any tokens share columns
        if (shared) for (int i = 0; i < omp_get_max_threads(); i++) columns.emplace_back(D);
#pragma omp parallel
        {
            std::unique_ptr<float[]> key(new float[s.hs]);
            Columns<T>* own = shared ? &columns[omp_get_thread_num()] : nullptr;
#pragma omp for schedule(static)
            for (int64_t n = 0; n < s.N; n++) put(s, x, n, key.get());
            for (size_t round = 0; round < rounds.size(); round++) {
                const int64_t from = ends[round], to = ends[round + 1], blocks = rounds[round].size();
#pragma omp for schedule(static)
                for (int64_t i = from * s.nh; i < to * s.nh; i++) {
                    const int64_t n = i / s.nh, h = i % s.nh, r = n * s.n_elem;
                    rotate(x.q + n * s.q_stride + h * s.hs, x.cos + r, x.sin + r, s.n_elem, s.hs, query(n, h, from));
                }
#pragma omp for schedule(dynamic)
                for (int64_t i = 0; i < s.ng * blocks * per_group; i++)
                    run(rounds[round][i / per_group % blocks], i / per_group / blocks, i % per_group * HEADS, from, own);
#pragma omp for schedule(static)
                for (int64_t i = from * s.nh; i < to * s.nh; i++) {
                    const int64_t n = i / s.nh, h = i % s.nh, count = start[n + 1] - start[n];
                    T* out = x.out + i * s.hs;
                    if (count == 0) std::memset((void*)out, 0, s.hs * sizeof(T));  // padding sees nothing
                    else merge(result(start[n], h, from), count, s.nh * part, s.hs, out);
                }
            }
        }
    }
};

}  // namespace

// q (N, nh, hs), k and v (N, ng, hs) or null, with strides between tokens; cos and sin (N, n_elem); caches (rows, ng, S, hs);
// out (N, nh, hs). All of one dtype: 0 float32, 1 bfloat16, 2 float16. Returns 1 if there is no memory, else 0.
int lit_attend(int dtype, const int64_t* sizes, float scale, float softcap, const int64_t* row,
               const int64_t* position, const void* q, const void* k, const void* v, const void* cos, const void* sin,
               void* k_cache, void* v_cache, void* out) {
    const Shape s{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7], sizes[8], row, position,
                  sizes[9], sizes[10], scale, softcap};
#define CALL(T) \
    { \
        const Tensors<T> x{(const T*)q, (const T*)k, (const T*)v, (const T*)cos, (const T*)sin, (T*)k_cache, (T*)v_cache, \
                           (T*)out}; \
        Attention<T>{s, x}.run(); \
    }
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
