// What sm_90a adds: mbarriers, the copy engine (TMA), warpgroup matrix products (wgmma), clusters, register hand-over.
// Thin wrappers of PTX (ISA 8.0 and later); names follow the instructions.
//
// SDACCEL_SPIN_LIMIT (milliseconds): a wait that lasts longer traps, so that a mistake is an error and not a hang.
#pragma once
#include "numeric.cuh"

namespace hopper {

SDACCEL_DEVICE uint32_t address(const void* shared) { return static_cast<uint32_t>(__cvta_generic_to_shared(shared)); }

// ---- mbarriers; `bar` is a shared-memory address of 8 aligned bytes ----------------------------------------------------

SDACCEL_DEVICE void barrier_init(uint32_t bar, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}

// After the inits, before the __syncthreads or cluster_sync that publishes them.
SDACCEL_DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

SDACCEL_DEVICE void barrier_arrive(uint32_t bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

// The same barrier of another block of the cluster. Orders nothing for ordinary memory of the cluster: a wider scope
// costs a fence of the whole chip and the L1 cache at every call.
SDACCEL_DEVICE void barrier_arrive_remote(uint32_t bar, int rank) {
    asm volatile(
        "{\n.reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(bar),
        "r"(rank)
        : "memory");
}

// Arrives and adds the bytes that copies will complete.
SDACCEL_DEVICE void barrier_expect(uint32_t bar, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

SDACCEL_DEVICE bool barrier_try_wait(uint32_t bar, int parity) {
    uint32_t done;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(bar), "r"(parity)
        : "memory");
    return done;
}

SDACCEL_DEVICE uint64_t nanoseconds() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// Until the phase of this parity is complete; parity 1 of a fresh barrier counts as complete.
SDACCEL_DEVICE void barrier_wait(uint32_t bar, int parity) {
    if (barrier_try_wait(bar, parity)) return;
#ifdef SDACCEL_SPIN_LIMIT
    const uint64_t start = nanoseconds();
#endif
    while (!barrier_try_wait(bar, parity)) {
#ifdef SDACCEL_SPIN_LIMIT
        if (nanoseconds() - start > uint64_t(SDACCEL_SPIN_LIMIT) * 1000000u) asm volatile("trap;");
#endif
    }
}

// ---- clusters ----------------------------------------------------------------------------------------------------------

SDACCEL_DEVICE int cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return int(rank);
}

SDACCEL_DEVICE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Address in the cluster's window of what lies at `shared` in block `rank`.
SDACCEL_DEVICE uint32_t remote_address(uint32_t shared, int rank) {
    uint32_t remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared), "r"(rank));
    return remote;
}

SDACCEL_DEVICE float4 load_remote(uint32_t remote) {
    float4 x;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(remote)
                 : "memory");
    return x;
}

SDACCEL_DEVICE void store_shared(uint32_t shared, float4 x) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
                 : "memory");
}

// ---- the copy engine ---------------------------------------------------------------------------------------------------

// CUtensorMap; pass it as `const __grid_constant__ TensorMap`.
struct alignas(64) TensorMap {
    uint64_t opaque[16];
};

SDACCEL_DEVICE void prefetch(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// A box at `to` (this block's shared memory); coordinates are elements, innermost first, and may lie outside: zeros come.
SDACCEL_DEVICE void load_box(const TensorMap& map, uint32_t to, uint32_t bar, int c0, int c1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
        "l"(&map), "r"(bar), "r"(c0), "r"(c1)
        : "memory");
}

