// Sparse multi-head latent attention over listed tokens, absorbed form: every head attends to the same cached rows.
//
//   score[h][t] = (latent_query[h] . latent[t] + rotary_query[h] . rotary[t]) * scale;  out[h] = sum softmax(score)[t] * latent[t]
//
// Rotary queries come as the linear layer left them and are rotated here. The list of a row is cut into chunks of 64 entries, a chunk
// into tiles of 32 keys. A tile is unpacked once into bfloat16 in shared memory and serves both products. Keys are the matrix rows and heads its columns (scores^T = K . Q^T, out^T = V^T . P^T), so 22
// heads fill 24 columns. Within a chunk the softmax is the usual running one; chunks are merged in order with explicit roundings:
//
//   attend_chunks  decode: a block a (chunk, row, 24 heads), partial results to memory; merge_chunks folds them in order.
//   attend_rows    prompt: a block a (row, 24 heads) walks all chunks and folds them in registers, with the same operations.
//
// Between two barriers either the tile before is weighed and the next one scored (matrix instructions), or scores are softened while
// the next tile is unpacked and the one after it comes: two barriers a tile, neither part idle in the other's latencies.
//
// Both give a row the same bits. merge_chunks and attend_rows can also give each head's logarithm of the sum of exponentials, which is
// what merging with other parts of the context needs.
//
// What binds it. H200, 22 heads, fp8: 2,048 rows of 2,048 keys take 2.2 ms, 4,000 cycles a tile: a warp issues 500 instructions a tile,
// four warps share a scheduler, and half of its slots go idle on shared memory's latency (28 % of the samples), fixed latencies (21 %)
// and barriers (11 %); tensor instructions alone would take about 800 cycles. Registers (128) keep addresses from staying in them.
// One row takes 14 us, mostly latencies in sequence. Chunks of 64 instead of 128 gain 5 us at one row and lose 10 at 16.
//
// KV: tfglm/formats/latent.py's formats 0 bf16, 1 fp8, 2 fp4, 3 fp4x. LATENT <= 512 and ROTARY multiples of 16.
// HEAD_TILES: groups of 8 heads a block, at most 3.
//! variant: KV=0 LATENT=512 ROTARY=64 HEAD_TILES=3
//! variant: KV=1 LATENT=512 ROTARY=64 HEAD_TILES=3
//! variant: KV=2 LATENT=512 ROTARY=64 HEAD_TILES=3
//! variant: KV=3 LATENT=512 ROTARY=64 HEAD_TILES=3
//! variant: KV=0 LATENT=48 ROTARY=16 HEAD_TILES=1
//! variant: KV=2 LATENT=48 ROTARY=16 HEAD_TILES=1
//! variant: KV=3 LATENT=48 ROTARY=16 HEAD_TILES=1
//! spills 40
#include "narrow.cuh"

#ifndef KV
#define KV 0
#define LATENT 512
#define ROTARY 64
#define HEAD_TILES 3
#endif

constexpr int THREADS = 512, WARPS = 16, QUARTERS = 4;
constexpr int TILE = 32, CHUNK = 64;
constexpr int HEADS = HEAD_TILES * 8;  // of a block

constexpr int aligned(int n) { return (n + 15) / 16 * 16; }
constexpr int LATENT_BYTES = KV == 0 ? 2 * LATENT : KV == 1 ? aligned(LATENT + 4) : aligned(LATENT / 2 + LATENT / 16 + 8);
constexpr int ROTARY_BYTES = KV == 3 ? ROTARY : 2 * ROTARY;
constexpr int RAW_BYTES = LATENT_BYTES + ROTARY_BYTES;
constexpr int KEY_STRIDE = (LATENT + ROTARY) * 2 + 16;  // bytes; the pad keeps ldmatrix free of bank conflicts
constexpr int P_STRIDE = TILE * 2 + 16;
#define PACKED_KV (KV != 0)

