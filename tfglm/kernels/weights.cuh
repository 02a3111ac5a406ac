// Weight matrices [N, K] as bfloat16 fragments of mma.m16n8k16, for every format a dense weight is kept in.
//
// A piece is 16 rows by 64 columns. Lane (g, t) = (lane / 4, lane % 4) holds, of rows g and g + 8, the 16 columns
//   column(i) = (i / 8) * 32 + t * 8 + i % 8,  i = 0..15
// and matrix step s = 0..3 multiplies the lanes' columns i = 4s..4s+3. A sum over columns may be taken in any order, so
// activations are read in the same order (two 16-byte loads a lane) and neither side is shuffled. Decode and prompt kernels
// share this order, which makes their results equal bit for bit.
//
// WEIGHT: 0 bf16, row-major [N, K], K a multiple of 8
//         1 fp8:  pieces of 1024 bytes [row half][lane][16 codes], one float32 scale a row
//         2 q4:   pieces of 512 bytes [lane][row half][8 bytes]
//         3 q6:   pieces of 768 bytes: q4's for the low four bits, then [lane][row half][4 bytes] for the high two
//         4 q8:   pieces of 1024 bytes as fp8
// Pieces are ordered [N / 16][K / 64]; N and K are padded to whole pieces. q4, q6, q8: value = bf16(scale * code + bias) with a
// bf16 pair (scale, bias) for each row and 64 columns, [N / 16][K / 64][16]. tfglm/formats/groups.py packs all of these.
#pragma once
#include "narrow.cuh"

#ifndef WEIGHT
#define WEIGHT 0
#endif

#if WEIGHT == 0
constexpr int PIECE_BYTES = 2048;
#elif WEIGHT == 2
constexpr int PIECE_BYTES = 512;
#elif WEIGHT == 3
constexpr int PIECE_BYTES = 768;
#else
constexpr int PIECE_BYTES = 1024;
#endif
constexpr bool GROUPED_SCALES = WEIGHT >= 2;

// What a lane reads of one piece, before it becomes numbers.
struct RawPiece {
#if WEIGHT == 0
    uint4 row[2][2];  // [row half][column half]
#elif WEIGHT == 2
    uint4 codes;  // row g: x, y; row g + 8: z, w
#elif WEIGHT == 3
    uint4 codes;
    uint2 high;
#else
    uint4 codes[2];
#endif
#if WEIGHT >= 2
    u32 scale[2];
#endif
};

// matrix[s]: the A operand of matrix step 2 * part + s.
struct Fragments {
    u32 matrix[2][4];
};

// 0x4300 is 128 in bfloat16 and its mantissa counts ones: or-ing a number below 128 into it adds that number exactly.
constexpr u32 BF16_128 = 0x43004300u;
constexpr u32 BF16_MINUS_128 = 0xc300c300u;
constexpr u32 BF16_ONE = 0x3f803f80u;
constexpr u32 BF16_MINUS_ONE = 0xbf80bf80u;

#if WEIGHT == 2 || WEIGHT == 3
// Two codes below 128 (one in each half) to scale * code + bias.
__device__ __forceinline__ u32 small_codes(u32 pair, u32 scale2, u32 bias2) {
    const u32 code = bf16_fma2(pair | BF16_128, BF16_ONE, BF16_MINUS_128);
    return bf16_fma2(code, scale2, bias2);
}
#endif

#if WEIGHT == 4
__device__ __forceinline__ u32 byte_codes(u32 pair, u32 scale2, u32 bias2) {
    // (128 + low seven bits) - (128, or 0 where the top bit is set)
    const u32 offset = BF16_128 - (pair & 0x00800080u) * 0x86u;
    const u32 code = bf16_fma2(offset, BF16_MINUS_ONE, (pair & 0x007f007fu) | BF16_128);
    return bf16_fma2(code, scale2, bias2);
}
#endif

// Masks in registers: an instruction takes one constant, and the compiler would bring a second one anew each time. `positive` is any
// number that it cannot know to be positive.
struct DecodeConstants {
    u32 nibbles;
    __device__ __forceinline__ explicit DecodeConstants(int positive) : nibbles(0x000f000fu + (static_cast<u32>(positive) >> 31)) {}
};

__device__ __forceinline__ Fragments fragments_of(const RawPiece& raw, int part, const DecodeConstants& constants) {
    Fragments f;
#pragma unroll
    for (int half = 0; half < 2; half++) {
#if WEIGHT == 0
        const uint4 v = raw.row[half][part];
        f.matrix[0][half] = v.x;
        f.matrix[0][half + 2] = v.y;
        f.matrix[1][half] = v.z;
        f.matrix[1][half + 2] = v.w;
#elif WEIGHT == 2 || WEIGHT == 3
        const u32 word = half ? (part ? raw.codes.w : raw.codes.z) : (part ? raw.codes.y : raw.codes.x);
        const u32 scale2 = both_halves(raw.scale[half]), bias2 = both_highs(raw.scale[half]);
#pragma unroll
        for (int pair = 0; pair < 4; pair++) {
            u32 codes = (word >> (4 * pair)) & constants.nibbles;
#if WEIGHT == 3
            const u32 high = half ? raw.high.y : raw.high.x;
            codes |= ((high >> (2 * (4 * part + pair))) & 0x00030003u) << 4;
#endif
            f.matrix[pair / 2][half + 2 * (pair % 2)] = small_codes(codes, scale2, bias2);
        }
#else
        const uint4 v = raw.codes[half];
        const u32 words[2] = {part ? v.z : v.x, part ? v.w : v.y};
#if WEIGHT == 4
        const u32 scale2 = both_halves(raw.scale[half]), bias2 = both_highs(raw.scale[half]);
#endif
#pragma unroll
        for (int word = 0; word < 2; word++) {
#pragma unroll
            for (int odd = 0; odd < 2; odd++) {
                const u32 pair = (words[word] >> (8 * odd)) & 0x00ff00ffu;
#if WEIGHT == 4
                f.matrix[word][half + 2 * odd] = byte_codes(pair, scale2, bias2);
#else
                f.matrix[word][half + 2 * odd] = e4m3_pair(pair);
#endif
            }
        }
#endif
    }
    return f;
}

// The B operands of four matrix steps from a lane's 16 activations of one row.
struct Activations {
    uint4 part[2];
};

__device__ __forceinline__ void step_operand(u32 (&b)[2], uint4 part, int step) {
    b[0] = step ? part.z : part.x;
    b[1] = step ? part.w : part.y;
}
