// What comes before and after a matrix product in registers: out = activation(bias + add + residual + sum), eight channels
// at a time. What is added is there before the sum: its way is covered by that of the first blocks.
//
// ACTIVATION: 0 none, 1 silu, 2 gelu (erf), 3 quick_gelu, 4 geglu: value * gelu(gate), both with their own bias,
// no residual.
// GROUP (a multiple of 8; 0: none): the result is not [rows, N] but [N / GROUP, rows, GROUP], each group of channels by
// itself; `group_stride` elements from one to the next.
#pragma once
#include "numeric.cuh"

#ifndef ACTIVATION
#define ACTIVATION 0
#endif

#ifndef GROUP
#define GROUP 0
#endif

constexpr bool GEGLU = ACTIVATION == 4;

// x Phi(x) by Abramowitz and Stegun 7.1.26: |error of erf| < 1.5e-7, and no cancellation for negative x.
SDACCEL_DEVICE float gelu_of_sum(float x) {
    float t, e;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(t) : "f"(fmaf(fabsf(x), 0.3275911f * 0.70710678f, 1.0f)));
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * x * -0.72134752f));
    float p = fmaf(t, 0.5f * 1.061405429f, 0.5f * -1.453152027f);
    p = fmaf(t, p, 0.5f * 1.421413741f);
    p = fmaf(t, p, 0.5f * -0.284496736f);
    p = fmaf(t, p, 0.5f * 0.254829592f) * t * e;
    return x * (x < 0.0f ? p : 1.0f - p);
}

SDACCEL_DEVICE float activate(float x) {
    if constexpr (ACTIVATION == 1) return silu(x);
    if constexpr (ACTIVATION == 2) return gelu_of_sum(x);
    if constexpr (ACTIVATION == 3) return quick_gelu(x);
    return x;
}

// Null pointers where a part is missing. `bias` [N], with GEGLU [2 N]: values, then gates.
struct Epilogue {
    T* out;
    const T* bias;
    const T* residual;
    const T* add;
    int n;
    int64_t group_stride = 0;

    __device__ __forceinline__ T* at(int64_t row, int channel) const {
#if GROUP > 0
        return out + channel / GROUP * group_stride + row + channel % GROUP;
#else
        return out + row + channel;
#endif
    }
};

// Where one row of the product goes: offsets in elements of its channel 0. `add`: that of one more row of N values.
struct Row {
    bool valid;
    int64_t out;
    int64_t residual;
    int64_t add;
};

// Zeros where not `valid`.
SDACCEL_DEVICE uint4 load16_if(bool valid, const void* p) {
    uint4 x;
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
        "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
        "@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
        : "=&r"(x.x), "=&r"(x.y), "=&r"(x.z), "=&r"(x.w)
        : "l"(p), "r"(int(valid)));
    return x;
}

SDACCEL_DEVICE void store16_if(bool valid, void* p, uint4 x) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p st.global.v4.u32 [%4], {%0, %1, %2, %3};\n}" ::"r"(x.x), "r"(x.y),
                 "r"(x.z), "r"(x.w), "l"(p), "r"(int(valid))
                 : "memory");
}

// The rows of a thread begin with what is added to the product. `sum(i, u, e, gates)`: that of channel first + 32 u + e of
// row i, e < 8. Loads of all rows are under way at once.
template <int R, int U, class Sum>
SDACCEL_DEVICE void begin_sums(const Epilogue& to, const Row (&row)[R], int first, const Sum& sum) {
    if (!GEGLU && to.residual != nullptr) {
        uint4 packed[R][U];
#pragma unroll
        for (int i = 0; i < R; ++i)
#pragma unroll
            for (int u = 0; u < U; ++u) {
                const int n = first + 32 * u;
                packed[i][u] = load16_if(row[i].valid && n < to.n, to.residual + row[i].residual + n);
            }
#pragma unroll
        for (int i = 0; i < R; ++i)
#pragma unroll
            for (int u = 0; u < U; ++u) {
                float x[8];
                unpack8<T>(packed[i][u], x);
#pragma unroll
                for (int e = 0; e < 8; ++e) sum(i, u, e, false) = x[e];
            }
    } else {
#pragma unroll
        for (int i = 0; i < R; ++i)
#pragma unroll
            for (int u = 0; u < U; ++u)
#pragma unroll
                for (int e = 0; e < 16; ++e)
                    if (GEGLU || e < 8) sum(i, u, e % 8, e >= 8) = 0.0f;
    }
    if (to.bias != nullptr) {
#pragma unroll
        for (int part = 0; part < (GEGLU ? 2 : 1); ++part)
#pragma unroll
            for (int u = 0; u < U; ++u) {
                const int n = first + 32 * u;
                float x[8];
                unpack8<T>(load16_if(n < to.n, to.bias + part * to.n + n), x);
#pragma unroll
                for (int i = 0; i < R; ++i)
#pragma unroll
                    for (int e = 0; e < 8; ++e) sum(i, u, e, part > 0) += x[e];
            }
    }
    if (!GEGLU && to.add != nullptr) {
#pragma unroll
        for (int i = 0; i < R; ++i)
#pragma unroll
            for (int u = 0; u < U; ++u) {
                const int n = first + 32 * u;
                float x[8];
                unpack8<T>(load16_if(row[i].valid && n < to.n, to.add + row[i].add + n), x);
#pragma unroll
                for (int e = 0; e < 8; ++e) sum(i, u, e, false) += x[e];
            }
    }
}

// Eight sums of channels n .. n + 7 of one row.
SDACCEL_DEVICE void finish(const Epilogue& to, const Row& row, int n, float (&x)[8], const float (&gate)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = GEGLU ? x[i] * gelu_of_sum(gate[i]) : activate(x[i]);
    store16_if(row.valid && n < to.n, to.at(row.out, n), pack8<T>(x));
}
