// Routed experts of a window of up to 16 rows: EXL3 weights of mixed widths, each distinct expert decoded once.
//
//   rows [R, hidden] bf16, picks [R, slots] int32 (expert, or >= experts: none), weight [R, slots] fp32
//   -> out [R, hidden] fp32 = sum over slots, in slot order, of weight * down(silu(gate(row)) * up(row)), + shared row last
//
// Three launches, no host involved:
//   experts_start    block 0 lists the distinct experts and their members; the others rotate rows to fp16
//   experts_gate_up  block = (128 columns of gate or up, part of the inputs, listed expert); the last block of a column
//                    block adds the parts in order and goes on to SwiGLU and the rotation for down
//   experts_down     block = (128 columns of down, listed expert) over all inputs; the last slot of a row adds the slots
//
// A warp takes a run of 16-input tile rows, copies their words to its own ring in shared memory (cp.async, no barriers),
// decodes tiles to mma A fragments (16 columns x 16 inputs) and multiplies them with up to 8 members at once; beyond 8
// members it takes half the columns at a time, so that each weight is still decoded once. Sums: a warp's run, then the
// warps in order, then the parts in order; all fixed by the matrix shape alone, so a row's bits never depend on the other
// rows. Atomics only count arrivals.
//
// Experts of a layer may differ in their inner columns on this rank (columns [experts], multiples of 128, at most width,
// possibly none); vectors and scratch have room for `width` columns of each.
//
// Limits: 16 rows, 256 picks, matrix sizes multiples of 128. Widths: 2, 3, 4 bits (WIDTHS=0) or all (1).
// What binds it. H200: decode instructions (gate_up at 8 rows: 82 % of issue slots, ALU pipe 77 %). GB10: should be bound by
// memory: 20 warps a multiprocessor with up to 3 stages of 0.5 to 1 KiB each in flight. 8 warps for down gain 3 us at one
// row of a GLM-5.3 rank on the H200 and lose 5 to 20 % from 4 rows on; 3 or 6 stages change nothing there.
//! variant: CODEBOOK=1 WIDTHS=0
//! variant: CODEBOOK=0 WIDTHS=0
//! variant: CODEBOOK=2 WIDTHS=0
//! variant: CODEBOOK=1 WIDTHS=1
//! variant: CODEBOOK=2 WIDTHS=1
//! no-spills
#include "exl3_decode.cuh"
#include "exl3_rotate.cuh"

#ifndef STAGES
#define STAGES 4
#endif
#ifndef GATE_UP_WARPS
#define GATE_UP_WARPS 4
#endif
#ifndef DOWN_WARPS
#define DOWN_WARPS 4
#endif
#ifndef GATE_UP_BLOCKS
#define GATE_UP_BLOCKS 5
#endif
#ifndef DOWN_BLOCKS
#define DOWN_BLOCKS 5
#endif

constexpr int MEMBERS = 16, MAX_PICKS = 256;
// Sums of four warps in shared memory: 8 members x (128 + 4 columns) floats each, or 16 x (64 + 4).

// One distinct expert of the window and the picks (row * slots + slot) that name it.
struct Listed {
    int expert, count, pad[2];
    int pick[MEMBERS];
};

// ----------------------------------------------------------------------------------------------------------------------

__device__ void list_experts(const int* picks, int rows, int slots, int experts, Listed* listed, int* distinct, int* valid) {
    __shared__ __align__(16) int pick[MAX_PICKS];
    __shared__ int warp_total[32], base;
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, total = rows * slots;
    for (int i = thread; i < MAX_PICKS; i += blockDim.x) pick[i] = i < total ? picks[i] : -1;
    if (thread == 0) base = 0;
    __syncthreads();
    if (thread < rows) {
        int count = 0;
        for (int s = 0; s < slots; ++s) count += u32(pick[thread * slots + s]) < experts;
        valid[thread] = count;
    }
    for (int first = 0; first < experts; first += blockDim.x) {
        const int expert = first + thread;
        u32 named[MAX_PICKS / 32] = {};  // bit i: pick i names this thread's expert
        int count = 0;
#pragma unroll
        for (int w = 0; w < MAX_PICKS / 32; ++w) {
            if (w * 32 >= total || expert >= experts) break;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int4 four = reinterpret_cast<const int4*>(pick)[w * 8 + i];
                named[w] |= (u32(four.x == expert) | u32(four.y == expert) << 1 | u32(four.z == expert) << 2 |
                             u32(four.w == expert) << 3) << (4 * i);
            }
            count += __popc(named[w]);
        }
        const u32 used = __ballot_sync(FULL, count > 0);
        if (lane == 0) warp_total[warp] = __popc(used);
        __syncthreads();
        int place = base + __popc(used & ((1u << lane) - 1));
        for (int w = 0; w < warp; ++w) place += warp_total[w];
        if (count > 0) {
            Listed& entry = listed[place];
            entry.expert = expert;
            entry.count = min(count, MEMBERS);
            int n = 0;
#pragma unroll
            for (int w = 0; w < MAX_PICKS / 32; ++w)
                for (u32 left = named[w]; left && n < MEMBERS; left &= left - 1) entry.pick[n++] = w * 32 + __ffs(left) - 1;
        }
        __syncthreads();
        if (thread == blockDim.x - 1) base = place + (count > 0);
        __syncthreads();
    }
    if (thread == 0) *distinct = base;
}

