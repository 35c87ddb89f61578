// The engine of linear layers and convolutions on sm_90a: tiles of C = A B^T, A [rows, K], B [N, K], K innermost in both.
//
// One producer thread keeps a ring of STAGES pairs of (A, B) blocks, 64 wide along K, filled by the copy engine; two
// consumer warpgroups multiply. Blocks of the grid walk over the tiles (persistent). 384 threads, shared memory
// STAGES * (TILE_M + TILE_N) * 128 + 16 * STAGES + 1024 bytes.
//   TILE_M, TILE_N   rows and columns of B in a tile. TILE_N a multiple of 32, GEGLU: half of it values, half gates.
//   PINGPONG         1: each warpgroup has a tile of its own, so that one multiplies while the other one writes;
//                    0: each has half of the rows of one tile
//   MULTICAST        1: clusters of two blocks, whose tiles lie below each other, fetch B once for both
//   SPLIT            clusters of so many blocks share one tile, each taking a part of K; their sums meet in shared memory.
//                    Then one tile a cluster, PINGPONG 0, MULTICAST 0.
//   GROUP_M          so many tiles below each other (pairs with MULTICAST) come before the next columns (L2)
//
// B is seen through a map that permutes its rows: product column 8 (j G + g) + 2 q + e of the tile is channel
// 32 g + 8 q + 2 j + e (j, q = 0..3; e = 0, 1; g < G = OUT_N / 32), so that a thread's accumulators are runs of eight
// channels: 16-byte stores without an exchange. With GEGLU values fill the left half of the columns, gates the right.
// The map's dimensions: K, 2 (e), 4 (q), rows / 32 (g), 4 (j); its box 64, 2, 4, G, 4, or 2 for MULTICAST without GEGLU.
//
// A Problem has
//   static constexpr bool EARLY_WEIGHTS                         no kernel shortly before writes them
//   void prefetch()                                             its maps
//   int tiles_m(), int tiles_n(), int blocks()                  of 64 along K
//   Tile tile(int m, int n)                                     with the tile's first channel, Tile::n
//   Cursor cursor(int block), void next(Cursor&)                a block along K
//   void load_a(Tile, Cursor, uint32_t to, uint32_t barrier)
//   int column(Cursor), int b_row(Tile)                         where the block of B lies
//   TensorMap weight; int n
//   Row row(Tile, int r)                                        where row r of the tile goes
#pragma once
#include "gemm_epilogue.cuh"
#include "hopper.cuh"

#ifndef PINGPONG
#define PINGPONG 0
#endif
#ifndef MULTICAST
#define MULTICAST 0
#endif
#ifndef SPLIT
#define SPLIT 1
#endif
#ifndef GROUP_M
#define GROUP_M 8
#endif

constexpr int THREADS = 384;
constexpr int A_BYTES = TILE_M * 128;
constexpr int B_BYTES = TILE_N * 128;
constexpr int OUT_N = GEGLU ? TILE_N / 2 : TILE_N;
constexpr int UNITS = OUT_N / 32;
constexpr int M_BLOCKS = TILE_M / (PINGPONG ? 64 : 128);
// Named barriers TURN + 1 and TURN + 2: a warpgroup reads the ring only when the other one has read all before, since a
// wait on a barrier's parity cannot tell its phase from the one two earlier.
constexpr int TURN = 1;
constexpr int CONSUMER_WARPS = PINGPONG ? 4 : 8;

static_assert(TILE_N % 32 == 0 && OUT_N % 32 == 0 && TILE_N <= 256 && TILE_M <= 256, "tile");
static_assert(M_BLOCKS * TILE_N / 2 <= 192, "the accumulators do not fit into registers");
static_assert(SPLIT == 1 || (!MULTICAST && !PINGPONG && TILE_M * TILE_N * 4 <= STAGES * (A_BYTES + B_BYTES)), "split");

struct Ring {
    uint32_t base;
    int stage = 0;
    int phase = 0;

