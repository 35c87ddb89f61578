// Attention over many keys on sm_90a: out = softmax(scale q k^T) v with a running maximum (FlashAttention-3, Shah et al. 2024).
//
// q [B, S, H, D], k and v [B, L, H, D] through tensor maps (dimensions D, H, S, B; box 64 x 1 x rows x 1, 128-byte swizzle),
// out [B, S, H * D] contiguous. Called by sdaccel/backends/cuda/ops/attention.py.
// Macros: SDACCEL_T, HEAD_DIM (40, 64, 80, 160), WARPGROUPS (of 64 query rows each), KEYS (a tile; a multiple of 32),
// STAGES (tiles of keys and of values under way), QUERY_STAGES, TURNS (1: warpgroups issue their products in turn),
// POLYNOMIAL (of eight exponentials, how many the multipliers compute instead of the special function unit), SPLIT (1: what
// does not fill a last wave is cut into pieces of 64 rows, whose keys the warpgroups share; needs WARPGROUPS tiles of them).
// Grid: as many blocks as run at once, each takes every gridDim.x-th piece of work; block: 128 * (WARPGROUPS + 1).
//
// The last warpgroup only loads. The others hold the scores of 64 rows against a tile of keys in registers; while the
// tensor cores multiply the weights of one tile with its values, the exponentials of the next are computed. A head is
// stored 64 columns wide in shared memory, the copy engine fills what it has not with zeros: for D = 40 the scores sum over
// 48 columns, and no product writes more than D columns.
#include "hopper_attention.cuh"
#include "mma.cuh"

using namespace hopper;

constexpr int BLOCKS = (HEAD_DIM + 63) / 64;  // of 64 columns
constexpr int STEPS = (HEAD_DIM + 15) / 16;   // of 16 columns in q k^T
constexpr int ROWS = 64 * WARPGROUPS;
constexpr int THREADS = 128 * (WARPGROUPS + 1);
constexpr int QUERY_BYTES = ROWS * BLOCKS * 128;
constexpr int TILE_BYTES = KEYS * BLOCKS * 128;
constexpr int REGISTERS = WARPGROUPS == 1 ? 240 : WARPGROUPS == 2 ? 240 : WARPGROUPS == 3 ? 160 : 112;
constexpr int PRODUCER_REGISTERS = WARPGROUPS == 3 ? 32 : 24;

// Places of a circular buffer in order, with the parity to wait for.
template <int N>
struct Ring {
    int slot = 0, parity = 0;
    __device__ __forceinline__ void next() {
        if (++slot == N) slot = 0, parity ^= 1;
    }
};

// 2^x for x < 127: 2^round(x) goes into the exponent, a cubic does the rest (relative error 1e-4).
SDACCEL_DEVICE float exp2_polynomial(float x) {
    x = fmaxf(x, -126.0f);
    const float shifted = x + 12582912.0f;  // 1.5 * 2^23: the integer is in the low bits
    const float f = x - (shifted - 12582912.0f);
    float y = fmaf(f, 0.0555054f, 0.2402265f);
    y = fmaf(f, y, 0.6931472f);
    y = fmaf(f, y, 1.0f);
    return __int_as_float(__float_as_int(y) + (__float_as_int(shifted) << 23));
}

struct Piece {
    int row, head, batch;
};

SDACCEL_DEVICE Piece piece_at(int index, int row_tiles, int heads) {
    const int pair = index / row_tiles;
    return {(index - pair * row_tiles) * ROWS, pair % heads, pair / heads};
}

// All the work: pieces of ROWS rows, then, from `whole` on, of 64.
struct Work {
    int whole, end, row_tiles, heads;

    __device__ __forceinline__ Work(int pieces, int row_tiles, int heads) : row_tiles(row_tiles), heads(heads) {
        whole = SPLIT ? pieces / int(gridDim.x) * int(gridDim.x) : pieces;
        end = whole + (pieces - whole) * WARPGROUPS;
    }
    __device__ __forceinline__ bool narrow(int i) const { return SPLIT && i >= whole; }
    __device__ __forceinline__ Piece at(int i) const {
        if (!narrow(i)) return piece_at(i, row_tiles, heads);
        Piece piece = piece_at(whole + (i - whole) / WARPGROUPS, row_tiles, heads);
        piece.row += (i - whole) % WARPGROUPS * 64;
        return piece;
    }
};

