// What the kernels of dense linear layers share: out [R, N] = x [R, K] . W [N, K]^T, and batches of them (one matrix a head).
//
// x bfloat16 with row stride ldx (a multiple of 8), W in the format that WEIGHT names (weights.cuh), out bfloat16 or float32.
// The sum over K is cut into `slices` equal parts of whole 64 columns; each part is added up by matrix instructions in order,
// the parts then in order in float32. The number of slices depends on K alone (ops/cuda_linear.py), so an output's bits depend
// on its row of x and its row of W and on nothing else: not on R, and not on which kernel computed it.
#pragma once
#include "weights.cuh"

constexpr int MAX_SLICES = 8;
constexpr int COLUMNS = 64;  // of a piece

struct Matrix {
    const u8* data;      // pieces, or bf16 rows
    const u32* scales;   // groups (q4, q6, q8) or row scales (fp8)
    int rows, columns;   // N, K
};

__device__ __forceinline__ int slice_columns(int columns, int slices) {
    const int pieces = (columns + COLUMNS - 1) / COLUMNS;
    return (pieces + slices - 1) / slices * COLUMNS;
}

__device__ __forceinline__ float row_factor(const Matrix& w, int row) {
#if WEIGHT == 1
    return __uint_as_float(w.scales[row]);
#else
    return 1.0f;
#endif
}

// Rows of 128 bytes; flipping the half by the row's parity keeps the reads of two neighbouring rows in different banks.
__device__ __forceinline__ int swizzled(int row, int chunk) { return row * 128 + ((chunk ^ ((row & 1) << 2)) << 4); }

// A lane's part of a piece in shared memory: pieces (or, of bf16, swizzled rows) one after another, and their scales.
__device__ __forceinline__ RawPiece shared_piece(const u8* w, const u8* scales, int piece, int lane) {
    RawPiece raw;
    const int g = lane / 4, t = lane % 4;
#if WEIGHT == 0
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int part = 0; part < 2; part++)
            raw.row[half][part] =
                *reinterpret_cast<const uint4*>(w + swizzled(piece * 16 + half * 8 + g, part * 4 + t));
#else
    const u8* at = w + piece * PIECE_BYTES;
#if WEIGHT == 2 || WEIGHT == 3
    raw.codes = *reinterpret_cast<const uint4*>(at + lane * 16);
#if WEIGHT == 3
    raw.high = *reinterpret_cast<const uint2*>(at + 512 + lane * 8);
#endif
#else
    raw.codes[0] = *reinterpret_cast<const uint4*>(at + lane * 16);
    raw.codes[1] = *reinterpret_cast<const uint4*>(at + 512 + lane * 16);
#endif
#if WEIGHT >= 2
    raw.scale[0] = *reinterpret_cast<const u32*>(scales + (piece * 16 + g) * 4);
    raw.scale[1] = *reinterpret_cast<const u32*>(scales + (piece * 16 + g + 8) * 4);
#endif
#endif
    return raw;
}

__device__ __forceinline__ void store_value(void* out, long long at, float value, int as_float) {
    if (as_float)
        static_cast<float*>(out)[at] = value;
    else
        static_cast<u16*>(out)[at] = bf16_bits(value);
}
