// Group normalisation (Wu and He, 2018) of NHWC images, with a per-image, per-channel addend before it and SiLU after it.
//
//   y = act((x + add - mean) / sqrt(variance + epsilon) * scale + bias)      mean, variance: of an image's group of channels
//
// x [B, rows, channels] in one or two pieces along the channels (x, then x2), add [B or 1, channels] or null, scale and
// bias [channels], y [B, rows, channels] dense; rows are pixels. Channels of each piece are multiples of 8.
//
//   group_norm_fused   one read, one write: a cluster of blocks holds a slice of the channels in shared memory
//   group_norm_stats   two reads: moments of every group from many blocks, then
//   group_norm_apply   the normalisation
//   group_norm_persistent   both in one: what shared memory and L2 hold of the image is not read again
//
// A thread owns eight channels and walks over the rows. The fused kernel sums differences to one pixel's value, the same
// for a group in all of an image, which add up in any order. The others sum differences to the first value that a thread
// meets; the moments of threads, warps, blocks are merged by Chan, Golub and LeVeque's formula (1983).
// Called by sdaccel/backends/cuda/ops/group_norm.py. Macros: SDACCEL_T, SILU (0, 1), and either PER_GROUP (channels of a
// group), for the fused kernel alone, or STREAM (1: larger than L2), for the others.
#include "numeric.cuh"

#define MAX_THREADS 512
#define UNROLL 4
#define STAGES 4

// ---- clusters: one block each below sm_90 ------------------------------------------------------------------------

SDACCEL_DEVICE int cluster_size() {
#if __CUDA_ARCH__ >= 900
    uint32_t n;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(n));
    return int(n);
#else
    return 1;
#endif
}

SDACCEL_DEVICE void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

SDACCEL_DEVICE void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// What the block `rank` of this cluster has at the address where we have `local`.
SDACCEL_DEVICE float4 load_remote(const float4* local, int rank) {
#if __CUDA_ARCH__ >= 900
    float4 x;
    uint32_t address = uint32_t(__cvta_generic_to_shared(local));
    asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(address)
                 : "memory");
    return x;
#else
    return *local;
#endif
}

// ---- from memory to shared memory, in the background from sm_80 on ------------------------------------------------

SDACCEL_DEVICE void copy_async(uint4* to, const T* from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(uint32_t(__cvta_generic_to_shared(to))), "l"(from)
                 : "memory");
#else
    *to = load16(from);
#endif
}

SDACCEL_DEVICE void copy_commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int PENDING>
SDACCEL_DEVICE void copy_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// Where a thread works: chunk `chunk` (eight channels) of every `lanes`-th row, from `lane` on.
struct Place {
    int chunks, lanes, chunk, lane;
    bool works;

    __device__ __forceinline__ Place(int slice)
        : chunks(slice / 8),
          lanes(int(blockDim.x) / chunks),
          chunk(int(threadIdx.x) % chunks),
          lane(int(threadIdx.x) / chunks),
          works(lane < lanes) {}
};

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

// ---- one read, one write -------------------------------------------------------------------------------------------

#ifdef PER_GROUP

constexpr int UNIT = PER_GROUP % 8 == 0 ? 8 : PER_GROUP % 4 == 0 ? 4 : PER_GROUP % 2 == 0 ? 2 : 1;  // channels of one group
constexpr int UNITS = 8 / UNIT;                                                                     // a thread's
constexpr int COLUMNS = PER_GROUP / UNIT;                                                           // units of a group

// The sum over eight neighbouring lanes.
SDACCEL_DEVICE float sum_of_eight(float x) {
#pragma unroll
    for (int mask = 4; mask > 0; mask >>= 1) x += __shfl_xor_sync(0xffffffffu, x, mask);
    return x;
}