struct Shared {
    uint32_t queries, keys, values, barriers;
    float* merge;  // what warpgroups have summed apart

    __device__ __forceinline__ uint32_t query_full(int i) const { return barriers + 8 * i; }
    __device__ __forceinline__ uint32_t query_empty(int i) const { return barriers + 8 * (QUERY_STAGES + i); }
    __device__ __forceinline__ uint32_t key_full(int i) const { return barriers + 8 * (2 * QUERY_STAGES + i); }
    __device__ __forceinline__ uint32_t key_empty(int i) const { return barriers + 8 * (2 * QUERY_STAGES + STAGES + i); }
    __device__ __forceinline__ uint32_t value_full(int i) const { return barriers + 8 * (2 * QUERY_STAGES + 2 * STAGES + i); }
    __device__ __forceinline__ uint32_t value_empty(int i) const { return barriers + 8 * (2 * QUERY_STAGES + 3 * STAGES + i); }
};

SDACCEL_DEVICE void load(const TensorMap& map, uint32_t to, uint32_t full, int rows, Piece at) {
    barrier_expect(full, rows * BLOCKS * 128);
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) load_box(map, to + i * rows * 128, full, 64 * i, at.head, at.row, at.batch);
}

// Partial tiles come first: masks are then needed once.
SDACCEL_DEVICE void produce(const TensorMap& q, const TensorMap& k, const TensorMap& v, const Shared& parts, const Work& work,
                            int queries, int key_tiles) {
    Ring<QUERY_STAGES> query;
    Ring<STAGES> place;
    for (int i = blockIdx.x; i < work.end; i += gridDim.x) {
        const Piece piece = work.at(i);
        if (SPLIT && piece.row >= queries) continue;
        barrier_wait(parts.query_empty(query.slot), query.parity ^ 1);
        load(q, parts.queries + query.slot * QUERY_BYTES, parts.query_full(query.slot), ROWS, piece);
        query.next();
        for (int tile = key_tiles - 1; tile >= 0; tile--) {
            const Piece from = {tile * KEYS, piece.head, piece.batch};
            barrier_wait(parts.key_empty(place.slot), place.parity ^ 1);
            load(k, parts.keys + place.slot * TILE_BYTES, parts.key_full(place.slot), KEYS, from);
            barrier_wait(parts.value_empty(place.slot), place.parity ^ 1);
            load(v, parts.values + place.slot * TILE_BYTES, parts.value_full(place.slot), KEYS, from);
            place.next();
        }
    }
}

// One warpgroup's state: rows g and g + 8 of each warp's 16.
struct Rows {
    float shift[2];  // about the greatest score so far, in units of log2
    float total[2];  // this thread's share of the sum of weights
};

// The greatest score of each of the thread's two rows, in units of log2.
SDACCEL_DEVICE void highest_scores(const float (&scores)[KEYS / 2], float (&highest)[2], float scale_log2e) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float most = fmaxf(scores[2 * half], scores[2 * half + 1]);
#pragma unroll
        for (int j = 1; j < KEYS / 8; j++) most = fmaxf(most, fmaxf(scores[4 * j + 2 * half], scores[4 * j + 2 * half + 1]));
        highest[half] = quad_max(most) * scale_log2e;
    }
}

// A weight may grow to 2^8 before the shift follows the maximum: rare after the first tiles, and no less exact.
constexpr float SLACK = 8.0f;

// Whether the shift of any of the warp's rows moved, and what its earlier sums must then be multiplied by.
SDACCEL_DEVICE bool move_shift(const float (&scores)[KEYS / 2], Rows& rows, float (&rescale)[2], float scale_log2e) {
    float highest[2];
    highest_scores(scores, highest, scale_log2e);
    if (!__any_sync(0xffffffffu, highest[0] > rows.shift[0] + SLACK || highest[1] > rows.shift[1] + SLACK)) return false;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        highest[half] = fmaxf(highest[half], rows.shift[half]);
        rescale[half] = exp2_approx(rows.shift[half] - highest[half]);
        rows.shift[half] = highest[half];
        rows.total[half] *= rescale[half];
    }
    return true;
}

