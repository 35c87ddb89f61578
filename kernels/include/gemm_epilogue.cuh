// What follows a matrix product in registers: out = activation(sum + bias + add + residual), eight channels at a time.
//
// ACTIVATION: 0 none, 1 silu, 2 gelu (erf), 3 quick_gelu, 4 geglu: value * gelu(gate), both with their own bias,
// no residual.
#pragma once
#include "numeric.cuh"

#ifndef ACTIVATION
#define ACTIVATION 0
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
    int n;
};

// Where one row of the product goes: offsets in elements of its channel 0. `add`: one more row of N values, or null.
struct Row {
    bool valid;
    int64_t out;
    int64_t residual;
    const T* add;
};

// Weights, or what no kernel under way writes: the compiler may move the load.
SDACCEL_DEVICE uint4 load16_constant(const void* p) {
    uint4 x;
    asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p));
    return x;
}

SDACCEL_DEVICE uint4 load_residual(const Epilogue& to, const Row& row, int n) {
    if (GEGLU || to.residual == nullptr || !row.valid || n >= to.n) return make_uint4(0, 0, 0, 0);
    return load16(to.residual + row.residual + n);
}

SDACCEL_DEVICE void plus(float (&x)[8], uint4 packed) {
    float y[8];
    unpack8<T>(packed, y);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] += y[i];
}

// Eight sums of channels n .. n + 7 of one row.
SDACCEL_DEVICE void finish(const Epilogue& to, const Row& row, int n, float (&x)[8], float (&gate)[8], uint4 residual) {
    if (!row.valid || n >= to.n) return;
    if (to.bias != nullptr) {
        plus(x, load16_constant(to.bias + n));
        if constexpr (GEGLU) plus(gate, load16_constant(to.bias + to.n + n));
    }
    if (row.add != nullptr) plus(x, load16(row.add + n));
    if (!GEGLU && to.residual != nullptr) plus(x, residual);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = GEGLU ? x[i] * gelu_of_sum(gate[i]) : activate(x[i]);
    store8(to.out + row.out + n, x);
}