// grid (cluster, channels / slice, B), cluster size grid.x; dynamic shared memory: 16 bytes a thread and row it owns,
// 8 * UNITS a thread, 24 a group of the slice. slice: a multiple of 8 and of PER_GROUP.
extern "C" __global__ void __launch_bounds__(MAX_THREADS, 2)
group_norm_fused(const T* x, int64_t x_batch, int x_row, int x_channels, const T* x2, int64_t x2_batch, int x2_row,
                 const T* add, int64_t add_batch, const T* __restrict__ scale, const T* __restrict__ bias, T* y,
                 int rows, int channels, float epsilon, int slice) {
    extern __shared__ uint4 shared[];
    const Place at(slice);
    const int groups = slice / PER_GROUP, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int channel = blockIdx.y * slice + at.chunk * 8;
    const int64_t batch = blockIdx.z;
    const bool second = channel >= x_channels;
    const int stride = second ? x2_row : x_row;
    x += batch * x_batch;
    if (x2 != nullptr) x2 += batch * x2_batch;
    const T* from = second ? x2 + channel - x_channels : x + channel;
    const uint4 scales = load16(scale + channel), biases = load16(bias + channel);

    const int share = (rows + int(gridDim.x) - 1) / int(gridDim.x);
    const int begin = min(int(blockIdx.x) * share, rows), end = min(begin + share, rows);
    const int items = (share + at.lanes - 1) / at.lanes;
    const int mine = at.works ? max(0, (end - begin - at.lane + at.lanes - 1) / at.lanes) : 0;
    float2* const units = reinterpret_cast<float2*>(shared + items * blockDim.x);
    float4* const block = reinterpret_cast<float4*>(units + UNITS * blockDim.x);
    float2* const result = reinterpret_cast<float2*>(block + groups);  // mean, 1 / standard deviation
    uint4* item = shared + threadIdx.x;  // the i-th lies at item[i * blockDim.x]; no other thread touches it

    pdl_launch_dependents();
    pdl_wait();
    from += int64_t(begin + at.lane) * stride;
    const int64_t step = int64_t(at.lanes) * stride;
    const int stage = (items + STAGES - 1) / STAGES;
#pragma unroll
    for (int s = 0; s < STAGES; ++s) {
        for (int i = s * stage; i < min((s + 1) * stage, mine); ++i) copy_async(item + i * blockDim.x, from + i * step);
        copy_commit();
    }

    float apart[8];  // what is added to x: the addend, less the group's value at the pixel in the middle
    unpack8<T>(add != nullptr ? load16(add + batch * add_batch + channel) : uint4{}, apart);
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
        const int head = (channel + u * UNIT) / PER_GROUP * PER_GROUP;
        float value = to_float(head < x_channels ? x[int64_t(rows / 2) * x_row + head]
                                                 : x2[int64_t(rows / 2) * x2_row + head - x_channels]);
        if (add != nullptr) value += to_float(add[batch * add_batch + head]);
#pragma unroll
        for (int j = u * UNIT; j < (u + 1) * UNIT; ++j) apart[j] -= value;
    }

    float sum[8] = {}, squares[8] = {};
#pragma unroll
    for (int s = 0; s < STAGES; ++s) {
        if (s == 0) copy_wait<STAGES - 1>();
        if (s == 1) copy_wait<STAGES - 2>();
        if (s == 2) copy_wait<STAGES - 3>();
        if (s == 3) copy_wait<STAGES - 4>();
#pragma unroll 2
        for (int i = s * stage; i < min((s + 1) * stage, mine); ++i) {
            float v[8];
            unpack8<T>(item[i * blockDim.x], v);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                v[j] += apart[j];
                sum[j] += v[j];
                squares[j] = fmaf(v[j], v[j], squares[j]);
            }
        }
    }
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
        float2 own = {0.0f, 0.0f};
#pragma unroll
        for (int j = u * UNIT; j < (u + 1) * UNIT; ++j) own = {own.x + sum[j], own.y + squares[j]};
        units[threadIdx.x * UNITS + u] = own;
    }
    __syncthreads();

    const int blocks = cluster_size(), warps = blockDim.x / 32;
    const float n = float(rows) * PER_GROUP;
    for (int group = warp; group < groups; group += warps) {
        float total = 0.0f, total_squares = 0.0f;
#pragma unroll 4
        for (int e = lane; e < at.lanes * COLUMNS; e += 32) {
            const float2 unit = units[e / COLUMNS * (at.chunks * UNITS) + group * COLUMNS + e % COLUMNS];
            total += unit.x;
            total_squares += unit.y;
        }
        total = warp_sum(total);
        total_squares = warp_sum(total_squares);
        if (lane == 0) block[group] = {total, total_squares, 0.0f, 0.0f};
    }
    if (blocks > 1) {
        cluster_arrive();
        cluster_wait();
    } else {
        __syncwarp();
    }
    for (int group = warp; group < groups; group += warps) {
        float4 totals = block[group];
        if (blocks > 1) {
            totals = lane % 8 < blocks ? load_remote(block + group, lane % 8) : float4{};
            totals.x = sum_of_eight(totals.x);
            totals.y = sum_of_eight(totals.y);
        }
        const float mean = totals.x / n, variance = fmaxf(fmaf(-mean, mean, totals.y / n), 0.0f);
        if (lane == 0) result[group] = {mean, rsqrtf(variance + epsilon)};
    }
    if (blocks > 1) cluster_arrive();  // others' shared memory is not read any more
    __syncthreads();

    if (mine > 0) {
        float a[8], b[8];
        unpack8<T>(scales, a);
        unpack8<T>(biases, b);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float2 group = result[(at.chunk * 8 + j / UNIT * UNIT) / PER_GROUP];
            a[j] *= group.y;
            b[j] = fmaf(apart[j] - group.x, a[j], b[j]);
        }
        T* to = y + (batch * rows + begin + at.lane) * channels + channel;
        const int64_t along = int64_t(at.lanes) * channels;