constexpr int LATENT_STEPS = LATENT / 16, ROTARY_STEPS = ROTARY / 16;
constexpr int LATENT_PER_QUARTER = (LATENT_STEPS + QUARTERS - 1) / QUARTERS;
constexpr int ROTARY_PER_QUARTER = (ROTARY_STEPS + QUARTERS - 1) / QUARTERS;
// Scores: 2 groups of 16 keys x 4 quarters of the columns x 2 parts of the heads make 16 warps.
constexpr int SCORE_TILES = (HEAD_TILES + 1) / 2;              // of 8 heads, a warp
constexpr int OUT_TILES = (LATENT_STEPS + WARPS - 1) / WARPS;  // of 16 latent values, a warp
constexpr int KEYS = TILE / WARPS;                             // that a warp brings

struct Shared {
    u8 tile[2][TILE * KEY_STRIDE];
    float scores[QUARTERS][HEADS][TILE + 4];  // the pad spreads a warp's stores over all banks
    __align__(16) u8 p[HEADS * P_STRIDE];
    float factor[HEADS];   // of what the tiles before left in the chunk
    float fold[2][HEADS];  // old and new part where a chunk joins the chunks before
    // then the slots of the list
};

// Where a warp works when scores are made.
struct Place {
    int key, quarter, tile;  // first key of the tile, quarter of the columns, first head tile
};
__device__ __forceinline__ Place place_of(int warp) { return {warp / 8 * 16, warp / 2 % QUARTERS, warp % 2 * SCORE_TILES}; }

struct Query {
    u32 latent[LATENT_PER_QUARTER][SCORE_TILES][2];
    u32 rotary[ROTARY_PER_QUARTER][SCORE_TILES][2];
};

typedef float Output[OUT_TILES][HEAD_TILES][4];

// Greatest score and sum of exponentials of the head whose softmax a half-warp keeps, the same in its 16 lanes.
struct Running {
    float most, sum;
};

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

// ---- queries

__device__ __forceinline__ u32 query_pair(const u16* q, int head_stride, int head, int heads, int column) {
    return head < heads ? *reinterpret_cast<const u32*>(q + static_cast<long long>(head) * head_stride + column) : 0u;
}

// Columns column and column + 1 of a head's rotary query: adjacent pairs of q rotated and laid out as halves.
__device__ __forceinline__ u32 rotated_pair(const u16* q, int head_stride, int head, int heads, int column, const float* cosines,
                                            const float* sines) {
    if (head >= heads) return 0u;
    const int i = column % (ROTARY / 2);
    const uint2 pairs = *reinterpret_cast<const uint2*>(q + static_cast<long long>(head) * head_stride + 2 * i);
    const float2 c = *reinterpret_cast<const float2*>(cosines + i), s = *reinterpret_cast<const float2*>(sines + i);
    const auto turned = [&](u32 pair, float c, float s) {
        const float even = bf16_low(pair), odd = bf16_high(pair);
        return column < ROTARY / 2 ? __fmaf_rn(even, c, -__fmul_rn(odd, s)) : __fmaf_rn(odd, c, __fmul_rn(even, s));
    };
    return bf16_pair(turned(pairs.x, c.x, s.x), turned(pairs.y, c.y, s.y));
}

__device__ __forceinline__ Query load_query(const u16* latent, int latent_stride, const u16* rotary, int rotary_stride,
                                            const float* cosines, const float* sines, int head0, int heads, int warp, int lane) {
    Query query;
    const int g = lane / 4, t = lane % 4, quarter = place_of(warp).quarter;
#pragma unroll
    for (int j = 0; j < SCORE_TILES; j++) {
        const int head = head0 + (place_of(warp).tile + j) * 8 + g;
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int s = 0; s < LATENT_PER_QUARTER; s++) {
                const int step = quarter * LATENT_PER_QUARTER + s;
                query.latent[s][j][half] =
                    step < LATENT_STEPS ? query_pair(latent, latent_stride, head, heads, step * 16 + half * 8 + 2 * t) : 0u;
            }
#pragma unroll
            for (int s = 0; s < ROTARY_PER_QUARTER; s++) {
                const int step = quarter * ROTARY_PER_QUARTER + s;
                query.rotary[s][j][half] =
                    step < ROTARY_STEPS
                        ? rotated_pair(rotary, rotary_stride, head, heads, step * 16 + half * 8 + 2 * t, cosines, sines)
                        : 0u;
            }
        }
    }
    return query;
}

// ---- keys

struct Planes {
    const u8* latent;
    const u8* rotary;
};

