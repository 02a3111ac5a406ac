// Narrow numbers to bfloat16 pairs, exactly. A code's exponent and mantissa bits are moved into a bfloat16's, which leaves a number
// that is right but for the difference of the two exponent biases; one multiplication by a power of two repairs that, also for
// subnormal codes (tests/gpu prove every code on the device).
#pragma once
#include "ptx.cuh"

// Two e4m3 codes, at bits 0 and 16 of `pair`.
__device__ __forceinline__ u32 e4m3_pair(u32 pair) {
    return bf16_mul2(((pair & 0x00800080u) << 8) | ((pair & 0x007f007fu) << 4), 0x7b807b80u);  // 2^(127 - 7)
}

// Two e2m1 codes, at bits 0 and 16.
__device__ __forceinline__ u32 e2m1_pair(u32 pair) {
    return bf16_mul2(((pair & 0x00080008u) << 12) | ((pair & 0x00070007u) << 6), 0x7e807e80u);  // 2^(127 - 1)
}

// Four neighbouring bytes as two such pairs.
__device__ __forceinline__ u32 low_bytes(u32 word) { return __byte_perm(word, 0, 0x4140); }
__device__ __forceinline__ u32 high_bytes(u32 word) { return __byte_perm(word, 0, 0x4342); }

// Two e4m3 codes, each in the high byte of a half, to bfloat16 bits that are too small by 2^120.
__device__ __forceinline__ u32 e4m3_bits(u32 highs) { return (highs & 0x80008000u) | ((highs >> 4) & 0x07f007f0u); }

// Four neighbouring bytes as two pairs of high bytes.
__device__ __forceinline__ u32 low_highs(u32 word) { return __byte_perm(word, 0, 0x1404); }
__device__ __forceinline__ u32 high_highs(u32 word) { return __byte_perm(word, 0, 0x3424); }

__device__ __forceinline__ u32 both_halves(u32 low) { return __byte_perm(low, 0, 0x1010); }
__device__ __forceinline__ u32 both_highs(u32 high) { return __byte_perm(high, 0, 0x3232); }
