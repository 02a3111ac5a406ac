// The search behind EXL3 tiles: for each tile the ring of 256 states whose weights come closest to 256 given ones
// (tail-biting Viterbi over 65,536 states, fp16 costs: the format's reference arithmetic, same states).
//
// A state is an edge: it leaves the node made of its top 16 - BITS bits and enters the node made of its low 16 - BITS
// bits. One block walks one tile; a step costs all 65,536 states. Thread t owns the V = 128 >> BITS adjacent entered nodes
// from t * V on, with all 2^BITS states that enter each of them: 128 states, whose weights stay in 64 registers for the
// whole walk. Node costs live in shared memory, one buffer read while the other is written.
//
//   exl3_walk_B   one pass over a tile; grid = tiles, block = 512, dynamic shared memory = 2^(18 - B) bytes
//     x        fp16 [tiles, 256]        weights in stream order, scaled to the codebook
//     start    u16 [tiles] or null      the node the walk leaves from; null: any, and the walk begins at position 128
//     history  [tiles, 256, 512]        per step and thread the choices of its V nodes (u64; u32 from 4 bits on);
//                                       a walk with free start keeps only its last 128 steps
//     end      u16 [tiles] or null      best node after the last step, equal costs in the reference's order
//   exl3_trace_B  one thread a tile: follows the choices back; grid = tiles / 32, block = 32
//     first = null: from `node` over positions 127..0, leaves the node that enters position 0 in `node`
//     else:         from `node` over positions 255..0, writes the states u16 [tiles, 256]
//
// Limits: 2 to 5 bits; other widths are searched on the CPU. Shared memory: 64 KiB at 2 bits.
//! variant: CODEBOOK=1
//! variant: CODEBOOK=0
//! variant: CODEBOOK=2
// ptxas spills up to ten registers once a step: 6 of some 350 instructions; fewer live registers cost more.
//! spills 40
//! limit all: registers 128
#include "exl3_decode.cuh"

constexpr int THREADS = 512, POSITIONS = 256, MIDDLE = POSITIONS / 2;

template <int BITS> struct Search {
    static constexpr int NODES = 1 << (16 - BITS);
    static constexpr int CHOICES = 1 << BITS;      // states that enter one node
    static constexpr int V = NODES / THREADS;      // nodes a thread owns
    static constexpr int PAIRS = V / 2;
    static constexpr int SOURCES = V >> BITS > 0 ? V >> BITS : 1;  // nodes a thread's states leave, for one top value
    static constexpr int WORDS = BITS < 4 ? 2 : 1;                 // of history, a step and thread
    static constexpr int PAIRS_A_WORD = PAIRS / WORDS;             // BITS bits each in the low and in the high half
    static_assert(PAIRS_A_WORD * BITS <= 16);
};

// The cheapest of states first .. first + COUNT - 1 for a pair of nodes; ties go to the lower one. bit[i]: 0xFFFF in
// each half whose winner has bit i of its number set.
template <int COUNT, int LEVELS> struct Best {
    u32 cost, bit[LEVELS > 0 ? LEVELS : 1];
};

template <int FIRST, int COUNT, int LEVELS, class Cost> __device__ __forceinline__ Best<COUNT, LEVELS> cheapest(Cost cost) {
    if constexpr (COUNT == 1) {
        return {cost(FIRST), {0}};
    } else {
        const auto low = cheapest<FIRST, COUNT / 2, LEVELS - 1>(cost);
        const auto high = cheapest<FIRST + COUNT / 2, COUNT / 2, LEVELS - 1>(cost);
        Best<COUNT, LEVELS> best;
        const u32 less = half2_less(high.cost, low.cost);
        best.cost = half2_min(low.cost, high.cost);
        best.bit[LEVELS - 1] = less;
#pragma unroll
        for (int i = 0; i < LEVELS - 1; ++i) best.bit[i] = select_bits(less, high.bit[i], low.bit[i]);
        return best;
    }
}

__device__ __forceinline__ u32 reverse5(u32 x) { return __brev(x) >> 27; }

// Place of an end node among those of equal cost.
__device__ __forceinline__ u32 end_rank(u32 node) {
    return reverse5(node >> 5 & 31) << 11 | reverse5(node & 31) << 6 | node >> 10;
}