// grid = 1 + rows rounded up to 8 warps, block = 256. `suh` null: one scale vector `shared_suh` for all gates and ups,
// rotated rows are [R, hidden]. Otherwise suh is [2, experts, hidden] (gate, up), rotated rows are [picks, 2, hidden].
extern "C" __global__ void __launch_bounds__(256) experts_start(
    const u16* x, const int* picks, const u16* shared_suh, const u16* suh, const float* shared, u16* rotated, float* out,
    Listed* listed, int* distinct, int* valid, int rows, int slots, int experts, int hidden) {
    let_successor_start();
    wait_for_predecessor();
    if (blockIdx.x == 0) return list_experts(picks, rows, slots, experts, listed, distinct, valid);
    const int lane = threadIdx.x % 32, blocks = hidden / BLOCK;
    const int item = (blockIdx.x - 1) * 8 + threadIdx.x / 32, line = item / blocks;
    const int column = item % blocks * BLOCK + lane * 4;
    if (line >= (suh ? rows * slots * 2 : rows)) return;
    const int row = suh ? line / (slots * 2) : line;

    if (suh == nullptr || line % (slots * 2) == 0) {  // a row without experts has nobody to write its result
        bool any = false;
        for (int s = 0; s < slots; ++s) any |= u32(picks[row * slots + s]) < experts;
        if (!any) {
            const i64 at = i64(row) * hidden + column;
            *reinterpret_cast<float4*>(out + at) = shared ? *reinterpret_cast<const float4*>(shared + at) : float4{};
        }
    }
    const u16* scale = shared_suh;
    if (suh) {
        const int expert = picks[line / 2];
        if (u32(expert) >= experts) return;
        scale = suh + (i64(line % 2) * experts + expert) * hidden;
    }
    const uint2 four = *reinterpret_cast<const uint2*>(x + i64(row) * hidden + column);
    float v[4] = {bf16_low(four.x), bf16_high(four.x), bf16_low(four.y), bf16_high(four.y)};
    scale_by_half4(v, scale + column);
    rotate(v, lane);
    store_fragment_order(rotated + i64(line) * hidden + item % blocks * BLOCK,
                         {half_pair(v[0], v[1]), half_pair(v[2], v[3])}, lane);
}

// ----------------------------------------------------------------------------------------------------------------------

// sum[tile][group] += weights of TILES column tiles x `steps` tile rows, times the members of GROUPS groups of 8.
//   words: this strip's first tile; pitch: bytes between tile rows
//   x: per group this lane's place in its member's row (fragment order), null where the group has no such member
//   wait: the rows come from the kernel before; the first words are under way before it is waited for
template <int K2, int GROUPS>
__device__ __forceinline__ void multiply(float (&sum)[8 / GROUPS][GROUPS][4], const u8* words, int pitch, int steps,
                                         const u16* const (&x)[GROUPS], u8* ring, bool wait) {
    constexpr int TILES = 8 / GROUPS, TILE_BYTES = 16 * K2, STAGE = TILES * TILE_BYTES, CHUNKS = STAGE / 16;
    const int lane = threadIdx.x % 32;
    const LaneCursors<K2> at(lane);
    const u8* from = words + lane * 16;
    const auto fetch = [&](int slot) {
#pragma unroll
        for (int i = 0; i < CHUNKS; i += 32)
            if (i + 32 <= CHUNKS || lane < CHUNKS % 32)
                cp_async_16(ring + slot * STAGE + (lane + i) * 16, from + i * 16);
        from += pitch;
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) {
        if (s < steps) fetch(s);
        cp_async_commit();
    }
    if (wait) wait_for_predecessor();
    uint2 next[GROUPS];
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) next[g] = x[g] ? *reinterpret_cast<const uint2*>(x[g]) : uint2{};

    int slot = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        uint2 b[GROUPS];
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            b[g] = next[g];
            if (x[g] && step + 1 < steps) next[g] = *reinterpret_cast<const uint2*>(x[g] + (step + 1) * 16);
        }
        cp_async_wait<STAGES - 2>();
        __syncwarp();  // the words have come, and all lanes are done with the stage that is filled next
        if (step + STAGES - 1 < steps) fetch(slot == 0 ? STAGES - 1 : slot - 1);
        cp_async_commit();
        const u32 stage = shared_address(ring + slot * STAGE);
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            u32 a[4];
            decode_tile<K2, CODEBOOK>(a, at, [&](int i) { return load_shared(stage + t * TILE_BYTES + i * 4); });
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) mma_f16(sum[t][g], a, {b[g].x, b[g].y});
        }
        slot = slot == STAGES - 1 ? 0 : slot + 1;
    }
    cp_async_wait<0>();
}

