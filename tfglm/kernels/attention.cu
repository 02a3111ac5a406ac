// Sparse multi-head latent attention over listed tokens, absorbed form: every head attends to the same cached rows.
//
//   score[h][t] = (latent_query[h] . latent[t] + rotary_query[h] . rotary[t]) * scale;  out[h] = sum softmax(score)[t] * latent[t]
//
// The list of a row is cut into chunks of 128 entries, a chunk into tiles of 32 keys. A tile is unpacked once into bfloat16 in shared
// memory and serves both products. Keys are the matrix rows and heads its columns (scores^T = K . Q^T, out^T = V^T . P^T), so 22
// heads fill 24 columns. Within a chunk the softmax is the usual running one; chunks are merged in order with explicit roundings:
//
//   attend_chunks  decode: a block a (chunk, row, 24 heads), partial results to memory; merge_chunks folds them in order.
//   attend_rows    prompt: a block a (row, 24 heads) walks all chunks and folds them in registers, with the same operations.
//
// Both give a row the same bits. merge_chunks and attend_rows can also give each head's logarithm of the sum of exponentials, which is
// what merging with other parts of the context needs.
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
//! spills 24
#include "narrow.cuh"

#ifndef KV
#define KV 0
#define LATENT 512
#define ROTARY 64
#define HEAD_TILES 3
#endif

constexpr int THREADS = 512, WARPS = 16, QUARTERS = 4;
constexpr int TILE = 32, CHUNK = 128;
constexpr int HEADS = HEAD_TILES * 8;  // of a block

constexpr int aligned(int n) { return (n + 15) / 16 * 16; }
constexpr int LATENT_BYTES = KV == 0 ? 2 * LATENT : KV == 1 ? aligned(LATENT + 4) : aligned(LATENT / 2 + LATENT / 16 + 8);
constexpr int ROTARY_BYTES = KV == 3 ? ROTARY : 2 * ROTARY;
constexpr int RAW_BYTES = LATENT_BYTES + ROTARY_BYTES;
constexpr int KEY_STRIDE = (LATENT + ROTARY) * 2 + 16;  // bytes; the pad keeps ldmatrix free of bank conflicts
constexpr int P_STRIDE = TILE * 2 + 16;
constexpr bool PACKED = KV != 0;

constexpr int LATENT_STEPS = LATENT / 16, ROTARY_STEPS = ROTARY / 16;
constexpr int LATENT_PER_QUARTER = (LATENT_STEPS + QUARTERS - 1) / QUARTERS;
constexpr int ROTARY_PER_QUARTER = (ROTARY_STEPS + QUARTERS - 1) / QUARTERS;
// Scores: 2 groups of 16 keys x 4 quarters of the columns x 2 parts of the heads make 16 warps.
constexpr int SCORE_TILES = (HEAD_TILES + 1) / 2;              // of 8 heads, a warp
constexpr int OUT_TILES = (LATENT_STEPS + WARPS - 1) / WARPS;  // of 16 latent values, a warp
constexpr int OWNED = (HEADS + WARPS - 1) / WARPS;             // heads whose softmax a warp keeps: warp, warp + 16

