// Numbers for all kernels: fixed-width integers, 16-bit floats, vectors of eight, reductions, activations, dependent launch.
// The element type of a kernel is the macro SDACCEL_T (half_t or bf16_t); `T` names it. Needs no CUDA headers.
//
// Rule for dependent launch (pdl_wait): pointers to what an earlier kernel writes must not be `const __restrict__`,
// or the compiler may move their loads in front of the wait. Weights may be.
#pragma once

typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;

#define SDACCEL_DEVICE static __device__ __forceinline__
#define SDACCEL_INFINITY __int_as_float(0x7f800000)

template <typename A, typename B>
struct same_type {
    static constexpr bool value = false;
};
template <typename A>
struct same_type<A, A> {
    static constexpr bool value = true;
};

// ---- 16-bit floats: storage only, arithmetic is in float32 ----------------------------------------------------------

struct half_t {
    uint16_t bits;
};

struct bf16_t {
    uint16_t bits;
};

SDACCEL_DEVICE float to_float(float x) { return x; }

SDACCEL_DEVICE float to_float(half_t x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

SDACCEL_DEVICE float to_float(bf16_t x) { return __uint_as_float(uint32_t(x.bits) << 16); }

// from_float<U>(x): round to nearest even.
template <typename U>
SDACCEL_DEVICE U from_float(float x);

template <>
__device__ __forceinline__ float from_float<float>(float x) {
    return x;
}

template <>
__device__ __forceinline__ half_t from_float<half_t>(float x) {
    half_t y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

template <>
__device__ __forceinline__ bf16_t from_float<bf16_t>(float x) {
    bf16_t y;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
    uint32_t bits = __float_as_uint(x);
    y.bits = x != x ? uint16_t(0x7fff) : uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
    return y;
}

// pack<U>(low, high): two rounded values in one register, `low` in the lower half as memory has them.
template <typename U>
SDACCEL_DEVICE uint32_t pack(float low, float high) {
#if __CUDA_ARCH__ >= 800
    uint32_t y;
    if constexpr (same_type<U, half_t>::value)
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    else
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
#else
    return uint32_t(from_float<U>(low).bits) | uint32_t(from_float<U>(high).bits) << 16;
#endif
}

template <typename U>
SDACCEL_DEVICE void unpack(uint32_t x, float& low, float& high) {
    low = to_float(U{uint16_t(x & 0xffffu)});
    high = to_float(U{uint16_t(x >> 16)});
}

// ---- vectors of eight: 16 bytes ------------------------------------------------------------------------------------

template <typename U>
struct alignas(16) Vec8 {
    U v[8];
};

// Raw 16-byte accesses; `p` must be 16-byte aligned.
SDACCEL_DEVICE uint4 load16(const void* p) { return *reinterpret_cast<const uint4*>(p); }
SDACCEL_DEVICE void store16(void* p, uint4 x) { *reinterpret_cast<uint4*>(p) = x; }

// Read once: does not displace what L1 holds and leaves L2 first.
SDACCEL_DEVICE uint4 load16_streaming(const void* p) {
    uint4 x;
    asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p));
    return x;
}

// Written and not read again soon: leaves L2 first.
SDACCEL_DEVICE void store16_streaming(void* p, uint4 x) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}

template <typename U>
SDACCEL_DEVICE void unpack8(uint4 x, float (&y)[8]) {
    unpack<U>(x.x, y[0], y[1]);
    unpack<U>(x.y, y[2], y[3]);
    unpack<U>(x.z, y[4], y[5]);
    unpack<U>(x.w, y[6], y[7]);
}

template <typename U>
SDACCEL_DEVICE uint4 pack8(const float (&x)[8]) {
    return make_uint4(pack<U>(x[0], x[1]), pack<U>(x[2], x[3]), pack<U>(x[4], x[5]), pack<U>(x[6], x[7]));
}

// Eight 16-bit elements as floats, and back.
template <typename U>
SDACCEL_DEVICE void load8(const U* p, float (&y)[8]) {
    unpack8<U>(load16(p), y);
}

template <typename U>
SDACCEL_DEVICE void store8(U* p, const float (&x)[8]) {
    store16(p, pack8<U>(x));
}

