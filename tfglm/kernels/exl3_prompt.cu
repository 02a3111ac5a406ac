// Routed experts of a prompt chunk (hundreds to 4096 rows): EXL3 weights of mixed widths on the tensor cores.
//
//   rows [R, hidden] bf16, picks [R, slots] int32 (expert, or >= experts: none), weight [R, slots] fp32
//   -> out [R, hidden] fp32 = sum over slots, in slot order, of weight * down(silu(gate(row)) * up(row)), + shared row last
//
//   prompt_start    a block an expert collects its picks in order, the last one cuts them into items of up to ROWS picks;
//                   the other blocks rotate the rows to fp16
//   prompt_gate_up  block = (item, 128 columns of gate and of up), then SwiGLU and the rotation for down
//   prompt_linear   block = (item, 256 columns of one matrix); rotated fp32 result a pick. Down, and for experts with
//                   their own input scales (or widths that differ between gate and up) also gate and up, with
//   prompt_swiglu   between them
//   prompt_combine  adds the slots of a row in slot order
//
// A warp owns 16 columns in each of two strips (gate and up, or two column blocks). For every 16 inputs it decodes its
// two tiles to mma A fragments in registers and multiplies them with all rows of the item, which come through shared
// memory (cp.async ring, XOR swizzle, ldmatrix). One fp32 chain over all inputs: a row's bits depend on nothing else.
// A weight is decoded once an item, so an item should hold an expert's whole share of the chunk.
//
// Limits: matrix sizes multiples of 128, 32768 picks, 1024 experts. Widths: 2, 3, 4 bits (WIDTHS=0) or all (1).
//! variant: CODEBOOK=0 WIDTHS=0
//! variant: CODEBOOK=1 WIDTHS=0
//! variant: CODEBOOK=2 WIDTHS=0
//! variant: CODEBOOK=1 WIDTHS=1
//! variant: CODEBOOK=2 WIDTHS=1
//! no-spills
#include "exl3_decode.cuh"
#include "exl3_rotate.cuh"

#ifndef ROWS
#define ROWS 128  // most picks an item holds
#endif
#ifndef PROMPT_STAGES
#define PROMPT_STAGES 3
#endif
#ifndef RESIDENT
#define RESIDENT 1
#endif

constexpr int WARPS = 8, THREADS = WARPS * 32;
constexpr int STEP = 64, STEP_TILES = STEP / 16;  // inputs a stage of the ring
constexpr int PAIRS = ROWS / 16;                  // 16 rows are multiplied or skipped together
constexpr int ROW_BYTES = STEP * 2;
constexpr int OUT_ROWS = 32, OUT_STRIDE = BLOCK + 4;  // results pass through shared memory 32 rows at a time

struct Item {
    int expert, first, count, pad;  // picks first .. first + count - 1 of the expert's list
};

// ----------------------------------------------------------------------------------------------------------------------

__device__ void cut_items(const int* counts, int experts, Item* items, int* item_count) {
    __shared__ int warp_total[WARPS], base;
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    if (thread == 0) base = 0;
    __syncthreads();
    for (int first = 0; first < experts; first += THREADS) {
        const int expert = first + thread;
        const int count = expert < experts ? *const_cast<const volatile int*>(counts + expert) : 0;
        const int parts = (count + ROWS - 1) / ROWS;
        int before = parts;  // running total over the warp
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(FULL, before, step);
            if (lane >= step) before += other;
        }
        if (lane == 31) warp_total[warp] = before;
        __syncthreads();
        int place = base + before - parts;
        for (int w = 0; w < warp; ++w) place += warp_total[w];
        if (parts) {
            const int most = ((count + parts - 1) / parts + 15) / 16 * 16;  // even shares
            for (int from = 0; from < count; from += most) items[place++] = {expert, from, min(most, count - from), 0};
        }
        __syncthreads();
        if (thread == THREADS - 1) base = place;
        __syncthreads();
    }
    if (thread == 0) *item_count = base;
}