    __device__ __forceinline__ uint32_t a(int s) const { return base + s * A_BYTES; }
    __device__ __forceinline__ uint32_t b(int s) const { return base + STAGES * A_BYTES + s * B_BYTES; }
    __device__ __forceinline__ uint32_t full(int s) const { return base + STAGES * (A_BYTES + B_BYTES) + s * 8; }
    __device__ __forceinline__ uint32_t empty(int s) const { return full(s) + STAGES * 8; }
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
    __device__ __forceinline__ void skip(int blocks) {
        const int at = stage + blocks;
        stage = at % STAGES;
        phase ^= (at / STAGES) & 1;
    }
};

// One block of B. With MULTICAST each of the two blocks fetches half and writes it into both.
template <class Problem>
SDACCEL_DEVICE void load_b(const Problem& problem, const typename Problem::Tile& tile, const typename Problem::Cursor& cursor,
                           int rank, uint32_t to, uint32_t barrier) {
    const int k = problem.column(cursor);
    const int g = problem.b_row(tile) / 32;
    const int gates = g + problem.n / 32;
    if constexpr (MULTICAST) {
        to += rank * (B_BYTES / 2);
        if constexpr (GEGLU)
            hopper::load_box_multicast(problem.weight, to, barrier, 3, k, 0, 0, rank ? gates : g, 0);
        else
            hopper::load_box_multicast(problem.weight, to, barrier, 3, k, 0, 0, g, 2 * rank);
    } else {
        hopper::load_box(problem.weight, to, barrier, k, 0, 0, g, 0);
        if constexpr (GEGLU) hopper::load_box(problem.weight, to + B_BYTES / 2, barrier, k, 0, 0, gates, 0);
    }
}

// Where a thread's accumulators hold channel 32 u + 8 q + e (gates: of the right half), q = thread % 4, in half of a block.
SDACCEL_DEVICE constexpr int place(int half, int u, int e, bool gates) {
    return ((gates ? 4 * UNITS : 0) + e / 2 * UNITS + u) * 4 + 2 * half + e % 2;
}

// first_row: of this thread.
template <class Problem>
SDACCEL_DEVICE void begin_tile(const Problem& problem, const Epilogue& to, const typename Problem::Tile& tile, int first_row,
                               float (&acc)[M_BLOCKS][TILE_N / 2]) {
    Row row[2 * M_BLOCKS];
#pragma unroll
    for (int i = 0; i < 2 * M_BLOCKS; ++i) row[i] = problem.row(tile, first_row + i / 2 * 64 + i % 2 * 8);
    begin_sums<2 * M_BLOCKS, UNITS>(to, row, tile.n + threadIdx.x % 4 * 8, [&](int i, int u, int e, bool gates) -> float& {
        return acc[i / 2][place(i % 2, u, e, gates)];
    });
}

template <class Problem>
SDACCEL_DEVICE void write_tile(const Problem& problem, const Epilogue& to, const typename Problem::Tile& tile, int first_row,
                               const float (&acc)[M_BLOCKS][TILE_N / 2]) {
#pragma unroll
    for (int i = 0; i < 2 * M_BLOCKS; ++i) {
        const Row row = problem.row(tile, first_row + i / 2 * 64 + i % 2 * 8);
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            float x[8], gate[8];
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                x[e] = acc[i / 2][place(i % 2, u, e, false)];
                gate[e] = GEGLU ? acc[i / 2][place(i % 2, u, e, true)] : 0.0f;
            }
            finish(to, row, tile.n + u * 32 + threadIdx.x % 4 * 8, x, gate);
        }
    }
}

