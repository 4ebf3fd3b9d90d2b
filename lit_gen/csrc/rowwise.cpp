// What happens to each row by itself between the products: normalisation, the MLP's activation, the residual sum.

#include "vec.h"

namespace {

constexpr int64_t SMALL = 1 << 14;  // elements that are not worth a second thread

// Sums as PyTorch forms them: the product is rounded to T first.
template <class T>
void add(const T* x, const T* y, int64_t size, float scale, T* out) {
#pragma omp parallel for schedule(static) if (size > SMALL)
    for (int64_t i = 0; i < size; i += LANES) {
        V z = load(y + i, size - i);
        if (scale != 1.0f) {
            T rounded[LANES] = {};
            store(rounded, z * scale, LANES);
            z = load(rounded);
        }
        store(out + i, load(x + i, size - i) + z, size - i);
    }
}

// Where row m of x is: `heads` rows lie one after the other, and `stride` elements further the next ones.
struct Rows {
    int64_t M, C, heads, stride;
    int64_t at(int64_t m) const { return m / heads * stride + m % heads * C; }
};

template <class T>
void rms_norm(const T* x, const Rows& rows, const T* weight, float offset, float eps, T* out) {
    const int64_t M = rows.M, C = rows.C;
#pragma omp parallel for schedule(static) if (M * C > SMALL)
    for (int64_t m = 0; m < M; m++) {
        const T* row = x + rows.at(m);
        V squares = {};
        for (int64_t c = 0; c < C; c += LANES) {
            const V y = load(row + c, C - c);
            squares += y * y;
        }
        const float factor = 1.0f / std::sqrt(sum(squares) / float(C) + eps);
        for (int64_t c = 0; c < C; c += LANES) {
            V y = load(row + c, C - c) * factor;
            if (weight) y *= load(weight + c, C - c) + offset;
            store(out + m * C + c, y, C - c);
        }
    }
}

template <class T>
void layer_norm(const T* x, const Rows& rows, const T* weight, const T* bias, float eps, T* out) {
    const int64_t M = rows.M, C = rows.C;
#pragma omp parallel for schedule(static) if (M * C > SMALL)
    for (int64_t m = 0; m < M; m++) {
        const T* row = x + rows.at(m);
        V total = {}, squares = {};
        for (int64_t c = 0; c < C; c += LANES) total += load(row + c, C - c);
        const float mean = sum(total) / float(C);
        for (int64_t c = 0; c < C; c += LANES) {
            const V y = keep(load(row + c, C - c) - mean, C - c, 0);
            squares += y * y;
        }
        const float factor = 1.0f / std::sqrt(sum(squares) / float(C) + eps);
        for (int64_t c = 0; c < C; c += LANES) {
            V y = (load(row + c, C - c) - mean) * factor;
            if (weight) y *= load(weight + c, C - c);
            if (bias) y += load(bias + c, C - c);
            store(out + m * C + c, y, C - c);
        }
    }
}

enum Act { SILU, GELU_TANH, GELU, RELU };

template <int A>
inline V act(V x) {
    if (A == SILU) return x / (1.0f + exp(-x));
    if (A == RELU) return select(x < 0.0f, V{}, x);
    if (A == GELU_TANH) {  // 0.5 x (1 + tanh u) = x / (1 + e**(-2u)), u = sqrt(2 / pi) (x + 0.044715 x**3)
        const V u = 0.7978845608f * (x + 0.044715f * x * x * x);
        return x / (1.0f + exp(-2.0f * u));
    }
    return map(x, [](float y, int) { return 0.5f * y * (1.0f + std::erf(y * 0.7071067812f)); });
}

template <class T, int A>
void activate(const T* x, int64_t M, int64_t size, bool gated, T* out) {
#pragma omp parallel for schedule(static) if (M * size > SMALL)
    for (int64_t m = 0; m < M; m++) {
        const T *gate = x + m * size * (gated ? 2 : 1), *up = gate + size;
        for (int64_t c = 0; c < size; c += LANES) {
            V y = act<A>(load(gate + c, size - c));
            if (gated) y *= load(up + c, size - c);
            store(out + m * size + c, y, size - c);
        }
    }
}

template <class T>
void choose(int kind, const T* x, int64_t M, int64_t size, bool gated, T* out) {
    if (kind == SILU) activate<T, SILU>(x, M, size, gated, out);
    if (kind == GELU_TANH) activate<T, GELU_TANH>(x, M, size, gated, out);
    if (kind == GELU) activate<T, GELU>(x, M, size, gated, out);
    if (kind == RELU) activate<T, RELU>(x, M, size, gated, out);
}

}  // namespace

// dtype of all tensors: 0 float32, 1 bfloat16, 2 float16.

// x (M, C) as in Rows, out (M, C), weight and bias (C,) or null.
int lit_rms_norm(int dtype, const void* x, const int64_t* rows, const void* weight, float offset, float eps, void* out) {
    const Rows r{rows[0], rows[1], rows[2], rows[3]};
    if (dtype == 0) rms_norm((const float*)x, r, (const float*)weight, offset, eps, (float*)out);
    if (dtype == 1) rms_norm((const bf16*)x, r, (const bf16*)weight, offset, eps, (bf16*)out);
    if (dtype == 2) rms_norm((const half*)x, r, (const half*)weight, offset, eps, (half*)out);
    return 0;
}

int lit_layer_norm(int dtype, const void* x, const int64_t* rows, const void* weight, const void* bias, float eps,
                   void* out) {
    const Rows r{rows[0], rows[1], rows[2], rows[3]};
    if (dtype == 0) layer_norm((const float*)x, r, (const float*)weight, (const float*)bias, eps, (float*)out);
    if (dtype == 1) layer_norm((const bf16*)x, r, (const bf16*)weight, (const bf16*)bias, eps, (bf16*)out);
    if (dtype == 2) layer_norm((const half*)x, r, (const half*)weight, (const half*)bias, eps, (half*)out);
    return 0;
}

// act(x (M, size)), or act(gate) * up of x (M, 2 * size) = gate | up. kind: 0 silu, 1 gelu with tanh, 2 gelu, 3 relu.
int lit_activate(int dtype, int kind, const void* x, int64_t M, int64_t size, bool gated, void* out) {
    if (dtype == 0) choose(kind, (const float*)x, M, size, gated, (float*)out);
    if (dtype == 1) choose(kind, (const bf16*)x, M, size, gated, (bf16*)out);
    if (dtype == 2) choose(kind, (const half*)x, M, size, gated, (half*)out);
    return 0;
}

// x + y * scale, (M, C) each.
int lit_add(int dtype, const void* x, const void* y, int64_t M, int64_t C, float scale, void* out) {
    if (dtype == 0) add((const float*)x, (const float*)y, M * C, scale, (float*)out);
    if (dtype == 1) add((const bf16*)x, (const bf16*)y, M * C, scale, (bf16*)out);
    if (dtype == 2) add((const half*)x, (const half*)y, M * C, scale, (half*)out);
    return 0;
}