#pragma unroll 2
        for (int i = 0; i < mine; ++i) store16(to + i * along, normalised(item[i * blockDim.x], a, b));
    }
    if (blocks > 1) cluster_wait();
}

#else

// ---- moments -------------------------------------------------------------------------------------------------------

// Count, mean, sum of squared deviations (in x, y, z).
using Moments = float4;

// `mine` of the lanes become one; lanes without values have n = 0.
SDACCEL_DEVICE Moments warp_merge(Moments mine) {
    const float n = warp_sum(mine.x);
    const float mean = warp_sum(mine.x * mine.y) / n;
    const float apart = mine.y - mean;
    return {n, mean, warp_sum(fmaf(mine.x * apart, apart, mine.z)), 0.0f};
}

// The rows that one thread has seen of its eight channels.
struct Sums {
    float shift[8], sum[8], squares[8];

    __device__ __forceinline__ void start(const uint4 first) {
        unpack8<T>(first, shift);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum[j] = squares[j] = 0.0f;
    }

    __device__ __forceinline__ void take(const uint4 row) {
        float v[8];
        unpack8<T>(row, v);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float apart = v[j] - shift[j];
            sum[j] += apart;
            squares[j] = fmaf(apart, apart, squares[j]);
        }
    }
};

// Shared memory of a reduction, in 16-byte units before `parts`: 4 a thread. `groups`: in the slice.
struct Scratch {
    float *means, *squares, *counts;
    Moments *parts, *block;
    float2* result;  // mean, 1 / standard deviation

    __device__ __forceinline__ Scratch(void* memory, int groups) {
        const int threads = blockDim.x;
        means = reinterpret_cast<float*>(memory);
        squares = means + 8 * threads;
        counts = squares + 8 * threads;
        parts = reinterpret_cast<Moments*>(counts + threads);
        block = parts + groups + threads / 32;
        result = reinterpret_cast<float2*>(block + groups);
    }
};

// Moments of each of the slice's groups over the block's rows, left in scratch.block (visible to the block only after
// the next barrier). `n`: rows this thread has seen. `add`: to its eight channels.
SDACCEL_DEVICE void merge_block(const Place& at, const Scratch& scratch, const Sums& sums, int n, uint4 add, int slice,
                                int groups, int per_group) {
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (at.works) {
        float extra[8];
        unpack8<T>(add, extra);
        const float inverse = n > 0 ? 1.0f / float(n) : 0.0f;
        float mean[8], squares[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float apart = n > 0 ? sums.sum[j] * inverse : 0.0f;
            mean[j] = n > 0 ? sums.shift[j] + apart + extra[j] : 0.0f;
            squares[j] = n > 0 ? fmaxf(fmaf(-sums.sum[j], apart, sums.squares[j]), 0.0f) : 0.0f;
        }
        float4* to = reinterpret_cast<float4*>(scratch.means) + 2 * threadIdx.x;
        to[0] = {mean[0], mean[1], mean[2], mean[3]};
        to[1] = {mean[4], mean[5], mean[6], mean[7]};
        to = reinterpret_cast<float4*>(scratch.squares) + 2 * threadIdx.x;
        to[0] = {squares[0], squares[1], squares[2], squares[3]};
        to[1] = {squares[4], squares[5], squares[6], squares[7]};
        if (at.chunk == 0) scratch.counts[at.lane] = float(n);
    }
    __syncthreads();

    const int shares = max(1, warps / groups);  // warps on one group
    for (int task = warp; task < groups * shares; task += warps) {
        const int group = task / shares, end = at.lanes * per_group, step = 32 * shares;
        const int first = task % shares * 32 + lane;
        float count = 0.0f, total = 0.0f;
        for (int e = first; e < end; e += step) {
            const int row = e / per_group;
            const float weight = scratch.counts[row];
            count += weight;
            total = fmaf(weight, scratch.means[row * slice + group * per_group + e - row * per_group], total);
        }
        count = warp_sum(count);
        const float mean = count > 0.0f ? warp_sum(total) / count : 0.0f;
        float squares = 0.0f;
        for (int e = first; e < end; e += step) {
            const int row = e / per_group, i = row * slice + group * per_group + e - row * per_group;
            const float apart = scratch.means[i] - mean;
            squares += fmaf(scratch.counts[row] * apart, apart, scratch.squares[i]);
        }
        squares = warp_sum(squares);
        if (lane == 0) (shares > 1 ? scratch.parts : scratch.block)[task] = {count, mean, squares, 0.0f};
    }
    if (shares > 1) {
        __syncthreads();
        for (int group = warp; group < groups; group += warps) {
            const Moments merged = warp_merge(lane < shares ? scratch.parts[group * shares + lane] : Moments{});
            if (lane == 0) scratch.block[group] = merged;
        }
    }
}