__device__ void collect(const int* picks, int total, int rows, int experts, int* members, int* counts, Item* items,
                        int* item_count, int* arrivals) {
    __shared__ int warp_count[WARPS], arrived;
    const int expert = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int share = (total + WARPS * 32 - 1) / (WARPS * 32) * 32, first = warp * share, last = min(total, first + share);
    int count = 0;
    for (int i = first; i < last; i += 32) count += __popc(__ballot_sync(FULL, i + lane < last && picks[i + lane] == expert));
    if (lane == 0) warp_count[warp] = count;
    __syncthreads();
    int place = 0, all = 0;
    for (int w = 0; w < WARPS; ++w) {
        if (w < warp) place += warp_count[w];
        all += warp_count[w];
    }
    int* list = members + i64(expert) * rows;
    for (int i = first; i < last; i += 32) {
        const bool mine = i + lane < last && picks[i + lane] == expert;
        const u32 found = __ballot_sync(FULL, mine);
        if (mine) list[place + __popc(found & ((1u << lane) - 1))] = i + lane;
        place += __popc(found);
    }
    if (threadIdx.x == 0) {
        counts[expert] = all;
        __threadfence();
        arrived = atomicAdd(arrivals, 1);
        if (arrived == experts - 1) *arrivals = 0;
    }
    __syncthreads();
    __threadfence();
    if (arrived == experts - 1) cut_items(counts, experts, items, item_count);
}

__device__ void rotate_block(const u16* from, const u16* scale, u16* to, int lane) {
    const uint2 four = *reinterpret_cast<const uint2*>(from + lane * 4);
    float v[4] = {bf16_low(four.x), bf16_high(four.x), bf16_low(four.y), bf16_high(four.y)};
    scale_by_half4(v, scale + lane * 4);
    rotate(v, lane);
    *reinterpret_cast<uint2*>(to + lane * 4) = {half_pair(v[0], v[1]), half_pair(v[2], v[3])};
}

// grid = experts + rotation warps / 8, block = 256. suh: the layer's one input scale [hidden]; null: only collect.
extern "C" __global__ void __launch_bounds__(THREADS) prompt_start(
    const u16* x, const int* picks, const u16* suh, u16* rotated, int* members, int* counts, Item* items, int* item_count,
    int* arrivals, int rows, int slots, int experts, int hidden) {
    if (blockIdx.x < experts)
        return collect(picks, rows * slots, rows, experts, members, counts, items, item_count, arrivals);
    const i64 item = i64(blockIdx.x - experts) * WARPS + threadIdx.x / 32;
    const int column = item % (hidden / BLOCK) * BLOCK;
    const i64 row = item / (hidden / BLOCK);
    if (suh && row < rows)
        rotate_block(x + row * hidden + column, suh + column, rotated + row * hidden + column, threadIdx.x % 32);
}

// A row for each pick -> rotated [picks, hidden], with its expert's own scale, suh [experts, hidden] and pitch = hidden,
// or one scale, suh [hidden] and pitch = 0. grid = warps / 8.
extern "C" __global__ void __launch_bounds__(THREADS) prompt_rotate(
    const u16* x, const int* picks, const u16* suh, u16* rotated, int pitch, int total, int slots, int experts, int hidden) {
    const i64 item = i64(blockIdx.x) * WARPS + threadIdx.x / 32, pick = item / (hidden / BLOCK);
    const int column = item % (hidden / BLOCK) * BLOCK;
    if (pick >= total || u32(picks[pick]) >= experts) return;
    rotate_block(x + pick / slots * hidden + column, suh + i64(picks[pick]) * pitch + column,
                 rotated + pick * hidden + column, threadIdx.x % 32);
}

// ----------------------------------------------------------------------------------------------------------------------

// Two strips of 128 columns, each `inputs` deep.
struct Strips {
    const u8* words[2];  // first tile of the strip (the second may repeat the first)
    int pitch;           // bytes between tile rows
};

template <int K2> constexpr int stage_bytes() { return ROWS * ROW_BYTES + 2 * STEP_TILES * 8 * 16 * K2; }

