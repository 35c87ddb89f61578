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

SDACCEL_DEVICE float activate(float x) {
    if constexpr (ACTIVATION == 1) return silu(x);
    if constexpr (ACTIVATION == 2) return gelu(x);
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

// Eight sums of channels n .. n + 7 of one row.
SDACCEL_DEVICE void finish(const Epilogue& to, const Row& row, int n, float (&x)[8], const float (&gate)[8],
                           const float (&bias)[8], const float (&gate_bias)[8]) {
    if (!row.valid || n >= to.n) return;
    float other[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] += bias[i];
    if (row.add != nullptr) {
        load8(row.add + n, other);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] += other[i];
    }
    if (!GEGLU && to.residual != nullptr) {
        load8(to.residual + row.residual + n, other);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] += other[i];
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if constexpr (GEGLU)
            x[i] *= gelu(gate[i] + gate_bias[i]);
        else
            x[i] = activate(x[i]);
    }
    store8(to.out + row.out + n, x);
}

SDACCEL_DEVICE void load_bias(const Epilogue& to, int n, float (&bias)[8], float (&gate_bias)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) bias[i] = gate_bias[i] = 0.0f;
    if (to.bias == nullptr || n >= to.n) return;
    load8(to.bias + n, bias);
    if constexpr (GEGLU) load8(to.bias + to.n + n, gate_bias);
}