// What a lane brings of its warp's keys, warp and warp + 16 of a tile, in registers: packed latents (and rotary parts of fp4x).
struct Incoming {
#if KV == 1
    uint4 codes[KEYS];
    float scale[KEYS];
#elif KV >= 2
    uint2 codes[KEYS];
    float scale[KEYS];
    u32 block[KEYS];  // code of the block's scale
#if KV == 3
    uint4 rotary;  // lanes 0..15: of the first key, 16..31: of the second
    float rotary_scale;
#endif
#endif
};

// Starts copying the bfloat16 part of the tile's rows: all of it, or the rotary part, which must not be read any more. Rows past the
// list become zero.
__device__ __forceinline__ void fetch_plain(u8* tile, const Planes& planes, const int* slots, int first, int count) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#if KV == 0
    constexpr int PER_LATENT = LATENT_BYTES / 16, PER_ROW = RAW_BYTES / 16;
#pragma unroll
    for (int key = warp; key < TILE; key += WARPS) {
        const bool take = first + key < count;
        const long long slot = take ? slots[first + key] : 0;
        const u8* latent = planes.latent + slot * LATENT_BYTES;
        const u8* rotary = planes.rotary + slot * ROTARY_BYTES - LATENT_BYTES;
#pragma unroll
        for (int base = 0; base < PER_ROW; base += 32) {
            const int part = base + lane;
            if (part < PER_ROW) cp_async_16(tile + key * KEY_STRIDE + part * 16, (part < PER_LATENT ? latent : rotary) + part * 16, take);
        }
    }
#elif KV != 3
    const int key = warp + lane / 16 * WARPS, part = lane % 16;
    static_assert(ROTARY_BYTES <= 256, "half a warp copies a row");
    if (part < ROTARY_BYTES / 16) {
        const bool take = first + key < count;
        const long long slot = take ? slots[first + key] : 0;
        cp_async_16(tile + key * KEY_STRIDE + LATENT * 2 + part * 16, planes.rotary + slot * ROTARY_BYTES + part * 16, take);
    }
#endif
}

// A float32 at some byte of a row; rows begin at multiples of 16.
template <int AT>
__device__ __forceinline__ float float_at(const u8* row) {
    if (AT % 4 == 0) return *reinterpret_cast<const float*>(row + AT);
    const u8* p = row + AT;  // rows of small models only
    return __uint_as_float(p[0] | p[1] << 8 | p[2] << 16 | static_cast<u32>(p[3]) << 24);
}

__device__ __forceinline__ u32 bf16_twice(float x) { return both_highs(__float_as_uint(x)); }  // x exact in bfloat16

// 32 bytes a lane, next to each other: every other four lanes begin with the second half, so that eight lanes fill all banks.
__device__ __forceinline__ void store_sixteen(u8* to, uint4 first, uint4 second) {
    const int swap = threadIdx.x / 4 % 2;
    reinterpret_cast<uint4*>(to)[swap] = swap ? second : first;
    reinterpret_cast<uint4*>(to)[1 - swap] = swap ? first : second;
}

// 16 e4m3 codes times a power of two.
__device__ __forceinline__ void unpack_e4m3(uint4 raw, float scale, u8* to) {
    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
    u32 out[8];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        out[2 * i] = e4m3_bits(low_highs(words[i]));
        out[2 * i + 1] = e4m3_bits(high_highs(words[i]));
    }
    // Both powers of two at once, unless their product leaves bfloat16 (a row of values beyond 2^14).
    const bool once = scale < 128.0f;
    const u32 factor = bf16_twice(once ? scale * 0x1p120f : 0x1p120f);
#pragma unroll
    for (int i = 0; i < 8; i++) out[i] = bf16_mul2(out[i], factor);
    if (!once) {
#pragma unroll
        for (int i = 0; i < 8; i++) out[i] = bf16_mul2(out[i], bf16_twice(scale));
    }
    store_sixteen(to, make_uint4(out[0], out[1], out[2], out[3]), make_uint4(out[4], out[5], out[6], out[7]));
}

// 16 e2m1 codes times their block's scale and the row's.
__device__ __forceinline__ void unpack_e2m1(uint2 raw, float scale, u8* to) {
    const u32 words[2] = {raw.x, raw.y}, scale2 = bf16_twice(scale);
    u32 out[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const u32 two = words[i / 4] >> (8 * (i % 4));
        out[i] = bf16_mul2(e2m1_pair((two & 0xfu) | ((two & 0xf0u) << 12)), scale2);
    }
    store_sixteen(to, make_uint4(out[0], out[1], out[2], out[3]), make_uint4(out[4], out[5], out[6], out[7]));
}