// Scores to weights in place.
SDACCEL_DEVICE void exponentials(float (&scores)[KEYS / 2], Rows& rows, float scale_log2e) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float& score = scores[4 * j + 2 * half + e];
                const float x = fmaf(score, scale_log2e, -rows.shift[half]);
                score = (2 * j + e) % 8 < POLYNOMIAL ? exp2_polynomial(x) : exp2_approx(x);
                sum += score;
            }
        }
        rows.total[half] += sum;
    }
}

SDACCEL_DEVICE void issue_scores(float (&scores)[KEYS / 2], uint64_t q, uint64_t k) {
#pragma unroll
    for (int i = 0; i < STEPS; i++)
        Wgmma<T, KEYS, 0>::mma(scores, q + i / 4 * (ROWS * 128 >> 4) + i % 4 * 2, k + i / 4 * (KEYS * 128 >> 4) + i % 4 * 2,
                               i > 0);
    wgmma_commit();
}

SDACCEL_DEVICE void issue_sums(float (&sums)[HEAD_DIM / 2], const uint32_t (&weights)[KEYS / 4], uint64_t v, bool first) {
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++)
        WgmmaOfRows<T, HEAD_DIM>::mma(sums, weights + 4 * i, v + i * (2048 >> 4), i > 0 || !first);
    wgmma_commit();
}

SDACCEL_DEVICE void round_weights(uint32_t (&weights)[KEYS / 4], const float (&scores)[KEYS / 2]) {
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) weights[i] = pack<T>(scores[2 * i], scores[2 * i + 1]);
}

SDACCEL_DEVICE void release(uint32_t empty) {
    if (threadIdx.x % 32 == 0) barrier_arrive(empty);
}

SDACCEL_DEVICE void await_turn(int group) {
    if constexpr (TURNS) named_barrier_wait<256>(1 + group);
}

SDACCEL_DEVICE void pass_turn(int group) {
    if constexpr (TURNS) named_barrier_arrive<256>(1 + (group + 1 == WARPGROUPS ? 0 : group + 1));
}

SDACCEL_DEVICE void mask(float (&scores)[KEYS / 2], int masked_from) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < KEYS / 2; j++)
        if (j / 4 * 8 + t * 2 + j % 2 >= masked_from) scores[j] = -SDACCEL_INFINITY;
}

// 64 rows from `row` on.
SDACCEL_DEVICE void write_rows(T* out, const float (&sums)[HEAD_DIM / 2], const Rows& rows, int row, int queries, int heads,
                               Piece piece) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float inverse = __fdividef(1.0f, quad_sum(rows.total[half]));
        const int at = row + warp * 16 + lane / 4 + 8 * half;
        T* to = out + ((int64_t(piece.batch) * queries + at) * heads + piece.head) * HEAD_DIM + lane % 4 * 2;
        if (at < queries) {
#pragma unroll
            for (int j = 0; j < HEAD_DIM / 8; j++)
                *reinterpret_cast<uint32_t*>(to + 8 * j) =
                    pack<T>(sums[4 * j + 2 * half] * inverse, sums[4 * j + 2 * half + 1] * inverse);
        }
    }
}

