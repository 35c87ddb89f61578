// Attention over few keys (text): out = softmax(scale q k^T) v with all keys and values of one head in shared memory.
//
// q [B, S, H * D], k and v [B, L, H * D] with free row and batch strides (elements, multiples of 8), out [B, S, H * D]
// contiguous; L <= KEYS, L > KEYS - 16. Called by sdaccel/backends/cuda/ops/attention.py; sm_80 and later.
// Macros: SDACCEL_T, HEAD_DIM (a multiple of 8), KEYS (a multiple of 16), WARPS, TILES (16-row tiles that a warp holds at
// once), MIN_BLOCKS (that share a multiprocessor). Grid: (blocks a head, heads, batch), block: 32 * WARPS.
//
// Warps are independent once keys and values have arrived: each takes tiles of 16 * TILES query rows, with the scores of a
// row against every key in registers, so softmax needs no rescaling. Operands of a product may be permuted along the
// summed dimension and along columns of v at will; they are so that a thread's share of q and of out is 16 contiguous bytes
// of global memory and its share of k 16 contiguous bytes of shared memory. A head is cut into groups of 32 columns and a
// last one of 24 = 16 + 8, 16 or 8; in a group of N times 8 thread t of a row owns columns 2 N t to 2 N t + 2 N - 1.
#include "mma.cuh"

constexpr int KEY_TILES = KEYS / 8;
constexpr int WORDS = HEAD_DIM / 8;  // a thread's share of one row of q, in pairs of elements
constexpr int VALUE_PITCH = 8 * ((HEAD_DIM / 8) | 1);  // an odd number of 16-byte chunks: ldmatrix without bank conflicts
constexpr int THREADS = 32 * WARPS;

// The group that column c lies in: its first column and its width.
__device__ constexpr int group_start(int c) {
    return c < HEAD_DIM / 32 * 32 ? c / 32 * 32 : c < HEAD_DIM / 16 * 16 ? c / 16 * 16 : c / 8 * 8;
}
__device__ constexpr int group_width(int c) { return c < HEAD_DIM / 32 * 32 ? 32 : c < HEAD_DIM / 16 * 16 ? 16 : 8; }

struct Strides {
    int row;
    int64_t batch;
};

// One thread's share of a row from column `start` of a group `8 * N` wide, N pairs.
template <int N>
SDACCEL_DEVICE void load_share(uint32_t* share, const T* row, int t) {
    if constexpr (N == 4) {
        const uint4 x = load16_streaming(row + 8 * t);
        share[0] = x.x, share[1] = x.y, share[2] = x.z, share[3] = x.w;
    } else if constexpr (N == 2) {
        const uint2 x = *reinterpret_cast<const uint2*>(row + 4 * t);
        share[0] = x.x, share[1] = x.y;
    } else {
        share[0] = *reinterpret_cast<const uint32_t*>(row + 2 * t);
    }
}

template <int N>
SDACCEL_DEVICE void store_share(const uint32_t* share, T* row, int t) {
    if constexpr (N == 4)
        store16(row + 8 * t, make_uint4(share[0], share[1], share[2], share[3]));
    else if constexpr (N == 2)
        *reinterpret_cast<uint2*>(row + 4 * t) = make_uint2(share[0], share[1]);
    else
        *reinterpret_cast<uint32_t*>(row + 2 * t) = share[0];
}

// Calls f with each group's first column and its number of 8-wide tiles, both known to the compiler.
template <int START = 0, typename F>
SDACCEL_DEVICE void each_group(const F& f) {
    if constexpr (START < HEAD_DIM) {
        f.template operator()<START, group_width(START) / 8>();
        each_group<START + group_width(START)>(f);
    }
}

struct LoadQueries {
    uint32_t (&q)[2][WORDS];
    const T* rows[2];
    bool valid[2];
    int t;

    template <int START, int N>
    __device__ __forceinline__ void operator()() const {
#pragma unroll
        for (int half = 0; half < 2; half++)
            if (valid[half]) load_share<N>(&q[half][START / 8], rows[half] + START, t);
    }
};

