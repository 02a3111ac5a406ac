// The lightning indexer: scores of cached tokens for the rows of a window, and the exact selection of the best.
//
//   index_scores   score[r][t] = sum over heads of w[r][h] * HEADS^-0.5 * relu(q[r][h] . k[t] * WIDTH^-0.5), float32, for t <= position.
//                  A block is up to 8 rows of the window and a run of pages of 256 keys: eight warps of 32 keys each. Keys are the matrix rows,
//                  heads its columns, so a score is one lane's sum over columns and two exchanges: the per-head scores never leave registers.
//                  Bound by the bytes of the keys in decode, by matrix instructions in prompts.
//   select_*       the `count` best of a row by (score descending, position ascending, -0 equal to +0), as ascending slots. A block ranks
//                  16,384 candidates held in registers, by radix selection over integers. Longer contexts go through levels: each block
//                  hands its best to the next level (8 blocks to one at count 2048), which leaves the selection exact.
//
// A row with position + 1 <= count takes all its tokens; it is neither scored nor ranked. Results depend on the row alone.
// KEYS: 0 bfloat16, 1 e4m3 with a float32 scale after each row (tfglm/formats/latent.py). WIDTH a multiple of 8, HEADS of 16.
//! variant: HEADS=32 WIDTH=128 KEYS=0
//! variant: HEADS=32 WIDTH=128 KEYS=1
//! variant: HEADS=16 WIDTH=32 KEYS=0
//! variant: HEADS=16 WIDTH=32 KEYS=1
//! spills 40
#include "block.cuh"
#include "narrow.cuh"

#ifndef HEADS
#define HEADS 32
#define WIDTH 128
#define KEYS 0
#endif

constexpr int PAGE = 256;
constexpr int ROWS = 8;                         // of the window, a block, at most
constexpr int CHUNKS = (WIDTH + 63) / 64;       // of 64 columns
constexpr int HEAD_PAIRS = HEADS / 16;          // 16 heads are scored at a time: 16 accumulators a lane
constexpr int QUERY_BYTES = HEADS * CHUNKS * 128;  // a row's queries in shared memory
constexpr int KEY_BYTES = KEYS ? WIDTH + 4 : WIDTH * 2;

// ---- scores

// Columns as in weights.cuh: lane t holds columns part * 32 + t * 8 .. + 7 of each chunk of 64.
__device__ __forceinline__ int query_offset(int head, int chunk, int sixteen) {
    return (head * CHUNKS + chunk) * 128 + ((sixteen ^ ((head & 1) << 2)) << 4);
}

__device__ __forceinline__ uint4 key_columns(const u8* key, int column) {
    const uint4 zero = {0, 0, 0, 0};
    if (column >= WIDTH) return zero;
#if KEYS == 0
    return *reinterpret_cast<const uint4*>(key + column * 2);
#else
    const u32 first = *reinterpret_cast<const u32*>(key + column), second = *reinterpret_cast<const u32*>(key + column + 4);
    return make_uint4(e4m3_pair(low_bytes(first)), e4m3_pair(high_bytes(first)), e4m3_pair(low_bytes(second)),
                      e4m3_pair(high_bytes(second)));
#endif
}

// The A operands of 32 keys.
struct KeyTile {
    u32 matrix[2][CHUNKS][4][4];  // [16 keys][chunk][step]
    float scale[2][2];            // [16 keys][half]
};

__device__ __forceinline__ KeyTile load_keys(const u8* first, int lane) {
    KeyTile keys;
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u8* key = first + (m * 16 + half * 8 + g) * KEY_BYTES;
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; chunk++)
#pragma unroll
                for (int part = 0; part < 2; part++) {
                    const uint4 v = key_columns(key, chunk * 64 + part * 32 + t * 8);
                    keys.matrix[m][chunk][2 * part][half] = v.x;
                    keys.matrix[m][chunk][2 * part][half + 2] = v.y;
                    keys.matrix[m][chunk][2 * part + 1][half] = v.z;
                    keys.matrix[m][chunk][2 * part + 1][half + 2] = v.w;
                }
#if KEYS == 1
            keys.scale[m][half] = *reinterpret_cast<const float*>(key + WIDTH);
#else
            keys.scale[m][half] = 1.0f;
#endif
        }
    return keys;
}