struct Shared {
    u8 tile[PACKED ? 1 : 2][TILE * KEY_STRIDE];
    u8 raw[PACKED ? TILE * RAW_BYTES : 16];
    float scores[QUARTERS][HEADS][TILE + 4];  // the pad spreads a warp's stores over all banks
    __align__(16) u8 p[HEADS * P_STRIDE];
    float factor[2][HEADS];  // old and new part when results are merged
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

struct Running {
    float most[OWNED], sum[OWNED];
};

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

// ---- queries

__device__ __forceinline__ u32 query_pair(const u16* q, int head_stride, int head, int heads, int column) {
    return head < heads ? *reinterpret_cast<const u32*>(q + static_cast<long long>(head) * head_stride + column) : 0u;
}

__device__ __forceinline__ Query load_query(const u16* latent, int latent_stride, const u16* rotary, int rotary_stride, int head0,
                                            int heads, int warp, int lane) {
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
                    step < ROTARY_STEPS ? query_pair(rotary, rotary_stride, head, heads, step * 16 + half * 8 + 2 * t) : 0u;
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

// Starts copying the tile's rows, two to a warp; rows past the list become zero.
__device__ __forceinline__ void fetch_tile(u8* to, int stride, const Planes& planes, const int* slots, int first, int count) {
    constexpr int PER_LATENT = LATENT_BYTES / 16, PER_ROW = RAW_BYTES / 16;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int key = warp; key < TILE; key += WARPS) {
        const bool take = first + key < count;
        const long long slot = take ? slots[first + key] : 0;
        const u8* latent = planes.latent + slot * LATENT_BYTES;
        const u8* rotary = planes.rotary + slot * ROTARY_BYTES - LATENT_BYTES;
#pragma unroll
        for (int base = 0; base < PER_ROW; base += 32) {
            const int part = base + lane;
            if (part < PER_ROW) cp_async_16(to + key * stride + part * 16, (part < PER_LATENT ? latent : rotary) + part * 16, take);
        }
    }
}

// A float32 at some byte of a row; rows begin at multiples of 16.
template <int AT>
__device__ __forceinline__ float float_at(const u8* row) {
    if (AT % 4 == 0) return *reinterpret_cast<const float*>(row + AT);
    const u8* p = row + AT;
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
__device__ __forceinline__ void unpack_e4m3(const u8* codes, float scale, u8* to) {
    const uint4 raw = *reinterpret_cast<const uint4*>(codes);
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
__device__ __forceinline__ void unpack_e2m1(const u8* codes, float scale, u8* to) {
    const uint2 raw = *reinterpret_cast<const uint2*>(codes);
    const u32 words[2] = {raw.x, raw.y}, scale2 = bf16_twice(scale);
    u32 out[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const u32 two = words[i / 4] >> (8 * (i % 4));
        out[i] = bf16_mul2(e2m1_pair((two & 0xfu) | ((two & 0xf0u) << 12)), scale2);
    }
    store_sixteen(to, make_uint4(out[0], out[1], out[2], out[3]), make_uint4(out[4], out[5], out[6], out[7]));
}

// Raw rows to bfloat16 rows, two to a warp. Row scales are powers of two and block scales have four bits, so every value is exact.
__device__ __forceinline__ void unpack_tile(const u8* raw, u8* tile) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1  // both keys at once take more registers than there are
    for (int key = warp; key < TILE; key += WARPS) {
        const u8* row = raw + key * RAW_BYTES;
        u8* to = tile + key * KEY_STRIDE;
        if (lane < LATENT / 16) {
#if KV == 1
            unpack_e4m3(row + lane * 16, float_at<LATENT>(row), to + lane * 32);
#else
            const float block = bf16_low(e4m3_pair(row[LATENT / 2 + lane]));
            unpack_e2m1(row + lane * 8, block * float_at<LATENT / 2 + LATENT / 16>(row), to + lane * 32);
#endif
        }
#if KV == 3
        if (lane < ROTARY / 16)
            unpack_e4m3(row + LATENT_BYTES + lane * 16, float_at<LATENT / 2 + LATENT / 16 + 4>(row), to + LATENT * 2 + lane * 32);
#else
        if (lane < ROTARY / 8)
            *reinterpret_cast<uint4*>(to + LATENT * 2 + lane * 16) = *reinterpret_cast<const uint4*>(row + LATENT_BYTES + lane * 16);
#endif
    }
}

// ---- one tile

// scores^T of 16 keys and up to 16 heads over this warp's quarter of the columns.
__device__ __forceinline__ void score_tile(Shared& shared, const u8* tile, const Query& query, int warp, int lane) {
    const Place place = place_of(warp);
    const int quarter = place.quarter, key0 = place.key;
    // ldmatrix: matrix i = lane / 8 covers keys (i % 2) * 8.. and columns (i / 2) * 8..
    const u8* row = tile + (key0 + lane / 8 % 2 * 8 + lane % 8) * KEY_STRIDE + lane / 16 * 16;
    float acc[SCORE_TILES][4] = {};
    u32 a[4];
#pragma unroll
    for (int s = 0; s < LATENT_PER_QUARTER; s++) {
        const int step = quarter * LATENT_PER_QUARTER + s;
        if (step < LATENT_STEPS) {
            ldmatrix_x4(a, row + step * 32);
#pragma unroll
            for (int j = 0; j < SCORE_TILES; j++)
                if (place.tile + j < HEAD_TILES) mma_bf16(acc[j], a, query.latent[s][j]);
        }
    }
#pragma unroll
    for (int s = 0; s < ROTARY_PER_QUARTER; s++) {
        const int step = quarter * ROTARY_PER_QUARTER + s;
        if (step < ROTARY_STEPS) {
            ldmatrix_x4(a, row + LATENT * 2 + step * 32);
#pragma unroll
            for (int j = 0; j < SCORE_TILES; j++)
                if (place.tile + j < HEAD_TILES) mma_bf16(acc[j], a, query.rotary[s][j]);
        }
    }
#pragma unroll
    for (int j = 0; j < SCORE_TILES; j++)
        if (place.tile + j < HEAD_TILES)
#pragma unroll
            for (int i = 0; i < 4; i++)
                shared.scores[quarter][(place.tile + j) * 8 + lane % 4 * 2 + i % 2][key0 + lane / 4 + i / 2 * 8] = acc[j][i];
}

// Scores to weights relative to the chunk's greatest score so far. scale includes log2(e). valid: keys of the tile in the list.
__device__ __forceinline__ void soften_tile(Shared& shared, Running& running, float scale, int valid, int warp, int lane) {
#pragma unroll
    for (int j = 0; j < OWNED; j++) {
        const int head = warp + WARPS * j;
        if (head >= HEADS) break;
        float s = 0.0f;
#pragma unroll
        for (int quarter = 0; quarter < QUARTERS; quarter++) s += shared.scores[quarter][head][lane];
        s = lane < valid ? __fmul_rn(s, scale) : minus_infinity();
        const float most = fmaxf(running.most[j], warp_max(s));
        const float old = exp2f(running.most[j] - most);
        const u16 p = bf16_bits(exp2f(s - most));
        running.sum[j] = __fmaf_rn(running.sum[j], old, warp_sum(bf16_float(p)));
        running.most[j] = most;
        reinterpret_cast<u16*>(shared.p + head * P_STRIDE)[lane] = p;
        if (lane == 0) shared.factor[0][head] = old;
    }
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
        const float even = shared.factor[0][j * 8 + 2 * t], odd = shared.factor[0][j * 8 + 2 * t + 1];
#pragma unroll
        for (int m = 0; m < OUT_TILES; m++) {
            out[m][j][0] *= even;
            out[m][j][1] *= odd;
            out[m][j][2] *= even;
            out[m][j][3] *= odd;
        }
    }
    // Transposing ldmatrix: matrix i covers keys (i / 2) * 8.. and latent values (i % 2) * 8..
    const u8* row = tile + (lane / 16 * 8 + lane % 8) * KEY_STRIDE + lane / 8 % 2 * 16;
#pragma unroll
    for (int m = 0; m < OUT_TILES; m++) {
        const int at = warp * OUT_TILES + m;
        if (at < LATENT_STEPS) {
#pragma unroll
            for (int s = 0; s < 2; s++) {
                u32 v[4];
                ldmatrix_x4_trans(v, row + s * 16 * KEY_STRIDE + at * 32);
#pragma unroll
                for (int j = 0; j < HEAD_TILES; j++) mma_bf16(out[m][j], v, p[j][s]);
            }
        }
    }
}

// ---- merging

// The one way in which a chunk joins what came before it; exact about roundings because two kernels do it.
struct Join {
    float old_factor, new_factor;
};

__device__ __forceinline__ Join join(float& most, float& sum, float chunk_most, float chunk_sum) {
    const float top = fmaxf(most, chunk_most);
    const Join factors = {exp2f(most - top), exp2f(chunk_most - top)};
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
    const u16* rotary_query;
    int rotary_row, rotary_head;
    Planes planes;
    const int* slots;  // [R, list_stride]
    int list_stride;
    const int* counts;
    float scale;  // times log2(e)
    int heads;
};

// Walks entries begin..end of the row's list; `slots` in shared memory holds them.
template <typename AfterChunk>
__device__ __forceinline__ void walk(Shared& shared, const Query& query, const Problem& problem, const int* slots, int entries,
                                     Output& out, Running& running, const AfterChunk& after_chunk) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tiles = (entries + TILE - 1) / TILE;
    u8* const landing = PACKED ? shared.raw : shared.tile[0];
    fetch_tile(landing, PACKED ? RAW_BYTES : KEY_STRIDE, problem.planes, slots, 0, entries);
    cp_async_commit();
#pragma unroll 1
    for (int i = 0; i < tiles; i++) {
        const u8* tile = shared.tile[PACKED ? 0 : i % 2];
        cp_async_wait<0>();
        __syncthreads();  // the tile has landed, and nobody reads the one before
        if (PACKED) {
            unpack_tile(shared.raw, shared.tile[0]);
            __syncthreads();
        }
        if (i + 1 < tiles) {
            u8* next = PACKED ? shared.raw : shared.tile[(i + 1) % (PACKED ? 1 : 2)];
            fetch_tile(next, PACKED ? RAW_BYTES : KEY_STRIDE, problem.planes, slots, (i + 1) * TILE, entries);
        }
        cp_async_commit();
        score_tile(shared, tile, query, warp, lane);
        __syncthreads();
        soften_tile(shared, running, problem.scale, entries - i * TILE, warp, lane);
        __syncthreads();
        weigh_tile(shared, tile, out, warp, lane);
        if ((i + 1) % (CHUNK / TILE) == 0 || i + 1 == tiles) after_chunk();
    }
}

