// Linear layers on sm_90a, called by ops/linear.py: out = activation([x, x2] W^T + bias + residual).
//
// x [M, K1], x2 [M, K2] (or nothing, K2 = 0), W [N, K1 + K2], out [M, N] contiguous; GEGLU: W has 2 N rows, values, then
// gates, and there is no residual. residual [M, N] with rows `residual_stride` elements apart. N a multiple of 32, K1 and K2 of 8. Maps: x and x2
// two-dimensional (K, rows), box 64 x TILE_M; W as gemm_sm90.cuh says.
// `flag`: null, or a number that makes the kernel do nothing where it is 0.
// Macros: SDACCEL_T, ACTIVATION (gemm_epilogue.cuh), those of gemm_sm90.cuh, which also says grid and shared memory.
#include "gemm_sm90.cuh"

struct Linear {
    static constexpr bool EARLY_WEIGHTS = true;
    struct Tile {
        int m, n;
    };
    struct Cursor {
        int block;
    };

    const hopper::TensorMap& x;
    const hopper::TensorMap& x2;
    const hopper::TensorMap& weight;
    int m, n, k1, k2;
    int64_t residual_stride;

    __device__ __forceinline__ void prefetch() const {
        hopper::prefetch(x);
        hopper::prefetch(weight);
        if (k2 > 0) hopper::prefetch(x2);
    }
    __device__ __forceinline__ int tiles_m() const { return (m + TILE_M - 1) / TILE_M; }
    __device__ __forceinline__ int tiles_n() const { return (n + OUT_N - 1) / OUT_N; }
    __device__ __forceinline__ int blocks() const { return (k1 + 63) / 64 + (k2 + 63) / 64; }
    __device__ __forceinline__ Tile tile(int at_m, int at_n) const { return {at_m * TILE_M, at_n * OUT_N}; }
    __device__ __forceinline__ Cursor cursor(int block) const { return {block}; }
    __device__ __forceinline__ void next(Cursor& at) const { ++at.block; }
    // Blocks from this one on come from x2.
    __device__ __forceinline__ int second() const { return (k1 + 63) / 64; }
    __device__ __forceinline__ void load_a(const Tile& tile, const Cursor& at, uint32_t to, uint32_t barrier) const {
        if (at.block < second())
            hopper::load_box(x, to, barrier, at.block * 64, tile.m);
        else
            hopper::load_box(x2, to, barrier, (at.block - second()) * 64, tile.m);
    }
    __device__ __forceinline__ int column(const Cursor& at) const {
        return at.block < second() ? at.block * 64 : k1 + (at.block - second()) * 64;
    }
    __device__ __forceinline__ int b_row(const Tile& tile) const { return tile.n; }
    __device__ __forceinline__ Row row(const Tile& tile, int r) const {
        const int64_t i = tile.m + r;
        return {i < m, i * (GROUP > 0 ? GROUP : n), i * residual_stride, 0};
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gemm_sm90(const __grid_constant__ hopper::TensorMap x, const __grid_constant__ hopper::TensorMap x2,
              const __grid_constant__ hopper::TensorMap weight, T* out, const T* bias, const T* residual, const int* flag, int m,
              int n, int k1, int k2, int64_t residual_stride) {
    const Epilogue to{out, bias, residual, nullptr, n, int64_t(m) * GROUP};
    gemm(Linear{x, x2, weight, m, n, k1, k2, residual_stride}, to, flag);
}