// Starts loading the packed part of the warp's keys; keys past the list become zero.
__device__ __forceinline__ void fetch_packed(Incoming& in, const Planes& planes, const int* slots, int first, int count) {
#if PACKED_KV
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < KEYS; j++) {
        const int at = first + warp + j * WARPS;
        in.codes[j] = {};
        in.scale[j] = 0.0f;
#if KV >= 2
        in.block[j] = 0;
#endif
        if (at < count && lane < LATENT / 16) {
            const u8* row = planes.latent + static_cast<long long>(slots[at]) * LATENT_BYTES;
#if KV == 1
            in.codes[j] = *reinterpret_cast<const uint4*>(row + lane * 16);
            in.scale[j] = float_at<LATENT>(row);
#else
            in.codes[j] = *reinterpret_cast<const uint2*>(row + lane * 8);
            in.scale[j] = float_at<LATENT / 2 + LATENT / 16>(row);
            in.block[j] = row[LATENT / 2 + lane];
#endif
        }
    }
#if KV == 3
    const int at = first + warp + lane / 16 * WARPS;
    in.rotary = {};
    in.rotary_scale = 0.0f;
    if (at < count && lane % 16 < ROTARY / 16) {
        in.rotary = *reinterpret_cast<const uint4*>(planes.rotary + static_cast<long long>(slots[at]) * ROTARY_BYTES + lane % 16 * 16);
        in.rotary_scale =
            float_at<LATENT / 2 + LATENT / 16 + 4>(planes.latent + static_cast<long long>(slots[at]) * LATENT_BYTES);
    }
#endif
#endif
}

// Packed keys to bfloat16 rows. Row scales are powers of two and block scales have four bits, so every value is exact.
__device__ __forceinline__ void unpack(const Incoming& in, u8* tile) {
#if PACKED_KV
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < KEYS; j++) {
        u8* to = tile + (warp + j * WARPS) * KEY_STRIDE + lane * 32;
        if (lane < LATENT / 16) {
#if KV == 1
            unpack_e4m3(in.codes[j], in.scale[j], to);
#else
            unpack_e2m1(in.codes[j], bf16_low(e4m3_pair(in.block[j])) * in.scale[j], to);
#endif
        }
    }
#if KV == 3
    if (lane % 16 < ROTARY / 16)
        unpack_e4m3(in.rotary, in.rotary_scale, tile + (warp + lane / 16 * WARPS) * KEY_STRIDE + LATENT * 2 + lane % 16 * 32);
#endif
#endif
}

// ---- one tile

// scores^T of 16 keys and up to 16 heads over this warp's quarter of the columns.
__device__ __forceinline__ void score_tile(Shared& shared, const u8* tile, const Query& query, int warp, int lane) {
    constexpr int STEPS = LATENT_PER_QUARTER + ROTARY_PER_QUARTER, AHEAD = KV == 3 ? 1 : 2;
    constexpr bool WHOLE = LATENT_STEPS % QUARTERS == 0 && ROTARY_STEPS % QUARTERS == 0;
    const Place place = place_of(warp);
    const int latent0 = place.quarter * LATENT_PER_QUARTER, rotary0 = place.quarter * ROTARY_PER_QUARTER, key0 = place.key;
    // ldmatrix: matrix i = lane / 8 covers keys (i % 2) * 8.. and columns (i / 2) * 8..
    const u8* row = tile + (key0 + lane / 8 % 2 * 8 + lane % 8) * KEY_STRIDE + lane / 16 * 16;
    const u8* first_latent = row + latent0 * 32;
    const u8* first_rotary = row + LATENT * 2 + rotary0 * 32;
    const auto has = [&](int s) {
        return WHOLE || (s < LATENT_PER_QUARTER ? latent0 + s < LATENT_STEPS : rotary0 + s - LATENT_PER_QUARTER < ROTARY_STEPS);
    };
    u32 a[AHEAD + 1][4];
    const auto load = [&](int s) {
        if (has(s)) ldmatrix_x4(a[s % (AHEAD + 1)], s < LATENT_PER_QUARTER ? first_latent + s * 32 : first_rotary + (s - LATENT_PER_QUARTER) * 32);
    };
    float acc[SCORE_TILES][4] = {};
#pragma unroll
    for (int s = 0; s < AHEAD && s < STEPS; s++) load(s);
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        if (s + AHEAD < STEPS) load(s + AHEAD);
        if (has(s))
#pragma unroll
            for (int j = 0; j < SCORE_TILES; j++)
                if (place.tile + j < HEAD_TILES)
                    mma_bf16(acc[j], a[s % (AHEAD + 1)],
                             s < LATENT_PER_QUARTER ? query.latent[s][j] : query.rotary[s - LATENT_PER_QUARTER][j]);
    }