__device__ __forceinline__ int* stage_slots(Shared& shared, const int* list, int entries) {
    int* slots = reinterpret_cast<int*>(&shared + 1);
    for (int i = threadIdx.x; i < entries; i += THREADS) slots[i] = list[i];
    __syncthreads();
    return slots;
}

__device__ __forceinline__ void start_running(Running& running) {
#pragma unroll
    for (int j = 0; j < OWNED; j++) {
        running.most[j] = minus_infinity();
        running.sum[j] = 0.0f;
    }
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
                  const u8* latent_plane, const u8* rotary_plane, const int* slots, int list_stride, const int* counts, float scale,
                  int heads, float* partial, float* state) {
    chain_start();
    extern __shared__ __align__(128) u8 dynamic_smem[];
    Shared& shared = *reinterpret_cast<Shared*>(dynamic_smem);
    const Problem problem{latent_query, latent_row,  latent_head, rotary_query, rotary_row, rotary_head, Planes{latent_plane, rotary_plane},
                          slots,        list_stride, counts,      scale,        heads};
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int chunk = blockIdx.x, row = blockIdx.y, head0 = blockIdx.z * HEADS;
    const int entries = min(counts[row] - chunk * CHUNK, CHUNK);
    if (entries <= 0) return;
    const Query query = load_query(latent_query + static_cast<long long>(row) * latent_row, latent_head,
                                   rotary_query + static_cast<long long>(row) * rotary_row, rotary_head, head0, heads,
                                   warp, lane);
    const int* listed = stage_slots(shared, slots + static_cast<long long>(row) * list_stride + chunk * CHUNK, entries);
    Output out = {};
    Running running;
    start_running(running);
    walk(shared, query, problem, listed, entries, out, running, [] {});
    const long long at = (static_cast<long long>(row) * gridDim.x + chunk) * heads + head0;
    each_value(out, warp, lane, [&](int head, int value, float x) {
        if (head0 + head < heads) partial[(at + head) * LATENT + value] = x;
    });
#pragma unroll
    for (int j = 0; j < OWNED; j++) {
        const int head = warp + WARPS * j;
        if (lane == 0 && head < HEADS && head0 + head < heads) {
            state[(at + head) * 2] = running.most[j];
            state[(at + head) * 2 + 1] = running.sum[j];
        }
    }
}

