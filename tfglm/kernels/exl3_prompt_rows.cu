// Routed experts of a prompt chunk (exl3_prompt.cu): what happens to lists and rows around the products.
//! no-spills
#include "exl3_prompt.cuh"

__device__ void cut_items(const int* counts, int experts, int item_rows, Item* items, int* item_count) {
    __shared__ int warp_total[WARPS], base;
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    if (thread == 0) base = 0;
    __syncthreads();
    for (int first = 0; first < experts; first += THREADS) {
        const int expert = first + thread;
        const int count = expert < experts ? *const_cast<const volatile int*>(counts + expert) : 0;
        const int parts = (count + item_rows - 1) / item_rows;
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
            const int most = ((count + parts - 1) / parts + 7) / 8 * 8;  // even shares
            for (int from = 0; from < count; from += most) items[place++] = {expert, from, min(most, count - from), 0};
        }
        __syncthreads();
        if (thread == THREADS - 1) base = place;
        __syncthreads();
    }
    if (thread == 0) *item_count = base;
}

__device__ void collect(const int* picks, int total, int rows, int experts, int item_rows, int* members, int* counts, Item* items,
                        int* item_count, int* arrivals) {
    __shared__ int warp_count[WARPS], arrived;
    const int expert = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    constexpr int RUN = 32 * 4;  // picks a warp looks at together, four a lane
    const int share = (total + WARPS * RUN - 1) / (WARPS * RUN) * RUN, first = warp * share, last = min(total, first + share);
    const bool wide = reinterpret_cast<u64>(picks) % 16 == 0;
    // Bit c: pick i + c is this expert's. i is a multiple of 4.
    const auto mine = [&](int i) {
        u32 bits = 0;
        if (wide && i + 4 <= last) {
            const int4 four = *reinterpret_cast<const int4*>(picks + i);
            return u32(four.x == expert) | u32(four.y == expert) << 1 | u32(four.z == expert) << 2 | u32(four.w == expert) << 3;
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) bits |= u32(i + c < last && picks[i + c] == expert) << c;
        return bits;
    };
    int count = 0;
#pragma unroll 4
    for (int i = first; i < last; i += RUN) count += __popc(mine(i + lane * 4));
    count = __reduce_add_sync(FULL, count);
    if (lane == 0) warp_count[warp] = count;
    __syncthreads();
    int place = 0, all = 0;
    for (int w = 0; w < WARPS; ++w) {
        if (w < warp) place += warp_count[w];
        all += warp_count[w];
    }
    int* list = members + i64(expert) * rows;
#pragma unroll 2
    for (int i = first; i < last; i += RUN) {
        const u32 bits = mine(i + lane * 4), before = (1u << lane) - 1;
        int at = place;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const u32 found = __ballot_sync(FULL, bits >> c & 1);
            at += __popc(found & before);
            place += __popc(found);
        }
#pragma unroll
        for (int c = 0; c < 4; ++c)
            if (bits >> c & 1) list[at++] = i + lane * 4 + c;
    }
    if (threadIdx.x == 0) {
        counts[expert] = all;
        __threadfence();
        arrived = atomicAdd(arrivals, 1);
        if (arrived == experts - 1) *arrivals = 0;
    }
    __syncthreads();
    __threadfence();
    if (arrived == experts - 1) cut_items(counts, experts, item_rows, items, item_count);
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
    int* arrivals, int rows, int slots, int experts, int item_rows, int hidden) {
    chain_start();
    if (blockIdx.x < experts)
        return collect(picks, rows * slots, rows, experts, item_rows, members, counts, items, item_count, arrivals);
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
    chain_start();
    const i64 item = i64(blockIdx.x) * WARPS + threadIdx.x / 32, pick = item / (hidden / BLOCK);
    const int column = item % (hidden / BLOCK) * BLOCK;
    if (pick >= total || u32(picks[pick]) >= experts) return;
    rotate_block(x + pick / slots * hidden + column, suh + i64(picks[pick]) * pitch + column,
                 rotated + pick * hidden + column, threadIdx.x % 32);
}

// Gate and up of prompt_linear, [2, picks, width] fp32 -> rotated input of down, h [picks, width] fp16. grid = warps / 8.
extern "C" __global__ void __launch_bounds__(THREADS) prompt_swiglu(
    const float* y, const int* picks, const int* own, const u16* down_suh, u16* h, int total, int experts, int width) {
    chain_start();
    const i64 item = i64(blockIdx.x) * WARPS + threadIdx.x / 32, pick = item / (width / BLOCK);
    const int lane = threadIdx.x % 32, column = item % (width / BLOCK) * BLOCK + lane * 4;
    if (pick >= total || u32(picks[pick]) >= experts || column >= own[picks[pick]]) return;
    const float4 g = *reinterpret_cast<const float4*>(y + pick * width + column);
    const float4 u = *reinterpret_cast<const float4*>(y + (i64(total) + pick) * width + column);
    float gate[4] = {g.x, g.y, g.z, g.w}, up[4] = {u.x, u.y, u.z, u.w};
    *reinterpret_cast<uint2*>(h + pick * width + column) =
        activate(gate, up, down_suh + i64(picks[pick]) * width + column, lane);
}

// y [picks, span] bf16: columns start .. start + span - 1 of out. grid = (span / 1024 rounded up, R), block = 256
extern "C" __global__ void __launch_bounds__(THREADS) prompt_combine(
    const u16* y, const int* picks, const float* weight, const float* shared, float* out, int slots, int experts, int hidden,
    int start, int span) {
    chain_start();
    const int column = (blockIdx.x * THREADS + threadIdx.x) * 4;
    const i64 row = blockIdx.y;
    if (column >= span) return;
    float4 sum = {};
#pragma unroll 8
    for (int s = 0; s < slots; ++s) {
        if (u32(picks[row * slots + s]) >= experts) continue;
        const uint2 two = *reinterpret_cast<const uint2*>(y + (row * slots + s) * span + column);
        const float4 more = {bf16_low(two.x), bf16_high(two.x), bf16_low(two.y), bf16_high(two.y)};
        const float w = weight[row * slots + s];
        sum = {fmaf(w, more.x, sum.x), fmaf(w, more.y, sum.y), fmaf(w, more.z, sum.z), fmaf(w, more.w, sum.w)};
    }
    if (shared) {
        const float4 last = *reinterpret_cast<const float4*>(shared + row * hidden + start + column);
        sum = {sum.x + last.x, sum.y + last.y, sum.z + last.z, sum.w + last.w};
    }
    *reinterpret_cast<float4*>(out + row * hidden + start + column) = sum;
}
