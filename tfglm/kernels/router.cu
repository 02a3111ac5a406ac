// Which experts a row goes to, and the rows of each expert.
//
//   route         scores = sigmoid(logits); the `picks` greatest of scores + correction (ties to the lower id), best first; weights are
//                 the scores alone, divided by their sum in that order if `normalise`, times `factor`. One warp a row, E <= 512.
//   group_pairs   the pairs (row, pick), as row * picks + pick, sorted by expert and then by number; the experts that have any, in
//                 ascending order; where each one's pairs begin. One block, E <= 1024.
//! no-spills
#include "block.cuh"

constexpr int MAX_PER_LANE = 16;

// (value descending, id ascending) as one unsigned number; 0 is less than all of them.
__device__ __forceinline__ u64 choice_key(float value, u32 id) {
    const u32 bits = __float_as_uint(value + 0.0f);
    const u32 ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return static_cast<u64>(ordered) << 32 | (0xffffffffu - id);
}

__device__ __forceinline__ u64 warp_greatest(u64 key) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) {
        const u64 other = __shfl_xor_sync(0xffffffffu, key, step);
        key = other > key ? other : key;
    }
    return key;
}

// logits [R, E] float32, correction [E] float32 -> experts [R, picks] int32, weights [R, picks] float32.
extern "C" __global__ void __launch_bounds__(128)
    route(const float* logits, const float* correction, int* experts, float* weights, int rows, int count, int picks, int normalise,
          float factor) {
    chain_start();
    const int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    logits += static_cast<long long>(row) * count;
    u64 keys[MAX_PER_LANE];
#pragma unroll
    for (int i = 0; i < MAX_PER_LANE; i++) {
        const int id = i * 32 + lane;
        keys[i] = 0;
        if (id < count) keys[i] = choice_key(1.0f / (1.0f + expf(-logits[id])) + correction[id], id);
    }
    float total = 0.0f, mine = 0.0f;  // lane p keeps pick p; picks <= 32
    for (int pick = 0; pick < picks; pick++) {
        u64 best = 0;
#pragma unroll
        for (int i = 0; i < MAX_PER_LANE; i++) best = keys[i] > best ? keys[i] : best;
        best = warp_greatest(best);
#pragma unroll
        for (int i = 0; i < MAX_PER_LANE; i++)
            if (keys[i] == best) keys[i] = 0;
        const int id = static_cast<int>(0xffffffffu - static_cast<u32>(best));
        const float score = 1.0f / (1.0f + expf(-logits[id]));
        total += score;
        if (lane == pick) {
            mine = score;
            experts[static_cast<long long>(row) * picks + pick] = id;
        }
    }
    if (lane < picks)
        weights[static_cast<long long>(row) * picks + lane] = (normalise ? __fdiv_rn(mine, total + 1e-20f) : mine) * factor;
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
