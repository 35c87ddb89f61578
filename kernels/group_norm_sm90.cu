// Group normalisation (Wu and He, 2018) of NHWC images in one launch, with a per-image, per-channel addend and SiLU; sm_90 on.
//
//   y = act((x + add - mean) / sqrt(variance + epsilon) * scale + bias)      mean, variance: of an image's group of channels
//
// x [B, rows, CHANNELS] in one or two pieces along the channels (x, then x2), rows of each dense and a multiple of 8 channels
// long; add [B or 1, CHANNELS] or null, scale and bias [CHANNELS], y [B, rows, CHANNELS] dense.
// Called by sdaccel/backends/cuda/ops/group_norm.py. Macros: SDACCEL_T, SILU (0, 1), CHANNELS, PER_GROUP, LANES (rows at
// once), ITEMS (such rows a tile).
//
// A block takes a run of an image's rows. One warp lets the copy engine bring them, tile by tile, into a ring that fills
// shared memory; all others sum up. The last tiles stay there while the blocks of the image exchange their sums, and are
// normalised first; the ones before them come again, the latest first, as L2 still has those.
//
// Sums are of differences to one pixel's value, the same for a group in all of an image: they add up in any order, and a
// large mean cancels before it costs digits.
#include "hopper.cuh"

using namespace hopper;

constexpr int CHUNKS = CHANNELS / 8, GROUPS = CHANNELS / PER_GROUP;
constexpr int CONSUMERS = (LANES * CHUNKS + 31) / 32 * 32, WARPS = CONSUMERS / 32;
constexpr int TILE_ROWS = LANES * ITEMS, TILE_BYTES = TILE_ROWS * CHANNELS * 2;
constexpr int UNIT = PER_GROUP % 8 == 0 ? 8 : PER_GROUP % 4 == 0 ? 4 : PER_GROUP % 2 == 0 ? 2 : 1;  // channels of one group
constexpr int UNITS = 8 / UNIT;                                                                     // a thread's
constexpr int MAX_STAGES = 32;

// ---- what is written by other blocks -----------------------------------------------------------------------------------

SDACCEL_DEVICE uint32_t load_acquire(const uint32_t* p) {
    uint32_t x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}

// Until all `blocks` blocks have come here. The counter's highest bit turns over when they have, so that it is good for the
// next time. Writes from before are visible after.
SDACCEL_DEVICE void await_blocks(uint32_t* counter, uint32_t blocks, bool first) {
    __threadfence();
    named_barrier_wait<CONSUMERS>(1);
    if (threadIdx.x == 0) {
        const uint32_t before = atomicAdd(counter, first ? 0x80000000u - (blocks - 1) : 1u);
        while (((before ^ load_acquire(counter)) & 0x80000000u) == 0) {
        }
        __threadfence();
    }
    named_barrier_wait<CONSUMERS>(1);
}

// ---- the ring ------------------------------------------------------------------------------------------------------------

SDACCEL_DEVICE uint64_t policy_of_passing() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// policy 0: none.
SDACCEL_DEVICE void copy_bulk(uint32_t to, const T* from, int bytes, uint32_t bar, uint64_t policy) {
    if (policy == 0)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                     "l"(from), "r"(bytes), "r"(bar)
                     : "memory");
    else
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
                to),
            "l"(from), "r"(bytes), "r"(bar), "l"(policy)
            : "memory");
}

// Slots are tile % stages; which phase of a slot comes next is a bit of its own.
struct Ring {
    uint32_t barriers;
    uint32_t phases = 0;

    __device__ __forceinline__ uint32_t full(int slot) const { return barriers + 8 * slot; }
    __device__ __forceinline__ uint32_t empty(int slot) const { return barriers + 8 * (MAX_STAGES + slot); }
    __device__ __forceinline__ void wait(uint32_t bar, int slot) {
        barrier_wait(bar, phases >> slot & 1);
        phases ^= 1u << slot;
    }
};

struct Source {
    const T *x, *x2;  // this block's first row
    int x_channels, rows;

    __device__ __forceinline__ void load(int tile, uint32_t to, uint32_t full, uint64_t policy) const {
        const int first = tile * TILE_ROWS, n = min(TILE_ROWS, rows - first), x2_channels = CHANNELS - x_channels;
        barrier_expect(full, n * CHANNELS * 2);
        copy_bulk(to, x + int64_t(first) * x_channels, n * x_channels * 2, full, policy);
        if (x2_channels > 0)
            copy_bulk(to + TILE_ROWS * x_channels * 2, x2 + int64_t(first) * x2_channels, n * x2_channels * 2, full, policy);
    }
};

