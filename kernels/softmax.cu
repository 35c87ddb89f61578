// Softmax of rows, the scale folded in: y[r, c] = exp(scale * (x[r, c] - max_r)) / sum over c of the same.
//
// x [rows, columns] of SOURCE (float, half_t, bf16_t), row stride x_row; y of SDACCEL_T, row stride y_row. Called by
// sdaccel/backends/cuda/ops/softmax.py. Macros: SDACCEL_T, SOURCE, THREADS (32 .. 1024) of a row, ROWS of a block (more
// than one only with THREADS 32), VECTORS: of WIDTH elements a thread holds in registers, 0: read twice instead,
// WIDTH (1, 8): elements a load; 8 wants columns and row strides that are multiples of 8.
#include "numeric.cuh"

#if WIDTH == 8
SDACCEL_DEVICE void load(const SOURCE* p, float (&v)[8]) {
    if constexpr (same_type<SOURCE, float>::value) {
        const float4 low = reinterpret_cast<const float4*>(p)[0], high = reinterpret_cast<const float4*>(p)[1];
        v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
        v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
    } else {
        unpack8<SOURCE>(load16(p), v);
    }
}
SDACCEL_DEVICE void store(T* p, const float (&v)[8]) { store8(p, v); }
#else
SDACCEL_DEVICE void load(const SOURCE* p, float (&v)[1]) { v[0] = to_float(*p); }
SDACCEL_DEVICE void store(T* p, const float (&v)[1]) { *p = from_float<T>(v[0]); }
#endif

// exp(x) is exp2(factor * x): factor = scale * log2(e), which must be positive.
extern "C" __global__ void __launch_bounds__(THREADS * ROWS)
softmax(const SOURCE* x, int64_t x_row, T* y, int64_t y_row, int rows, int columns, float factor) {
    __shared__ float scratch[32];
    const int thread = threadIdx.x % THREADS;
    const int64_t row = int64_t(blockIdx.x) * ROWS + threadIdx.x / THREADS;
    pdl_launch_dependents();
    pdl_wait();
    if (row >= rows) return;  // whole warps
    x += row * x_row;
    y += row * y_row;
    const int step = THREADS * WIDTH;

#if VECTORS > 0
    float v[VECTORS][WIDTH], most = -SDACCEL_INFINITY, total = 0.0f;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int column = i * step + thread * WIDTH;
        if (column < columns) {
            load(x + column, v[i]);
        } else {
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) v[i][j] = -SDACCEL_INFINITY;
        }
    }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) most = fmaxf(most, v[i][j]);
    most = block_max<THREADS>(most, scratch);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) total += v[i][j] = exp2f((v[i][j] - most) * factor);
    const float inverse = 1.0f / block_sum<THREADS>(total, scratch);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int column = i * step + thread * WIDTH;
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) v[i][j] *= inverse;
        if (column < columns) store(y + column, v[i]);
    }
#else
    // Milakov and Gimelshein (2018): the sum is rescaled whenever the maximum grows.
    float most = -SDACCEL_INFINITY, total = 0.0f, v[WIDTH];
#pragma unroll 4
    for (int column = thread * WIDTH; column < columns; column += step) {
        load(x + column, v);
        float here = v[0];
#pragma unroll
        for (int j = 1; j < WIDTH; ++j) here = fmaxf(here, v[j]);
        if (here > most) {
            total *= exp2f((most - here) * factor);
            most = here;
        }
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) total += v[j] == -SDACCEL_INFINITY ? 0.0f : exp2f((v[j] - most) * factor);
    }
    const float all = block_max<THREADS>(most, scratch);
    total *= most == -SDACCEL_INFINITY ? 0.0f : exp2f((most - all) * factor);
    const float inverse = 1.0f / block_sum<THREADS>(total, scratch);
#pragma unroll 4
    for (int column = thread * WIDTH; column < columns; column += step) {
        load(x + column, v);
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) v[j] = exp2f((v[j] - all) * factor) * inverse;
        store(y + column, v);
    }
#endif
}