// partials [groups, count] → mean and 1 / standard deviation of each group; a warp takes one.
SDACCEL_DEVICE void merge_partials(const Moments* partials, int count, int groups, float epsilon, float2* result) {
    const int lane = threadIdx.x % 32;
    for (int group = threadIdx.x / 32; group < groups; group += blockDim.x / 32) {
        const Moments* mine = partials + int64_t(group) * count;
        float n = 0.0f, total = 0.0f, squares = 0.0f;
        for (int i = lane; i < count; i += 32) {
            const Moments part = __ldcg(mine + i);
            n += part.x;
            total = fmaf(part.x, part.y, total);
        }
        n = warp_sum(n);
        const float mean = warp_sum(total) / n;
        for (int i = lane; i < count; i += 32) {
            const Moments part = __ldcg(mine + i);
            const float apart = part.y - mean;
            squares += fmaf(part.x * apart, apart, part.z);
        }
        squares = warp_sum(squares);
        if (lane == 0) result[group] = {mean, rsqrtf(squares / n + epsilon)};
    }
}

// y = x * a + b for the thread's eight channels, of which `local` is the first, counted from the slice on.
SDACCEL_DEVICE void coefficients(const float2* result, int local, int per_group, uint4 add, uint4 scale, uint4 bias,
                                 float (&a)[8], float (&b)[8]) {
    float extra[8];
    unpack8<T>(add, extra);
    unpack8<T>(scale, a);
    unpack8<T>(bias, b);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float2 group = result[(local + j) / per_group];
        a[j] *= group.y;
        b[j] = fmaf(extra[j] - group.x, a[j], b[j]);
    }
}

// ---- two reads -----------------------------------------------------------------------------------------------------

