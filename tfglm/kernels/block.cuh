// Sums, maxima and prefix sums over a block in an order that depends on the block's size alone.
#pragma once
#include "ptx.cuh"

constexpr int MAX_WARPS = 32;

// Every thread gets the sum: lanes by butterfly, then warps likewise.
__device__ __forceinline__ float block_sum(float x) {
    __shared__ float of_warp[MAX_WARPS];
    const int lane = threadIdx.x % 32;
    x = warp_sum(x);
    __syncthreads();  // an earlier call may still be read
    if (lane == 0) of_warp[threadIdx.x / 32] = x;
    __syncthreads();
    return warp_sum(lane < static_cast<int>(blockDim.x) / 32 ? of_warp[lane] : 0.0f);
}

__device__ __forceinline__ float block_max(float x) {
    __shared__ float of_warp[MAX_WARPS];
    const int lane = threadIdx.x % 32;
    x = warp_max(x);
    __syncthreads();
    if (lane == 0) of_warp[threadIdx.x / 32] = x;
    __syncthreads();
    return warp_max(of_warp[lane < static_cast<int>(blockDim.x) / 32 ? lane : 0]);
}

// Sum of x over lower threads; `total` gets the block's sum.
__device__ __forceinline__ u32 block_scan(u32 x, u32& total) {
    __shared__ u32 of_warp[MAX_WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 inclusive = x;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        const u32 below = __shfl_up_sync(0xffffffffu, inclusive, step);
        if (lane >= step) inclusive += below;
    }
    __syncthreads();
    if (lane == 31) of_warp[warp] = inclusive;
    __syncthreads();
    u32 before = 0, all = 0;
    for (int w = 0; w < static_cast<int>(blockDim.x) / 32; w++) {
        if (w < warp) before += of_warp[w];
        all += of_warp[w];
    }
    total = all;
    return before + inclusive - x;
}
