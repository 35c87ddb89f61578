// Linear layers by mma.sync on sm_80 and later, called by ops/linear.py: out = activation([x, x2] W^T + bias + residual).
//
// x [M, K1] and x2 [M, K2] (or nothing, K2 = 0) with rows `x_stride` and `x2_stride` elements apart, W [N, K1 + K2], out [M, N]
// contiguous; GEGLU: W has 2 N rows, values, then gates, and there is no residual. residual [M, N] with rows
// `residual_stride` apart. N, K1 and K2 multiples of 8. `flag`: null, or a number that makes the kernel do nothing where it is 0.
//
// A warp multiplies WARP_M rows by 64 rows of W; blocks of both, 32 along K, come by cp.async into a ring of STAGES. Rows of W
// lie permuted in shared memory: row 8 j + 2 q + e of each 32 is channel 8 q + 2 j + e (j, q = 0..3; e = 0, 1), so that a
// thread's accumulators are runs of eight channels. With GEGLU the first 32 of a warp's 64 are values, the others gates.
// Macros: SDACCEL_T, ACTIVATION (gemm_epilogue.cuh), TILE_M (of WARP_M), TILE_N (of 64), WARP_M (32 or 64), STAGES.
// Grid: tiles; TILE_M / WARP_M * TILE_N / 64 warps; shared memory STAGES * (TILE_M + TILE_N) * 64 bytes.
#include "gemm_epilogue.cuh"
#include "mma.cuh"

constexpr int WARPS_M = TILE_M / WARP_M;
constexpr int WARPS_N = TILE_N / 64;
constexpr int THREADS = WARPS_M * WARPS_N * 32;
constexpr int OUT_N = GEGLU ? TILE_N / 2 : TILE_N;
constexpr int UNITS = GEGLU ? 1 : 2;
constexpr int BLOCKS_M = WARP_M / 16;
constexpr int A_BYTES = TILE_M * 64;
constexpr int STAGE_BYTES = A_BYTES + TILE_N * 64;
constexpr int GROUP_M = 8;  // so many tiles below each other come before the next columns (L2)

static_assert(TILE_M % WARP_M == 0 && TILE_N % 64 == 0 && WARP_M % 16 == 0, "tile");
static_assert(TILE_M * 4 % THREADS == 0 && TILE_N * 4 % THREADS == 0, "whole rounds of copies");

// Sixteen bytes `piece` (0..3) of a row of 32 elements: eight rows of one piece lie in eight different groups of banks.
SDACCEL_DEVICE uint32_t place(int row, int piece) { return row * 64 + ((piece ^ (row >> 1 & 3)) << 4); }

extern "C" __global__ void __launch_bounds__(THREADS)
    gemm_sm80(const T* x, const T* x2, const T* __restrict__ weight, T* out, const T* bias, const T* residual, const int* flag,
              int m, int n, int k1, int k2, int64_t x_stride, int64_t x2_stride, int64_t residual_stride) {
    extern __shared__ __align__(128) uint8_t dynamic[];
    const uint32_t base = shared_address(dynamic);
    const Epilogue to{out, bias, residual, nullptr, n};
    pdl_launch_dependents();
    pdl_wait();
    if (flag != nullptr && *flag == 0) return;

    const int tiles_m = (m + TILE_M - 1) / TILE_M;
    const int tiles_n = (n + OUT_N - 1) / OUT_N;
    const int top = blockIdx.x / (GROUP_M * tiles_n) * GROUP_M;
    const int height = min(GROUP_M, tiles_m - top);
    const int inside = blockIdx.x - top * tiles_n;
    const int tile_m = (top + inside % height) * TILE_M;
    const int tile_n = inside / height * OUT_N;

    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int warp_m = warp % WARPS_M * WARP_M;
    const int warp_n = warp / WARPS_M * 64;

    const int second = (k1 + 31) / 32;  // blocks from this one on come from x2
    const int blocks = second + (k2 + 31) / 32;
    const auto load = [&](int block, int stage) {
        const bool first = block < second;
        const int k = (first ? block : block - second) * 32;
        const int width = first ? k1 : k2;
        const T* rows = first ? x : x2;
        const int64_t stride = first ? x_stride : x2_stride;
        const uint32_t a = base + stage * STAGE_BYTES;
#pragma unroll
        for (int i = 0; i < TILE_M * 4 / THREADS; ++i) {
            const int item = threadIdx.x + i * THREADS;
            const int row = item / 4, at = k + item % 4 * 8;
            const bool valid = tile_m + row < m && at < width;
            cp_async_16(a + place(row, item % 4), valid ? rows + (tile_m + row) * stride + at : rows, valid);
        }
#pragma unroll
        for (int i = 0; i < TILE_N * 4 / THREADS; ++i) {
            const int item = threadIdx.x + i * THREADS;
            const int row = item / 4, at = k + item % 4 * 8;
            const int channel = row % 8 / 2 * 8 + row / 8 % 4 * 2 + row % 2;
            const int from = tile_n + (GEGLU ? row / 64 * 32 : row / 32 * 32) + channel;
            const bool valid = from < n && at < width;
            const int64_t start = int64_t(GEGLU && row / 32 % 2 ? n + from : from) * (k1 + k2) + (first ? 0 : k1);
            cp_async_16(a + A_BYTES + place(row, item % 4), valid ? weight + start + at : weight, valid);
        }
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) {
        if (s < blocks) load(s, s);
        cp_async_commit();
    }

    Row row[2 * BLOCKS_M];
#pragma unroll
    for (int i = 0; i < 2 * BLOCKS_M; ++i) {
        const int64_t at = tile_m + warp_m + i / 2 * 16 + i % 2 * 8 + lane / 4;
        row[i] = {at < m, at * n, at * residual_stride, 0};
    }
    const int channel = tile_n + (GEGLU ? warp_n / 2 : warp_n) + lane % 4 * 8;
    float acc[BLOCKS_M][8][4];
    const auto sum = [&](int i, int u, int e, bool gates) -> float& {
        return acc[i / 2][(gates ? 4 : 4 * u) + e / 2][i % 2 * 2 + e % 2];
    };
    begin_sums<2 * BLOCKS_M, UNITS>(to, row, channel, sum);

    int stage = 0;
    for (int block = 0; block < blocks; ++block) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        if (block + STAGES - 1 < blocks) load(block + STAGES - 1, stage == 0 ? STAGES - 1 : stage - 1);
        cp_async_commit();
        const uint32_t a_block = base + stage * STAGE_BYTES;
        const uint32_t b_block = a_block + A_BYTES;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            uint32_t a[BLOCKS_M][4], b[4][4];
#pragma unroll
            for (int i = 0; i < BLOCKS_M; ++i) ldmatrix_x4(a[i], a_block + place(warp_m + i * 16 + lane % 16, 2 * k + lane / 16));
#pragma unroll
            for (int j = 0; j < 4; ++j)
                ldmatrix_x4(b[j], b_block + place(warp_n + j * 16 + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
#pragma unroll
            for (int i = 0; i < BLOCKS_M; ++i)
#pragma unroll
                for (int j = 0; j < 8; ++j)
                    mma_16816<T>(acc[i][j], a[i][0], a[i][1], a[i][2], a[i][3], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }

#pragma unroll
    for (int i = 0; i < 2 * BLOCKS_M; ++i)
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            float y[8], gate[8];
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                y[e] = sum(i, u, e, false);
                gate[e] = GEGLU ? sum(i, u, e, true) : 0.0f;
            }
            finish(to, row[i], channel + 32 * u, y, gate);
        }
}