// grid (blocks, 1, B), a multiple of the cluster size; dynamic shared memory: Scratch. Writes the moments of the groups of
// `slice` channels from `first` on: partials [B, channels / per_group, clusters of an image]. Goes from the last row to
// the first, so that what the kernel before has written last is read first; rows below `keep` shall stay in L2.
extern "C" __global__ void __launch_bounds__(MAX_THREADS, 2)
group_norm_stats(const T* x, int64_t x_batch, int x_row, int x_channels, const T* x2, int64_t x2_batch, int x2_row,
                 const T* add, int64_t add_batch, Moments* partials, int rows, int channels, int per_group, int first,
                 int slice, int keep) {
    extern __shared__ uint4 shared[];
    const Place at(slice);
    const int groups = slice / per_group, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Scratch scratch(shared, groups);
    const int channel = first + at.chunk * 8;
    const int64_t batch = blockIdx.z;
    const bool second = channel >= x_channels;
    const int stride = second ? x2_row : x_row, step = at.lanes * stride;
    const T* from = second ? x2 + batch * x2_batch + channel - x_channels : x + batch * x_batch + channel;

    pdl_launch_dependents();
    pdl_wait();
    const uint4 adds = add != nullptr && at.works ? load16(add + batch * add_batch + channel) : uint4{};
    const int tile = at.lanes * UNROLL, jump = gridDim.x * tile;
    const int start = ((rows + tile - 1) / tile - 1 - int(blockIdx.x)) * tile + at.lane;
    from += int64_t(start) * stride;
    Sums sums;
    int n = 0;
    if (at.works) {
        // the topmost tile may be short
        const bool beyond = start >= rows;
        const int second_row = start - jump;
        sums.start(!beyond ? load16(from) : second_row >= 0 ? load16(from - int64_t(jump) * stride) : uint4{});
        for (int row = start; row >= 0; row -= jump, from -= int64_t(jump) * stride) {
            if (row + (UNROLL - 1) * at.lanes < rows) {
                uint4 v[UNROLL];
#pragma unroll
                for (int u = 0; u < UNROLL; ++u)
                    v[u] = row < keep ? load16(from + u * step) : load16_streaming(from + u * step);
#pragma unroll
                for (int u = 0; u < UNROLL; ++u) sums.take(v[u]);
                n += UNROLL;
            } else {
                for (int u = 0; row + u * at.lanes < rows; ++u, ++n) sums.take(load16(from + u * step));
            }
        }
    }
    merge_block(at, scratch, sums, n, adds, slice, groups, per_group);

    const int blocks = cluster_size();
    if (blocks > 1) {
        cluster_arrive();
        cluster_wait();
    } else {
        __syncthreads();
    }
    if (blockIdx.x % blocks == 0) {
        const int clusters = gridDim.x / blocks;
        partials += (batch * (channels / per_group) + first / per_group) * clusters + blockIdx.x / blocks;
        for (int group = warp; group < groups; group += blockDim.x / 32) {
            Moments merged = scratch.block[group];
            if (blocks > 1) merged = warp_merge(lane < blocks ? load_remote(scratch.block + group, lane) : Moments{});
            if (lane == 0) partials[int64_t(group) * clusters] = merged;
        }
    }
    if (blocks > 1) {
        cluster_arrive();
        cluster_wait();
    }
}

// grid (blocks, 1, B); dynamic shared memory: 8 bytes a group of the slice. `count`: partials of a group.
extern "C" __global__ void __launch_bounds__(MAX_THREADS, 2)
group_norm_apply(const T* x, int64_t x_batch, int x_row, int x_channels, const T* x2, int64_t x2_batch, int x2_row,
                 const T* add, int64_t add_batch, const T* __restrict__ scale, const T* __restrict__ bias, T* y,
                 const Moments* partials, int count, int rows, int channels, int per_group, float epsilon, int first,
                 int slice) {
    extern __shared__ uint4 shared[];
    float2* result = reinterpret_cast<float2*>(shared);
    const Place at(slice);
    const int groups = slice / per_group, channel = first + at.chunk * 8;
    const int64_t batch = blockIdx.z;
    const bool second = channel >= x_channels;
    const int stride = second ? x2_row : x_row, step = at.lanes * stride, to_step = at.lanes * channels;
    const T* from = second ? x2 + batch * x2_batch + channel - x_channels : x + batch * x_batch + channel;
    const uint4 none = {}, scales = at.works ? load16(scale + channel) : none;
    const uint4 biases = at.works ? load16(bias + channel) : none;

    pdl_launch_dependents();
    pdl_wait();
    const uint4 adds = add != nullptr && at.works ? load16(add + batch * add_batch + channel) : none;
    partials += (batch * (channels / per_group) + first / per_group) * count;
    merge_partials(partials, count, groups, epsilon, result);
    __syncthreads();
    if (!at.works) return;

    float a[8], b[8];
    coefficients(result, at.chunk * 8, per_group, adds, scales, biases, a, b);
    const auto load = [](const T* p) { return STREAM ? load16_streaming(p) : load16(p); };
    const auto store = [](T* p, uint4 v) { STREAM ? store16_streaming(p, v) : store16(p, v); };
    const int jump = gridDim.x * at.lanes * UNROLL;
    int row = blockIdx.x * at.lanes * UNROLL + at.lane;
    from += int64_t(row) * stride;
    T* to = y + (batch * rows + row) * channels + channel;
    for (; row < rows; row += jump, from += int64_t(jump) * stride, to += int64_t(jump) * channels) {
        uint4 v[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            if (row + u * at.lanes < rows) v[u] = load(from + u * step);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            if (row + u * at.lanes < rows) store(to + u * to_step, normalised(v[u], a, b));
    }
}

// ---- persistent ----------------------------------------------------------------------------------------------------

// Waits until `blocks` blocks have come here; `counter` is 0 before. Writes from before are visible after.
SDACCEL_DEVICE void grid_wait(unsigned* counter, unsigned blocks) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        atomicAdd(counter, 1u);
        unsigned come;
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(come) : "l"(counter) : "memory");
        } while (come < blocks);
    }
    __syncthreads();
}

