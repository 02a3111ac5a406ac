// Sparse multi-head latent attention over listed tokens, absorbed form: every head attends to the same cached rows.
//
//   score[h][t] = (latent_query[h] . latent[t] + rotary_query[h] . rotary[t]) * scale;  out[h] = sum softmax(score)[t] * latent[t]
//
// Rotary queries come as the linear layer left them and are rotated here. The list of a row is cut into chunks of 64 entries, a chunk
// into tiles of 32 keys. Keys are the matrix rows and heads its columns (scores^T = K . Q^T, out^T = V^T . P^T), so 22 heads fill 24
// columns. A warp takes 64 columns of 16 keys from the cache to operands of the first product, multiplies them, and stores them as
// bfloat16 for the second one (attention_keys.cuh); the eight parts of a score are added when the tile is softened. Within a chunk the
// softmax is the usual running one; chunks are merged in order with explicit roundings:
//
//   attend_chunks  decode: a block a (chunk, row, 24 heads), partial results to memory; merge_chunks folds them in order.
//   attend_rows    prompt: a block a (row, 24 heads) walks all chunks and folds them with the same operations, into shared memory where a
//                  block may have 143 KiB of it, else into registers.
//
// Between two barriers either the tile before is weighed and the next one scored (matrix instructions), or scores are softened.
//
// Both give a row the same bits. merge_chunks and attend_rows can also give each head's logarithm of the sum of exponentials, which is
// what merging with other parts of the context needs.
//
// What binds it. H200, 22 heads, 2,048 rows of 2,048 keys: 1.95 ms from fp8 (1.77 bf16, 2.22 fp4), 3,400 cycles a tile, of which the
// path to shared memory and L1 is busy 70 % (1,700 wavefronts and 600 tags), issue slots 38 %; tensor instructions alone would take
// about 800. Slower there, by format: scoring before weighing 2 to 5 %, a third values buffer and one barrier a tile 0 to 20 %, the sums of
// the chunks before in registers 0 to 17 %. One row takes 11 us, mostly latencies in sequence. Chunks of 128 take 20 to 30 % off 8 to 16
// rows, but add 25 % to one row and 1 to 28 % to prompts. GB10 (not measured) has a fifth of the tensor rate a clock, so the rest should
// weigh less there.
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
//! spills 208
#include "attention_tile.cuh"

// Whether attend_rows keeps what it has of the chunks before in shared memory: an H200's block may have 227 KiB, a GB10's 99.
#ifndef TOTALS_SHARED
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
#define TOTALS_SHARED 1
#else
#define TOTALS_SHARED 0
#endif
#endif

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
    float scale;  // times log2(e)
    int heads;
};