template <typename U>
SDACCEL_DEVICE Vec8<U> load_vec8(const U* p) {
    return *reinterpret_cast<const Vec8<U>*>(p);
}

template <typename U>
SDACCEL_DEVICE void store_vec8(U* p, const Vec8<U>& x) {
    *reinterpret_cast<Vec8<U>*>(p) = x;
}

#ifdef SDACCEL_T
using T = SDACCEL_T;
#endif

// ---- reductions: every thread gets the result ----------------------------------------------------------------------

SDACCEL_DEVICE float warp_sum(float x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask >>= 1) x += __shfl_xor_sync(0xffffffffu, x, mask);
    return x;
}

SDACCEL_DEVICE float warp_max(float x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, mask));
    return x;
}

// threads: a multiple of 32, at most 1024, one-dimensional block, all threads call. `scratch`: 32 floats of shared memory,
// free again when the call returns.
template <int threads>
SDACCEL_DEVICE float block_sum(float x, float* scratch) {
    x = warp_sum(x);
    if constexpr (threads > 32) {
        const int lane = threadIdx.x % 32;
        if (lane == 0) scratch[threadIdx.x / 32] = x;
        __syncthreads();
        x = warp_sum(lane < threads / 32 ? scratch[lane] : 0.0f);
        __syncthreads();
    }
    return x;
}

template <int threads>
SDACCEL_DEVICE float block_max(float x, float* scratch) {
    x = warp_max(x);
    if constexpr (threads > 32) {
        const int lane = threadIdx.x % 32;
        if (lane == 0) scratch[threadIdx.x / 32] = x;
        __syncthreads();
        x = warp_max(lane < threads / 32 ? scratch[lane] : -SDACCEL_INFINITY);
        __syncthreads();
    }
    return x;
}

// ---- activations ----------------------------------------------------------------------------------------------------

// One instruction each, for normal results: relative error 2^-22.
SDACCEL_DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

SDACCEL_DEVICE float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

SDACCEL_DEVICE float exp_approx(float x) { return exp2_approx(1.4426950409f * x); }

SDACCEL_DEVICE float sigmoid(float x) { return reciprocal_approx(1.0f + exp_approx(-x)); }

SDACCEL_DEVICE float silu(float x) { return x * sigmoid(x); }

// With one reciprocal for both: the special function unit is what limits a norm. Below -41 the sigmoid is 2^-60, not less.
SDACCEL_DEVICE void silu_of_two(float& x, float& y) {
    const float a = 1.0f + exp2_approx(fminf(-1.4426950409f * x, 60.0f));
    const float b = 1.0f + exp2_approx(fminf(-1.4426950409f * y, 60.0f));
    const float inverse = reciprocal_approx(a * b);
    x *= inverse * b;
    y *= inverse * a;
}

// x * Phi(x), by the error function itself (not the tanh approximation): Abramowitz and Stegun 7.1.26. Within 4e-7 of the
// exact value, which is nearer than x * (1 + erf(x / sqrt 2)) / 2 in float32 comes, at half the instructions of erff.
SDACCEL_DEVICE float gelu(float x) {
    const float size = fabsf(x), z = size * 0.70710678f;
    const float t = reciprocal_approx(fmaf(0.3275911f, z, 1.0f));
    float tail = 0.5307027145f;  // half of erfc(z) / (t exp(-z z)), a polynomial in t
    tail = fmaf(tail, t, -0.7265760135f);
    tail = fmaf(tail, t, 0.7107068705f);
    tail = fmaf(tail, t, -0.142248368f);
    tail = fmaf(tail, t, 0.127414796f);
    return fmaf(-size * t, tail * exp_approx(-z * z), fmaxf(x, 0.0f));
}

// x * sigmoid(1.702 x), CLIP's.
SDACCEL_DEVICE float quick_gelu(float x) { return x * sigmoid(1.702f * x); }

// ---- programmatic dependent launch; without it, or below sm_90, both do nothing -------------------------------------

// Blocks until the kernels before this one have finished and their writes are visible.
SDACCEL_DEVICE void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel start its part before its own pdl_wait(). Call it early: the wait still covers all our writes.
SDACCEL_DEVICE void pdl_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