// Scores of one group of columns added to those of all keys.
struct AddScores {
    float (&scores)[TILES][KEY_TILES][4];
    const uint32_t (&q)[TILES][2][WORDS];
    const T* keys;
    int lane;

    template <int START, int N>
    __device__ __forceinline__ void operator()() const {
        constexpr int W = START / 8;
#pragma unroll
        for (int n = 0; n < KEY_TILES; n++) {
            const T* tile = keys + n * 8 * HEAD_DIM + 8 * START;
            if constexpr (N == 4) {
                const uint4 b = load16(tile + 8 * lane);
#pragma unroll
                for (int m = 0; m < TILES; m++) {
                    mma_16816<T>(scores[m][n], q[m][0][W], q[m][1][W], q[m][0][W + 1], q[m][1][W + 1], b.x, b.y);
                    mma_16816<T>(scores[m][n], q[m][0][W + 2], q[m][1][W + 2], q[m][0][W + 3], q[m][1][W + 3], b.z, b.w);
                }
            } else if constexpr (N == 2) {
                const uint2 b = *reinterpret_cast<const uint2*>(tile + 4 * lane);
#pragma unroll
                for (int m = 0; m < TILES; m++)
                    mma_16816<T>(scores[m][n], q[m][0][W], q[m][1][W], q[m][0][W + 1], q[m][1][W + 1], b.x, b.y);
            } else {
                const uint32_t b = *reinterpret_cast<const uint32_t*>(tile + 2 * lane);
#pragma unroll
                for (int m = 0; m < TILES; m++) mma_1688<T>(scores[m][n], q[m][0][W], q[m][1][W], b);
            }
        }
    }
};

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
        T* to = key_tiles + key / 8 * 8 * HEAD_DIM + 8 * group_start(c) + key % 8 * group_width(c) + (c - group_start(c));
        cp_async_16(shared_address(to), valid ? k + int64_t(key) * k_row + c : k, valid);
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
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) scores[m][n][e] = 0.0f;
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
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) sums[m][n][e] = 0.0f;
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++) {
#pragma unroll
            for (int n = 0; n + 1 < HEAD_DIM / 8; n += 2) {
                uint32_t b[4];
                ldmatrix_x4_trans(b, value_address + (16 * i * VALUE_PITCH + 8 * n) * sizeof(T));
#pragma unroll
                for (int m = 0; m < TILES; m++) {
                    const uint32_t(&w)[KEY_TILES][2] = weights[m];
                    mma_16816<T>(sums[m][n], w[2 * i][0], w[2 * i][1], w[2 * i + 1][0], w[2 * i + 1][1], b[0], b[1]);
                    mma_16816<T>(sums[m][n + 1], w[2 * i][0], w[2 * i][1], w[2 * i + 1][0], w[2 * i + 1][1], b[2], b[3]);
                }
            }
            if constexpr (HEAD_DIM / 8 % 2 == 1) {
                uint32_t b[2];
                constexpr int n = HEAD_DIM / 8 - 1;
                ldmatrix_x2_trans(b, value_address + (16 * i * VALUE_PITCH + 8 * n) * sizeof(T));
#pragma unroll
                for (int m = 0; m < TILES; m++) {
                    const uint32_t(&w)[KEY_TILES][2] = weights[m];
                    mma_16816<T>(sums[m][n], w[2 * i][0], w[2 * i][1], w[2 * i + 1][0], w[2 * i + 1][1], b[0], b[1]);
                }
            }
        }
#pragma unroll
        for (int m = 0; m < TILES; m++) {
            const int row = (tile * TILES + m) * 16 + g;
            T* rows = out + int64_t(row) * out_row;
            each_group(
                StoreRows{sums[m], inverse[m], {rows, rows + 8 * out_row}, {row < queries, row + 8 < queries}, t});
        }
    }
}