template <int GROUPS>
__device__ __forceinline__ void multiply_width(int k2, float (&sum)[8 / GROUPS][GROUPS][4], const u8* words, int pitch,
                                               int steps, const u16* const (&x)[GROUPS], u8* ring, bool wait) {
    switch (k2) {
        case 4: return multiply<4, GROUPS>(sum, words, pitch, steps, x, ring, wait);
        case 6: return multiply<6, GROUPS>(sum, words, pitch, steps, x, ring, wait);
        case 8: return multiply<8, GROUPS>(sum, words, pitch, steps, x, ring, wait);
#if WIDTHS
        case 2: return multiply<2, GROUPS>(sum, words, pitch, steps, x, ring, wait);
        case 10: return multiply<10, GROUPS>(sum, words, pitch, steps, x, ring, wait);
        case 12: return multiply<12, GROUPS>(sum, words, pitch, steps, x, ring, wait);
        case 14: return multiply<14, GROUPS>(sum, words, pitch, steps, x, ring, wait);
        case 16: return multiply<16, GROUPS>(sum, words, pitch, steps, x, ring, wait);
#if CODEBOOK == 2
        case 3: return multiply<3, GROUPS>(sum, words, pitch, steps, x, ring, wait);
        case 5: return multiply<5, GROUPS>(sum, words, pitch, steps, x, ring, wait);
        case 7: return multiply<7, GROUPS>(sum, words, pitch, steps, x, ring, wait);
#endif
#endif
    }
}

// A block's share of one matrix: tile rows first_row .. + rows of its 128 columns, for the members of one expert.
struct Share {
    const u8* trellis;  // whole matrix
    int k2, columns, column, first_row, rows;
};

// The sums of all warps over `share`, in order: done(member, column, sum). row_of(member): the member's fp16 row. Shared memory: max(WARPS * STAGES * 128 * k2, 17408) bytes.
template <int WARPS, int GROUPS, class RowOf, class Done>
__device__ __forceinline__ void block_sums(const Share& share, int count, u8* memory, bool wait, RowOf row_of, Done done) {
    constexpr int TILES = 8 / GROUPS, COLUMNS = TILES * 16, KEPT = WARPS < 4 ? WARPS : 4;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int steps = share.rows / WARPS, first = share.first_row + warp * steps;
    const int tile_bytes = 16 * share.k2, pitch = share.columns / 16 * tile_bytes;
    u8* ring = memory + warp * STAGES * TILES * tile_bytes;
    float* sums = reinterpret_cast<float*>(memory);
    const u16* x[GROUPS];
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
        const int member = lane / 4 + 8 * g;
        x[g] = member < count ? row_of(member) + first * 16 + lane % 4 * 4 : nullptr;
    }
#pragma unroll 1
    for (int pass = 0; pass < GROUPS; ++pass) {
        float sum[TILES][GROUPS][4] = {};
        multiply_width<GROUPS>(share.k2, sum, share.trellis + i64(first) * pitch + (share.column / 16 + pass * TILES) * tile_bytes,
                               pitch, steps, x, ring, wait);
        // A warp's place for its sums: [member][column of this pass].
        const auto place = [&](int w, int member, int column) -> float& {
            return sums[(w * 8 * GROUPS + member) * (COLUMNS + 4) + column];
        };
        const auto each = [&](auto&& use) {
#pragma unroll
            for (int t = 0; t < TILES; ++t)
#pragma unroll
                for (int g = 0; g < GROUPS; ++g)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int member = 8 * g + lane % 4 * 2 + i % 2;
                        if (member < count) use(place(warp % KEPT, member, t * 16 + lane / 4 + i / 2 * 8), sum[t][g][i]);
                    }
        };
        __syncthreads();  // rings are free
        if (WARPS > KEPT) {
            if (warp >= KEPT) each([](float& kept, float own) { kept = own; });
            __syncthreads();
            if (warp < KEPT) each([](float& kept, float own) { kept = own + kept; });
        } else {
            each([](float& kept, float own) { kept = own; });
        }
        __syncthreads();
        for (int i = threadIdx.x; i < count * COLUMNS; i += WARPS * 32) {
            const int member = i / COLUMNS, column = i % COLUMNS;
            float total = place(0, member, column);
#pragma unroll
            for (int w = 1; w < KEPT; ++w) total += place(w, member, column);
            done(member, pass * COLUMNS + column, total);
        }
        __syncthreads();
    }
}

