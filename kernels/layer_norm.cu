// Layer normalisation (Ba et al., 2016) of rows, with what is added to the residual stream before it.
//
//   sum = x + residual + bias_in        y = (sum - mean) / sqrt(variance + epsilon) * scale + bias
//
// x [rows, CHANNELS], row stride x_row; residual the same, row stride residual_row, or null; bias_in [CHANNELS] or null;
// y [rows, CHANNELS] dense; sum likewise, or null where nothing is added. LANES threads hold a row in registers, so the
// variance is that of the deviations. Called by sdaccel/backends/cuda/ops/layer_norm.py.
// Macros: SDACCEL_T, CHANNELS (a multiple of 8), LANES (1 .. 32, a power of two). 128 threads, 128 / LANES rows a block.
#include "numeric.cuh"

#define THREADS 128
#define CHUNKS (CHANNELS / 8)
#define VECTORS ((CHUNKS + LANES - 1) / LANES)

SDACCEL_DEVICE float row_sum(float x) {
#pragma unroll
    for (int mask = LANES / 2; mask > 0; mask >>= 1) x += __shfl_xor_sync(0xffffffffu, x, mask);
    return x;
}

extern "C" __global__ void __launch_bounds__(THREADS)
layer_norm(const T* x, int x_row, const T* residual, int residual_row, const T* __restrict__ bias_in,
           const T* __restrict__ scale, const T* __restrict__ bias, T* y, T* sum, int rows, float epsilon) {
    const int lane = threadIdx.x % LANES;
    const int64_t row = int64_t(blockIdx.x) * (THREADS / LANES) + threadIdx.x / LANES;
    const auto exists = [&](int i) { return CHUNKS % LANES == 0 || i * LANES + lane < CHUNKS; };
    const auto channel = [&](int i) { return (i * LANES + lane) * 8; };
    const bool inside = row < rows;

    pdl_launch_dependents();
    pdl_wait();
    uint4 raw[VECTORS] = {}, more[VECTORS] = {};
    if (inside) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
            if (exists(i)) raw[i] = load16(x + row * x_row + channel(i));
        if (residual != nullptr) {
#pragma unroll
            for (int i = 0; i < VECTORS; ++i)
                if (exists(i)) more[i] = load16(residual + row * residual_row + channel(i));
        }
    }
    float v[VECTORS][8], total = 0.0f;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        float extra[8];
        unpack8<T>(raw[i], v[i]);
        unpack8<T>(more[i], extra);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[i][j] += extra[j];
        if (bias_in != nullptr && exists(i)) {
            load8(bias_in + channel(i), extra);
#pragma unroll
            for (int j = 0; j < 8; ++j) v[i][j] += extra[j];
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) total += v[i][j];
    }
    const float mean = row_sum(total) * (1.0f / CHANNELS);
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        if (exists(i)) {
#pragma unroll
            for (int j = 0; j < 8; ++j) squares = fmaf(v[i][j] - mean, v[i][j] - mean, squares);
        }
    }
    const float inverse = rsqrtf(row_sum(squares) * (1.0f / CHANNELS) + epsilon);
    if (!inside) return;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        if (!exists(i)) continue;
        if (sum != nullptr) store8(sum + row * CHANNELS + channel(i), v[i]);
        float a[8], b[8];
        load8(scale + channel(i), a);
        load8(bias + channel(i), b);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[i][j] = fmaf((v[i][j] - mean) * inverse, a[j], b[j]);
        store8(y + row * CHANNELS + channel(i), v[i]);
    }
}
