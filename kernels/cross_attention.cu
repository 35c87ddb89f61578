// Attention over few keys (text): out = softmax(scale q k^T) v with all keys and values of one head in shared memory.
//
// q [B, S, H * D], k and v [B, L, H * D] with free row and batch strides (elements, multiples of 8), out [B, S, H * D]
// contiguous; L <= KEYS, L > KEYS - 16. Called by sdaccel/backends/cuda/ops/attention.py; sm_80 and later.
// Macros: SDACCEL_T, HEAD_DIM (a multiple of 8), KEYS (a multiple of 16), WARPS, TILES (16-row tiles that a warp holds at
// once), MIN_BLOCKS (that share a multiprocessor). Grid: (blocks a head, heads, batch), block: 32 * WARPS.
//
// Warps are independent once keys and values have arrived: each takes tiles of 16 * TILES query rows, with the scores of a
// row against every key in registers, so softmax needs no rescaling. Columns of v are permuted on their way into shared
// memory as those of q and k are (attention.cuh), so that a thread stores 16 contiguous bytes of out.
#include "attention.cuh"

constexpr int THREADS = 32 * WARPS;

struct StoreRows {
    const float (&sums)[HEAD_DIM / 8][4];
    float (&inverse)[2];
    T* rows[2];
    bool valid[2];
    int t;

    template <int START, int N>
    __device__ __forceinline__ void operator()() const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t share[N];
#pragma unroll
            for (int j = 0; j < N; j++) {
                const float(&c)[4] = sums[START / 8 + j];
                share[j] = pack<T>(c[2 * half] * inverse[half], c[2 * half + 1] * inverse[half]);
            }
            if (valid[half]) store_share<N>(share, rows[half] + START, t);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    cross_attention(const T* q, const T* k, const T* v, T* out, int queries, int keys, int q_row, int64_t q_batch, int k_row,
                    int64_t k_batch, int v_row, int64_t v_batch, float scale_log2e) {
    extern __shared__ uint4 shared[];
    T* const key_tiles = reinterpret_cast<T*>(shared);
    T* const value_rows = key_tiles + KEYS * HEAD_DIM;
    const int head = blockIdx.y;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;

    pdl_wait();
    q += blockIdx.z * q_batch + head * HEAD_DIM;
    k += blockIdx.z * k_batch + head * HEAD_DIM;
    v += blockIdx.z * v_batch + head * HEAD_DIM;
    out += int64_t(blockIdx.z) * queries * (gridDim.y * HEAD_DIM) + head * HEAD_DIM;
    const int out_row = gridDim.y * HEAD_DIM;

    constexpr int CHUNKS = HEAD_DIM / 8;
    for (int i = threadIdx.x; i < KEYS * CHUNKS; i += THREADS) {
        const int key = i / CHUNKS, c = i % CHUNKS * 8;
        const bool valid = key < keys;
        cp_async_16(shared_address(key_place(key_tiles, key, c)), valid ? k + int64_t(key) * k_row + c : k, valid);
    }
    cp_async_commit();

    const int tiles = (queries + 16 * TILES - 1) / (16 * TILES);
    const int step = gridDim.x * WARPS;
    int tile = threadIdx.x / 32 * gridDim.x + blockIdx.x;
    uint32_t queries_now[TILES][2][WORDS];
    auto load_queries = [&](int tile) {
#pragma unroll
        for (int m = 0; m < TILES; m++) {
            const int row = (tile * TILES + m) * 16 + g;
            const T* rows = q + int64_t(row) * q_row;
            each_group(LoadQueries{queries_now[m], {rows, rows + 8 * q_row}, {row < queries, row + 8 < queries}, t});
        }
    };
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int w = 0; w < WORDS; w++) queries_now[m][half][w] = 0;
    load_queries(tile);

    // Values in rows as they come, but with the pairs of a group transposed: pair j of thread t goes to tile j, place t.
#pragma unroll 4
    for (int i = threadIdx.x; i < KEYS * CHUNKS; i += THREADS) {
        const int key = i / CHUNKS, c = i % CHUNKS * 8;
        const uint4 x = key < keys ? load16(v + int64_t(key) * v_row + c) : make_uint4(0, 0, 0, 0);
        const int pairs = group_width(c) / 8, first = (c - group_start(c)) / 2;
        uint32_t* row = reinterpret_cast<uint32_t*>(value_rows + key * VALUE_PITCH + group_start(c));
        const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int w = 0; w < 4; w++) row[(first + w) % pairs * 4 + (first + w) / pairs] = words[w];
    }
    cp_async_wait<0>();
    __syncthreads();
    pdl_launch_dependents();

    // ldmatrix: matrices 0 and 1 are keys 0-7 and 8-15 of one tile of columns, 2 and 3 those of the next
    const uint32_t value_address = shared_address(value_rows + (lane % 16) * VALUE_PITCH + lane / 16 * 8);

    for (; tile < tiles; tile += step) {
        float scores[TILES][KEY_TILES][4];
#pragma unroll
        for (int m = 0; m < TILES; m++) clear(scores[m]);
        each_group(AddScores{scores, queries_now, key_tiles, lane});
        if (tile + step < tiles) load_queries(tile + step);

        uint32_t weights[TILES][KEY_TILES][2];
        float inverse[TILES][2];
#pragma unroll
        for (int m = 0; m < TILES; m++) {
#pragma unroll
            for (int n = KEY_TILES - 2; n < KEY_TILES; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (8 * n + 2 * t + e % 2 >= keys) scores[m][n][e] = -SDACCEL_INFINITY;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float most = -SDACCEL_INFINITY;
#pragma unroll
                for (int n = 0; n < KEY_TILES; n++)
                    most = fmaxf(most, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
                const float shift = quad_max(most) * scale_log2e;
                float sum = 0.0f;
#pragma unroll
                for (int n = 0; n < KEY_TILES; n++) {
                    const float x = exp2_approx(fmaf(scores[m][n][2 * half], scale_log2e, -shift));
                    const float y = exp2_approx(fmaf(scores[m][n][2 * half + 1], scale_log2e, -shift));
                    sum += x + y;
                    weights[m][n][half] = pack<T>(x, y);
                }
                inverse[m][half] = __fdividef(1.0f, quad_sum(sum));
            }
        }

        float sums[TILES][HEAD_DIM / 8][4];
#pragma unroll
        for (int m = 0; m < TILES; m++) clear(sums[m]);
        add_values(sums, weights, value_address);
#pragma unroll
        for (int m = 0; m < TILES; m++) {
            const int row = (tile * TILES + m) * 16 + g;
            T* rows = out + int64_t(row) * out_row;
            each_group(
                StoreRows{sums[m], inverse[m], {rows, rows + 8 * out_row}, {row < queries, row + 8 < queries}, t});
        }
    }
}