// A piece of 64 rows: each warpgroup takes every WARPGROUPS-th tile of keys, the first puts the sums together.
SDACCEL_DEVICE void share_piece(float (&scores)[KEYS / 2], float (&sums)[HEAD_DIM / 2], uint32_t (&weights)[KEYS / 4],
                                Rows& rows, Ring<STAGES>& key, Ring<STAGES>& value, const Shared& parts, uint64_t q, int group,
                                int masked_from, int key_tiles, float scale_log2e) {
    for (int tile = 0; tile < key_tiles; tile++) {
        const bool mine = tile % WARPGROUPS == group;
        barrier_wait(parts.key_full(key.slot), key.parity);
        if (mine) {
            wgmma_fence();
            issue_scores(scores, q, descriptor(parts.keys + key.slot * TILE_BYTES));
            wgmma_wait<0>();
            keep(scores);
        }
        __syncwarp();  // all have seen it full
        release(parts.key_empty(key.slot));
        key.next();
        if (mine) {
            if (tile == 0 && masked_from < KEYS) mask(scores, masked_from);
            float rescale[2];
            if (tile < WARPGROUPS) {
                highest_scores(scores, rows.shift, scale_log2e);
                rows.total[0] = rows.total[1] = 0.0f;
            } else if (move_shift(scores, rows, rescale, scale_log2e)) {
#pragma unroll
                for (int j = 0; j < HEAD_DIM / 2; j++) sums[j] *= rescale[j / 2 % 2];
            }
            exponentials(scores, rows, scale_log2e);
            round_weights(weights, scores);
        }
        barrier_wait(parts.value_full(value.slot), value.parity);
        if (mine) {
            wgmma_fence();
            issue_sums(sums, weights, descriptor_of_rows(parts.values + value.slot * TILE_BYTES, KEYS * 128),
                       tile < WARPGROUPS);
            wgmma_wait<0>();
            keep(sums);
        }
        __syncwarp();
        release(parts.value_empty(value.slot));
        value.next();
    }

    constexpr int EACH = HEAD_DIM / 2 + 4;
    const int thread = threadIdx.x % 128;
    if (group > 0) {
        float* to = parts.merge + (group - 1) * EACH * 128 + thread;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            to[half * 128] = rows.shift[half];
            to[(2 + half) * 128] = rows.total[half];
        }
#pragma unroll
        for (int j = 0; j < HEAD_DIM / 2; j++) to[(4 + j) * 128] = sums[j];
    }
    named_barrier_wait<128 * WARPGROUPS>(8);
    if (group == 0) {
        for (int g = 0; g < WARPGROUPS - 1; g++) {
            const float* from = parts.merge + g * EACH * 128 + thread;
            float ours[2], theirs[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float shift = from[half * 128], most = fmaxf(rows.shift[half], shift);
                ours[half] = exp2_approx(rows.shift[half] - most);
                theirs[half] = exp2_approx(shift - most);
                rows.shift[half] = most;
                rows.total[half] = rows.total[half] * ours[half] + from[(2 + half) * 128] * theirs[half];
            }
#pragma unroll
            for (int j = 0; j < HEAD_DIM / 2; j++)
                sums[j] = sums[j] * ours[j / 2 % 2] + from[(4 + j) * 128] * theirs[j / 2 % 2];
        }
    }
    named_barrier_wait<128 * WARPGROUPS>(8);
}

