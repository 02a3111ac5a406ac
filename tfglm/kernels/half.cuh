// fp16 pairs, bit tricks and launch order: named PTX that the EXL3 kernels need besides ptx.cuh.
#pragma once
#include "ptx.cuh"

typedef long long i64;

constexpr u32 FULL = 0xFFFFFFFFu;  // every lane of the warp

// ---- fp16: one in a u16, a pair in a u32 with the first element in the low half; each operation rounds once

__device__ __forceinline__ u32 half2_sub(u32 a, u32 b) { u32 d; asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
__device__ __forceinline__ u32 half2_min(u32 a, u32 b) { u32 d; asm("min.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
__device__ __forceinline__ u32 half2_fma(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
// a * b + c with c one half of `word`, the same for both results
__device__ __forceinline__ u32 half2_fma_one(u32 a, u32 b, u32 word, bool high) {
    return half2_fma(a, b, __byte_perm(word, 0, high ? 0x3232 : 0x1010));
}
// 0xFFFF in each half where a < b
__device__ __forceinline__ u32 half2_less(u32 a, u32 b) {
    u32 d;
    asm("set.lt.u32.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ u32 half_pair(float low, float high) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
__device__ __forceinline__ float half_float(u16 h) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h)); return f; }
__device__ __forceinline__ float half_low(u32 pair) { return half_float(pair & 0xFFFF); }
__device__ __forceinline__ float half_high(u32 pair) { return half_float(pair >> 16); }
__device__ __forceinline__ u16 half_bits(float f) { u16 h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f)); return h; }

// ---- bits

// (a & mask) ^ flip in one instruction
__device__ __forceinline__ u32 and_xor(u32 a, u32 mask, u32 flip) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(d) : "r"(a), "r"(mask), "r"(flip));
    return d;
}
// mask ? a : b, bit by bit
__device__ __forceinline__ u32 select_bits(u32 mask, u32 a, u32 b) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(d) : "r"(mask), "r"(a), "r"(b));
    return d;
}

// ---- shared memory by address

__device__ __forceinline__ u32 load_shared(u32 address) {
    u32 d;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(d) : "r"(address) : "memory");
    return d;
}

// 16 bytes global -> shared past L1
__device__ __forceinline__ void cp_async_16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// As ldmatrix_x4 of ptx.cuh.
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// ---- order between kernels of a stream (both are no-ops below sm_90)

// Wait for the kernels before this one; needed only in kernels launched with overlap.
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Let the next kernel of the stream start launching.
__device__ __forceinline__ void let_successor_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