SDACCEL_DEVICE void load_box(const TensorMap& map, uint32_t to, uint32_t bar, int c0, int c1, int c2, int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
        "l"(&map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

SDACCEL_DEVICE void load_box(const TensorMap& map, uint32_t to, uint32_t bar, int c0, int c1, int c2, int c3, int c4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
        "l"(&map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}

// Into the same place of every block named in `mask`, completing on each one's own barrier.
SDACCEL_DEVICE void load_box_multicast(const TensorMap& map, uint32_t to, uint32_t bar, uint16_t mask, int c0, int c1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
        "l"(&map), "r"(bar), "r"(c0), "r"(c1), "h"(mask)
        : "memory");
}

SDACCEL_DEVICE void load_box_multicast(
    const TensorMap& map, uint32_t to, uint32_t bar, uint16_t mask, int c0, int c1, int c2, int c3, int c4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(to),
        "l"(&map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "h"(mask)
        : "memory");
}

// Ordinary writes to shared memory, seen by the copy engine and the tensor cores after the next barrier.
SDACCEL_DEVICE void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- warpgroups --------------------------------------------------------------------------------------------------------

// Barriers by number, 0 is __syncthreads'. THREADS counts those that wait and those that only arrive.
template <int THREADS>
SDACCEL_DEVICE void named_barrier_wait(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

template <int THREADS>
SDACCEL_DEVICE void named_barrier_arrive(int id) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

// Multiples of 8; all warps of the warpgroup call. The kernel needs __launch_bounds__(threads, 1).
template <int REGISTERS>
SDACCEL_DEVICE void registers_give() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
SDACCEL_DEVICE void registers_take() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Before the first wgmma and whenever registers of its accumulators were touched.
SDACCEL_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
SDACCEL_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most PENDING groups of this warp are under way.
template <int PENDING>
SDACCEL_DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving uses of the accumulators over the wait in front.
template <int N>
SDACCEL_DEVICE void keep(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Rows of 64 16-bit elements (128 bytes) in 128-byte swizzle, eight rows every 1024 bytes, the tile 1024-byte aligned: what
// load_box writes for a box 64 elements wide. Bits: address / 16; stride of row groups / 16 at 32; swizzle mode at 62.
// Steps of 16 elements along the row add 2 (32 bytes).
SDACCEL_DEVICE uint64_t descriptor(uint32_t shared) {
    return uint64_t((shared & 0x3ffffu) >> 4) | uint64_t(1) << 16 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}

// D[64, N] (+)= A[64, 16] B[N, 16]^T, both from shared memory, K innermost (TRANSPOSE_B: N innermost in B).
// Thread t of the warpgroup holds rows 16 (t / 32) + t % 32 / 4 (+ 8) and columns 8 j + 2 (t % 4) (+ 1):
// d[4 j], d[4 j + 1] of the upper row, d[4 j + 2], d[4 j + 3] of the lower. accumulate = 0 ignores what D held.
template <typename U, int N, int TRANSPOSE_B = 0>
struct Wgmma;

#define SDACCEL_F8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
                      "+f"(d[i + 6]), "+f"(d[i + 7])
#define SDACCEL_F16(i) SDACCEL_F8(i), SDACCEL_F8(i + 8)
#define SDACCEL_R0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define SDACCEL_R1 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define SDACCEL_R2 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define SDACCEL_R3 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define SDACCEL_R4 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define SDACCEL_R5 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define SDACCEL_R6 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define SDACCEL_R7 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

#define SDACCEL_WGMMA_OF(U, TYPE, N, REGISTERS, A, B, ACCUMULATE, TB, ...)                                               \
    template <int TRANSPOSE_B>                                                                                         \
    struct Wgmma<U, N, TRANSPOSE_B> {                                                                                  \
        static __device__ __forceinline__ void mma(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) {                           \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ACCUMULATE ", 0;\n"                                       \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" REGISTERS "}, " A ", " B \
                         ", p, 1, 1, 0, " TB ";\n}"                                                                    \
                         : __VA_ARGS__                                                                                 \
                         : "l"(a), "l"(b), "r"(accumulate), "n"(TRANSPOSE_B));                                         \
        }                                                                                                              \
    };
#define SDACCEL_WGMMA(N, REGISTERS, A, B, ACCUMULATE, TB, ...)                                          \
    SDACCEL_WGMMA_OF(half_t, "f16", N, REGISTERS, A, B, ACCUMULATE, TB, __VA_ARGS__)                    \
    SDACCEL_WGMMA_OF(bf16_t, "bf16", N, REGISTERS, A, B, ACCUMULATE, TB, __VA_ARGS__)

SDACCEL_WGMMA(32, SDACCEL_R0, "%16", "%17", "%18", "%19", SDACCEL_F16(0))
SDACCEL_WGMMA(64, SDACCEL_R0 SDACCEL_R1, "%32", "%33", "%34", "%35", SDACCEL_F16(0), SDACCEL_F16(16))
SDACCEL_WGMMA(96, SDACCEL_R0 SDACCEL_R1 SDACCEL_R2, "%48", "%49", "%50", "%51",
              SDACCEL_F16(0), SDACCEL_F16(16), SDACCEL_F16(32))
SDACCEL_WGMMA(128, SDACCEL_R0 SDACCEL_R1 SDACCEL_R2 SDACCEL_R3, "%64", "%65", "%66", "%67",
              SDACCEL_F16(0), SDACCEL_F16(16), SDACCEL_F16(32), SDACCEL_F16(48))
SDACCEL_WGMMA(160, SDACCEL_R0 SDACCEL_R1 SDACCEL_R2 SDACCEL_R3 SDACCEL_R4, "%80", "%81", "%82", "%83",
              SDACCEL_F16(0), SDACCEL_F16(16), SDACCEL_F16(32), SDACCEL_F16(48), SDACCEL_F16(64))
SDACCEL_WGMMA(192, SDACCEL_R0 SDACCEL_R1 SDACCEL_R2 SDACCEL_R3 SDACCEL_R4 SDACCEL_R5, "%96", "%97", "%98", "%99",
              SDACCEL_F16(0), SDACCEL_F16(16), SDACCEL_F16(32), SDACCEL_F16(48), SDACCEL_F16(64), SDACCEL_F16(80))
SDACCEL_WGMMA(224, SDACCEL_R0 SDACCEL_R1 SDACCEL_R2 SDACCEL_R3 SDACCEL_R4 SDACCEL_R5 SDACCEL_R6,
              "%112", "%113", "%114", "%115",
              SDACCEL_F16(0), SDACCEL_F16(16), SDACCEL_F16(32), SDACCEL_F16(48), SDACCEL_F16(64), SDACCEL_F16(80),
              SDACCEL_F16(96))
SDACCEL_WGMMA(256, SDACCEL_R0 SDACCEL_R1 SDACCEL_R2 SDACCEL_R3 SDACCEL_R4 SDACCEL_R5 SDACCEL_R6 SDACCEL_R7,
              "%128", "%129", "%130", "%131",
              SDACCEL_F16(0), SDACCEL_F16(16), SDACCEL_F16(32), SDACCEL_F16(48), SDACCEL_F16(64), SDACCEL_F16(80),
              SDACCEL_F16(96), SDACCEL_F16(112))

}  // namespace hopper