SDACCEL_DEVICE void consume(T* out, const Shared& parts, int group, int queries, int keys, const Work& work, int key_tiles,
                            float scale_log2e) {
    const int heads = work.heads;
    const int masked_from = keys - (key_tiles - 1) * KEYS;
    Ring<QUERY_STAGES> query;
    Ring<STAGES> key, value;
    float scores[KEYS / 2], sums[HEAD_DIM / 2], rescale[2];
    uint32_t weights[KEYS / 4];
    if (group == WARPGROUPS - 1) pass_turn(group);

    for (int i = blockIdx.x; i < work.end; i += gridDim.x) {
        const Piece piece = work.at(i);
        Rows rows;
        if (SPLIT && work.narrow(i)) {
            if (piece.row >= queries) continue;
            barrier_wait(parts.query_full(query.slot), query.parity);
            share_piece(scores, sums, weights, rows, key, value, parts,
                        descriptor(parts.queries + query.slot * QUERY_BYTES), group, masked_from, key_tiles, scale_log2e);
            release(parts.query_empty(query.slot));
            query.next();
            if (group == 0) write_rows(out, sums, rows, piece.row, queries, heads, piece);
            continue;
        }
        const uint64_t q = descriptor(parts.queries + query.slot * QUERY_BYTES + group * 64 * 128);

        barrier_wait(parts.query_full(query.slot), query.parity);
        barrier_wait(parts.key_full(key.slot), key.parity);
        wgmma_fence();
        issue_scores(scores, q, descriptor(parts.keys + key.slot * TILE_BYTES));
        wgmma_wait<0>();
        keep(scores);
        release(parts.key_empty(key.slot));
        key.next();
        if (masked_from < KEYS) mask(scores, masked_from);
        highest_scores(scores, rows.shift, scale_log2e);
        rows.total[0] = rows.total[1] = 0.0f;
        exponentials(scores, rows, scale_log2e);
        round_weights(weights, scores);

        for (int tile = 1; tile < key_tiles; tile++) {
            barrier_wait(parts.key_full(key.slot), key.parity);
            await_turn(group);
            wgmma_fence();
            issue_scores(scores, q, descriptor(parts.keys + key.slot * TILE_BYTES));
            barrier_wait(parts.value_full(value.slot), value.parity);
            wgmma_fence();
            issue_sums(sums, weights, descriptor_of_rows(parts.values + value.slot * TILE_BYTES, KEYS * 128), tile == 1);
            pass_turn(group);
            wgmma_wait<1>();
            keep(scores);
            release(parts.key_empty(key.slot));
            key.next();
            const bool moved = move_shift(scores, rows, rescale, scale_log2e);
            exponentials(scores, rows, scale_log2e);
            wgmma_wait<0>();
            keep(sums);
            release(parts.value_empty(value.slot));
            value.next();
            if (moved) {
#pragma unroll
                for (int j = 0; j < HEAD_DIM / 2; j++) sums[j] *= rescale[j / 2 % 2];
            }
            round_weights(weights, scores);
        }
        release(parts.query_empty(query.slot));
        query.next();

        barrier_wait(parts.value_full(value.slot), value.parity);
        wgmma_fence();
        issue_sums(sums, weights, descriptor_of_rows(parts.values + value.slot * TILE_BYTES, KEYS * 128), key_tiles == 1);
        wgmma_wait<0>();
        keep(sums);
        release(parts.value_empty(value.slot));
        value.next();

        write_rows(out, sums, rows, piece.row + group * 64, queries, heads, piece);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    flash_attention(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                    const __grid_constant__ TensorMap v, T* out, int queries, int keys, int heads, int batch,
                    float scale_log2e) {
    extern __shared__ uint4 memory[];
    const uint32_t start = (address(memory) + 1023) & ~1023u;
    Shared parts;
    parts.queries = start;
    parts.keys = parts.queries + QUERY_STAGES * QUERY_BYTES;
    parts.values = parts.keys + STAGES * TILE_BYTES;
    parts.barriers = parts.values + STAGES * TILE_BYTES;
    parts.merge = reinterpret_cast<float*>(reinterpret_cast<char*>(memory) + (parts.barriers + 256 - address(memory)));

    if (threadIdx.x == 0) {
        for (int i = 0; i < QUERY_STAGES; i++) {
            barrier_init(parts.query_full(i), 1);
            barrier_init(parts.query_empty(i), 4 * WARPGROUPS);
        }
        for (int i = 0; i < STAGES; i++) {
            barrier_init(parts.key_full(i), 1);
            barrier_init(parts.key_empty(i), 4 * WARPGROUPS);
            barrier_init(parts.value_full(i), 1);
            barrier_init(parts.value_empty(i), 4 * WARPGROUPS);
        }
        barrier_init_fence();
    }
    __syncthreads();
    pdl_wait();
    pdl_launch_dependents();

    const int row_tiles = (queries + ROWS - 1) / ROWS;
    const int key_tiles = (keys + KEYS - 1) / KEYS;
    const Work work(row_tiles * heads * batch, row_tiles, heads);
    const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    if (group == WARPGROUPS) {
        registers_give<PRODUCER_REGISTERS>();
        if (threadIdx.x % 128 == 0) produce(q, k, v, parts, work, queries, key_tiles);
    } else {
        registers_take<REGISTERS>();
        consume(out, parts, group, queries, keys, work, key_tiles, scale_log2e);
    }
}