// Walks a row's list of `entries` > 0 slots. soft(head) follows the softening of a chunk's last tile, closed() its weighing.
template <typename Soft, typename Closed>
__device__ __forceinline__ void walk(Shared& shared, const Problem& problem, int row, int head0, const int* list, int entries, Output& out,
                                     Running& running, int warp, int lane, const Soft& soft, const Closed& closed) {
    const int tiles = (entries + TILE - 1) / TILE;
    const Place place(warp, lane);
    const Columns columns(problem.planes, place);
    const int* const kept_list = kept(list);
    // Keys past the list are its last one again and get no weight.
    const auto slots_of = [&](int (&slots)[2], int tile) {
#pragma unroll
        for (int h = 0; h < 2; h++) slots[h] = kept_list[min(tile * TILE + place.key + h * 8, entries - 1)];
    };
    int slots[2];
    Incoming in = {};
    slots_of(slots, 0);
    fetch(in, columns, slots, place);
    slots_of(slots, 1);
    // The last warp, which softens nothing, brings the scales, a lane those of one key.
    const bool brings = SCALES > 0 && warp == WARPS - 1;
    const auto own_slot = [&](int tile) { return brings ? kept_list[min(tile * TILE + lane, entries - 1)] : 0; };
    const auto keep_scales = [&](const Scales& scales) {
        if (brings)
#pragma unroll
            for (int i = 0; i < SCALES; i++) shared.scales[i][lane] = scales.v[i];
    };
    int own = own_slot(0);
    Scales scales(problem.planes, own);
    keep_scales(scales);
    own = own_slot(1);
    if (brings) scales = Scales(problem.planes, own);
    own = own_slot(2);
    const long long at = row;
    const Query query = load_query(problem.latent_query + at * problem.latent_row, problem.latent_head,
                                   problem.rotary_query + at * problem.rotary_row, problem.rotary_head,
                                   problem.cosines + at * (ROTARY / 2), problem.sines + at * (ROTARY / 2), head0, problem.heads, place, lane);
    __syncthreads();
    // Scores tile i; then the next one is under way.
    const auto score = [&](int i) {
        float scale[2] = {}, rotary_scale[2] = {};
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (SCALES > 0) scale[h] = shared.scales[0][place.key + 8 * h];
            if (SCALES > 1) rotary_scale[h] = shared.scales[SCALES - 1][place.key + 8 * h];
        }
        u8* values = shared.values[i % 2];
        if (all_small(KV == 3 ? rotary_scale : scale)) score_tile<true>(shared, values, in, scale, rotary_scale, query, place);
        else score_tile<false>(shared, values, in, scale, rotary_scale, query, place);
        fetch(in, columns, slots, place);
        slots_of(slots, i + 2);
    };
    const auto closes = [&](int i) { return (i + 1) % TILES_A_CHUNK == 0 || i + 1 == tiles; };
    const auto weigh = [&](int i) {
        weigh_tile(shared, shared.values[i % 2], i % TILES_A_CHUNK == 0, out, warp, lane);
        if (closes(i)) closed();
    };
    const auto soften = [&](int i) {
        if (warp < HEADS / 2) {
            const int head = warp * 2 + lane / 16;
            soften_tile(shared, running, problem.scale, entries - i * TILE, head, lane);
            if (closes(i)) soft(head);
        }
        if (brings) {
            keep_scales(scales);
            scales = Scales(problem.planes, own);
            own = own_slot(i + 3);
        }
    };
#pragma unroll 1
    for (int i = 0; i < tiles; i += 2) {
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            if (i + odd >= tiles) break;
            if (i + odd > 0) weigh(i + odd - 1);
            score(i + odd);
            __syncthreads();
            soften(i + odd);
            __syncthreads();
        }
    }
    weigh(tiles - 1);
}