// sum[strip][8 rows][..] += the warp's 16 columns of both strips, times the item's rows.
//   row_at[i]: this thread's i-th 16-byte piece of the first stage's rows, an offset in `rows`; < 0: none
template <int K2>
__device__ __forceinline__ void multiply(float (&sum)[2][ROWS / 8][4], const Strips& strips, int inputs, const u16* rows,
                                         const int (&row_at)[ROWS * ROW_BYTES / 16 / THREADS], int pairs, u8* ring) {
    constexpr int TILE = 16 * K2, RUN = 8 * K2;  // bytes a tile; 16-byte pieces of 8 tiles
    constexpr int PIECES = 2 * STEP_TILES * RUN, ROUNDS = (PIECES + THREADS - 1) / THREADS, STAGE = stage_bytes<K2>();
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const LaneCursors<K2> at(lane);

    const u8* from[ROUNDS];
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        const int piece = thread + i * THREADS, run = piece / RUN;
        from[i] = (run < STEP_TILES ? strips.words[0] : strips.words[1]) + run % STEP_TILES * strips.pitch + piece % RUN * 16;
    }
    const int advance = STEP_TILES * strips.pitch;
    int stage_input = 0;
    const auto fetch = [&](u8* stage) {
#pragma unroll
        for (int i = 0; i < ROWS * ROW_BYTES / 16 / THREADS; ++i) {
            const int piece = thread + i * THREADS, row = piece / 8, chunk = piece % 8;
            if (row_at[i] >= 0)
                cp_async_16(stage + row * ROW_BYTES + (chunk ^ row % 8) * 16, rows + i64(row_at[i]) + stage_input);
        }
        stage_input += STEP;
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            const int piece = thread + i * THREADS;
            if (PIECES % THREADS == 0 || piece < PIECES) cp_async_16(stage + ROWS * ROW_BYTES + piece * 16, from[i]);
            from[i] += advance;
        }
    };
    const int steps = inputs / STEP;
#pragma unroll
    for (int s = 0; s < PROMPT_STAGES - 1; ++s) {
        if (s < steps) fetch(ring + s * STAGE);
        cp_async_commit();
    }
    // Row of the item and half of its 16 inputs that this lane addresses for ldmatrix (two groups of 8 rows at once).
    const int lane_row = lane / 16 * 8 + lane % 8, lane_half = lane / 8 % 2;
    int slot = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        cp_async_wait<PROMPT_STAGES - 2>();
        __syncthreads();
        if (step + PROMPT_STAGES - 1 < steps) fetch(ring + (slot == 0 ? PROMPT_STAGES - 1 : slot - 1) * STAGE);
        cp_async_commit();
        const u8* stage = ring + slot * STAGE;
        const u32 words = shared_address(stage + ROWS * ROW_BYTES + warp * TILE);
        // Words of the next tile and rows of the next pair are asked for before the current ones are used.
        TileWords<K2> next[2];
        const auto ask = [&](int tile) {
#pragma unroll
            for (int strip = 0; strip < 2; ++strip)
                next[strip].load(at, [&](int i) { return load_shared(words + (strip * STEP_TILES + tile) * 8 * TILE + i * 4); });
        };
        ask(0);
#pragma unroll
        for (int tile = 0; tile < STEP_TILES; ++tile) {
            const u8* row = stage + lane_row * ROW_BYTES + ((tile * 2 + lane_half) ^ lane_row % 8) * 16;
            u32 a[2][4], b[2][4];
            ldmatrix_x4(b[0], row);
#pragma unroll
            for (int strip = 0; strip < 2; ++strip) decode_tile<K2, CODEBOOK>(a[strip], at, next[strip]);
            if (tile + 1 < STEP_TILES) ask(tile + 1);
#pragma unroll
            for (int pair = 0; pair < PAIRS; ++pair) {
                if (pair >= pairs) break;
                if (pair + 1 < PAIRS) ldmatrix_x4(b[(pair + 1) % 2], row + (pair + 1) * 16 * ROW_BYTES);
#pragma unroll
                for (int strip = 0; strip < 2; ++strip) {
                    mma_f16(sum[strip][pair * 2], a[strip], {b[pair % 2][0], b[pair % 2][1]});
                    mma_f16(sum[strip][pair * 2 + 1], a[strip], {b[pair % 2][2], b[pair % 2][3]});
                }
            }
        }
        slot = slot == PROMPT_STAGES - 1 ? 0 : slot + 1;
    }
    cp_async_wait<0>();
    __syncthreads();
}

