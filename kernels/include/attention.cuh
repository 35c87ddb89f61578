// Attention by mma.sync, shared by cross_attention.cu and flash_attention_sm80.cu: queries in registers, keys in shared memory.
// Macros: SDACCEL_T, HEAD_DIM (a multiple of 8), KEYS (of a tile, a multiple of 16), TILES (of 16 query rows a warp).
//
// Operands of a product may be permuted along the summed dimension at will; they are so that a thread's share of q is 16
// contiguous bytes of global memory and its share of k 16 contiguous bytes of shared memory. A head is cut into groups of 32
// columns and a last one of 24 = 16 + 8, 16 or 8; in a group of N times 8 thread t of a row owns columns 2 N t to
// 2 N (t + 1) - 1.
#pragma once

#include "mma.cuh"

constexpr int KEY_TILES = KEYS / 8;
constexpr int WORDS = HEAD_DIM / 8;  // a thread's share of one row of q, in pairs of elements
constexpr int VALUE_PITCH = 8 * ((HEAD_DIM / 8) | 1);  // an odd number of 16-byte chunks: ldmatrix without bank conflicts

// The group that column c lies in: its first column and its width.
__device__ constexpr int group_start(int c) {
    return c < HEAD_DIM / 32 * 32 ? c / 32 * 32 : c < HEAD_DIM / 16 * 16 ? c / 16 * 16 : c / 8 * 8;
}
__device__ constexpr int group_width(int c) { return c < HEAD_DIM / 32 * 32 ? 32 : c < HEAD_DIM / 16 * 16 ? 16 : 8; }

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

// Where 16 bytes of keys lie, from column c on: eight keys side by side in each group, as mma wants them.
SDACCEL_DEVICE T* key_place(T* keys, int key, int c) {
    return keys + key / 8 * 8 * HEAD_DIM + 8 * group_start(c) + key % 8 * group_width(c) + (c - group_start(c));
}

template <int N>
SDACCEL_DEVICE void clear(float (&x)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) x[i][e] = 0.0f;
}

// sums += weights values: values in rows VALUE_PITCH apart, `address` that of row lane % 16, column lane / 16 * 8.
SDACCEL_DEVICE void add_values(float (&sums)[TILES][HEAD_DIM / 8][4], const uint32_t (&weights)[TILES][KEY_TILES][2],
                               uint32_t address) {
    constexpr int COLUMNS = HEAD_DIM / 8;
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++) {
#pragma unroll
        for (int n = 0; n + 1 < COLUMNS; n += 2) {
            uint32_t b[4];
            ldmatrix_x4_trans(b, address + (16 * i * VALUE_PITCH + 8 * n) * sizeof(T));
#pragma unroll
            for (int m = 0; m < TILES; m++) {
                const uint32_t(&w)[KEY_TILES][2] = weights[m];
                mma_16816<T>(sums[m][n], w[2 * i][0], w[2 * i][1], w[2 * i + 1][0], w[2 * i + 1][1], b[0], b[1]);
                mma_16816<T>(sums[m][n + 1], w[2 * i][0], w[2 * i][1], w[2 * i + 1][0], w[2 * i + 1][1], b[2], b[3]);
            }
        }
        if constexpr (COLUMNS % 2 == 1) {
            uint32_t b[2];
            ldmatrix_x2_trans(b, address + (16 * i * VALUE_PITCH + 8 * (COLUMNS - 1)) * sizeof(T));
#pragma unroll
            for (int m = 0; m < TILES; m++) {
                const uint32_t(&w)[KEY_TILES][2] = weights[m];
                mma_16816<T>(sums[m][COLUMNS - 1], w[2 * i][0], w[2 * i][1], w[2 * i + 1][0], w[2 * i + 1][1], b[0], b[1]);
            }
        }
    }
}