// True in every thread of the last of `of` blocks to arrive; resets the counter for the next launch.
__device__ __forceinline__ bool last_to_arrive(int* counter, int of) {
    __shared__ int arrived;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        arrived = atomicAdd(counter, 1);
        if (arrived == of - 1) *counter = 0;
    }
    __syncthreads();
    __threadfence();
    return arrived == of - 1;
}

__device__ __forceinline__ void load_four(float (&v)[4], const float* at) {  // past L1: another block wrote it
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "l"(at) : "memory");
}

// grid = (2 * width / 128 * parts, most distinct experts), block = GATE_UP_WARPS * 32
//   trellis [3, experts] addresses, k2 [3, experts] (gate, up, down); columns [experts]: inner columns of each;
//   svh [2, experts, width]; down_suh [experts, width]
//   part sums z fp32 [picks, 2, parts, width]; h fp16 [picks, width] in fragment order; counters zero between launches
template <int GROUPS>
__device__ __forceinline__ void gate_up(const u64* trellis, const int* k2, const int* columns, const u16* rotated, bool one_row,
                                        const u16* svh, const u16* down_suh, const Listed* listed, const int* distinct, float* z, u16* h,
                                        int* counters, int slots, int experts, int hidden, int width, int parts) {
    extern __shared__ __align__(16) u8 memory[];
    wait_for_predecessor();
    let_successor_start();
    if (blockIdx.y >= *distinct) return;
    const Listed& entry = listed[blockIdx.y];
    const int expert = entry.expert, count = entry.count;
    const int part = blockIdx.x % parts, matrix = blockIdx.x / parts % 2, block = blockIdx.x / (parts * 2);
    const int rows = hidden / 16 / parts;
    const Share share = {reinterpret_cast<const u8*>(trellis[matrix * experts + expert]), k2[matrix * experts + expert],
                         columns[expert], block * BLOCK, part * rows, rows};
    if (share.column >= share.columns) return;
    const auto row_of = [&](int m) {
        const int pick = entry.pick[m];
        return rotated + i64(one_row ? pick / slots : pick * 2 + matrix) * hidden;
    };
    const auto part_of = [&](int m, int which, int p) {
        return z + ((i64(entry.pick[m]) * 2 + which) * parts + p) * width + block * BLOCK;
    };
    const auto store = [&](int m, int column, float sum) { part_of(m, matrix, part)[column] = sum; };
    if (GROUPS == 1 || count <= 8) block_sums<GATE_UP_WARPS, 1>(share, count, memory, false, row_of, store);
    else block_sums<GATE_UP_WARPS, GROUPS>(share, count, memory, false, row_of, store);

    if (!last_to_arrive(counters + blockIdx.y * (width / BLOCK) + block, 2 * parts)) return;
    const int lane = threadIdx.x % 32, column = block * BLOCK + lane * 4;
    for (int m = threadIdx.x / 32; m < count; m += GATE_UP_WARPS) {
        float v[2][4] = {};
#pragma unroll
        for (int which = 0; which < 2; ++which)
            for (int p = 0; p < parts; ++p) {
                float more[4];
                load_four(more, part_of(m, which, p) + lane * 4);
#pragma unroll
                for (int i = 0; i < 4; ++i) v[which][i] += more[i];
            }
        const uint2 four = swiglu(v[0], v[1], svh + i64(expert) * width + column,
                                  svh + (i64(experts) + expert) * width + column, down_suh + i64(expert) * width + column, lane);
        store_fragment_order(h + i64(entry.pick[m]) * width + block * BLOCK, four, lane);
    }
}