// Adds the cluster's accumulators, in the order of ranks, and writes this block's share of the tile.
template <class Problem>
SDACCEL_DEVICE void reduce_tile(const Problem& problem, const Epilogue& to, const typename Problem::Tile& tile, uint32_t base,
                                const float (&acc)[M_BLOCKS][TILE_N / 2]) {
    constexpr int VECTORS = TILE_N / 8;
    const int thread = threadIdx.x - 128;
    const int warp = thread / 32;
    const int lane = thread % 32;
    const int rank = hopper::cluster_rank();
    asm volatile("bar.sync 1, 256;" ::: "memory");  // both warpgroups have read the ring
#pragma unroll
    for (int m = 0; m < M_BLOCKS; ++m)
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
            hopper::store_shared(base + ((m * VECTORS + i) * 256 + thread) * 16,
                                 make_float4(acc[m][4 * i], acc[m][4 * i + 1], acc[m][4 * i + 2], acc[m][4 * i + 3]));
    hopper::cluster_sync();
    // 16 rows (of one warp) by 32 channels at a time
    for (int item = warp * SPLIT + rank; item < 8 * M_BLOCKS * UNITS; item += 8 * SPLIT) {
        const int owner = item % 8;
        const int u = item / 8 % UNITS;
        const int m = item / 8 / UNITS;
        float x[2][8] = {}, gate[2][8] = {};
#pragma unroll
        for (int from = 0; from < SPLIT; ++from) {
            const uint32_t remote = hopper::remote_address(base, from);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const uint32_t at = remote + ((m * VECTORS + j * UNITS + u) * 256 + owner * 32 + lane) * 16;
                const float4 v = hopper::load_remote(at);
                x[0][2 * j] += v.x, x[0][2 * j + 1] += v.y, x[1][2 * j] += v.z, x[1][2 * j + 1] += v.w;
                if constexpr (GEGLU) {
                    const float4 g = hopper::load_remote(at + UNITS * 4 * 256 * 16);
                    gate[0][2 * j] += g.x, gate[0][2 * j + 1] += g.y, gate[1][2 * j] += g.z, gate[1][2 * j + 1] += g.w;
                }
            }
        }
        const int n = tile.n + u * 32 + lane % 4 * 8;
        const int first = owner / 4 * (TILE_M / 2) + m * 64 + owner % 4 * 16 + lane / 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Row row = problem.row(tile, first + half * 8);
            finish(to, row, n, x[half], gate[half]);
        }
    }
    hopper::cluster_sync();  // nobody reads here any more
}