// queries [R, HEADS, WIDTH] bfloat16 (row stride), head_weights [R, HEADS] bfloat16 (row stride), positions and stream_of [R],
// pages [streams, page_stride]. Rows of one stream are neighbours in ascending position. scores [R, score_stride].
extern "C" __global__ void __launch_bounds__(256, 2)
    index_scores(const u16* queries, int query_stride, const u16* head_weights, int weight_stride, const long long* positions,
                 const long long* stream_of, const long long* pages, int page_stride, const u8* plane, float* scores,
                 int score_stride, int rows, int block_rows, int count) {
    chain_start();
    extern __shared__ __align__(128) u8 dynamic_smem[];
    __shared__ float weights[ROWS][HEADS];
    __shared__ int visible[ROWS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int r0 = blockIdx.y * block_rows, rows_here = min(block_rows, rows - r0);
    if (static_cast<int>(threadIdx.x) < rows_here) {
        const int n = static_cast<int>(positions[r0 + threadIdx.x]) + 1;
        visible[threadIdx.x] = n > count ? n : 0;  // 0: not scored
    }
    for (int i = threadIdx.x; i < rows_here * HEADS; i += 256)
        weights[i / HEADS][i % HEADS] =
            bf16_float(head_weights[static_cast<long long>(r0 + i / HEADS) * weight_stride + i % HEADS]) *
            rsqrtf(static_cast<float>(HEADS));
    for (int i = threadIdx.x; i < rows_here * HEADS * CHUNKS * 8; i += 256) {
        const int sixteen = i % 8, chunk = i / 8 % CHUNKS, head = i / (8 * CHUNKS) % HEADS, r = i / (8 * CHUNKS * HEADS);
        const int column = chunk * 64 + sixteen * 8;
        const u16* from = queries + static_cast<long long>(r0 + r) * query_stride + head * WIDTH + column;
        cp_async_16(dynamic_smem + r * QUERY_BYTES + query_offset(head, chunk, sixteen), column < WIDTH ? from : queries,
                    column < WIDTH);
    }
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();

    for (int start = 0, stop; start < rows_here; start = stop) {  // the rows of one stream at a time
        const long long stream = stream_of[r0 + start];
        for (stop = start + 1; stop < rows_here && stream_of[r0 + stop] == stream;) stop++;
        const int longest = visible[stop - 1];
        for (int page = blockIdx.x; page * PAGE < longest; page += gridDim.x) {
            const int key0 = page * PAGE + warp * 32;
            if (key0 >= longest) continue;
            const long long slot = pages[stream * page_stride + page] * PAGE + warp * 32;
            const KeyTile keys = load_keys(plane + slot * KEY_BYTES, lane);
            for (int r = start; r < stop; r++) {
                if (key0 >= visible[r]) continue;
                float sums[2][2] = {};  // [16 keys][half]
                const u8* query = dynamic_smem + r * QUERY_BYTES;
#pragma unroll 1
                for (int pair = 0; pair < HEAD_PAIRS; pair++) {
                    float acc[2][2][4] = {};  // [16 keys][8 heads]
#pragma unroll
                    for (int chunk = 0; chunk < CHUNKS; chunk++)
#pragma unroll
                        for (int j = 0; j < 2; j++)
#pragma unroll
                            for (int part = 0; part < 2; part++) {
                                const int head = (pair * 2 + j) * 8 + g;
                                const uint4 v = *reinterpret_cast<const uint4*>(query + query_offset(head, chunk, part * 4 + t));
                                const u32 b0[2] = {v.x, v.y}, b1[2] = {v.z, v.w};
#pragma unroll
                                for (int m = 0; m < 2; m++) {
                                    mma_bf16(acc[m][j], keys.matrix[m][chunk][2 * part], b0);
                                    mma_bf16(acc[m][j], keys.matrix[m][chunk][2 * part + 1], b1);
                                }
                            }
#pragma unroll
                    for (int m = 0; m < 2; m++)
#pragma unroll
                        for (int half = 0; half < 2; half++) {
                            const float scale = keys.scale[m][half] * rsqrtf(static_cast<float>(WIDTH));
#pragma unroll
                            for (int j = 0; j < 2; j++)
#pragma unroll
                                for (int odd = 0; odd < 2; odd++)
                                    sums[m][half] += weights[r][(pair * 2 + j) * 8 + t * 2 + odd] *
                                                     fmaxf(acc[m][j][half * 2 + odd] * scale, 0.0f);
                        }
                }
#pragma unroll
                for (int m = 0; m < 2; m++) {
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        sums[m][half] += __shfl_xor_sync(0xffffffffu, sums[m][half], 1);
                        sums[m][half] += __shfl_xor_sync(0xffffffffu, sums[m][half], 2);
                    }
                    const int key = key0 + m * 16 + t * 8 + g;  // lanes t = 0 and 1 write the two halves
                    if (t < 2 && key < visible[r])
                        scores[static_cast<long long>(r0 + r) * score_stride + key] = t ? sums[m][1] : sums[m][0];
                }
            }
        }
    }
}

