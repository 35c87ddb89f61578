// What moves or maps elements without reducing them. Images are NHWC: [B, pixels, channels]. Called by
// sdaccel/backends/cuda/ops/elementwise.py. 256 threads. Macros: SDACCEL_T everywhere; ACTIVATION (0 none, 1 silu, 2 gelu,
// 3 quick_gelu) in `activate`; SOURCE (float, half_t, bf16_t, int64_t, …) in `pack_image` and `timestep_embedding`;
// TARGET (float, half_t, bf16_t) in `unpack_image`. Kernels that another op needs compile with any of them left out.
#include "numeric.cuh"

#define THREADS 256

#ifndef ACTIVATION
#define ACTIVATION 0
#endif
#ifndef SOURCE
#define SOURCE T
#endif
#ifndef TARGET
#define TARGET T
#endif

inline __device__ float to_float(int64_t x) { return float(x); }
inline __device__ float to_float(int32_t x) { return float(x); }

SDACCEL_DEVICE float activation(float x) {
#if ACTIVATION == 1
    return silu(x);
#elif ACTIVATION == 2
    return gelu(x);
#elif ACTIVATION == 3
    return quick_gelu(x);
#else
    return x;
#endif
}

// y = act(x + other), n elements an image; grid (n / (8 THREADS) rounded up, B). other: null; channels 0: like x;
// otherwise [B or 1, channels], an image's row `other_row` after the one before, channels a multiple of 8.
extern "C" __global__ void __launch_bounds__(THREADS)
activate(const T* x, const T* other, T* y, int n, int channels, int other_row) {
    const int i = (blockIdx.x * THREADS + threadIdx.x) * 8;
    const int64_t image = int64_t(blockIdx.y) * n;
    pdl_launch_dependents();
    pdl_wait();
    if (i >= n) return;
    if (other != nullptr) other += channels ? int64_t(blockIdx.y) * other_row + i % channels : image + i;
    x += image + i;
    y += image + i;
    if (n - i >= 8) {
        float v[8], w[8] = {};
        load8(x, v);
        if (other != nullptr) load8(other, w);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = activation(v[j] + w[j]);
        store8(y, v);
    } else {
        for (int j = 0; j < n - i; ++j)
            y[j] = from_float<T>(activation(to_float(x[j]) + (other != nullptr ? to_float(other[j]) : 0.0f)));
    }
}

// The nearest pixel: source row = floor(row * in_height / out_height), columns alike. chunks: channels / 8.
// grid (out_width * chunks / THREADS rounded up, out_height, B).
extern "C" __global__ void __launch_bounds__(THREADS)
upsample(const T* x, int64_t x_image, int x_pixel, T* y, int chunks, int in_height, int in_width, int out_height,
         int out_width) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    pdl_launch_dependents();
    pdl_wait();
    if (i >= out_width * chunks) return;
    const int column = i / chunks, chunk = i % chunks;
    const int row = blockIdx.y * in_height / out_height, from = column * in_width / out_width;
    x += blockIdx.z * x_image + (int64_t(row) * in_width + from) * x_pixel + chunk * 8;
    y += ((blockIdx.z * int64_t(out_height) + blockIdx.y) * out_width * chunks + i) * 8;
    store16(y, load16(x));
}

// y[r] = (a[r], b[r]): rows of 8 a_chunks and 8 b_chunks elements, n = rows * (a_chunks + b_chunks).
extern "C" __global__ void __launch_bounds__(THREADS)
concat(const T* a, int64_t a_image, int a_row, int a_chunks, const T* b, int64_t b_image, int b_row, int b_chunks, T* y,
       int n) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    pdl_launch_dependents();
    pdl_wait();
    if (i >= n) return;
    const int row = i / (a_chunks + b_chunks), chunk = i % (a_chunks + b_chunks);
    const T* from = chunk < a_chunks ? a + blockIdx.y * a_image + int64_t(row) * a_row + chunk * 8
                                     : b + blockIdx.y * b_image + int64_t(row) * b_row + (chunk - a_chunks) * 8;
    store16(y + (int64_t(blockIdx.y) * n + i) * 8, load16(from));
}

