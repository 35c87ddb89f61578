// What tells weights from others: of each of many tensors the sum over its bits and a few of its values, in one launch.
// Called by sdaccel/backends/cuda/fingerprint.py.
//
// table [tensors, 4 + SAMPLES] int64: address, number of elements (without gaps), width of one in bytes (1, 2, 4, 8),
// kind (0 half, 1 bfloat16, 2 float), then the offset of each sample in elements.
// sums [tensors]: elements as unsigned integers, modulo 2^64; zero before. samples [tensors, SAMPLES] float.
// Macros: SDACCEL_T (unused), SAMPLES. Grid: (blocks a tensor, tensors), 256 threads.
#include "numeric.cuh"

#define THREADS 256

// The elements in four bytes, added up.
SDACCEL_DEVICE uint64_t parts(uint32_t word, int width) {
    if (width == 1) return (word & 0xff) + (word >> 8 & 0xff) + (word >> 16 & 0xff) + (word >> 24);
    if (width == 2) return (word & 0xffff) + (word >> 16);
    return word;
}

SDACCEL_DEVICE uint64_t element(const void* data, int64_t i, int width) {
    if (width == 1) return static_cast<const uint8_t*>(data)[i];
    if (width == 2) return static_cast<const uint16_t*>(data)[i];
    if (width == 4) return static_cast<const uint32_t*>(data)[i];
    return static_cast<const uint64_t*>(data)[i];
}

SDACCEL_DEVICE float value(const void* data, int64_t i, int kind) {
    if (kind == 0) return to_float(static_cast<const half_t*>(data)[i]);
    if (kind == 1) return to_float(static_cast<const bf16_t*>(data)[i]);
    return static_cast<const float*>(data)[i];
}

extern "C" __global__ void __launch_bounds__(THREADS)
    fingerprint(const int64_t* __restrict__ table, uint64_t* sums, float* samples) {
    const int64_t* row = table + int64_t(blockIdx.y) * (4 + SAMPLES);
    const void* data = reinterpret_cast<const void*>(row[0]);
    const int64_t count = row[1];
    const int width = int(row[2]);
    const int thread = blockIdx.x * THREADS + threadIdx.x;
    const int threads = gridDim.x * THREADS;
    if (thread < SAMPLES) samples[int64_t(blockIdx.y) * SAMPLES + thread] = value(data, row[4 + thread], int(row[3]));

    uint64_t sum = 0;
    int64_t done = 0;
    if (row[0] % 16 == 0) {
        const int64_t vectors = count * width / 16;
        const uint4* vector = static_cast<const uint4*>(data);
#pragma unroll 4
        for (int64_t i = thread; i < vectors; i += threads) {
            const uint4 x = vector[i];
            if (width == 8)
                sum += (uint64_t(x.y) << 32 | x.x) + (uint64_t(x.w) << 32 | x.z);
            else
                sum += parts(x.x, width) + parts(x.y, width) + parts(x.z, width) + parts(x.w, width);
        }
        done = vectors * 16 / width;
    }
    for (int64_t i = done + thread; i < count; i += threads) sum += element(data, i, width);

#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_down_sync(0xffffffffu, sum, lane);
    if (threadIdx.x % 32 == 0 && sum != 0) atomicAdd(sums + blockIdx.y, sum);
}