// ---- selection

constexpr int SELECT_THREADS = 1024, PER_THREAD = 16, CANDIDATES = SELECT_THREADS * PER_THREAD;
constexpr int BINS = 2 * SELECT_THREADS, COPIES = 2;  // of each counter, so that alike scores of neighbouring lanes meet less

// Unsigned integers in the order of floats, 0 for none: -0 becomes +0, negative numbers are reversed.
__device__ __forceinline__ u32 order_key(float score) {
    const u32 bits = __float_as_uint(score + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The count-th greatest of the block's keys (0 if there are fewer), and how many are greater. Radix selection by 11, 11 and 10 bits.
__device__ __forceinline__ u32 kth_greatest(const u32 (&keys)[PER_THREAD], int count, u32* histogram, int& greater) {
    __shared__ u32 chosen[2];  // digit, keys with a higher one
    constexpr int SHIFTS[4] = {32, 21, 10, 0};
    u32 prefix = 0;
    int wanted = count;
    greater = 0;
#pragma unroll
    for (int pass = 1; pass < 4; pass++) {
        const int shift = SHIFTS[pass], above = SHIFTS[pass - 1];
        const u32 mask = (1u << (above - shift)) - 1u;
        for (int i = threadIdx.x; i < BINS * COPIES; i += SELECT_THREADS) histogram[i] = 0;
        __syncthreads();
#pragma unroll
        for (int j = 0; j < PER_THREAD; j++)
            if (keys[j] && (pass == 1 || keys[j] >> (above & 31) == prefix))
                atomicAdd(&histogram[((keys[j] >> shift) & mask) * COPIES + threadIdx.x % COPIES], 1u);
        __syncthreads();
        // Each thread has two digits; thread 0 the highest.
        const u32 high = BINS - 1 - 2 * threadIdx.x;
        const uint2 upper = *reinterpret_cast<const uint2*>(histogram + high * COPIES);
        const uint2 lower = *reinterpret_cast<const uint2*>(histogram + (high - 1) * COPIES);
        const u32 in_upper = upper.x + upper.y, in_both = in_upper + lower.x + lower.y;
        u32 all;
        const u32 before = block_scan(in_both, all);
        if (pass == 1 && static_cast<int>(all) < count) {
            greater = static_cast<int>(all);
            return 0;
        }
        if (static_cast<int>(before) < wanted && wanted <= static_cast<int>(before + in_both)) {
            const bool first = wanted <= static_cast<int>(before + in_upper);
            chosen[0] = first ? high : high - 1;
            chosen[1] = first ? before : before + in_upper;
        }
        __syncthreads();
        prefix = pass == 1 ? chosen[0] : prefix << (above - shift) | chosen[0];
        wanted -= static_cast<int>(chosen[1]);
        greater += static_cast<int>(chosen[1]);
    }
    return prefix;
}

struct Level {
    const float* scores;        // first level: [R, score_stride]
    int score_stride;
    const u32* in_keys;         // later levels: [R, in_parts * count], 0 where there is none
    const int* in_positions;
    int in_parts;
    u32* out_keys;              // levels before the last: [R, parts * count]
    int* out_positions;
    const long long* positions;
    const long long* stream_of;  // last level
    const long long* pages;
    int page_stride;
    int* slots;                 // [R, count]
    int* counts;                // [R]
    int count;
};

template <bool FIRST, bool LAST>
__device__ __forceinline__ void select_level(const Level& level) {
    chain_start();
    __shared__ __align__(16) u32 histogram[BINS * COPIES];
    const int row = blockIdx.y, part = blockIdx.x, count = level.count;
    const int visible = static_cast<int>(level.positions[row]) + 1;
    const long long* pages = LAST ? level.pages + level.stream_of[row] * level.page_stride : nullptr;
    auto slot_of = [&](int position) { return static_cast<int>(pages[position / PAGE] * PAGE) + position % PAGE; };
    if (visible <= count) {  // everything is selected
        if (LAST) {
            for (int i = threadIdx.x; i < visible; i += SELECT_THREADS)
                level.slots[static_cast<long long>(row) * count + i] = slot_of(i);
            if (threadIdx.x == 0) level.counts[row] = visible;
        }
        return;
    }
    const int total = FIRST ? visible : level.in_parts * count;
    const int first = part * CANDIDATES + threadIdx.x * PER_THREAD;
    const long long in_row = static_cast<long long>(row) * (FIRST ? level.score_stride : total);
    u32 keys[PER_THREAD];
#pragma unroll
    for (int j = 0; j < PER_THREAD; j += 4) {
        // Rows are padded to whole fours, so a four that begins inside may be read as one.
        if (first + j < total) {
            if (FIRST) {
                const float4 v = *reinterpret_cast<const float4*>(level.scores + in_row + first + j);
                keys[j] = order_key(v.x);
                keys[j + 1] = order_key(v.y);
                keys[j + 2] = order_key(v.z);
                keys[j + 3] = order_key(v.w);
            } else {
                const uint4 v = *reinterpret_cast<const uint4*>(level.in_keys + in_row + first + j);
                keys[j] = v.x;
                keys[j + 1] = v.y;
                keys[j + 2] = v.z;
                keys[j + 3] = v.w;
            }
        }
#pragma unroll
        for (int i = j; i < j + 4; i++)
            if (first + i >= total) keys[i] = 0;
    }
    int greater;
    const u32 threshold = kth_greatest(keys, count, histogram, greater);
    const int ties = threshold ? count - greater : 0;  // how many equal to the threshold get in: the lowest positions
    u32 mine = 0;
#pragma unroll
    for (int j = 0; j < PER_THREAD; j++)
        mine += (keys[j] > threshold ? 1u : 0u) + (threshold && keys[j] == threshold ? 0x10000u : 0u);
    u32 all;
    const u32 before = block_scan(mine, all);
    int equal = static_cast<int>(before >> 16);
    int at = static_cast<int>(before & 0xffffu) + min(equal, ties);  // where this thread's first one goes; the rest follow it
    const long long out_row = static_cast<long long>(row) * (LAST ? 1 : gridDim.x) * count + (LAST ? 0 : part * count);
    if (mine) {
        int position[PER_THREAD];
#pragma unroll
        for (int j = 0; j < PER_THREAD; j += 4) {
            const int4 four = FIRST || first + j >= total ? make_int4(first + j, first + j + 1, first + j + 2, first + j + 3)
                                                          : *reinterpret_cast<const int4*>(level.in_positions + in_row + first + j);
            position[j] = four.x;
            position[j + 1] = four.y;
            position[j + 2] = four.z;
            position[j + 3] = four.w;
        }
        if (LAST && !FIRST) {  // all page numbers are asked for before any is used
#pragma unroll
            for (int j = 0; j < PER_THREAD; j++) position[j] = slot_of(keys[j] ? position[j] : 0);
        }
        const int own_page = LAST && FIRST ? static_cast<int>(pages[first / PAGE] * PAGE) : 0;  // 16 tokens lie in one page
#pragma unroll
        for (int j = 0; j < PER_THREAD; j++) {
            const bool tie = threshold && keys[j] == threshold;
            if (keys[j] > threshold || (tie && equal < ties)) {
                if (LAST) {
                    level.slots[out_row + at] = FIRST ? own_page + position[j] % PAGE : position[j];
                } else {
                    level.out_keys[out_row + at] = keys[j];
                    level.out_positions[out_row + at] = position[j];
                }
                at++;
            }
            equal += tie;
        }
    }
    const int found = static_cast<int>(all & 0xffffu) + min(static_cast<int>(all >> 16), ties);
    if (LAST) {
        if (threadIdx.x == 0) level.counts[row] = found;
    } else {
        for (int i = found + threadIdx.x; i < count; i += SELECT_THREADS) level.out_keys[out_row + i] = 0;
    }
}

#define SELECT(name, FIRST, LAST)                                                                                              \
    extern "C" __global__ void __launch_bounds__(SELECT_THREADS)                                                              \
        name(const float* scores, int score_stride, const u32* in_keys, const int* in_positions, int in_parts, u32* out_keys,  \
             int* out_positions, const long long* positions, const long long* stream_of, const long long* pages,              \
             int page_stride, int* slots, int* counts, int count) {                                                           \
        select_level<FIRST, LAST>(Level{scores, score_stride, in_keys, in_positions, in_parts, out_keys, out_positions,       \
                                        positions, stream_of, pages, page_stride, slots, counts, count});                     \
    }
SELECT(select_only, true, true)
SELECT(select_first, true, false)
SELECT(select_middle, false, false)
SELECT(select_last, false, true)