template <class Problem>
SDACCEL_DEVICE void gemm(const Problem& problem, const Epilogue& to, const int* flag) {
    extern __shared__ uint8_t dynamic[];
    constexpr int CLUSTER = MULTICAST ? 2 : SPLIT;
    Ring ring{(hopper::address(dynamic) + 1023u) & ~1023u};
    if (threadIdx.x == 0) {
        problem.prefetch();
        for (int s = 0; s < STAGES; ++s) {
            hopper::barrier_init(ring.full(s), 1);
            hopper::barrier_init(ring.empty(s), CONSUMER_WARPS * (MULTICAST ? 2 : 1));
        }
        hopper::barrier_init_fence();
    }
    if constexpr (MULTICAST)
        hopper::cluster_sync();
    else
        __syncthreads();
    pdl_launch_dependents();

    const int rank = CLUSTER > 1 ? hopper::cluster_rank() : 0;
    const int all = problem.blocks();
    const int begin = SPLIT > 1 ? all * rank / SPLIT : 0;
    const int end = SPLIT > 1 ? all * (rank + 1) / SPLIT : all;

    const int tiles_m = MULTICAST ? (problem.tiles_m() + 1) / 2 : problem.tiles_m();
    const int tiles_n = problem.tiles_n();
    const int tiles = tiles_m * tiles_n;
    const int step = gridDim.x / CLUSTER;
    int first = blockIdx.x / CLUSTER;
    const auto tile_at = [&](int index) {
        const int top = index / (GROUP_M * tiles_n) * GROUP_M;
        const int height = min(GROUP_M, tiles_m - top);
        const int inside = index - top * tiles_n;
        const int m = top + inside % height;
        return problem.tile(MULTICAST ? 2 * m + rank : m, inside / height);
    };

    // The first weights may come while the kernel before is still writing.
    int early = 0;
    if (Problem::EARLY_WEIGHTS && flag == nullptr && threadIdx.x == 0 && first < tiles) {
        const auto tile = tile_at(first);
        auto cursor = problem.cursor(begin);
        for (; early < min(STAGES, end - begin); ++early) {
            hopper::barrier_expect(ring.full(early), A_BYTES + B_BYTES);
            load_b(problem, tile, cursor, rank, ring.b(early), ring.full(early));
            problem.next(cursor);
        }
    }
    pdl_wait();
    if (flag != nullptr && *flag == 0) return;

    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    if (warpgroup == 0) {
        hopper::registers_give<40>();
        if (threadIdx.x == 0) {
            for (int index = first; index < tiles; index += step) {
                const auto tile = tile_at(index);
                auto cursor = problem.cursor(begin);
                for (int block = begin; block < end; ++block) {
                    const uint32_t full = ring.full(ring.stage);
                    if (early > 0) {
                        --early;
                    } else {
                        hopper::barrier_wait(ring.empty(ring.stage), ring.phase ^ 1);
                        hopper::barrier_expect(full, A_BYTES + B_BYTES);
                        load_b(problem, tile, cursor, rank, ring.b(ring.stage), full);
                    }
                    problem.load_a(tile, cursor, ring.a(ring.stage), full);
                    problem.next(cursor);
                    ring.next();
                }
            }
        }
        __syncwarp();
        if constexpr (SPLIT > 1) hopper::cluster_sync();
        if constexpr (CLUSTER > 1) hopper::cluster_sync();
    } else {
        hopper::registers_take<232>();
        const int lane = threadIdx.x % 32;
        const int first_row = (PINGPONG ? 0 : (warpgroup - 1) * (TILE_M / 2)) + threadIdx.x / 32 % 4 * 16;
        const uint32_t a_offset = PINGPONG ? 0 : (warpgroup - 1) * (A_BYTES / 2);
        const auto release = [&](int stage) {
            if constexpr (MULTICAST) {
                if (lane < 2) hopper::barrier_arrive_remote(ring.empty(stage), lane);
            } else {
                if (lane == 0) hopper::barrier_arrive(ring.empty(stage));
            }
        };
        if (PINGPONG && warpgroup == 2) {
            first += step;
            ring.skip(all);
            hopper::named_barrier_arrive<256>(TURN + 1);
        }
        for (int index = first; index < tiles; index += PINGPONG ? 2 * step : step) {
            const auto tile = tile_at(index);
            float acc[M_BLOCKS][TILE_N / 2];
            if (SPLIT == 1 || rank == 0)
                begin_tile(problem, to, tile, first_row + lane / 4, acc);
            else
                begin_tile(problem, Epilogue{nullptr, nullptr, nullptr, nullptr, 0}, tile, first_row, acc);
#pragma unroll
            for (int m = 0; m < M_BLOCKS; ++m) hopper::keep(acc[m]);
            if (PINGPONG) hopper::named_barrier_wait<256>(TURN + warpgroup);
            const auto multiply = [&] {
                hopper::barrier_wait(ring.full(ring.stage), ring.phase);
                const uint64_t a = hopper::descriptor(ring.a(ring.stage) + a_offset);
                const uint64_t b = hopper::descriptor(ring.b(ring.stage));
                hopper::wgmma_fence();
#pragma unroll
                for (int k = 0; k < 4; ++k)
#pragma unroll
                    for (int m = 0; m < M_BLOCKS; ++m)
                        hopper::Wgmma<T, TILE_N>::mma(acc[m], a + m * (64 * 128 / 16) + 2 * k, b + 2 * k, 1);
                hopper::wgmma_commit();
            };
            // The first block apart: where ordinary registers and results of products meet at the top of a loop, ptxas
            // waits after every product.
            multiply();
            int previous = ring.stage;
            ring.next();
            for (int block = begin + 1; block < end; ++block) {
                multiply();
                hopper::wgmma_wait<1>();
                release(previous);
                previous = ring.stage;
                ring.next();
            }
            if (PINGPONG) hopper::named_barrier_arrive<256>(TURN + 3 - warpgroup);
            hopper::wgmma_wait<0>();
#pragma unroll
            for (int m = 0; m < M_BLOCKS; ++m) hopper::keep(acc[m]);
            release(previous);
            if (PINGPONG) ring.skip(all);
            if constexpr (SPLIT > 1)
                reduce_tile(problem, to, tile, ring.base, acc);
            else
                write_tile(problem, to, tile, first_row + lane / 4, acc);
        }
        if constexpr (MULTICAST) hopper::cluster_sync();  // the other block may still signal here
    }
}
