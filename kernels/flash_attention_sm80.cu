// Attention over many keys by mma.sync: out = softmax(scale q k^T) v with a running maximum (FlashAttention-2, Dao 2023).
//
// q [B, S, H * D], k and v [B, L, H * D] with free row and batch strides (elements, multiples of 8), out [B, S, H * D]
// contiguous. Called by sdaccel/backends/cuda/ops/attention.py; sm_80 and later.
// Macros: SDACCEL_T, HEAD_DIM (a multiple of 8), KEYS (a tile; a multiple of 16), WARPS, TILES (of 16 query rows a warp),
// MIN_BLOCKS (that share a multiprocessor). Grid: (S / (16 * TILES * WARPS), heads, batch), block: 32 * WARPS.
//
// Two tiles of keys and values are in shared memory: one in use, one on its way. The partial tile comes first, so that
// masks are needed once.
#include "attention.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int ROWS = 16 * TILES * WARPS;
constexpr int STAGE = KEYS * (HEAD_DIM + VALUE_PITCH);

struct Source {
    const T* k;
    const T* v;
    int k_row, v_row, keys;
};

// Keys and values `start` to `start + KEYS - 1`, zeros beyond the last.
SDACCEL_DEVICE void load_tile(T* stage, const Source& from, int start) {
    constexpr int CHUNKS = HEAD_DIM / 8;
    T* const values = stage + KEYS * HEAD_DIM;
#pragma unroll 2
    for (int i = threadIdx.x; i < KEYS * CHUNKS; i += THREADS) {
        const int row = i / CHUNKS, c = i % CHUNKS * 8, key = start + row;
        const bool valid = key < from.keys;
        cp_async_16(shared_address(key_place(stage, row, c)), valid ? from.k + int64_t(key) * from.k_row + c : from.k, valid);
        cp_async_16(shared_address(values + row * VALUE_PITCH + c), valid ? from.v + int64_t(key) * from.v_row + c : from.v,
                    valid);
    }
    cp_async_commit();
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    flash_attention_sm80(const T* q, const T* k, const T* v, T* out, int queries, int keys, int q_row, int64_t q_batch,
                         int k_row, int64_t k_batch, int v_row, int64_t v_batch, float scale_log2e) {
    extern __shared__ uint4 shared[];
    T* const stages = reinterpret_cast<T*>(shared);
    const int head = blockIdx.y;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int first_row = blockIdx.x * ROWS + threadIdx.x / 32 * 16 * TILES + g;

    pdl_wait();
    pdl_launch_dependents();
    q += blockIdx.z * q_batch + head * HEAD_DIM;
    const Source from = {k + blockIdx.z * k_batch + head * HEAD_DIM, v + blockIdx.z * v_batch + head * HEAD_DIM, k_row,
                         v_row, keys};
    const int last_tile = (keys - 1) / KEYS;
    load_tile(stages, from, last_tile * KEYS);

    uint32_t queries_now[TILES][2][WORDS];
#pragma unroll
    for (int m = 0; m < TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int w = 0; w < WORDS; w++) queries_now[m][half][w] = 0;
        const int row = first_row + 16 * m;
        const T* rows = q + int64_t(row) * q_row;
        each_group(LoadQueries{queries_now[m], {rows, rows + 8 * q_row}, {row < queries, row + 8 < queries}, t});
    }

    float sums[TILES][HEAD_DIM / 8][4];
    float most[TILES][2], total[TILES][2];
#pragma unroll
    for (int m = 0; m < TILES; m++) {
        clear(sums[m]);
        most[m][0] = most[m][1] = -SDACCEL_INFINITY;
        total[m][0] = total[m][1] = 0.0f;
    }

    for (int tile = last_tile, stage = 0; tile >= 0; tile--, stage ^= 1) {
        cp_async_wait<0>();
        __syncthreads();  // this tile is here for all, and nobody reads the other stage any more
        if (tile > 0) load_tile(stages + (stage ^ 1) * STAGE, from, (tile - 1) * KEYS);
        const T* const key_tiles = stages + stage * STAGE;
        const T* const value_rows = key_tiles + KEYS * HEAD_DIM;

        float scores[TILES][KEY_TILES][4];
#pragma unroll
        for (int m = 0; m < TILES; m++) clear(scores[m]);
        each_group(AddScores{scores, queries_now, key_tiles, lane});
        if (tile * KEYS + KEYS > keys) {
#pragma unroll
            for (int m = 0; m < TILES; m++)
#pragma unroll
                for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        if (tile * KEYS + 8 * n + 2 * t + e % 2 >= keys) scores[m][n][e] = -SDACCEL_INFINITY;
        }

        uint32_t weights[TILES][KEY_TILES][2];
#pragma unroll
        for (int m = 0; m < TILES; m++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float highest = most[m][half];
#pragma unroll
                for (int n = 0; n < KEY_TILES; n++)
                    highest = fmaxf(highest, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
                highest = quad_max(highest);
                const float rescale = exp2_approx((most[m][half] - highest) * scale_log2e);
                const float shift = highest * scale_log2e;
                most[m][half] = highest;
                float sum = 0.0f;
#pragma unroll
                for (int n = 0; n < KEY_TILES; n++) {
                    const float x = exp2_approx(fmaf(scores[m][n][2 * half], scale_log2e, -shift));
                    const float y = exp2_approx(fmaf(scores[m][n][2 * half + 1], scale_log2e, -shift));
                    sum += x + y;
                    weights[m][n][half] = pack<T>(x, y);
                }
                total[m][half] = fmaf(total[m][half], rescale, sum);
#pragma unroll
                for (int n = 0; n < HEAD_DIM / 8; n++) {
                    sums[m][n][2 * half] *= rescale;
                    sums[m][n][2 * half + 1] *= rescale;
                }
            }
        }
        add_values(sums, weights, shared_address(value_rows + (lane % 16) * VALUE_PITCH + lane / 16 * 8));
    }

    const int out_row = gridDim.y * HEAD_DIM;
    out += int64_t(blockIdx.z) * queries * out_row + head * HEAD_DIM + 2 * t;
#pragma unroll
    for (int m = 0; m < TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float inverse = __fdividef(1.0f, quad_sum(total[m][half]));
            const int row = first_row + 16 * m + 8 * half;
            if (row < queries) {
                T* const to = out + int64_t(row) * out_row;
#pragma unroll
                for (int n = 0; n < HEAD_DIM / 8; n++)
                    *reinterpret_cast<uint32_t*>(to + 8 * n) =
                        pack<T>(sums[m][n][2 * half] * inverse, sums[m][n][2 * half + 1] * inverse);
            }
        }
    }
}