#pragma unroll
    for (int j = 0; j < SCORE_TILES; j++)
        if (place.tile + j < HEAD_TILES)
#pragma unroll
            for (int i = 0; i < 4; i++)
                shared.scores[place.quarter][(place.tile + j) * 8 + lane % 4 * 2 + i % 2][key0 + lane / 4 + i / 2 * 8] = acc[j][i];
}

// Scores to weights relative to the chunk's greatest score so far. scale includes log2(e). valid: keys of the tile in the list.
// A half-warp softens head 2 * warp + lane / 16, a lane two keys of it.
__device__ __forceinline__ void soften_tile(Shared& shared, Running& running, float scale, int valid, int warp, int lane) {
    const int head = warp * 2 + lane / 16, key = lane % 16 * 2;
    if (head >= HEADS) return;  // the same in a whole warp
    float2 s = {0.0f, 0.0f};
#pragma unroll
    for (int quarter = 0; quarter < QUARTERS; quarter++) {
        const float2 more = *reinterpret_cast<const float2*>(&shared.scores[quarter][head][key]);
        s = {s.x + more.x, s.y + more.y};
    }
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

// out^T = out^T * factor + V^T . P^T
__device__ __forceinline__ void weigh_tile(const Shared& shared, const u8* tile, Output& out, int warp, int lane) {
    const int t = lane % 4;
    u32 p[HEAD_TILES][2][2];
#pragma unroll
    for (int j = 0; j < HEAD_TILES; j++) {
        u32 all[4];  // the four groups of 8 keys
        ldmatrix_x4(all, shared.p + (j * 8 + lane % 8) * P_STRIDE + lane / 8 * 16);
        p[j][0][0] = all[0];
        p[j][0][1] = all[1];
        p[j][1][0] = all[2];
        p[j][1][1] = all[3];
        const float even = shared.factor[j * 8 + 2 * t], odd = shared.factor[j * 8 + 2 * t + 1];
#pragma unroll
        for (int m = 0; m < OUT_TILES; m++) {
            out[m][j][0] *= even;
            out[m][j][1] *= odd;
            out[m][j][2] *= even;
            out[m][j][3] *= odd;
        }
    }
    // Transposing ldmatrix: matrix i covers keys (i / 2) * 8.. and latent values (i % 2) * 8..
    const u8* row = tile + (lane / 16 * 8 + lane % 8) * KEY_STRIDE + lane / 8 % 2 * 16 + warp * OUT_TILES * 32;
    const auto has = [&](int m) { return LATENT_STEPS == OUT_TILES * WARPS || warp * OUT_TILES + m < LATENT_STEPS; };
    u32 v[2][4];
    const auto load = [&](int n) {
        if (has(n / 2)) ldmatrix_x4_trans(v[n % 2], row + n % 2 * 16 * KEY_STRIDE + n / 2 * 32);
    };
    load(0);
#pragma unroll
    for (int n = 0; n < 2 * OUT_TILES; n++) {
        if (n + 1 < 2 * OUT_TILES) load(n + 1);
        if (has(n / 2))
#pragma unroll
            for (int j = 0; j < HEAD_TILES; j++) mma_bf16(out[n / 2][j], v[n % 2], p[j][n % 2]);
    }
}

// ---- merging

// The one way in which a chunk joins what came before it; exact about roundings because two kernels do it.
struct Join {
    float old_factor, new_factor;
};

__device__ __forceinline__ Join join(float& most, float& sum, float chunk_most, float chunk_sum) {
    const float top = fmaxf(most, chunk_most);
    const Join factors = {power_of_two(most - top), power_of_two(chunk_most - top)};
    sum = __fmaf_rn(chunk_sum, factors.new_factor, __fmul_rn(sum, factors.old_factor));
    most = top;
    return factors;
}
__device__ __forceinline__ float joined(float old, float chunk, float old_factor, float new_factor) {
    return __fmaf_rn(chunk, new_factor, __fmul_rn(old, old_factor));
}

__device__ __forceinline__ float log_sum(float most, float sum) { return (most + log2f(sum)) * 0.6931471805599453f; }

__device__ __forceinline__ void store_result(void* out, int as_float, long long at, float value) {
    if (as_float)
        static_cast<float*>(out)[at] = value;
    else
        static_cast<u16*>(out)[at] = bf16_bits(value);
}

// ---- kernels

struct Problem {
    const u16* latent_query;  // [R, heads, LATENT], rows and heads strided
    int latent_row, latent_head;
    const u16* rotary_query;  // likewise, not rotated yet
    int rotary_row, rotary_head;
    const float* cosines;  // [R, ROTARY / 2]
    const float* sines;
    Planes planes;
    const int* slots;  // [R, list_stride]
    int list_stride;
    const int* counts;
    float scale;  // times log2(e)
    int heads;
};

__device__ __forceinline__ Query load_query(const Problem& problem, int row, int head0, int warp, int lane) {
    const long long at = row;
    return load_query(problem.latent_query + at * problem.latent_row, problem.latent_head, problem.rotary_query + at * problem.rotary_row,
                      problem.rotary_head, problem.cosines + at * (ROTARY / 2), problem.sines + at * (ROTARY / 2), head0, problem.heads,
                      warp, lane);
}

// Walks the row's list; `slots` in shared memory holds it. ask() gives the query, once the first keys are under way. soft(i) follows the softening of tile i, weighed(i) its weighing: after
// the barrier that follows soft(i).
template <typename Ask, typename Soft, typename Weighed>
__device__ __forceinline__ void walk(Shared& shared, const Ask& ask, const Problem& problem, const int* slots, int entries,
                                     Output& out, Running& running, const Soft& soft, const Weighed& weighed) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tiles = (entries + TILE - 1) / TILE;
    Incoming in;
    fetch_packed(in, problem.planes, slots, 0, entries);
    fetch_plain(shared.tile[0], problem.planes, slots, 0, entries);
    cp_async_commit();
    const Query query = ask();
    unpack(in, shared.tile[0]);
    fetch_packed(in, problem.planes, slots, TILE, entries);
    if (PACKED_KV) {
        fetch_plain(shared.tile[1], problem.planes, slots, TILE, entries);
        cp_async_commit();
    }
    cp_async_wait<PACKED_KV ? 1 : 0>();
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < tiles; i++) {
        if (i > 0) {
            weigh_tile(shared, shared.tile[(i - 1) % 2], out, warp, lane);
            weighed(i - 1);
        }
        score_tile(shared, shared.tile[i % 2], query, warp, lane);
        __syncthreads();
        // Of plain tiles the next one comes now, of packed ones the rotary part of the one after it: scores have read tile i's.
        if (!PACKED_KV) fetch_plain(shared.tile[(i + 1) % 2], problem.planes, slots, (i + 1) * TILE, entries);
        if (PACKED_KV) fetch_plain(shared.tile[i % 2], problem.planes, slots, (i + 2) * TILE, entries);
        cp_async_commit();
        soften_tile(shared, running, problem.scale, entries - i * TILE, warp, lane);
        soft(i);
        unpack(in, shared.tile[(i + 1) % 2]);
        fetch_packed(in, problem.planes, slots, (i + 2) * TILE, entries);
        cp_async_wait<PACKED_KV ? 1 : 0>();
        __syncthreads();
    }
    if (tiles > 0) {
        weigh_tile(shared, shared.tile[(tiles - 1) % 2], out, warp, lane);
        weighed(tiles - 1);
    }
}

