// Tiny named wrappers around the PTX instructions that the kernels use, and the number conversions that go with them.
// Portable set: sm_89, sm_90, sm_120, sm_121 (mma.sync, ldmatrix, cp.async). No CUDA header is needed, so NVRTC compiles this alone.
//
// Fragments of mma.m16n8k16 (PTX ISA, "Matrix Fragments for mma.m16n8k16"); g = lane / 4, t = lane % 4:
//   A [16, 16]: a0 (g, 2t..2t+1)  a1 (g+8, 2t..)  a2 (g, 2t+8..)  a3 (g+8, 2t+8..)
//   B [16, 8]:  b0 (k 2t..2t+1, n g)  b1 (k 2t+8.., n g)
//   C [16, 8]:  c0 (g, 2t)  c1 (g, 2t+1)  c2 (g+8, 2t)  c3 (g+8, 2t+1)
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// ---- matrix instructions

// d += a . b in float32, a and b bfloat16.
__device__ __forceinline__ void mma_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Same with float16 operands.
__device__ __forceinline__ void mma_f16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ u32 shared_address(const void* p) {
    return static_cast<u32>(__cvta_generic_to_shared(p));
}

// Four 8x8 matrices of 16-bit values; lane i gives the row address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// ---- asynchronous copies to shared memory

// 16 bytes past L1; where `take` is false the destination is zeroed and the source is not read.
__device__ __forceinline__ void cp_async_16(void* to, const void* from, bool take = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(take ? 16 : 0)
                 : "memory");
}

// The same to a shared address; where `take` is false nothing happens.
__device__ __forceinline__ void cp_async_16_if(u32 to, const void* from, bool take = true) {
    asm volatile("{.reg .pred take; setp.ne.u32 take, %2, 0; @take cp.async.cg.shared.global [%0], [%1], 16;}" ::"r"(to), "l"(from),
                 "r"(static_cast<u32>(take))
                 : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `pending` of this thread's newest groups are unfinished.
template <int pending>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// ---- chains of kernels (programmatic dependent launch; nothing happens below sm_90)
//
// A kernel launched with `overlap` starts while its predecessor still runs. Every block of every such kernel must pass grid_wait
// before it touches what other kernels write or read, and before it ends; then all that came earlier has ended too, because the
// predecessor waited likewise.

// Lets the next kernel start once every block of this one has come here.
__device__ __forceinline__ void grid_release() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the kernels before this one have ended.
__device__ __forceinline__ void grid_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void chain_start() {
    grid_release();
    grid_wait();
}

// ---- bfloat16 as raw bits: one in a u16, a pair in a u32 with the first element in the low half

__device__ __forceinline__ float bf16_float(u16 x) { return __uint_as_float(static_cast<u32>(x) << 16); }
__device__ __forceinline__ float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// Round to nearest even.
__device__ __forceinline__ u32 bf16_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ u16 bf16_bits(float x) { return static_cast<u16>(bf16_pair(x, 0.0f)); }
__device__ __forceinline__ float bf16_round(float x) { return bf16_float(bf16_bits(x)); }

// a * b + c on both halves, one rounding each; subnormals are kept.
__device__ __forceinline__ u32 bf16_fma2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
__device__ __forceinline__ u32 bf16_mul2(u32 a, u32 b) { return bf16_fma2(a, b, 0x80008000u); }

// ---- exact reads of memory that other kernels wrote, without touching L1 (weights are read once)

__device__ __forceinline__ uint4 load_once(const void* p) {
    uint4 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

// ---- numbers

// 2^x; what is below 2^-126 becomes zero.
__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ---- reductions in a fixed order

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

// Through one instruction on integers whose order is that of the floats; x is no NaN.
__device__ __forceinline__ float warp_max(float x) {
    const int bits = __float_as_int(x);
    const int top = __reduce_max_sync(0xffffffffu, bits ^ ((bits >> 31) & 0x7fffffff));
    return __int_as_float(top ^ ((top >> 31) & 0x7fffffff));
}