__device__ __forceinline__ void multiply_width(int k2, float (&sum)[2][ROWS / 8][4], const Strips& strips, int inputs,
                                               const u16* rows, const int (&row_at)[ROWS * ROW_BYTES / 16 / THREADS],
                                               int pairs, u8* ring) {
    switch (k2) {
        case 4: return multiply<4>(sum, strips, inputs, rows, row_at, pairs, ring);
        case 6: return multiply<6>(sum, strips, inputs, rows, row_at, pairs, ring);
        case 8: return multiply<8>(sum, strips, inputs, rows, row_at, pairs, ring);
#if WIDTHS
        case 2: return multiply<2>(sum, strips, inputs, rows, row_at, pairs, ring);
        case 10: return multiply<10>(sum, strips, inputs, rows, row_at, pairs, ring);
        case 12: return multiply<12>(sum, strips, inputs, rows, row_at, pairs, ring);
        case 14: return multiply<14>(sum, strips, inputs, rows, row_at, pairs, ring);
        case 16: return multiply<16>(sum, strips, inputs, rows, row_at, pairs, ring);
#if CODEBOOK == 2
        case 3: return multiply<3>(sum, strips, inputs, rows, row_at, pairs, ring);
        case 5: return multiply<5>(sum, strips, inputs, rows, row_at, pairs, ring);
        case 7: return multiply<7>(sum, strips, inputs, rows, row_at, pairs, ring);
#endif
#endif
    }
}

// Multiplies an item and hands its result out: finish(pick, first strip's 4 columns, second strip's) is called by a whole
// warp for each pick, lane l holding columns 4l .. 4l + 3 of both strips. line_of(pick): line of `rows` that it reads.
template <class LineOf, class Finish>
__device__ __forceinline__ void process(const Item& item, const int* list, const Strips& strips, int k2, int inputs,
                                        const u16* rows, u8* memory, LineOf line_of, Finish finish) {
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    int row_at[ROWS * ROW_BYTES / 16 / THREADS];
#pragma unroll
    for (int i = 0; i < ROWS * ROW_BYTES / 16 / THREADS; ++i) {
        const int piece = thread + i * THREADS, row = piece / 8;
        row_at[i] = row < item.count ? line_of(list[row]) * inputs + piece % 8 * 8 : -1;
    }
    float sum[2][ROWS / 8][4] = {};
    multiply_width(k2, sum, strips, inputs, rows, row_at, (item.count + 15) / 16, memory);

    float(*out)[OUT_ROWS][OUT_STRIDE] = reinterpret_cast<float(*)[OUT_ROWS][OUT_STRIDE]>(memory);
#pragma unroll
    for (int first = 0; first < ROWS; first += OUT_ROWS) {
        if (first >= item.count) break;
#pragma unroll
        for (int strip = 0; strip < 2; ++strip)
#pragma unroll
            for (int group = 0; group < OUT_ROWS / 8; ++group)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    out[strip][group * 8 + lane % 4 * 2 + i % 2][warp * 16 + lane / 4 + i / 2 * 8] =
                        sum[strip][first / 8 + group][i];
        __syncthreads();
        for (int row = warp; row < OUT_ROWS && first + row < item.count; row += WARPS) {
            float v[2][4];
#pragma unroll
            for (int strip = 0; strip < 2; ++strip) {
                const float4 four = *reinterpret_cast<const float4*>(&out[strip][row][lane * 4]);
                v[strip][0] = four.x, v[strip][1] = four.y, v[strip][2] = four.z, v[strip][3] = four.w;
            }
            finish(list[first + row], v[0], v[1]);
        }
        __syncthreads();
    }
}

// grid = (width / 128, most items), block = 256, dynamic shared memory = PROMPT_STAGES * stage_bytes(widest k2)
//   rotated [R, hidden] fp16; svh [2, experts, width]; down_suh [experts, width]; h [picks, width] fp16
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) prompt_gate_up(
    const u64* trellis, const int* k2, const u16* rotated, const u16* svh, const u16* down_suh, const int* members,
    const Item* items, const int* item_count, u16* h, int rows, int slots, int experts, int hidden, int width) {
    extern __shared__ __align__(128) u8 memory[];
    if (blockIdx.y >= *item_count) return;
    const Item item = items[blockIdx.y];
    const int bits = k2[item.expert], column = blockIdx.x * BLOCK, pitch = width * bits;
    const i64 start = i64(column / 16) * 16 * bits;
    const Strips strips = {{reinterpret_cast<const u8*>(trellis[item.expert]) + start,
                            reinterpret_cast<const u8*>(trellis[experts + item.expert]) + start}, pitch};
    const int lane = threadIdx.x % 32;
    const i64 at = i64(item.expert) * width + column;
    process(item, members + i64(item.expert) * rows + item.first, strips, bits, hidden, rotated, memory,
            [&](int pick) { return pick / slots; },
            [&](int pick, float(&gate)[4], float(&up)[4]) {
                const uint2 four = swiglu(gate, up, svh + at + lane * 4, svh + i64(experts) * width + at + lane * 4,
                                          down_suh + at + lane * 4, lane);
                *reinterpret_cast<uint2*>(h + i64(pick) * width + column + lane * 4) = four;
            });
}