// out [R, heads, LATENT] bfloat16 or float32; log_sums [R, heads] or null. A block a head and row, LATENT / 4 threads.
extern "C" __global__ void merge_chunks(const float* partial, const float* state, const int* counts, int chunks, int heads, void* out,
                                        int as_float, float* log_sums) {
    chain_start();
    const int head = blockIdx.x, row = blockIdx.y, used = (counts[row] + CHUNK - 1) / CHUNK;
    float most = minus_infinity(), sum = 0.0f, value[4] = {};
    for (int chunk = 0; chunk < used; chunk++) {
        const long long at = (static_cast<long long>(row) * chunks + chunk) * heads + head;
        const float4 v = *reinterpret_cast<const float4*>(partial + at * LATENT + threadIdx.x * 4);
        const Join f = join(most, sum, state[at * 2], state[at * 2 + 1]);
        value[0] = joined(value[0], v.x, f.old_factor, f.new_factor);
        value[1] = joined(value[1], v.y, f.old_factor, f.new_factor);
        value[2] = joined(value[2], v.z, f.old_factor, f.new_factor);
        value[3] = joined(value[3], v.w, f.old_factor, f.new_factor);
    }
    const long long at = static_cast<long long>(row) * heads + head;
#pragma unroll
    for (int i = 0; i < 4; i++)
        store_result(out, as_float, at * LATENT + threadIdx.x * 4 + i, used ? __fdiv_rn(value[i], sum) : 0.0f);
    if (log_sums != nullptr && threadIdx.x == 0) log_sums[at] = used ? log_sum(most, sum) : minus_infinity();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attend_rows(const u16* latent_query, int latent_row, int latent_head, const u16* rotary_query, int rotary_row, int rotary_head,
                const u8* latent_plane, const u8* rotary_plane, const int* slots, int list_stride, const int* counts, float scale,
                int heads, void* out, int as_float, float* log_sums) {
    chain_start();
    extern __shared__ __align__(128) u8 dynamic_smem[];
    Shared& shared = *reinterpret_cast<Shared*>(dynamic_smem);
    const Problem problem{latent_query, latent_row,  latent_head, rotary_query, rotary_row, rotary_head, Planes{latent_plane, rotary_plane},
                          slots,        list_stride, counts,      scale,        heads};
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = blockIdx.x, head0 = blockIdx.y * HEADS, entries = counts[row];
    const long long at = static_cast<long long>(row) * heads + head0;
    const int* listed = stage_slots(shared, slots + static_cast<long long>(row) * list_stride, entries);
    const Query query = load_query(latent_query + static_cast<long long>(row) * latent_row, latent_head,
                                   rotary_query + static_cast<long long>(row) * rotary_row, rotary_head, head0, heads,
                                   warp, lane);
    Output chunk_out = {}, total = {};
    Running chunk, whole;
    start_running(chunk);
    start_running(whole);
    walk(shared, query, problem, listed, entries, chunk_out, chunk, [&] {
        // shared.factor: the last tile's readers are past it only after this barrier.
        __syncthreads();
#pragma unroll
        for (int j = 0; j < OWNED; j++) {
            const int head = warp + WARPS * j;
            if (head >= HEADS) break;
            const Join f = join(whole.most[j], whole.sum[j], chunk.most[j], chunk.sum[j]);
            if (lane == 0) {
                shared.factor[0][head] = f.old_factor;
                shared.factor[1][head] = f.new_factor;
            }
        }
        start_running(chunk);
        __syncthreads();
#pragma unroll
        for (int j = 0; j < HEAD_TILES; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int head = j * 8 + lane % 4 * 2 + i % 2;
                const float old_factor = shared.factor[0][head], new_factor = shared.factor[1][head];
#pragma unroll
                for (int m = 0; m < OUT_TILES; m++) {
                    total[m][j][i] = joined(total[m][j][i], chunk_out[m][j][i], old_factor, new_factor);
                    chunk_out[m][j][i] = 0.0f;
                }
            }
    });
    __syncthreads();
#pragma unroll
    for (int j = 0; j < OWNED; j++) {
        const int head = warp + WARPS * j;
        if (lane == 0 && head < HEADS) {
            shared.factor[0][head] = whole.sum[j];
            if (log_sums != nullptr && head0 + head < heads)
                log_sums[at + head] = entries ? log_sum(whole.most[j], whole.sum[j]) : minus_infinity();
        }
    }
    __syncthreads();
    each_value(total, warp, lane, [&](int head, int value, float x) {
        if (head0 + head < heads)
            store_result(out, as_float, (at + head) * LATENT + value, entries ? __fdiv_rn(x, shared.factor[0][head]) : 0.0f);
    });
}