// grid (blocks, 1, B), cooperative: all blocks run at once. Dynamic shared memory: 16 bytes a thread and resident item,
// then Scratch. A thread's items are eight channels of every `lanes`-th row of the block's share: the first `resident` lie
// in shared memory, the next `keep` are read last and shall stay in L2. counters: B zeros.
extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1)
group_norm_persistent(const T* x, int64_t x_batch, int x_row, int x_channels, const T* x2, int64_t x2_batch, int x2_row,
                      const T* add, int64_t add_batch, const T* __restrict__ scale, const T* __restrict__ bias, T* y,
                      Moments* partials, unsigned* counters, int rows, int channels, int per_group, float epsilon,
                      int resident, int keep) {
    extern __shared__ uint4 shared[];
    constexpr int DEPTH = 2 * UNROLL;
    const Place at(channels);
    const int groups = channels / per_group, channel = at.chunk * 8;
    const Scratch scratch(shared + resident * blockDim.x, groups);
    uint4* item = shared + threadIdx.x;
    const int64_t batch = blockIdx.z;
    const bool second = channel >= x_channels;
    const int stride = second ? x2_row : x_row, step = at.lanes * stride, to_step = at.lanes * channels;
    const T* from = second ? x2 + batch * x2_batch + channel - x_channels : x + batch * x_batch + channel;
    const uint4 none = {}, scales = at.works ? load16(scale + channel) : none;
    const uint4 biases = at.works ? load16(bias + channel) : none;
    const uint4 adds = add != nullptr && at.works ? load16(add + batch * add_batch + channel) : none;

    const int share = (rows + int(gridDim.x) - 1) / int(gridDim.x);
    const int begin = min(int(blockIdx.x) * share, rows), end = min(begin + share, rows);
    const int mine = at.works ? max(0, (end - begin - at.lane + at.lanes - 1) / at.lanes) : 0;
    const int held = min(resident, mine);
    from += int64_t(begin + at.lane) * stride;
    for (int i = 0; i < held; ++i) copy_async(item + i * blockDim.x, from + int64_t(i) * step);
    copy_commit();

    Sums sums;
    sums.start(mine > 0 ? load16(from) : none);
    int left = mine;
    for (const T* p = from + int64_t(left) * step; left - DEPTH >= held; left -= DEPTH) {
        uint4 v[DEPTH];
        p -= int64_t(DEPTH) * step;
#pragma unroll
        for (int u = 0; u < DEPTH; ++u)
            v[u] = left <= held + keep ? load16(p + int64_t(u) * step) : load16_streaming(p + int64_t(u) * step);
#pragma unroll
        for (int u = 0; u < DEPTH; ++u) sums.take(v[u]);
    }
    for (; left > held; --left) sums.take(load16(from + int64_t(left - 1) * step));
    copy_wait<0>();
    for (int i = 0; i < held; ++i) sums.take(item[i * blockDim.x]);
    merge_block(at, scratch, sums, mine, adds, channels, groups, per_group);
    __syncthreads();
    partials += batch * groups * gridDim.x;
    for (int group = threadIdx.x; group < groups; group += blockDim.x)
        partials[group * gridDim.x + blockIdx.x] = scratch.block[group];
    grid_wait(counters + batch, gridDim.x);
    merge_partials(partials, gridDim.x, groups, epsilon, scratch.result);
    __syncthreads();
    if (mine == 0) return;

    float a[8], b[8];
    coefficients(scratch.result, channel, per_group, adds, scales, biases, a, b);
    T* to = y + (batch * rows + begin + at.lane) * channels + channel;
    int i = held;
    for (; i + DEPTH <= mine; i += DEPTH) {
        uint4 v[DEPTH];
#pragma unroll
        for (int u = 0; u < DEPTH; ++u) v[u] = load16_streaming(from + int64_t(i + u) * step);
#pragma unroll
        for (int u = 0; u < DEPTH; ++u) store16_streaming(to + int64_t(i + u) * to_step, normalised(v[u], a, b));
    }
    for (; i < mine; ++i)
        store16_streaming(to + int64_t(i) * to_step, normalised(load16(from + int64_t(i) * step), a, b));
    for (i = 0; i < held; ++i)
        store16_streaming(to + int64_t(i) * to_step, normalised(item[i * blockDim.x], a, b));
}

#endif
