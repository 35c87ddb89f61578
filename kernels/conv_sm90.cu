// Convolutions of images [B, H, W, C] on sm_90a as matrix products, called by ops/conv.py and ops/upsample_conv.py:
// out = activation(conv([x, x2], W) + bias + add + residual).
//
// Rows of the product are output pixels: a tile is a box of BOX_W x BOX_H pixels of some images, TILE_M in all, sides powers
// of two. For each tap the copy engine fetches the box moved by the tap; outside of the image it writes zeros. K runs over
// taps, then the channels of x, then those of x2. W [N, kernel, kernel, C1 + C2], a matrix; N a multiple of 32, C1 and C2 of 8.
// Maps: x and x2 (C, W, H, B), box 64 x BOX_W x BOX_H x images, element strides those of the convolution.
// UPSAMPLE: x is seen at twice its size (nearest neighbour) by a 3 x 3 convolution. Four phases, the parities (py, px) of the
// output pixel, are 2 x 2 convolutions of x itself, W [4 (2 py + px), N, 2, 2, C]; height and width count pixels of one phase.
// bias [N], add [B, N] with rows `add_stride` apart, residual like out: [B, H, W, N].
// Macros: SDACCEL_T, ACTIVATION (gemm_epilogue.cuh), those of gemm_sm90.cuh, UPSAMPLE.
#include "gemm_sm90.cuh"

#ifndef UPSAMPLE
#define UPSAMPLE 0
#endif

struct Convolution {
    static constexpr bool EARLY_WEIGHTS = !UPSAMPLE;  // those of the phases are made on the way
    struct Tile {
        int x, y, image, n, phase;
    };
    // tap (kx, ky), block of channels, column of W where the tap begins
    struct Cursor {
        int kx, ky, block, column;
    };

    const hopper::TensorMap& x;
    const hopper::TensorMap& x2;
    const hopper::TensorMap& weight;
    int batch, height, width, c1, c2, n, kernel, stride, padding, log_box_w, log_box_h, add_stride;

    __device__ __forceinline__ void prefetch() const {
        hopper::prefetch(x);
        hopper::prefetch(weight);
        if (c2 > 0) hopper::prefetch(x2);
    }

    __device__ __forceinline__ int log_images() const {
        constexpr int log_tile = TILE_M == 64 ? 6 : TILE_M == 128 ? 7 : 8;
        return log_tile - log_box_w - log_box_h;
    }
    static __device__ __forceinline__ int pieces(int size, int log_piece) { return (size + (1 << log_piece) - 1) >> log_piece; }
    __device__ __forceinline__ int across() const { return pieces(width, log_box_w); }
    __device__ __forceinline__ int down() const { return pieces(height, log_box_h); }
    __device__ __forceinline__ int columns() const { return (n + OUT_N - 1) / OUT_N; }
    __device__ __forceinline__ int tiles_m() const { return pieces(batch, log_images()) * down() * across(); }
    __device__ __forceinline__ int tiles_n() const { return columns() * (UPSAMPLE ? 4 : 1); }
    __device__ __forceinline__ Tile tile(int m, int at_n) const {
        const int row = m / across();
        const int image = row / down();
        const int phase = UPSAMPLE ? at_n / columns() : 0;
        return {(m - row * across()) << log_box_w, (row - image * down()) << log_box_h, image << log_images(),
                (at_n - phase * columns()) * OUT_N, phase};
    }

    __device__ __forceinline__ int second() const { return (c1 + 63) / 64; }
    __device__ __forceinline__ int blocks_a_tap() const { return second() + (c2 + 63) / 64; }
    __device__ __forceinline__ int blocks() const { return kernel * kernel * blocks_a_tap(); }
    __device__ __forceinline__ Cursor cursor(int block) const {
        const int tap = block / blocks_a_tap();
        const int ky = tap / kernel;
        return {tap - ky * kernel, ky, block - tap * blocks_a_tap(), tap * (c1 + c2)};
    }
    __device__ __forceinline__ void next(Cursor& at) const {
        if (++at.block < blocks_a_tap()) return;
        at.block = 0;
        at.column += c1 + c2;
        if (++at.kx < kernel) return;
        at.kx = 0;
        ++at.ky;
    }
    __device__ __forceinline__ void load_a(const Tile& tile, const Cursor& at, uint32_t to, uint32_t barrier) const {
        const int left = tile.x * stride + at.kx - padding + (tile.phase & 1);
        const int top = tile.y * stride + at.ky - padding + (tile.phase >> 1);
        if (at.block < second())
            hopper::load_box(x, to, barrier, at.block * 64, left, top, tile.image);
        else
            hopper::load_box(x2, to, barrier, (at.block - second()) * 64, left, top, tile.image);
    }
    __device__ __forceinline__ int column(const Cursor& at) const {
        return at.column + (at.block < second() ? at.block * 64 : c1 + (at.block - second()) * 64);
    }
    __device__ __forceinline__ int b_row(const Tile& tile) const { return tile.phase * n + tile.n; }

    __device__ __forceinline__ Row row(const Tile& tile, int r) const {
        const int image = tile.image + (r >> (log_box_w + log_box_h));
        const int at_y = tile.y + (r >> log_box_w & ((1 << log_box_h) - 1));
        const int at_x = tile.x + (r & ((1 << log_box_w) - 1));
        int64_t pixel;
        if constexpr (UPSAMPLE)
            pixel = (int64_t(image) * 2 * height + 2 * at_y + (tile.phase >> 1)) * 2 * width + 2 * at_x + (tile.phase & 1);
        else
            pixel = (int64_t(image) * height + at_y) * width + at_x;
        const bool valid = image < batch && at_y < height && at_x < width;
        return {valid, pixel * n, pixel * n, int64_t(image) * add_stride};
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    conv_sm90(const __grid_constant__ hopper::TensorMap x, const __grid_constant__ hopper::TensorMap x2,
              const __grid_constant__ hopper::TensorMap weight, T* out, const T* bias, const T* residual, const T* add, int batch,
              int height, int width, int c1, int c2, int n, int kernel, int stride, int padding, int log_box_w, int log_box_h,
              int add_stride) {
    gemm(Convolution{x, x2, weight, batch, height, width, c1, c2, n, kernel, stride, padding, log_box_w, log_box_h, add_stride},
         Epilogue{out, bias, residual, add, n}, nullptr);
}
