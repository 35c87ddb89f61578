// Linear layers of a few rows (time and text embeddings), any GPU, called by ops/linear.py: out = activation(x W^T + bias +
// residual), bound by reading W once. x [ROWS, K] with rows `stride` elements apart, W [N, K], out [ROWS, N].
//
// A warp computes COLUMNS neighbouring channels for all rows; its lanes go through K sixteen bytes at a time.
// Macros: SDACCEL_T, ACTIVATION (not geglu), ROWS (at most 16), COLUMNS. K a multiple of 8, N of COLUMNS.
// Grid: N / (4 COLUMNS) rounded up; 128 threads. `flag` as in gemm_sm90.cu.
#include "gemm_epilogue.cuh"

extern "C" __global__ void __launch_bounds__(128)
    gemv(const T* x, const T* __restrict__ weight, T* out, const T* __restrict__ bias, const T* residual, const int* flag,
         int n, int k, int stride, int residual_stride) {
    pdl_launch_dependents();
    pdl_wait();
    if (flag != nullptr && *flag == 0) return;
    const int lane = threadIdx.x % 32;
    const int column = (blockIdx.x * 4 + threadIdx.x / 32) * COLUMNS;
    if (column >= n) return;

    float sum[COLUMNS][ROWS] = {};
#pragma unroll 2
    for (int i = lane * 8; i < k; i += 256) {
        float w[COLUMNS][8];
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) unpack8<T>(load16_streaming(weight + int64_t(column + c) * k + i), w[c]);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            float v[8];
            load8(x + int64_t(r) * stride + i, v);
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
                for (int e = 0; e < 8; ++e) sum[c][r] = fmaf(w[c][e], v[e], sum[c][r]);
        }
    }
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            float y = warp_sum(sum[c][r]);
            if (lane == (c * ROWS + r) % 32) {
                if (bias) y += to_float(bias[column + c]);
                if (residual) y += to_float(residual[int64_t(r) * residual_stride + column + c]);
                out[int64_t(r) * n + column + c] = from_float<T>(activate(y));
            }
        }
}
