// What maps or compares elements without reducing them. Images are NHWC: [B, pixels, channels]. Called by
// sdaccel/backends/cuda/ops/elementwise.py. 256 threads. Macros: SDACCEL_T; SOURCE (float, half_t, bf16_t, int64_t, …) in
// `timestep_embedding`.
#include "numeric.cuh"

#define THREADS 256

#ifndef SOURCE
#define SOURCE T
#endif

inline __device__ float to_float(int64_t x) { return float(x); }
inline __device__ float to_float(int32_t x) { return float(x); }

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