// All tiles in order, then again those that are not there any more, from the last on. In the first pass the `keep` before
// those that stay are read so that L2 keeps them, if `stream`.
SDACCEL_DEVICE void produce(const Source& source, Ring ring, uint32_t memory, int tiles, int stages, int keep, bool stream) {
    const uint64_t passing = stream ? policy_of_passing() : 0;
    const int again = tiles - stages;
    for (int tile = 0, slot = 0; tile < tiles; tile++) {
        if (tile >= stages) ring.wait(ring.empty(slot), slot);
        const bool kept = tile < again && tile >= again - keep;
        source.load(tile, memory + slot * TILE_BYTES, ring.full(slot), kept ? 0 : passing);
        if (++slot == stages) slot = 0;
    }
    for (int tile = again - 1; tile >= 0; tile--) {
        const int slot = tile % stages;
        ring.wait(ring.empty(slot), slot);
        source.load(tile, memory + slot * TILE_BYTES, ring.full(slot), passing);
    }
}

// ---- numbers -------------------------------------------------------------------------------------------------------------

struct alignas(8) Totals {
    float sum, squares;
};

// By name: the compiler makes four stores of a choice between a streaming one and a plain one.
SDACCEL_DEVICE void store16_global(void* p, uint4 x) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

SDACCEL_DEVICE uint4 normalised(uint4 row, const float (&a)[8], const float (&b)[8]) {
    float v[8];
    unpack8<T>(row, v);
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = fmaf(v[j], a[j], b[j]);
#if SILU
#pragma unroll
    for (int j = 0; j < 8; j += 2) silu_of_two(v[j], v[j + 1]);
#endif
    return pack8<T>(v);
}

// The block's sums of each group, `mine` being a thread's, go to totals[group * blocks].
SDACCEL_DEVICE void sum_block(const Totals (&mine)[UNITS], Totals* scratch, Totals* totals, int blocks) {
    constexpr int COLUMNS = PER_GROUP / UNIT, ENTRIES = LANES * COLUMNS;
#pragma unroll
    for (int u = 0; u < UNITS; u++) scratch[threadIdx.x * UNITS + u] = mine[u];
    named_barrier_wait<CONSUMERS>(1);
    const int lane = threadIdx.x % 32;
    for (int group = threadIdx.x / 32; group < GROUPS; group += WARPS) {
        float sum = 0.0f, squares = 0.0f;
#pragma unroll 4
        for (int e = lane; e < ENTRIES; e += 32) {
            const Totals entry = scratch[e / COLUMNS * (CHUNKS * UNITS) + group * COLUMNS + e % COLUMNS];
            sum += entry.sum;
            squares += entry.squares;
        }
        sum = warp_sum(sum);
        squares = warp_sum(squares);
        if (lane == 0) totals[group * blocks] = {sum, squares};
    }
}

// Sums of all blocks → mean and 1 / standard deviation of each group.
SDACCEL_DEVICE void finish(const Totals* totals, int blocks, float n, float epsilon, float2* result) {
    const int lane = threadIdx.x % 32;
    for (int group = threadIdx.x / 32; group < GROUPS; group += WARPS) {
        float sum = 0.0f, squares = 0.0f;
#pragma unroll 5
        for (int i = lane; i < blocks; i += 32) {
            const float2 entry = __ldcg(reinterpret_cast<const float2*>(totals + group * blocks + i));
            sum += entry.x;
            squares += entry.y;
        }
        const float mean = warp_sum(sum) / n;
        squares = fmaxf(fmaf(-mean, mean, warp_sum(squares) / n), 0.0f);
        if (lane == 0) result[group] = {mean, rsqrtf(squares + epsilon)};
    }
}

// ---- the kernel ------------------------------------------------------------------------------------------------------------