// f(head of the block, latent value, register) for each value a lane holds.
template <typename F>
__device__ __forceinline__ void each_value(Output& out, int warp, int lane, const F& f) {
#pragma unroll
    for (int m = 0; m < OUT_TILES; m++)
        if (warp * OUT_TILES + m < VALUE_STEPS)
#pragma unroll
            for (int j = 0; j < HEAD_TILES; j++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    f(j * 8 + lane % 4 * 2 + i % 2, (warp * OUT_TILES + m) * 16 + lane / 4 + i / 2 * 8, out[m][j][i]);
}

// partial [R, chunks, heads, LATENT] float32, unnormalised; state [R, chunks, heads, 2]: greatest score and sum.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attend_chunks(const u16* latent_query, int latent_row, int latent_head, const u16* rotary_query, int rotary_row, int rotary_head,
                  const float* cosines, const float* sines, const u8* latent_plane, const u8* rotary_plane, const int* slots,
                  int list_stride, const int* counts, float scale, int heads, float* partial, float* state) {
    chain_start();
    extern __shared__ __align__(128) u8 dynamic_smem[];
    Shared& shared = *reinterpret_cast<Shared*>(dynamic_smem);
    const Problem problem{latent_query, latent_row, latent_head, rotary_query, rotary_row, rotary_head, cosines, sines,
                          Planes{latent_plane, rotary_plane}, scale, heads};
    const int thread = kept(static_cast<int>(threadIdx.x)), warp = thread / 32, lane = thread % 32;
    const int chunk = blockIdx.x, row = blockIdx.y, head0 = blockIdx.z * HEADS;
    const int entries = min(counts[row] - chunk * CHUNK, CHUNK);
    if (entries <= 0) return;
    Output out;
    Running running{minus_infinity(), 0.0f};
    walk(shared, problem, row, head0, slots + static_cast<long long>(row) * list_stride + chunk * CHUNK, entries, out, running, warp, lane,
         [](int) {}, [] {});
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
                const float* cosines, const float* sines, const u8* latent_plane, const u8* rotary_plane, const int* slots,
                int list_stride, const int* counts, float scale, int heads, void* out, int as_float, float* log_sums) {
    chain_start();
    extern __shared__ __align__(128) u8 dynamic_smem[];
    Shared& shared = *reinterpret_cast<Shared*>(dynamic_smem);
    const Problem problem{latent_query, latent_row, latent_head, rotary_query, rotary_row, rotary_head, cosines, sines,
                          Planes{latent_plane, rotary_plane}, scale, heads};
    const int thread = kept(static_cast<int>(threadIdx.x)), warp = thread / 32, lane = thread % 32;
    const int row = blockIdx.x, head0 = blockIdx.y * HEADS, entries = counts[row];
    const long long at = static_cast<long long>(row) * heads + head0;
    Output chunk_out;
#if TOTALS_SHARED
    float4 (*totals)[THREADS] = reinterpret_cast<float4 (*)[THREADS]>(&shared + 1);
#pragma unroll
    for (int i = 0; i < OUT_TILES * HEAD_TILES; i++) totals[i][threadIdx.x] = float4{0.0f, 0.0f, 0.0f, 0.0f};
#else
    Output total = {};
#endif
    Running chunk{minus_infinity(), 0.0f}, whole = chunk;
    const int head = warp * 2 + lane / 16;
    const auto soft = [&](int head) {
        const Join f = join(whole.most, whole.sum, chunk.most, chunk.sum);
        if (lane % 16 == 0) {
            shared.fold[0][head] = f.old_factor;
            shared.fold[1][head] = f.new_factor;
        }
        chunk = {minus_infinity(), 0.0f};
    };
    const auto closed = [&] {
#pragma unroll
        for (int j = 0; j < HEAD_TILES; j++) {
            const int head = j * 8 + lane % 4 * 2;
            const float2 old = *reinterpret_cast<const float2*>(&shared.fold[0][head]);
            const float2 now = *reinterpret_cast<const float2*>(&shared.fold[1][head]);
#pragma unroll
            for (int m = 0; m < OUT_TILES; m++) {
#if TOTALS_SHARED
                float4& place = totals[m * HEAD_TILES + j][threadIdx.x];
                const float4 four = place;
                place = {joined(four.x, chunk_out[m][j][0], old.x, now.x), joined(four.y, chunk_out[m][j][1], old.y, now.y),
                         joined(four.z, chunk_out[m][j][2], old.x, now.x), joined(four.w, chunk_out[m][j][3], old.y, now.y)};
#else
#pragma unroll
                for (int i = 0; i < 4; i++)
                    total[m][j][i] = joined(total[m][j][i], chunk_out[m][j][i], i % 2 ? old.y : old.x, i % 2 ? now.y : now.x);
#endif
            }
        }
    };
    if (entries > 0)
        walk(shared, problem, row, head0, slots + static_cast<long long>(row) * list_stride, entries, chunk_out, chunk, warp, lane, soft,
             closed);
    __syncthreads();
    if (lane % 16 == 0 && head < HEADS) {
        shared.factor[head] = whole.sum;
        if (log_sums != nullptr && head0 + head < heads)
            log_sums[at + head] = entries ? log_sum(whole.most, whole.sum) : minus_infinity();
    }
    __syncthreads();
#if TOTALS_SHARED
    Output total;
#pragma unroll
    for (int m = 0; m < OUT_TILES; m++)
#pragma unroll
        for (int j = 0; j < HEAD_TILES; j++) {
            const float4 four = totals[m * HEAD_TILES + j][threadIdx.x];
            total[m][j][0] = four.x, total[m][j][1] = four.y, total[m][j][2] = four.z, total[m][j][3] = four.w;
        }
#endif
    each_value(total, warp, lane, [&](int head, int value, float x) {
        if (head0 + head < heads)
            store_result(out, as_float, (at + head) * LATENT + value, entries ? __fdiv_rn(x, shared.factor[head]) : 0.0f);
    });
}
