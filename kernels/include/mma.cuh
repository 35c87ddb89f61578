// Tensor cores of sm_80 and later as one warp sees them: mma.sync, ldmatrix, cp.async.
//
// With g = lane / 4 and t = lane % 4 a thread holds of a 16 x 16 A: {A[g][2t..], A[g+8][2t..], A[g][2t+8..], A[g+8][2t+8..]},
// of a 16 x 8 B: {B[2t..][g], B[2t+8..][g]} (pairs along k), of a 16 x 8 C: C[g][2t], C[g][2t+1], C[g+8][2t], C[g+8][2t+1].
#pragma once

#include "numeric.cuh"

SDACCEL_DEVICE uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

// c += a b, k = 16, float32 sums of 16-bit products.
template <typename U>
SDACCEL_DEVICE void mma_16816(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    if constexpr (same_type<U, half_t>::value)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                     "{%0, %1, %2, %3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                     "{%0, %1, %2, %3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// c += a b, k = 8: a0 is row g, a1 row g + 8.
template <typename U>
SDACCEL_DEVICE void mma_1688(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
    if constexpr (same_type<U, half_t>::value)
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a0), "r"(a1), "r"(b0));
    else
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a0), "r"(a1), "r"(b0));
}

// Four 8 x 8 matrices; lane l gives the shared address of row l % 8 of matrix l / 8 (16 bytes, aligned).
SDACCEL_DEVICE void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

SDACCEL_DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// Two matrices, addressed by lanes 0 to 15.
SDACCEL_DEVICE void ldmatrix_x2_trans(uint32_t (&r)[2], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(address)
                 : "memory");
}

// 16 bytes from global to shared memory behind the thread's back; zeros when `valid` is false (`source` must still be
// an address of the tensor).
SDACCEL_DEVICE void cp_async_16(uint32_t destination, const void* source, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(valid ? 16 : 0)
                 : "memory");
}

SDACCEL_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most N of this thread's groups are in flight.
template <int N>
SDACCEL_DEVICE void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Over the four lanes of a row of C.
SDACCEL_DEVICE float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

SDACCEL_DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