// grid = (hidden / 128, most distinct experts), block = DOWN_WARPS * 32
//   svh [experts, hidden]; y fp32 [picks, hidden]; shared fp32 [R, hidden] or null; valid [R]: experts of a row
template <int GROUPS>
__device__ __forceinline__ void down(const u64* trellis, const int* k2, const int* columns, const u16* h, const u16* svh, const Listed* listed,
                                     const int* distinct, const int* picks, const float* weight, const float* shared,
                                     const int* valid, float* y, float* out, int* counters, int slots, int experts,
                                     int hidden, int width) {
    extern __shared__ __align__(16) u8 memory[];
    __shared__ float total[(GROUPS == 1 ? 8 : MEMBERS)][BLOCK];
    // The list comes from two kernels back, which has ended: gate_up waited for it before it let this one start.
    if (blockIdx.y >= *distinct) return;
    const Listed& entry = listed[blockIdx.y];
    const int expert = entry.expert, count = entry.count, block = blockIdx.x;
    const Share share = {reinterpret_cast<const u8*>(trellis[2 * experts + expert]), k2[2 * experts + expert],
                         hidden, block * BLOCK, 0, columns[expert] / 16};
    const auto row_of = [&](int m) { return h + i64(entry.pick[m]) * width; };
    const auto store = [&](int m, int column, float sum) { total[m][column] = sum; };
    if (GROUPS == 1 || count <= 8) block_sums<DOWN_WARPS, 1>(share, count, memory, true, row_of, store);
    else block_sums<DOWN_WARPS, GROUPS>(share, count, memory, true, row_of, store);

    const int lane = threadIdx.x % 32, column = block * BLOCK + lane * 4;
    for (int m = threadIdx.x / 32; m < count; m += DOWN_WARPS) {
        const int pick = entry.pick[m], row = pick / slots;
        float v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = total[m][lane * 4 + i];
        rotate(v, lane);
        scale_by_half4(v, svh + i64(expert) * hidden + column);
        *reinterpret_cast<float4*>(y + i64(pick) * hidden + column) = {v[0], v[1], v[2], v[3]};
        __threadfence();
        __syncwarp();
        int* counter = counters + row * (hidden / BLOCK) + block;
        int arrived = lane == 0 ? atomicAdd(counter, 1) : 0;
        arrived = __shfl_sync(FULL, arrived, 0);
        if (arrived != valid[row] - 1) continue;
        // This was the row's last slot: add them all, in slot order, the shared expert last.
        if (lane == 0) *counter = 0;
        __threadfence();
        float sum[4] = {};
        for (int s = 0; s < slots; ++s) {
            if (u32(picks[row * slots + s]) >= experts) continue;
            float more[4];
            load_four(more, y + i64(row * slots + s) * hidden + column);
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[i] = fmaf(weight[row * slots + s], more[i], sum[i]);
        }
        const i64 at = i64(row) * hidden + column;
        if (shared) {
            const float4 last = *reinterpret_cast<const float4*>(shared + at);
            sum[0] += last.x, sum[1] += last.y, sum[2] += last.z, sum[3] += last.w;
        }
        *reinterpret_cast<float4*>(out + at) = {sum[0], sum[1], sum[2], sum[3]};
    }
}

// FEWER: blocks fewer on a multiprocessor, for the registers of a second group of members or of wide tiles.
#define EXPERT_KERNELS(NAME, GROUPS, FEWER)                                                                                   \
    extern "C" __global__ void __launch_bounds__(GATE_UP_WARPS * 32, GATE_UP_BLOCKS - (FEWER)) experts_gate_up_##NAME(            \
        const u64* trellis, const int* k2, const int* columns, const u16* rotated, int one_row, const u16* svh, const u16* down_suh, \
        const Listed* listed, const int* distinct, float* z, u16* h, int* counters, int slots, int experts,            \
        int hidden, int width, int parts) {                                                                            \
        gate_up<GROUPS>(trellis, k2, columns, rotated, one_row, svh, down_suh, listed, distinct, z, h, counters, slots,         \
                        experts, hidden, width, parts);                                                                \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(DOWN_WARPS * 32, DOWN_BLOCKS - (FEWER)) experts_down_##NAME(                     \
        const u64* trellis, const int* k2, const int* columns, const u16* h, const u16* svh, const Listed* listed, const int* distinct,    \
        const int* picks, const float* weight, const float* shared, const int* valid, float* y, float* out,            \
        int* counters, int slots, int experts, int hidden, int width) {                                                \
        down<GROUPS>(trellis, k2, columns, h, svh, listed, distinct, picks, weight, shared, valid, y, out, counters, slots,     \
                     experts, hidden, width);                                                                          \
    }
EXPERT_KERNELS(8, 1, WIDTHS)
EXPERT_KERNELS(16, 2, 1 + WIDTHS)
