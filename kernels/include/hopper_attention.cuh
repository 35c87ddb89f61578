// What attention on sm_90a needs beside hopper.cuh: products whose first operand is in registers, values with keys as rows
// as a second operand, more widths, and boxes from shared memory to the tensor.
#pragma once

#include "hopper.cuh"

namespace hopper {

// B[N, 16] with N innermost: rows of 64 columns (128 bytes, 128-byte swizzle) for each k, eight rows every 1024 bytes, the
// next 64 columns `next` bytes further on. Steps of 16 rows add 2048 >> 4.
SDACCEL_DEVICE uint64_t descriptor_of_rows(uint32_t shared, uint32_t next) {
    return uint64_t((shared & 0x3ffffu) >> 4) | uint64_t(next >> 4) << 16 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}

// D[64, N] (+)= A[64, 16] B[N, 16]^T: A in registers as mma_16816 has it (warp w of the warpgroup holds rows 16 w to
// 16 w + 15), B in shared memory with N innermost.
template <typename U, int N>
struct WgmmaOfRows;

#define SDACCEL_F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])

#define SDACCEL_WGMMA_OF_ROWS_AS(U, TYPE, N, REGISTERS, A, B, ACCUMULATE, ...)                                           \
    template <>                                                                                                        \
    struct WgmmaOfRows<U, N> {                                                                                         \
        static __device__ __forceinline__ void mma(float (&d)[N / 2], const uint32_t* a, uint64_t b, int accumulate) { \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ACCUMULATE ", 0;\n"                                       \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" REGISTERS "}, {" A "}, " \
                         B ", p, 1, 1, 1;\n}"                                                                          \
                         : __VA_ARGS__                                                                                 \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)                         \
                         : "memory");                                                                                  \
        }                                                                                                              \
    };
#define SDACCEL_WGMMA_OF_ROWS(N, REGISTERS, A, B, ACCUMULATE, ...)                                 \
    SDACCEL_WGMMA_OF_ROWS_AS(half_t, "f16", N, REGISTERS, A, B, ACCUMULATE, __VA_ARGS__)           \
    SDACCEL_WGMMA_OF_ROWS_AS(bf16_t, "bf16", N, REGISTERS, A, B, ACCUMULATE, __VA_ARGS__)

SDACCEL_WGMMA_OF_ROWS(40, SDACCEL_R0 ",%16,%17,%18,%19", "%20,%21,%22,%23", "%24", "%25", SDACCEL_F16(0), SDACCEL_F4(16))
SDACCEL_WGMMA_OF_ROWS(64, SDACCEL_R0 SDACCEL_R1, "%32,%33,%34,%35", "%36", "%37", SDACCEL_F16(0), SDACCEL_F16(16))
SDACCEL_WGMMA_OF_ROWS(80, SDACCEL_R0 SDACCEL_R1 ",%32,%33,%34,%35,%36,%37,%38,%39", "%40,%41,%42,%43", "%44", "%45",
                      SDACCEL_F16(0), SDACCEL_F16(16), SDACCEL_F8(32))
SDACCEL_WGMMA_OF_ROWS(160, SDACCEL_R0 SDACCEL_R1 SDACCEL_R2 SDACCEL_R3 SDACCEL_R4, "%80,%81,%82,%83", "%84", "%85",
                      SDACCEL_F16(0), SDACCEL_F16(16), SDACCEL_F16(32), SDACCEL_F16(48), SDACCEL_F16(64))

SDACCEL_WGMMA(80, SDACCEL_R0 SDACCEL_R1 ",%32,%33,%34,%35,%36,%37,%38,%39", "%40", "%41", "%42", "%43", SDACCEL_F16(0),
              SDACCEL_F16(16), SDACCEL_F8(32))
SDACCEL_WGMMA(240, SDACCEL_R0 SDACCEL_R1 SDACCEL_R2 SDACCEL_R3 SDACCEL_R4 SDACCEL_R5 SDACCEL_R6
              ",%112,%113,%114,%115,%116,%117,%118,%119", "%120", "%121", "%122", "%123",
              SDACCEL_F16(0), SDACCEL_F16(16), SDACCEL_F16(32), SDACCEL_F16(48), SDACCEL_F16(64), SDACCEL_F16(80),
              SDACCEL_F16(96), SDACCEL_F8(112))

// ---- from shared memory to the tensor -----------------------------------------------------------------------------------

SDACCEL_DEVICE void store_shared(uint32_t shared, uint32_t x) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared), "r"(x) : "memory");
}

// What lies outside of the tensor is left out.
SDACCEL_DEVICE void store_box(const TensorMap& map, uint32_t from, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
                 "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
}

SDACCEL_DEVICE void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until this thread's stores have read shared memory.
SDACCEL_DEVICE void stores_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

}  // namespace hopper