__device__ __forceinline__ int* stage_slots(Shared& shared, const int* list, int entries) {
    int* slots = reinterpret_cast<int*>(&shared + 1);
    for (int i = threadIdx.x; i < entries; i += THREADS) slots[i] = list[i];
    __syncthreads();
    return slots;
}

// f(head of the block, latent value, register) for each value a lane holds.
template <typename F>
__device__ __forceinline__ void each_value(Output& out, int warp, int lane, const F& f) {
#pragma unroll
    for (int m = 0; m < OUT_TILES; m++)
        if (warp * OUT_TILES + m < LATENT_STEPS)
#pragma unroll
            for (int j = 0; j < HEAD_TILES; j++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    f(j * 8 + lane % 4 * 2 + i % 2, (warp * OUT_TILES + m) * 16 + lane / 4 + i / 2 * 8, out[m][j][i]);
}

// partial [R, chunks, heads, LATENT] float32, unnormalised; state [R, chunks, heads, 2]: greatest score and sum.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attend_chunks(const u16* latent_query, int latent_row, int latent_head, const u16* rotary_query, int rotary_row, int rotary_head,
                  const float* cosines, const float* sines, const u8* latent_plane, const u8* rotary_plane, const int* slots, int list_stride, const int* counts, float scale,
                  int heads, float* partial, float* state) {
    chain_start();
    extern __shared__ __align__(128) u8 dynamic_smem[];
    Shared& shared = *reinterpret_cast<Shared*>(dynamic_smem);
    const Problem problem{latent_query, latent_row, latent_head, rotary_query, rotary_row, rotary_head, cosines, sines,
                          Planes{latent_plane, rotary_plane}, slots, list_stride, counts, scale, heads};
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int chunk = blockIdx.x, row = blockIdx.y, head0 = blockIdx.z * HEADS;
    const int* listed = stage_slots(shared, slots + static_cast<long long>(row) * list_stride + chunk * CHUNK,
                                    min(list_stride - chunk * CHUNK, CHUNK));
    const int entries = min(counts[row] - chunk * CHUNK, CHUNK);
    if (entries <= 0) return;
    const auto ask = [&] { return load_query(problem, row, head0, warp, lane); };
    Output out = {};
    Running running{minus_infinity(), 0.0f};
    walk(shared, ask, problem, listed, entries, out, running, [](int) {}, [](int) {});
    const long long at = (static_cast<long long>(row) * gridDim.x + chunk) * heads + head0;
    each_value(out, warp, lane, [&](int head, int value, float x) {
        if (head0 + head < heads) partial[(at + head) * LATENT + value] = x;
    });
    const int head = warp * 2 + lane / 16;
    if (lane % 16 == 0 && head < HEADS && head0 + head < heads)
        *reinterpret_cast<float2*>(state + (at + head) * 2) = {running.most, running.sum};
}

