// One tile of attention.cu: scores, softmax, weighted values.
#pragma once
#include "attention_keys.cuh"

constexpr int VALUE_STRIDE = LATENT * 2 + 16;  // bytes a key; the pad keeps ldmatrix and the lanes' stores free of bank conflicts
constexpr int P_STRIDE = TILE * 2 + 16;
constexpr int VALUE_STEPS = LATENT / 16;
constexpr int OUT_TILES = (VALUE_STEPS + WARPS - 1) / WARPS;  // of 16 latent values, a warp

struct Shared {
    u8 values[2][TILE * VALUE_STRIDE];
    float scores[USED_GROUPS][HEADS][TILE];  // keys at score_at
    __align__(16) u8 p[HEADS * P_STRIDE];
    __align__(16) float factor[HEADS];        // of what the chunk's tiles before left
    float fold[2][HEADS];                     // old and new part where a chunk joins the chunks before
    float scales[SCALES ? SCALES : 1][TILE];  // of the tile that is scored next
};

typedef float Output[OUT_TILES][HEAD_TILES][4];

// Greatest score and sum of exponentials of the head whose softmax a half-warp keeps, the same in its 16 lanes.
struct Running {
    float most, sum;
};

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

// Where a head's score of a key lies in its row: the stores of four lanes with different heads then fill different banks.
__device__ __forceinline__ int score_at(int head, int key) { return key ^ (head / 2 % 4 * 8); }

// ---- one tile

// scores^T of 16 keys and all heads over the warp's columns. The values pass through registers only once: they are also stored, for
// the second product. SMALL: as latent_values has it.
template <bool SMALL>
__device__ __forceinline__ void score_tile(Shared& shared, u8* values, const Incoming& in, const float (&scale)[2],
                                           const float (&rotary_scale)[2], const Query& query, const Place& place) {
    float acc[HEAD_TILES][4] = {};
    u8* to = values + place.key * VALUE_STRIDE + place.column * 2;
#pragma unroll
    for (int part = 0; part < 2; part++) {
        u32 a[2][4] = {};  // of two matrix steps
        if (place.has_latent())
#pragma unroll
            for (int h = 0; h < 2; h++) {
                Twice v[4];
                latent_values<SMALL>(v, in, scale[h], h, part);
                *reinterpret_cast<uint4*>(to + h * 8 * VALUE_STRIDE + part * 16) =
                    make_uint4(v[0].stored, v[1].stored, v[2].stored, v[3].stored);
#pragma unroll
                for (int i = 0; i < 4; i++) a[i / 2][h + i % 2 * 2] = v[i].operand;
            }
#pragma unroll
        for (int s = 0; s < 2; s++)
#pragma unroll
            for (int j = 0; j < HEAD_TILES; j++) mma_bf16(acc[j], a[s], query.latent[2 * part + s][j]);
    }
    if (place.has_rotary()) {
        u32 a[4];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            u32 v[2];
            rotary_values<SMALL>(v, in, rotary_scale[h], h);
            a[h] = v[0], a[h + 2] = v[1];
        }
#pragma unroll
        for (int j = 0; j < HEAD_TILES; j++) mma_bf16(acc[j], a, query.rotary[j]);
    }
    if (place.group >= USED_GROUPS) return;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float* to = &shared.scores[place.group][place.t * 2][score_at(place.t * 2, place.key + h * 8)];
#pragma unroll
        for (int j = 0; j < HEAD_TILES; j++)
#pragma unroll
            for (int odd = 0; odd < 2; odd++) to[(j * 8 + odd) * TILE] = acc[j][h * 2 + odd];
    }
}

// Scores to weights relative to the chunk's greatest score so far. scale includes log2(e). valid: keys of the tile in the list.
// A half-warp softens head 2 * warp + lane / 16, a lane two keys of it.
__device__ __forceinline__ void soften_tile(Shared& shared, Running& running, float scale, int valid, int head, int lane) {
    const int key = lane % 16 * 2;
    float2 part[USED_GROUPS], s = {0.0f, 0.0f};
#pragma unroll
    for (int group = 0; group < USED_GROUPS; group++)
        part[group] = *reinterpret_cast<const float2*>(&shared.scores[group][head][score_at(head, key)]);
#pragma unroll
    for (int group = 0; group < USED_GROUPS; group++) s = {s.x + part[group].x, s.y + part[group].y};
    s.x = key < valid ? __fmul_rn(s.x, scale) : minus_infinity();
    s.y = key + 1 < valid ? __fmul_rn(s.y, scale) : minus_infinity();
    float most = fmaxf(running.most, fmaxf(s.x, s.y));
#pragma unroll
    for (int step = 8; step > 0; step >>= 1) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
    const float old = power_of_two(running.most - most);
    const u32 p = bf16_pair(power_of_two(s.x - most), power_of_two(s.y - most));
    float sum = bf16_low(p) + bf16_high(p);
#pragma unroll
    for (int step = 8; step > 0; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    running.sum = __fmaf_rn(running.sum, old, sum);
    running.most = most;
    *reinterpret_cast<u32*>(shared.p + head * P_STRIDE + key * 2) = p;
    if (lane % 16 == 0) shared.factor[head] = old;
}

// out^T = out^T * factor + V^T . P^T, or V^T . P^T alone for the first tile of a chunk.
__device__ __forceinline__ void weigh_tile(const Shared& shared, const u8* values, bool first, Output& out, int warp, int lane) {
    const int t = lane % 4;
    u32 p[HEAD_TILES][4];  // of the four groups of 8 keys
#pragma unroll
    for (int j = 0; j < HEAD_TILES; j++) ldmatrix_x4(p[j], shared.p + (j * 8 + lane % 8) * P_STRIDE + lane / 8 * 16);
    if (first) {
#pragma unroll
        for (int m = 0; m < OUT_TILES; m++)
#pragma unroll
            for (int j = 0; j < HEAD_TILES; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) out[m][j][i] = 0.0f;
    } else {
#pragma unroll
        for (int j = 0; j < HEAD_TILES; j++) {
            const float2 factor = *reinterpret_cast<const float2*>(&shared.factor[j * 8 + 2 * t]);
#pragma unroll
            for (int m = 0; m < OUT_TILES; m++)
#pragma unroll
                for (int i = 0; i < 4; i++) out[m][j][i] *= i % 2 ? factor.y : factor.x;
        }
    }
    // Transposing ldmatrix: matrix i covers keys (i / 2) * 8.. and latent values (i % 2) * 8..
    const u8* row = values + (lane / 16 * 8 + lane % 8) * VALUE_STRIDE + lane / 8 % 2 * 16 + warp * OUT_TILES * 32;
    const auto has = [&](int m) { return VALUE_STEPS == OUT_TILES * WARPS || warp * OUT_TILES + m < VALUE_STEPS; };
    u32 v[2 * OUT_TILES][4];
#pragma unroll
    for (int n = 0; n < 2 * OUT_TILES; n++)
        if (has(n / 2)) ldmatrix_x4_trans(v[n], row + n % 2 * 16 * VALUE_STRIDE + n / 2 * 32);
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int m = 0; m < OUT_TILES; m++)
            if (has(m))
#pragma unroll
                for (int j = 0; j < HEAD_TILES; j++) mma_bf16(out[m][j], v[2 * m + half], {p[j][2 * half], p[j][2 * half + 1]});
}
