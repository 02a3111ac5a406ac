// Which experts a row goes to, and the rows of each expert.
//
//   route         scores = sigmoid(logits); the `picks` greatest of scores + correction (ties to the lower id), best first; weights are
//                 the scores alone, divided by their sum in that order if `normalise`, times `factor`. One warp a row, E <= 512.
//   group_pairs   the pairs (row, pick), as row * picks + pick, sorted by expert and then by number; the experts that have any, in
//                 ascending order; where each one's pairs begin. One block, E <= 1024.
//! no-spills
#include "block.cuh"

// Unsigned numbers in the order of floats, -0 equal to +0; 0 is less than all of them.
__device__ __forceinline__ u32 choice_key(float value) {
    const u32 bits = __float_as_uint(value + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

template <int PER_LANE>
__device__ __forceinline__ void route_row(const float* logits, const float* correction, int* experts, float* weights, int count,
                                          int picks, bool normalise, float factor, bool present) {
    const int lane = threadIdx.x % 32;
    float shift[PER_LANE], score[PER_LANE];
    u32 key[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) shift[i] = i * 32 + lane < count ? correction[i * 32 + lane] : 0.0f;
    grid_wait();
    if (!present) return;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) score[i] = i * 32 + lane < count ? logits[i * 32 + lane] : 0.0f;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        score[i] = 1.0f / (1.0f + expf(-score[i]));
        key[i] = i * 32 + lane < count ? choice_key(score[i] + shift[i]) : 0;
    }
    float total = 0.0f, mine = 0.0f;  // lane p keeps pick p; picks <= 32
#pragma unroll 1
    for (int pick = 0; pick < picks; pick++) {
        u32 best = 0;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) best = max(best, key[i]);
        best = __reduce_max_sync(0xffffffffu, best);
        u32 id = 0xffffffffu;
#pragma unroll
        for (int i = PER_LANE - 1; i >= 0; i--)
            if (key[i] == best) id = i * 32 + lane;
        id = __reduce_min_sync(0xffffffffu, id);
        float found = 0.0f;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
            if (id == i * 32 + lane) {
                found = score[i];
                key[i] = 0;
            }
        found = __shfl_sync(0xffffffffu, found, id % 32);
        total += found;
        if (lane == pick) {
            mine = found;
            experts[pick] = static_cast<int>(id);
        }
    }
    if (lane < picks) weights[lane] = (normalise ? __fdiv_rn(mine, total + 1e-20f) : mine) * factor;
}

// logits [R, E] float32, correction [E] float32 -> experts [R, picks] int32, weights [R, picks] float32.
extern "C" __global__ void __launch_bounds__(128)
    route(const float* logits, const float* correction, int* experts, float* weights, int rows, int count, int picks, int normalise,
          float factor) {
    grid_release();
    const int row = blockIdx.x * 4 + threadIdx.x / 32;
    const long long at = row;
    logits += at * count, experts += at * picks, weights += at * picks;
    if (count <= 256) route_row<8>(logits, correction, experts, weights, count, picks, normalise, factor, row < rows);
    else route_row<16>(logits, correction, experts, weights, count, picks, normalise, factor, row < rows);
}

// experts [total] -> pairs [total], group_expert [groups], group_start [groups + 1]; groups past the last have no pairs.
extern "C" __global__ void __launch_bounds__(1024)
    group_pairs(const int* experts, int total, int count, int* pairs, int* group_start, int* group_expert, int groups) {
    chain_start();
    constexpr int STAGE = 4096;
    __shared__ int staged[STAGE];
    const int expert = threadIdx.x;
    u32 own = 0;
    for (int base = 0; base < total; base += STAGE) {
        const int here = min(STAGE, total - base);
        __syncthreads();
        for (int i = threadIdx.x; i < here; i += blockDim.x) staged[i] = experts[base + i];
        __syncthreads();
        if (expert < count)
            for (int i = 0; i < here; i++) own += staged[i] == expert;
    }
    u32 all, active;
    u32 at = block_scan(own, all);
    const u32 group = block_scan(own ? 1u : 0u, active);
    if (own) {
        group_expert[group] = expert;
        group_start[group] = static_cast<int>(at);
    }
    for (int i = static_cast<int>(active + threadIdx.x); i <= groups; i += blockDim.x) {
        group_start[i] = total;
        if (i < groups) group_expert[i] = 0;
    }
    for (int base = 0; base < total; base += STAGE) {
        const int here = min(STAGE, total - base);
        __syncthreads();
        for (int i = threadIdx.x; i < here; i += blockDim.x) staged[i] = experts[base + i];
        __syncthreads();
        if (own)
            for (int i = 0; i < here; i++)
                if (staged[i] == expert) pairs[at++] = base + i;
    }
}
