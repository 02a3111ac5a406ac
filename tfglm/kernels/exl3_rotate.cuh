// The 128-wide Hadamard rotation of EXL3 on one warp, and the SwiGLU between the two rotations of an expert.
#pragma once
#include "half.cuh"

constexpr int BLOCK = 128;  // columns that one rotation mixes
constexpr float ROTATION_SCALE = 0.08838834764831845f;  // 1 / sqrt(128)

// v: columns 4 * lane .. + 3 of a block -> the same columns of the rotated block.
__device__ __forceinline__ void rotate(float (&v)[4], int lane) {
    const float a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];
    v[0] = a + c, v[1] = b + d, v[2] = a - c, v[3] = b - d;
#pragma unroll
    for (int step = 1; step < 32; step *= 2)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float other = __shfl_xor_sync(FULL, v[i], step);
            v[i] = lane & step ? other - v[i] : v[i] + other;
        }
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] *= ROTATION_SCALE;
}

__device__ __forceinline__ void scale_by_half4(float (&v)[4], const u16* scale) {
    const uint2 s = *reinterpret_cast<const uint2*>(scale);
    v[0] *= half_low(s.x), v[1] *= half_high(s.x), v[2] *= half_low(s.y), v[3] *= half_high(s.y);
}

// Gate and up in the model's basis -> rotated fp16 input of down, 4 columns a lane of one block. The model rounds gate, up,
// silu and the product to bf16 each.
__device__ __forceinline__ uint2 activate(const float (&gate)[4], const float (&up)[4], const u16* down_suh, int lane) {
    float h[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float g = bf16_round(gate[i]);
        h[i] = bf16_round(bf16_round(g / (1.0f + expf(-g))) * bf16_round(up[i]));
    }
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