// out [R, heads, LATENT] bfloat16 or float32; log_sums [R, heads] or null. grid = (heads, R, LATENT / 128 rounded up), block = 32.
extern "C" __global__ void __launch_bounds__(32)
    merge_chunks(const float* partial, const float* state, const int* counts, int chunks, int heads, void* out, int as_float,
                 float* log_sums) {
    chain_start();
    constexpr int BATCH = 16;  // chunks asked for together
    const int head = blockIdx.x, row = blockIdx.y, lane = threadIdx.x, used = (counts[row] + CHUNK - 1) / CHUNK;
    const int first_value = (blockIdx.z * 32 + lane) * 4;
    const bool inside = first_value < LATENT;
    float most = minus_infinity(), sum = 0.0f, value[4] = {};
#pragma unroll 1
    for (int first = 0; first < used; first += BATCH) {
        const int here = min(used - first, BATCH);
        const long long chunk0 = (static_cast<long long>(row) * chunks + first) * heads + head;
        float4 v[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            if (i < here && inside) v[i] = *reinterpret_cast<const float4*>(partial + (chunk0 + i * heads) * LATENT + first_value);
        // join() of all chunks at once, lane i that of chunk i: what came before it only has to bring its greatest score.
        float2 own = {minus_infinity(), 0.0f};
        if (lane < here) own = *reinterpret_cast<const float2*>(state + (chunk0 + lane * heads) * 2);
        float top = fmaxf(own.x, most);
#pragma unroll
        for (int step = 1; step < BATCH; step <<= 1) {
            const float below = __shfl_up_sync(0xffffffffu, top, step);
            if (lane >= step) top = fmaxf(top, below);
        }
        const float before = __shfl_up_sync(0xffffffffu, top, 1);
        const float old_factor = power_of_two((lane == 0 ? most : before) - top), new_factor = power_of_two(own.x - top);
        most = __shfl_sync(0xffffffffu, top, here - 1);
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const float old = __shfl_sync(0xffffffffu, old_factor, i), now = __shfl_sync(0xffffffffu, new_factor, i);
            const float chunk_sum = __shfl_sync(0xffffffffu, own.y, i);
            if (i < here) {
                sum = __fmaf_rn(chunk_sum, now, __fmul_rn(sum, old));
                value[0] = joined(value[0], v[i].x, old, now);
                value[1] = joined(value[1], v[i].y, old, now);
                value[2] = joined(value[2], v[i].z, old, now);
                value[3] = joined(value[3], v[i].w, old, now);
            }
        }
    }
    if (!inside) return;
    const long long at = static_cast<long long>(row) * heads + head;
#pragma unroll
    for (int i = 0; i < 4; i++)
        store_result(out, as_float, at * LATENT + first_value + i, used ? __fdiv_rn(value[i], sum) : 0.0f);
    if (log_sums != nullptr && first_value == 0) log_sums[at] = used ? log_sum(most, sum) : minus_infinity();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attend_rows(const u16* latent_query, int latent_row, int latent_head, const u16* rotary_query, int rotary_row, int rotary_head,
                const float* cosines, const float* sines, const u8* latent_plane, const u8* rotary_plane, const int* slots, int list_stride, const int* counts, float scale,
                int heads, void* out, int as_float, float* log_sums) {
    chain_start();
    extern __shared__ __align__(128) u8 dynamic_smem[];
    Shared& shared = *reinterpret_cast<Shared*>(dynamic_smem);
    const Problem problem{latent_query, latent_row, latent_head, rotary_query, rotary_row, rotary_head, cosines, sines,
                          Planes{latent_plane, rotary_plane}, slots, list_stride, counts, scale, heads};
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = blockIdx.x, head0 = blockIdx.y * HEADS, entries = counts[row];
    const long long at = static_cast<long long>(row) * heads + head0;
    const int* listed = stage_slots(shared, slots + static_cast<long long>(row) * list_stride, entries);
    const auto ask = [&] { return load_query(problem, row, head0, warp, lane); };
    Output chunk_out = {}, total = {};
    Running chunk{minus_infinity(), 0.0f}, whole = chunk;
    const int head = warp * 2 + lane / 16, tiles = (entries + TILE - 1) / TILE;
    const auto closes = [&](int i) { return (i + 1) % (CHUNK / TILE) == 0 || i + 1 == tiles; };
    walk(
        shared, ask, problem, listed, entries, chunk_out, chunk,
        [&](int i) {
            if (!closes(i)) return;
            const Join f = join(whole.most, whole.sum, chunk.most, chunk.sum);
            if (lane % 16 == 0 && head < HEADS) {
                shared.fold[0][head] = f.old_factor;
                shared.fold[1][head] = f.new_factor;
            }
            chunk = {minus_infinity(), 0.0f};
        },
        [&](int i) {
            if (!closes(i)) return;
#pragma unroll
            for (int j = 0; j < HEAD_TILES; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int head = j * 8 + lane % 4 * 2 + i % 2;
                    const float old_factor = shared.fold[0][head], new_factor = shared.fold[1][head];
#pragma unroll
                    for (int m = 0; m < OUT_TILES; m++) {
                        total[m][j][i] = joined(total[m][j][i], chunk_out[m][j][i], old_factor, new_factor);
                        chunk_out[m][j][i] = 0.0f;
                    }
                }
        });
    __syncthreads();
    if (lane % 16 == 0 && head < HEADS) {
        shared.factor[head] = whole.sum;
        if (log_sums != nullptr && head0 + head < heads)
            log_sums[at + head] = entries ? log_sum(whole.most, whole.sum) : minus_infinity();
    }
    __syncthreads();
    each_value(total, warp, lane, [&](int head, int value, float x) {
        if (head0 + head < heads)
            store_result(out, as_float, (at + head) * LATENT + value, entries ? __fdiv_rn(x, shared.factor[head]) : 0.0f);
    });
}