// x [B, channels, height, width] of SOURCE with any strides → y [B, height * width, 8 chunks], zeros after the channels.
// grid (height * width * chunks / THREADS rounded up, B).
extern "C" __global__ void __launch_bounds__(THREADS)
pack_image(const SOURCE* x, int64_t image, int64_t plane, int64_t line, int64_t pixel, T* y, int channels, int height,
           int width, int chunks) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    pdl_launch_dependents();
    pdl_wait();
    if (i >= height * width * chunks) return;
    const int at = i / chunks, channel = i % chunks * 8;
    x += blockIdx.y * image + at / width * line + at % width * pixel + channel * plane;
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = channel + j < channels ? to_float(x[j * plane]) : 0.0f;
    store8(y + (int64_t(blockIdx.y) * height * width * chunks + i) * 8, v);
}

// x: channels innermost, a pixel `x_pixel` elements after the one before → y [B, channels, pixels] of TARGET.
// grid (channels * pixels / THREADS rounded up, B).
extern "C" __global__ void __launch_bounds__(THREADS)
unpack_image(const T* x, int64_t x_image, int x_pixel, TARGET* y, int channels, int pixels) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    pdl_launch_dependents();
    pdl_wait();
    if (i >= channels * pixels) return;
    x += blockIdx.y * x_image + int64_t(i % pixels) * x_pixel + i / pixels;
    y[int64_t(blockIdx.y) * channels * pixels + i] = from_float<TARGET>(to_float(*x));
}

// y [B, 2 half]: (sin, cos) of time [B] * frequencies [half], the cosines first where `flip`. grid (half / THREADS, B).
extern "C" __global__ void __launch_bounds__(THREADS)
timestep_embedding(const SOURCE* time, int step, const float* __restrict__ frequencies, T* y, int half, int flip) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    pdl_launch_dependents();
    pdl_wait();
    if (i >= half) return;
    float sine, cosine;
    sincosf(to_float(time[int64_t(blockIdx.y) * step]) * frequencies[i], &sine, &cosine);
    y += int64_t(blockIdx.y) * 2 * half + i;
    y[flip ? half : 0] = from_float<T>(sine);
    y[flip ? 0 : half] = from_float<T>(cosine);
}

// flag = whether `value` differs from `stored` in any bit; stored = value. `words` of 16 bytes, then `rest` of 2.
// While blocks report, the flag's bits are 1-15: blocks that have, 16-30: those that saw a difference; the last one
// leaves 0 or 1. At most 32767 blocks.
extern "C" __global__ void __launch_bounds__(THREADS)
changed(const uint4* value, uint4* stored, int words, int rest, unsigned* flag) {
    pdl_launch_dependents();
    pdl_wait();
    const int thread = blockIdx.x * THREADS + threadIdx.x;
    bool differs = false;
    for (int i = thread; i < words; i += gridDim.x * THREADS) {
        const uint4 a = value[i], b = stored[i];
        if (a.x != b.x || a.y != b.y || a.z != b.z || a.w != b.w) {
            differs = true;
            stored[i] = a;
        }
    }
    if (thread < rest) {
        const uint16_t a = reinterpret_cast<const uint16_t*>(value + words)[thread];
        uint16_t& b = reinterpret_cast<uint16_t*>(stored + words)[thread];
        if (a != b) {
            differs = true;
            b = a;
        }
    }
    differs = __syncthreads_or(differs);
    if (threadIdx.x == 0) {
        const unsigned before = atomicAdd(flag, differs ? 0x10002u : 2u);
        if (((before >> 1) & 0x7fffu) == gridDim.x - 1) atomicExch(flag, (before >> 16) || differs ? 1u : 0u);
    }
}
