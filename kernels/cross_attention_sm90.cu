// Attention over few keys (text) on sm_90a: out = softmax(scale q k^T) v with all keys and values of one head in shared memory.
//
// q [B, S, H, D], k and v [B, L, H, D], out [B, S, H, D] through tensor maps (dimensions D, H, S, B; box 64 x 1 x rows x 1,
// 128-byte swizzle; rows: 64 of q and out, KEYS of k and v); KEYS - 32 < L <= KEYS. Called by
// sdaccel/backends/cuda/ops/attention.py. Macros: SDACCEL_T, HEAD_DIM (40, 64, 80, 160), KEYS (a multiple of 16), STAGES
// (tiles of 64 query rows under way), MIN_BLOCKS (that share a multiprocessor).
// Grid: (heads, blocks a head, batch), each block takes every gridDim.y-th tile; block: one warpgroup.
//
// What is to be read is asked for at once. One product gives a row's scores against every key, so softmax needs no
// rescaling; the result takes the place of its queries and leaves by the copy engine in whole lines. Blocks that share a
// multiprocessor overlap one's products with another's exponentials. Heads are stored 64 columns wide, zeros beyond D.
#include "hopper_attention.cuh"
#include "mma.cuh"

using namespace hopper;

constexpr int BLOCKS = (HEAD_DIM + 63) / 64;  // of 64 columns
constexpr int STEPS = (HEAD_DIM + 15) / 16;   // of 16 columns in q k^T
constexpr int ROWS = 64;
constexpr int QUERY_BYTES = ROWS * BLOCKS * 128;
constexpr int KEY_BYTES = KEYS * BLOCKS * 128;

SDACCEL_DEVICE void load(const TensorMap& map, uint32_t to, uint32_t full, int rows, int head, int row, int batch) {
    barrier_expect(full, rows * BLOCKS * 128);
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) load_box(map, to + i * rows * 128, full, 64 * i, head, row, batch);
}

// Scores to rounded weights; returns one over their sum for each of the thread's two rows.
SDACCEL_DEVICE void softmax(float (&scores)[KEYS / 2], uint32_t (&weights)[KEYS / 4], float (&inverse)[2], int keys,
                            float scale_log2e) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int j = KEYS > 32 ? (KEYS - 32) / 2 : 0; j < KEYS / 2; j++)
        if (j / 4 * 8 + t * 2 + j % 2 >= keys) scores[j] = -SDACCEL_INFINITY;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float most = -SDACCEL_INFINITY;
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++) most = fmaxf(most, fmaxf(scores[4 * j + 2 * half], scores[4 * j + 2 * half + 1]));
        const float shift = quad_max(most) * scale_log2e;
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++) {
            const float x = exp2_approx(fmaf(scores[4 * j + 2 * half], scale_log2e, -shift));
            const float y = exp2_approx(fmaf(scores[4 * j + 2 * half + 1], scale_log2e, -shift));
            sum += x + y;
            weights[2 * j + half] = pack<T>(x, y);
        }
        inverse[half] = __fdividef(1.0f, quad_sum(sum));
    }
}

extern "C" __global__ void __launch_bounds__(128, MIN_BLOCKS)
    cross_attention(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                    const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap out, int queries, int keys,
                    float scale_log2e) {
    extern __shared__ uint4 memory[];
    const uint32_t key_tile = (address(memory) + 1023) & ~1023u, value_tile = key_tile + KEY_BYTES;
    const uint32_t query_tiles = value_tile + KEY_BYTES, key_full = query_tiles + STAGES * QUERY_BYTES;
    const uint32_t value_full = key_full + 8, query_full = key_full + 16;
    const int head = blockIdx.x, batch = blockIdx.z, first = blockIdx.y, step = gridDim.y;
    const int tiles = ((queries + ROWS - 1) / ROWS - first + step - 1) / step;
    const bool leader = threadIdx.x == 0;
    const auto load_queries = [&](int i) {
        const int slot = i % STAGES;
        load(q, query_tiles + slot * QUERY_BYTES, query_full + 8 * slot, ROWS, head, (first + i * step) * ROWS, batch);
    };

    if (leader) {
        prefetch(q);
        prefetch(k);
        prefetch(v);
        prefetch(out);
        barrier_init(key_full, 1);
        barrier_init(value_full, 1);
#pragma unroll
        for (int i = 0; i < STAGES; i++) barrier_init(query_full + 8 * i, 1);
        barrier_init_fence();
    }
    pdl_wait();
    if (leader) {
        load_queries(0);
        load(k, key_tile, key_full, KEYS, head, 0, batch);
        load(v, value_tile, value_full, KEYS, head, 0, batch);
        for (int i = 1; i < min(STAGES, tiles); i++) load_queries(i);
    }
    pdl_launch_dependents();
    __syncthreads();

    for (int i = 0; i < tiles; i++) {
        const int slot = i % STAGES;
        const uint32_t place = query_tiles + slot * QUERY_BYTES;
        float scores[KEYS / 2], sums[HEAD_DIM / 2], inverse[2];
        uint32_t weights[KEYS / 4];

        if (leader && i > 0 && i - 1 + STAGES < tiles) {
            stores_wait_read();
            load_queries(i - 1 + STAGES);
        }
        __syncwarp();
        if (i == 0) barrier_wait(key_full, 0);
        barrier_wait(query_full + 8 * slot, i / STAGES % 2);
        wgmma_fence();
        const uint64_t rows = descriptor(place), columns = descriptor(key_tile);
#pragma unroll
        for (int s = 0; s < STEPS; s++)
            Wgmma<T, KEYS, 0>::mma(scores, rows + s / 4 * (ROWS * 128 >> 4) + s % 4 * 2,
                                   columns + s / 4 * (KEYS * 128 >> 4) + s % 4 * 2, s > 0);
        wgmma_commit();
        wgmma_wait<0>();
        keep(scores);

        softmax(scores, weights, inverse, keys, scale_log2e);

        if (i == 0) barrier_wait(value_full, 0);
        wgmma_fence();
        const uint64_t values = descriptor_of_rows(value_tile, KEYS * 128);
#pragma unroll
        for (int s = 0; s < KEYS / 16; s++)
            WgmmaOfRows<T, HEAD_DIM>::mma(sums, weights + 4 * s, values + s * (2048 >> 4), s > 0);
        wgmma_commit();
        wgmma_wait<0>();
        keep(sums);

        __syncthreads();  // nobody reads these queries any more
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint32_t row = place + (threadIdx.x / 32 * 16 + lane / 4 + 8 * half) * 128 + lane % 4 * 4;
#pragma unroll
            for (int j = 0; j < HEAD_DIM / 8; j++)
                store_shared(row + j / 8 * (ROWS * 128) + ((j % 8) ^ (lane / 4)) * 16,
                             pack<T>(sums[4 * j + 2 * half] * inverse[half], sums[4 * j + 2 * half + 1] * inverse[half]));
        }
        proxy_fence();
        __syncthreads();
        if (leader) {
#pragma unroll
            for (int b = 0; b < BLOCKS; b++)
                store_box(out, place + b * ROWS * 128, 64 * b, head, (first + i * step) * ROWS, batch);
            stores_commit();
        }
    }
    if (leader) stores_wait_read();
}