// grid (blocks, 1, B), cooperative: all blocks run at once; block CONSUMERS + 32. totals: [B, GROUPS, blocks] scratch.
// counters [B]: 0 or what this kernel left. Dynamic shared memory: 512 bytes of barriers, 8 a group, 8 * UNITS a consumer
// (all of them in whole 128), stages tiles. stream: x is larger than L2.
extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 1)
    group_norm(const T* x, int64_t x_batch, int x_channels, const T* x2, int64_t x2_batch, const T* add, int64_t add_batch,
               const T* __restrict__ scale, const T* __restrict__ bias, T* y, Totals* totals, uint32_t* counters, int rows,
               float epsilon, int stages, int keep, int stream) {
    extern __shared__ uint4 shared[];
    char* const bytes = reinterpret_cast<char*>(shared);
    float2* const result = reinterpret_cast<float2*>(bytes + 512);
    Totals* const scratch = reinterpret_cast<Totals*>(bytes + 512 + (GROUPS * 8 + 127) / 128 * 128);
    char* const tiles_at = reinterpret_cast<char*>(scratch) + CONSUMERS * UNITS * 8;

    const int64_t batch = blockIdx.z;
    const int blocks = gridDim.x;
    const int begin = int(int64_t(rows) * blockIdx.x / blocks), end = int(int64_t(rows) * (blockIdx.x + 1) / blocks);
    const int tiles = (end - begin + TILE_ROWS - 1) / TILE_ROWS, x2_channels = CHANNELS - x_channels;
    x += batch * x_batch;
    if (x2_channels > 0) x2 += batch * x2_batch;
    Ring ring{address(shared)};
    if (threadIdx.x == CONSUMERS) {
        for (int i = 0; i < stages; i++) {
            barrier_init(ring.full(i), 1);
            barrier_init(ring.empty(i), CONSUMERS);
        }
        barrier_init_fence();
    }
    __syncthreads();

    if (threadIdx.x >= CONSUMERS) {
        const Source source{x + int64_t(begin) * x_channels, x2 + (x2_channels > 0 ? int64_t(begin) * x2_channels : 0),
                            x_channels, end - begin};
        if (threadIdx.x == CONSUMERS) produce(source, ring, address(tiles_at), tiles, stages, keep, stream);
        return;
    }

    const int lane = threadIdx.x / CHUNKS, channel = threadIdx.x % CHUNKS * 8;
    const bool works = lane < LANES, second = channel >= x_channels;
    const int pitch = 2 * (second ? x2_channels : x_channels);
    const char* const mine = tiles_at + 2 * (second ? TILE_ROWS * x_channels + channel - x_channels : channel) + lane * pitch;
    // read: of what came last from the slot. Behind stores a load can take longer than the next copy into the slot: the
    // barrier's address depends on what it brings.
    const uint32_t zero = uint32_t(stages) >> 16;
    const auto release = [&](int slot, uint32_t read) { barrier_arrive(ring.empty(slot) + (read & zero)); };

    const uint4 scales = load16(scale + channel), biases = load16(bias + channel);
    float apart[8];  // what is added to x: the addend, less the group's value at the pixel in the middle
    unpack8<T>(add != nullptr ? load16(add + batch * add_batch + channel) : uint4{}, apart);
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const int head = (channel + u * UNIT) / PER_GROUP * PER_GROUP;
        const T* pixel = head < x_channels ? x + int64_t(rows / 2) * x_channels + head
                                           : x2 + int64_t(rows / 2) * x2_channels + head - x_channels;
        float value = to_float(*pixel);
        if (add != nullptr) value += to_float(add[batch * add_batch + head]);
#pragma unroll
        for (int j = u * UNIT; j < (u + 1) * UNIT; j++) apart[j] -= value;
    }

    float sum[8] = {}, squares[8] = {};
    for (int tile = 0, slot = 0; tile < tiles; tile++) {
        const int left = works ? end - begin - tile * TILE_ROWS - lane : 0;
        const char* const item = mine + slot * TILE_BYTES;
        ring.wait(ring.full(slot), slot);
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            if (i * LANES < left) {
                float v[8];
                unpack8<T>(load16(item + i * LANES * pitch), v);
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    v[j] += apart[j];
                    sum[j] += v[j];
                    squares[j] = fmaf(v[j], v[j], squares[j]);
                }
            }
        }
        if (tile + stages < tiles) release(slot, 0);
        if (++slot == stages) slot = 0;
    }
    Totals own[UNITS];
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        own[u] = {0.0f, 0.0f};
#pragma unroll
        for (int j = u * UNIT; j < (u + 1) * UNIT; j++) own[u] = {own[u].sum + sum[j], own[u].squares + squares[j]};
    }
    totals += batch * GROUPS * blocks;
    sum_block(own, scratch, totals + blockIdx.x, blocks);
    await_blocks(counters + batch, blocks, blockIdx.x == 0);
    finish(totals, blocks, float(rows) * PER_GROUP, epsilon, result);
    named_barrier_wait<CONSUMERS>(1);

    float a[8], b[8];
    unpack8<T>(scales, a);
    unpack8<T>(biases, b);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float2 group = result[(channel + j / UNIT * UNIT) / PER_GROUP];
        a[j] *= group.y;
        b[j] = fmaf(apart[j] - group.x, a[j], b[j]);
    }
    T* const to = y + (batch * rows + begin + lane) * CHANNELS + channel;
    for (int tile = tiles - 1; tile >= 0; tile--) {
        const int slot = tile % stages, left = works ? end - begin - tile * TILE_ROWS - lane : 0;
        const char* const item = mine + slot * TILE_BYTES;
        if (tile < tiles - stages) ring.wait(ring.full(slot), slot);
        uint4 v[ITEMS];
        uint32_t read = 0;
#pragma unroll
        for (int i = 0; i < ITEMS; i++)
            if (i * LANES < left) {
                v[i] = load16(item + i * LANES * pitch);
                read |= v[i].x;
            }
        if (tile >= stages) release(slot, read);
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            if (i * LANES < left) {
                T* const place = to + int64_t(tile * TILE_ROWS + i * LANES) * CHANNELS;
                const uint4 result = normalised(v[i], a, b);
                if (stream)
                    store16_streaming(place, result);
                else
                    store16_global(place, result);
            }
        }
    }
}