template <int BITS>
__device__ __forceinline__ void walk(const u16* x, const u16* start, u32* history, u16* end) {
    using S = Search<BITS>;
    extern __shared__ __align__(16) u16 cost[];  // [2][NODES]
    __shared__ u32 target[POSITIONS], best_of_warp[THREADS / 32];
    const int thread = threadIdx.x, tile = blockIdx.x;

    if (thread < POSITIONS) target[thread] = x[i64(tile) * POSITIONS + thread] * 0x10001u;
    const int from = start ? start[tile] : -1;
    for (int node = thread; node < S::NODES; node += THREADS) cost[node] = from < 0 || node == from ? 0 : 0x7C00;

    u32 weight[S::CHOICES][S::PAIRS];
#pragma unroll
    for (int k = 0; k < S::CHOICES; ++k)
#pragma unroll
        for (int j = 0; j < S::PAIRS; ++j) {
            const u32 state = k << (16 - BITS) | (thread * S::V + 2 * j);
            const u32 pair = weights<CODEBOOK>(hash<CODEBOOK>(state), hash<CODEBOOK>(state + 1));
            // The exchange of a lane with itself hides from ptxas that the pair was made of two halves: it would keep
            // them apart, in twice the registers.
            weight[k][j] = __shfl_sync(FULL, pair, thread % 32);
        }
    __syncthreads();

    const int first = start ? 0 : MIDDLE;
    u32* kept = history + (i64(tile) * POSITIONS * THREADS + thread) * S::WORDS;
#pragma unroll 1
    for (int step = 0; step < POSITIONS; ++step) {
        const u16* old = cost + step % 2 * S::NODES;
        u16* fresh = cost + (step + 1) % 2 * S::NODES;
        const int position = (first + step) % POSITIONS;
        const u32 wanted = target[position];
        // Costs of the nodes this thread's states leave: for top value k, nodes k << (16 - 2 BITS) | (t * V >> BITS) ...
        u32 source[S::CHOICES][(S::SOURCES + 1) / 2];
#pragma unroll
        for (int k = 0; k < S::CHOICES; ++k) {
            const u16* at = old + (k << (16 - 2 * BITS)) + (thread * S::V >> BITS);
            if constexpr (S::SOURCES == 8) {
                const uint4 eight = *reinterpret_cast<const uint4*>(at);
                source[k][0] = eight.x, source[k][1] = eight.y, source[k][2] = eight.z, source[k][3] = eight.w;
            } else if constexpr (S::SOURCES == 2) {
                source[k][0] = *reinterpret_cast<const u32*>(at);
            } else {
                source[k][0] = *at;
            }
        }
        u32 choices[S::WORDS] = {}, out[S::PAIRS];
#pragma unroll
        for (int j = 0; j < S::PAIRS; ++j) {
            const auto best = cheapest<0, S::CHOICES, BITS>([&](int k) {
                const u32 away = half2_sub(weight[k][j], wanted);
                const int which = 2 * j >> BITS;  // among SOURCES
                const u32 word = source[k][which / 2];
                return half2_fma_one(away, away, word, which % 2);
            });
            out[j] = best.cost;
#pragma unroll
            for (int i = 0; i < BITS; ++i)
                choices[j / S::PAIRS_A_WORD] |= best.bit[i] & 0x00010001u << (i + j % S::PAIRS_A_WORD * BITS);
        }
        if constexpr (S::V >= 8) {
#pragma unroll
            for (int j = 0; j < S::PAIRS; j += 4)
                reinterpret_cast<uint4*>(fresh)[(thread * S::PAIRS + j) / 4] = {out[j], out[j + 1], out[j + 2], out[j + 3]};
        } else if constexpr (S::V == 4) {
            reinterpret_cast<uint2*>(fresh)[thread] = {out[0], out[1]};
        } else {
            reinterpret_cast<u32*>(fresh)[thread] = out[0];
        }
        if (start || position < MIDDLE) {
            u32* place = kept + i64(position) * THREADS * S::WORDS;
            if constexpr (S::WORDS == 2) *reinterpret_cast<uint2*>(place) = {choices[0], choices[1]};
            else *place = choices[0];
        }
        __syncthreads();
    }
    if (end == nullptr) return;

    // POSITIONS is even: the last costs are in the first buffer.
    u32 best = 0xFFFFFFFFu;
    for (int node = thread; node < S::NODES; node += THREADS) best = min(best, u32(cost[node]) << 16 | end_rank(node));
    best = __reduce_min_sync(FULL, best);
    if (thread % 32 == 0) best_of_warp[thread / 32] = best;
    __syncthreads();
    if (thread < 32) {
        best = __reduce_min_sync(FULL, best_of_warp[thread % (THREADS / 32)]);
        const u32 rank = best & 0xFFFF;
        if (thread == 0) end[tile] = (rank & 63) << 10 | reverse5(rank >> 11) << 5 | reverse5(rank >> 6 & 31);
    }
}

template <int BITS>
__device__ __forceinline__ void trace(const u32* history, u16* node, u16* states, int tiles) {
    using S = Search<BITS>;
    const int tile = blockIdx.x * 32 + threadIdx.x;
    if (tile >= tiles) return;
    const u32* kept = history + i64(tile) * POSITIONS * THREADS * S::WORDS;
    u32 at = node[tile];
    for (int position = (states ? POSITIONS : MIDDLE) - 1; position >= 0; --position) {
        const u32 pair = at % S::V / 2;
        const u32 word = kept[(i64(position) * THREADS + at / S::V) * S::WORDS + pair / S::PAIRS_A_WORD];
        const u32 choice = word >> (at % 2 * 16 + pair % S::PAIRS_A_WORD * BITS) & (S::CHOICES - 1);
        const u32 state = choice << (16 - BITS) | at;
        if (states) states[i64(tile) * POSITIONS + position] = state;
        at = state >> BITS;
    }
    if (!states) node[tile] = at;
}

#define EXL3_SEARCH(BITS)                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS) exl3_walk_##BITS(                                            \
        const u16* x, const u16* start, u32* history, u16* end) {                                                     \
        walk<BITS>(x, start, history, end);                                                                            \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(32) exl3_trace_##BITS(                                                \
        const u32* history, u16* node, u16* states, int tiles) {                                                      \
        trace<BITS>(history, node, states, tiles);                                                                     \
    }
EXL3_SEARCH(2)
EXL3_SEARCH(3)
EXL3_SEARCH(4)
EXL3_SEARCH(5)
