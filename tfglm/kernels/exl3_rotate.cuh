// The 128-wide Hadamard rotation of EXL3 on one warp, and the SwiGLU between the two rotations of an expert.
#pragma once
#include "half.cuh"

constexpr int BLOCK = 128;  // columns that one rotation mixes
constexpr float ROTATION_SCALE = 0.08838834764831845f;  // 1 / sqrt(128)

// One step of the butterfly over lanes: the partner `step` away holds the other term.
__device__ __forceinline__ float butterfly(float own, int step, float sign) {
    return fmaf(own, sign, __shfl_xor_sync(FULL, own, step));  // own + other, or other - own: one rounding
}

// LANES neighbouring lanes share a block; v[i]: columns 4 * (LANES * i + q) .. + 3 of it, q = lane % LANES -> the same
// columns of the rotated block.
template <int LANES> __device__ __forceinline__ void rotate(float (&v)[32 / LANES][4], int lane) {
    constexpr int RUNS = 32 / LANES;
#pragma unroll
    for (int i = 0; i < RUNS; ++i) {
        const float a = v[i][0] + v[i][1], b = v[i][0] - v[i][1], c = v[i][2] + v[i][3], d = v[i][2] - v[i][3];
        v[i][0] = a + c, v[i][1] = b + d, v[i][2] = a - c, v[i][3] = b - d;
    }
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) {
        const float sign = lane & step ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < RUNS; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) v[i][j] = butterfly(v[i][j], step, sign);
    }
#pragma unroll
    for (int step = 1; step < RUNS; step *= 2)
#pragma unroll
        for (int i = 0; i < RUNS; ++i)
            if ((i & step) == 0)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float low = v[i][j], high = v[i | step][j];
                    v[i][j] = low + high, v[i | step][j] = low - high;
                }
#pragma unroll
    for (int i = 0; i < RUNS; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) v[i][j] *= ROTATION_SCALE;
}

// A block spread over the whole warp: v = columns 4 * lane .. + 3.
__device__ __forceinline__ void rotate(float (&v)[4], int lane) { rotate<32>(reinterpret_cast<float(&)[1][4]>(v), lane); }

__device__ __forceinline__ void scale_by_half4(float (&v)[4], const u16* scale) {
    const uint2 s = *reinterpret_cast<const uint2*>(scale);
    v[0] *= half_low(s.x), v[1] *= half_high(s.x), v[2] *= half_low(s.y), v[3] *= half_high(s.y);
}

// silu(gate) * up; the model rounds gate, up, silu and the product to bf16 each.
__device__ __forceinline__ float swiglu_bf16(float gate, float up) {
    const float g = bf16_round(gate);
    // The fast exponential and division err by a few units of fp32, bf16 keeps 8 bits.
    return bf16_round(bf16_round(__fdividef(g, 1.0f + __expf(-g))) * bf16_round(up));
}

// Gate and up in the model's basis -> rotated fp16 input of down, 4 columns a lane of one block.
__device__ __forceinline__ uint2 activate(const float (&gate)[4], const float (&up)[4], const u16* down_suh, int lane) {
    float h[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) h[i] = swiglu_bf16(gate[i], up[i]);
    scale_by_half4(h, down_suh);
    rotate(h, lane);
    return {half_pair(h[0], h[1]), half_pair(h[2], h[3])};
}

// The same from the sums of gate and up in the rotated basis.
__device__ __forceinline__ uint2 swiglu(float (&gate)[4], float (&up)[4], const u16* gate_svh, const u16* up_svh,
                                        const u16* down_suh, int lane) {
    rotate(gate, lane);
    rotate(up, lane);
    scale_by_half4(gate, gate_svh);
    scale_by_half4(up, up_svh);
    return activate(gate, up, down_suh, lane);
}

// Rows of the decode kernels lie in fragment order: of each 16 inputs, lane c of a quad finds inputs 2c, 2c+1, 2c+8,
// 2c+9 side by side. Stores columns 4 * lane .. + 3 of a block at `row` (fp16, start of the block).
__device__ __forceinline__ void store_fragment_order(u16* row, uint2 four, int lane) {
    u16* tile = row + lane / 4 * 16 + lane % 4 / 2 * 2;  // inputs 8..15 come second in each lane's four
    *reinterpret_cast<u32*>(tile + lane % 2 * 8) = four.x;
    *reinterpret_cast<u32*>(tile + lane % 2 * 8 + 4) = four.y;
}
