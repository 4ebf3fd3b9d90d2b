// One entry for all kernels: a list of calls, each a row of numbers that kernels.py has written.
//
// A decode step of a model is some hundred calls. In one list they run without going back to Python in between.

#include <cstdint>
#include <cstring>

int lit_linear(int dtype, const void* x, int64_t M, int format, const char* w, const char* scales, const float* factor,
               const float* bias, int64_t N, int64_t K, void* out);
int lit_attend(int dtype, const int64_t* sizes, float scale, float softcap, const int64_t* row, const int64_t* position,
               const void* q, const void* k, const void* v, const void* cos, const void* sin, void* k_cache, void* v_cache,
               void* out);
int lit_rms_norm(int dtype, const void* x, const int64_t* rows, const void* weight, float offset, float eps, void* out);
int lit_layer_norm(int dtype, const void* x, const int64_t* rows, const void* weight, const void* bias, float eps,
                   void* out);
int lit_activate(int dtype, int kind, const void* x, int64_t M, int64_t size, bool gated, void* out);
int lit_add(int dtype, const void* x, const void* y, int64_t M, int64_t C, float scale, void* out);

namespace {

constexpr int WIDTH = 25;  // numbers in a call: which kernel, and what it takes, in order

template <class T>
T* at(int64_t address) { return (T*)address; }

float number(int64_t bits) {  // a float32 in the lower half
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

int run(const int64_t* a) {
    const int dtype = int(a[1]);
    switch (a[0]) {
        case 0:
            return lit_linear(dtype, at<void>(a[2]), a[3], int(a[4]), at<char>(a[5]), at<char>(a[6]), at<float>(a[7]),
                              at<float>(a[8]), a[9], a[10], at<void>(a[11]));
        case 1:
            return lit_attend(dtype, a + 2, number(a[13]), number(a[14]), at<int64_t>(a[15]), at<int64_t>(a[16]),
                              at<void>(a[17]), at<void>(a[18]), at<void>(a[19]), at<void>(a[20]), at<void>(a[21]),
                              at<void>(a[22]), at<void>(a[23]), at<void>(a[24]));
        case 2:
            return lit_rms_norm(dtype, at<void>(a[2]), a + 3, at<void>(a[7]), number(a[8]), number(a[9]), at<void>(a[10]));
        case 3:
            return lit_layer_norm(dtype, at<void>(a[2]), a + 3, at<void>(a[7]), at<void>(a[8]), number(a[9]),
                                  at<void>(a[10]));
        case 4: return lit_activate(dtype, int(a[2]), at<void>(a[3]), a[4], a[5], a[6], at<void>(a[7]));
        case 5: return lit_add(dtype, at<void>(a[2]), at<void>(a[3]), a[4], a[5], number(a[6]), at<void>(a[7]));
    }
    return 2;
}

}  // namespace

// calls (n, WIDTH). Returns 0; 1 if there was no memory, and then the rest was not run.
extern "C" int lit_run(const int64_t* calls, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (const int failed = run(calls + i * WIDTH)) return failed;
    return 0;
}
