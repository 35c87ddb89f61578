// GEGLU (Shazeer, 2020): y = x[..., :C] * gelu(x[..., C:]), gelu by the error function.
//
// x [rows, 2 C], row stride x_row; y [rows, C] dense; C = 8 CHUNKS. Called by sdaccel/backends/cuda/ops/geglu.py.
// Macros: SDACCEL_T, CHUNKS, UNROLL (16-byte results a thread). 256 threads; grid rows * CHUNKS / (256 UNROLL), rounded up.
#include "numeric.cuh"

#define THREADS 256

extern "C" __global__ void __launch_bounds__(THREADS) geglu(const T* x, int x_row, T* y, int chunks) {
    pdl_launch_dependents();
    pdl_wait();
    const int first = blockIdx.x * (THREADS * UNROLL) + threadIdx.x;
    uint4 value[UNROLL], gate[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        const int i = first + u * THREADS;
        if (i < chunks) {
            const T* from = x + int64_t(i / CHUNKS) * x_row + i % CHUNKS * 8;
            value[u] = load16(from);
            gate[u] = load16(from + CHUNKS * 8);
        }
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        const int i = first + u * THREADS;
        if (i < chunks) {
            float a[8], b[8];
            unpack8<T>(value[u], a);
            unpack8<T>(gate[u], b);
#pragma unroll
            for (int j = 0; j < 8; ++j) a[j] *= gelu(b[j]);
            store8(y + int64_t(i) * 8, a);
        }
    }
}