// One matrix (0 gate, 1 up, 2 down) for a row of its own a pick: input [picks, inputs] fp16 -> y [picks, span] fp32, the
// columns start .. start + span - 1 of `columns`. grid = (span / 256 rounded up, most items), block = 256;
// svh [experts, columns]
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) prompt_linear(
    const u64* trellis, const int* k2, const u16* input, const u16* svh, const int* members, const Item* items,
    const int* item_count, float* y, int matrix, int rows, int experts, int inputs, int columns, int start, int span) {
    extern __shared__ __align__(128) u8 memory[];
    if (blockIdx.y >= *item_count) return;
    const Item item = items[blockIdx.y];
    const int bits = k2[matrix * experts + item.expert], place = blockIdx.x * 2 * BLOCK, column = start + place;
    const bool two = place + BLOCK < span;
    const u8* first = reinterpret_cast<const u8*>(trellis[matrix * experts + item.expert]) + i64(column) * bits;
    const Strips strips = {{first, two ? first + BLOCK * bits : first}, columns * bits};
    const int lane = threadIdx.x % 32;
    const u16* scale = svh + i64(item.expert) * columns + column + lane * 4;
    process(item, members + i64(item.expert) * rows + item.first, strips, bits, inputs, input, memory,
            [](int pick) { return pick; },
            [&](int pick, float(&a)[4], float(&b)[4]) {
                float* to = y + i64(pick) * span + place + lane * 4;
                rotate(a, lane);
                scale_by_half4(a, scale);
                *reinterpret_cast<float4*>(to) = {a[0], a[1], a[2], a[3]};
                if (!two) return;
                rotate(b, lane);
                scale_by_half4(b, scale + BLOCK);
                *reinterpret_cast<float4*>(to + BLOCK) = {b[0], b[1], b[2], b[3]};
            });
}

// Gate and up of prompt_linear, [2, picks, width] fp32 -> rotated input of down, h [picks, width] fp16. grid = warps / 8.
extern "C" __global__ void __launch_bounds__(THREADS) prompt_swiglu(
    const float* y, const int* picks, const u16* down_suh, u16* h, int total, int experts, int width) {
    const i64 item = i64(blockIdx.x) * WARPS + threadIdx.x / 32, pick = item / (width / BLOCK);
    const int lane = threadIdx.x % 32, column = item % (width / BLOCK) * BLOCK + lane * 4;
    if (pick >= total || u32(picks[pick]) >= experts) return;
    const float4 g = *reinterpret_cast<const float4*>(y + pick * width + column);
    const float4 u = *reinterpret_cast<const float4*>(y + (i64(total) + pick) * width + column);
    float gate[4] = {g.x, g.y, g.z, g.w}, up[4] = {u.x, u.y, u.z, u.w};
    *reinterpret_cast<uint2*>(h + pick * width + column) =
        activate(gate, up, down_suh + i64(picks[pick]) * width + column, lane);
}

// y [picks, span]: columns start .. start + span - 1 of out. grid = (span / 1024 rounded up, R), block = 256
extern "C" __global__ void __launch_bounds__(THREADS) prompt_combine(
    const float* y, const int* picks, const float* weight, const float* shared, float* out, int slots, int experts, int hidden,
    int start, int span) {
    const int column = (blockIdx.x * THREADS + threadIdx.x) * 4;
    const i64 row = blockIdx.y;
    if (column >= span) return;
    float4 sum = {};
#pragma unroll 8
    for (int s = 0; s < slots; ++s) {
        if (u32(picks[row * slots + s]) >= experts) continue;
        const float4 more = *reinterpret_cast<const float4*>(y + (row * slots + s) * span + column);
        const float w = weight[row * slots + s];
        sum = {fmaf(w, more.x, sum.x), fmaf(w, more.y, sum.y), fmaf(w, more.z, sum.z), fmaf(w, more.w, sum.w)};
    }
    if (shared) {
        const float4 last = *reinterpret_cast<const float4*>(shared + row * hidden + start + column);
        sum = {sum.x + last.x, sum.y + last.y, sum.z + last.z, sum.w + last.w};
    }
    *reinterpret_cast<float4*>(out + row * hidden + start + column) = sum;
}
