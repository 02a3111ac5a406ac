// Routed experts of a prompt chunk (hundreds to 4096 rows): EXL3 weights of mixed widths on the tensor cores.
//
//   rows [R, hidden] bf16, picks [R, slots] int32 (expert, or >= experts: none), weight [R, slots] fp32
//   -> out [R, hidden] fp32 = sum over slots, in slot order, of weight * down(silu(gate(row)) * up(row)), + shared row last
//
//   prompt_start    a block an expert collects its picks in order, the last one cuts them into items of up to ROWS picks;
//                   the other blocks rotate the rows to fp16 (this one, prompt_swiglu, prompt_combine: exl3_prompt_rows.cu)
//   prompt_gate_up  block = (item, 128 columns of gate and of up), then SwiGLU and the rotation for down
//   prompt_linear   block = (item, 128 columns of one matrix); rotated result a pick. Down, in bf16, and for experts with
//                   their own input scales (or widths that differ between gate and up) also gate and up, with
//   prompt_swiglu   between them
//   prompt_combine  adds the slots of a row in slot order, in fp32. An expert's result comes to it in bf16, as the model itself
//                   rounds it: half of the 800 MB that 2,048 rows would write and read, on a GB10 1.8 of some 10 ms a layer
//
// A block has one strip of 128 columns, or two (gate and up); a warp owns 16 columns of each. For every 16 inputs it
// decodes its tiles to mma A fragments in registers and multiplies them with all rows of the item, which come through
// shared memory (cp.async ring, XOR swizzle, ldmatrix). One fp32 chain over all inputs: a row's bits depend on nothing else.
// A weight is decoded once an item, so an item should hold an expert's whole share of the chunk.
//
// What binds it. H200: mma.sync and decoding do not overlap (each alone takes its time off the total), both from issue
// slots; 16 warps with one strip each are no faster, more stages neither; rows in groups of 8 instead of 16 gain 1 %, results
// in bf16 instead of fp32 2.5 %. GB10 has a fifth of the tensor rate a clock, so
// there decoding should hide behind the products, and prompt_linear fits one block a multiprocessor instead of two.
//
// Experts of a layer may differ in their inner columns on this rank (columns [experts], multiples of 128, at most width,
// possibly none); vectors and scratch have room for `width` columns of each.
//
// Limits: matrix sizes multiples of 128, 32768 picks, 1024 experts. Widths: 2, 3, 4 bits (WIDTHS=0) or all (1).
//! variant: CODEBOOK=1 WIDTHS=0
//! variant: CODEBOOK=0 WIDTHS=0
//! variant: CODEBOOK=2 WIDTHS=0
//! variant: CODEBOOK=1 WIDTHS=1
//! variant: CODEBOOK=2 WIDTHS=1
//! spills 48
#include "exl3_decode.cuh"
#include "exl3_prompt.cuh"

#ifndef ROWS
#define ROWS 128  // most picks an item holds
#endif
#ifndef PROMPT_STAGES
#define PROMPT_STAGES 3
#endif

constexpr int STEP = 64, STEP_TILES = STEP / 16;  // inputs a stage of the ring
constexpr int ROW_BYTES = STEP * 2;
constexpr int ROW_PIECES = ROWS * ROW_BYTES / 16 / THREADS;  // 16-byte pieces of a stage's rows that a thread copies
constexpr int OUT_ROWS = 64;                      // results pass through shared memory 64 rows at a time
constexpr int LANES = 8;                          // lanes that share a block of a result row there
constexpr int RUNS = 32 / LANES;                  // runs of 4 columns a lane holds of it

using RowPieces = int[ROW_PIECES];

// Strips of 128 columns of equal widths, all `inputs` deep.
template <int STRIPS> struct Columns {
    const u8* words[STRIPS];  // first tile of each strip
    int pitch;                // bytes between tile rows
};

template <int N> struct Number {
    static constexpr int value = N;
};

template <int K2, int STRIPS> constexpr int stage_bytes() { return ROWS * ROW_BYTES + STRIPS * STEP_TILES * 8 * 16 * K2; }

// sum[strip][8 rows][..] += the warp's 16 columns of its strips, times the first 8 * EIGHTS rows of the item.
//   row_at[i]: where this thread's i-th 16-byte piece of the first stage's rows lies in `rows`, in pieces; < 0: nowhere
// While a tile is multiplied, the warp decodes the next one (across stages too), so that the decode instructions fill
// the gaps between the tensor-core instructions.
template <int K2, int EIGHTS, int STRIPS>
__device__ __forceinline__ void multiply(float (&sum)[STRIPS][ROWS / 8][4], const Columns<STRIPS>& columns, int inputs, const u16* rows,
                                         const RowPieces& row_at, u8* memory) {
    constexpr int PAIRS = (EIGHTS + 1) / 2;  // groups of 16 rows
    constexpr int TILE = 16 * K2, RUN = 8 * K2;  // bytes a tile; 16-byte pieces of 8 tiles
    constexpr int PIECES = STRIPS * STEP_TILES * RUN, ROUNDS = (PIECES + THREADS - 1) / THREADS;
    constexpr int STAGE = stage_bytes<K2, STRIPS>();
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const LaneCursors<K2> at(lane);
    const u32 ring = shared_address(memory);

    const u8* from[ROUNDS];
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        const int piece = thread + i * THREADS, run = piece / RUN;
        const u8* words = STRIPS > 1 && run >= STEP_TILES ? columns.words[STRIPS - 1] : columns.words[0];
        from[i] = words + run % STEP_TILES * columns.pitch + piece % RUN * 16;
    }
    const int advance = STEP_TILES * columns.pitch;
    const u8* row_from = reinterpret_cast<const u8*>(rows);
    // Pieces of one thread lie THREADS / 8 rows apart, a multiple of 8: the swizzle is the same for all.
    const u32 row_to = thread / 8 * ROW_BYTES + (thread % 8 ^ thread / 8 % 8) * 16;
    const auto fetch = [&](u32 stage) {
#pragma unroll
        for (int i = 0; i < ROW_PIECES; ++i)
            if (row_at[i] >= 0) cp_async_16(stage + row_to + i * (THREADS / 8 * ROW_BYTES), row_from + i64(row_at[i]) * 16);
        row_from += ROW_BYTES;
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
    const u32 own_words = ROWS * ROW_BYTES + warp * TILE;
    const auto words_of = [&](TileWords<K2>(&words)[STRIPS], u32 stage, int tile) {
#pragma unroll
        for (int s = 0; s < STRIPS; ++s)
            words[s].load(at, [&](int i) { return load_shared(stage + own_words + (s * STEP_TILES + tile) * 8 * TILE + i * 4); });
    };
    // Row of the item and half of its 16 inputs that this lane addresses for ldmatrix (two groups of 8 rows at once).
    const int lane_row = lane / 16 * 8 + lane % 8, lane_half = lane / 8 % 2;

    u32 a[2][STRIPS][4];  // of even and odd tiles
    {
        cp_async_wait<PROMPT_STAGES - 2>();
        __syncthreads();
        TileWords<K2> words[STRIPS];
        words_of(words, ring, 0);
#pragma unroll
        for (int i = 0; i < 4 * STRIPS; ++i) a[0][i / 4][i % 4] = decode_register<K2, CODEBOOK>(i % 4, at, words[i / 4]);
    }
    u32 stage = ring, last_stage = ring + (PROMPT_STAGES - 1) * STAGE;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        cp_async_wait<PROMPT_STAGES - 3>();  // the next stage has come, too
        __syncthreads();
        if (step + PROMPT_STAGES - 1 < steps) fetch(stage == ring ? last_stage : stage - STAGE);
        cp_async_commit();
        const u32 next_stage = stage == last_stage ? ring : stage + STAGE;
#pragma unroll
        for (int tile = 0; tile < STEP_TILES; ++tile) {
            TileWords<K2> words[STRIPS];
            if (tile + 1 < STEP_TILES) words_of(words, stage, tile + 1);
            else words_of(words, next_stage, 0);  // after the last step: anything, it is not used
            const u32 row = stage + lane_row * ROW_BYTES + ((tile * 2 + lane_half) ^ lane_row % 8) * 16;
            u32 b[2][4];
            ldmatrix_x4(b[0], row);
#pragma unroll
            for (int pair = 0; pair < PAIRS; ++pair) {
                if (pair + 1 < PAIRS) ldmatrix_x4(b[(pair + 1) % 2], row + (pair + 1) * 16 * ROW_BYTES);
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int s = 0; s < STRIPS; ++s)
                        if (pair * 2 + half < EIGHTS)
                            mma_f16(sum[s][pair * 2 + half], a[tile % 2][s], {b[pair % 2][half * 2], b[pair % 2][half * 2 + 1]});
#pragma unroll
                for (int i = 0; i < 4 * STRIPS; ++i)
                    if (i >= 4 * STRIPS * pair / PAIRS && i < 4 * STRIPS * (pair + 1) / PAIRS)
                        a[(tile + 1) % 2][i / 4][i % 4] = decode_register<K2, CODEBOOK>(i % 4, at, words[i / 4]);
            }
        }
        stage = next_stage;
    }
    cp_async_wait<0>();
    __syncthreads();
}

// eights: groups of 8 rows that the item has. Every number is told apart around 64 rows, as many as an expert gets of 2,048.
template <int K2, int STRIPS>
__device__ __forceinline__ void multiply_rows(int eights, float (&sum)[STRIPS][ROWS / 8][4], const Columns<STRIPS>& columns, int inputs,
                                              const u16* rows, const RowPieces& row_at, u8* memory) {
    const auto of = [&](auto count) { multiply<K2, decltype(count)::value, STRIPS>(sum, columns, inputs, rows, row_at, memory); };
#if WIDTHS
    if (eights <= 8) return of(Number<8>());
#else
    switch (eights) {
        case 1: case 2: return of(Number<2>());
        case 3: case 4: return of(Number<4>());
        case 5: case 6: return of(Number<6>());
        case 7: return of(Number<7>());
        case 8: return of(Number<8>());
        case 9: return of(Number<9>());
        case 10: return of(Number<10>());
        case 11: case 12: return of(Number<12>());
    }
#endif
    of(Number<ROWS / 8>());
}

template <int STRIPS>
__device__ __forceinline__ void multiply_width(int k2, int eights, float (&sum)[STRIPS][ROWS / 8][4], const Columns<STRIPS>& columns,
                                               int inputs, const u16* rows, const RowPieces& row_at, u8* memory) {
    switch (k2) {
        case 4: return multiply_rows<4, STRIPS>(eights, sum, columns, inputs, rows, row_at, memory);
        case 6: return multiply_rows<6, STRIPS>(eights, sum, columns, inputs, rows, row_at, memory);
        case 8: return multiply_rows<8, STRIPS>(eights, sum, columns, inputs, rows, row_at, memory);
#if WIDTHS
        case 2: return multiply_rows<2, STRIPS>(eights, sum, columns, inputs, rows, row_at, memory);
        case 10: return multiply_rows<10, STRIPS>(eights, sum, columns, inputs, rows, row_at, memory);
        case 12: return multiply_rows<12, STRIPS>(eights, sum, columns, inputs, rows, row_at, memory);
        case 14: return multiply_rows<14, STRIPS>(eights, sum, columns, inputs, rows, row_at, memory);
        case 16: return multiply_rows<16, STRIPS>(eights, sum, columns, inputs, rows, row_at, memory);
#if CODEBOOK == 2
        case 3: return multiply_rows<3, STRIPS>(eights, sum, columns, inputs, rows, row_at, memory);
        case 5: return multiply_rows<5, STRIPS>(eights, sum, columns, inputs, rows, row_at, memory);
        case 7: return multiply_rows<7, STRIPS>(eights, sum, columns, inputs, rows, row_at, memory);
#endif
#endif
    }
}

// A value of a result row in shared memory; the swizzle keeps both the writes of accumulators and the reads of rows free
// of bank conflicts.
__device__ __forceinline__ float* out_place(u8* memory, int strip, int row, int column) {
    const int swizzle = (row & 1) << 4 ^ (row >> 1 & 3) << 3;
    return reinterpret_cast<float*>(memory) + (strip * OUT_ROWS + row) * BLOCK + (column ^ swizzle);
}

// Multiplies an item and hands its result out. finish(pick, values) is called by LANES neighbouring lanes for each pick:
// values[strip] holds the runs of 4 columns 4 * (LANES * i + q) .. + 3 of the strip, q = lane % LANES.
// line_of(pick): line of `rows`, `stride` values apart, whose first `inputs` it reads.
template <int STRIPS, class LineOf, class Finish>
__device__ __forceinline__ void process(const Item& item, const int* list, const Columns<STRIPS>& columns, int k2, int inputs,
                                        int stride, const u16* rows, u8* memory, LineOf line_of, Finish finish) {
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    RowPieces row_at;
#pragma unroll
    for (int i = 0; i < ROW_PIECES; ++i) {
        const int piece = thread + i * THREADS, row = piece / 8;
        row_at[i] = row < item.count ? line_of(list[row]) * (stride / 8) + piece % 8 : -1;
    }
    float sum[STRIPS][ROWS / 8][4] = {};
    multiply_width<STRIPS>(k2, (item.count + 7) / 8, sum, columns, inputs, rows, row_at, memory);

#pragma unroll
    for (int first = 0; first < ROWS; first += OUT_ROWS) {
        if (first >= item.count) break;
#pragma unroll
        for (int s = 0; s < STRIPS; ++s)
#pragma unroll
            for (int group = 0; group < OUT_ROWS / 8 && first / 8 + group < ROWS / 8; ++group)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    *out_place(memory, s, group * 8 + lane % 4 * 2 + i % 2, warp * 16 + lane / 4 + i / 2 * 8) =
                        sum[s][first / 8 + group][i];
        __syncthreads();
        const int q = lane % LANES;
#pragma unroll 1
        for (int row = thread / LANES; row < OUT_ROWS; row += THREADS / LANES) {
            if (first + (row & ~3) >= item.count) continue;  // the whole warp has no row here
            float values[STRIPS][RUNS][4];
#pragma unroll
            for (int s = 0; s < STRIPS; ++s)
#pragma unroll
                for (int i = 0; i < RUNS; ++i) {
                    const float4 four = *reinterpret_cast<const float4*>(out_place(memory, s, row, 4 * (LANES * i + q)));
                    values[s][i][0] = four.x, values[s][i][1] = four.y, values[s][i][2] = four.z, values[s][i][3] = four.w;
                }
            // Lanes without a row take part in the exchanges, on old values, and store nothing.
            finish(first + row < item.count ? list[first + row] : -1, values);
        }
        __syncthreads();
    }
}

// grid = (width / 128, most items), block = THREADS, dynamic shared memory = PROMPT_STAGES * stage_bytes(widest k2)
//   own [experts]: inner columns of each; rotated [R, hidden] fp16; svh [2, experts, width]; down_suh [experts, width];
//   h [picks, width] fp16
extern "C" __global__ void __launch_bounds__(THREADS, 1) prompt_gate_up(
    const u64* trellis, const int* k2, const int* own, const u16* rotated, const u16* svh, const u16* down_suh, const int* members,
    const Item* items, const int* item_count, u16* h, int rows, int slots, int experts, int hidden, int width) {
    chain_start();
    extern __shared__ __align__(128) u8 memory[];
    const Item item = items[blockIdx.y];  // asked for together with the count: the list is that long in any case
    if (blockIdx.y >= *item_count) return;
    const int bits = k2[item.expert], column = blockIdx.x * BLOCK, pitch = own[item.expert] * bits;
    if (column >= own[item.expert]) return;
    const i64 start = i64(column / 16) * 16 * bits;
    const Columns<2> strips = {{reinterpret_cast<const u8*>(trellis[item.expert]) + start,
                            reinterpret_cast<const u8*>(trellis[experts + item.expert]) + start}, pitch};
    process<2>(
        item, members + i64(item.expert) * rows + item.first, strips, bits, hidden, hidden, rotated, memory,
        [&](int pick) { return pick / slots; },
        [&](int pick, float(&values)[2][RUNS][4]) {
            auto &gate = values[0], &up = values[1];
            const int lane = threadIdx.x % 32, q = lane % LANES;
            const int at = item.expert * width + blockIdx.x * BLOCK;
            rotate<LANES>(gate, lane);
            rotate<LANES>(up, lane);
#pragma unroll
            for (int i = 0; i < RUNS; ++i) {
                const int run = 4 * (LANES * i + q);
                scale_by_half4(gate[i], svh + at + run);
                scale_by_half4(up[i], svh + experts * width + at + run);
#pragma unroll
                for (int j = 0; j < 4; ++j) gate[i][j] = swiglu_bf16(gate[i][j], up[i][j]);
                scale_by_half4(gate[i], down_suh + at + run);
            }
            rotate<LANES>(gate, lane);
            if (pick < 0) return;
#pragma unroll
            for (int i = 0; i < RUNS; ++i)
                *reinterpret_cast<uint2*>(h + i64(pick) * width + blockIdx.x * BLOCK + 4 * (LANES * i + q)) = {
                    half_pair(gate[i][0], gate[i][1]), half_pair(gate[i][2], gate[i][3])};
        });
}

// One matrix (0 gate, 1 up, 2 down) for a row of its own a pick: input [picks, inputs] fp16 -> y [picks, span], fp32 or
// of down bf16, the columns start .. start + span - 1 of `columns`. grid = (span / 128, most items), block = THREADS;
// svh [experts, columns]. Two blocks share a multiprocessor: one multiplies while the other starts or ends.
extern "C" __global__ void __launch_bounds__(THREADS, 2) prompt_linear(
    const u64* trellis, const int* k2, const int* own, const u16* input, const u16* svh, const int* members, const Item* items,
    const int* item_count, void* y, int matrix, int rows, int experts, int inputs, int columns, int start, int span) {
    chain_start();
    extern __shared__ __align__(128) u8 memory[];
    const Item item = items[blockIdx.y];  // asked for together with the count: the list is that long in any case
    if (blockIdx.y >= *item_count) return;
    const int bits = k2[matrix * experts + item.expert], column = start + blockIdx.x * BLOCK;
    const int inner = own[item.expert], depth = matrix == 2 ? inner : inputs, across = matrix == 2 ? columns : inner;
    if (column >= across) return;
    const Columns<1> strip = {
        {reinterpret_cast<const u8*>(trellis[matrix * experts + item.expert]) + i64(column) * bits}, across * bits};
    process<1>(
        item, members + i64(item.expert) * rows + item.first, strip, bits, depth, inputs, input, memory,
        [](int pick) { return pick; },
        [&](int pick, float(&values)[1][RUNS][4]) {
            const int lane = threadIdx.x % 32, q = lane % LANES;
            rotate<LANES>(values[0], lane);
            if (pick < 0) return;
#pragma unroll
            for (int i = 0; i < RUNS; ++i) {
                const int run = blockIdx.x * BLOCK + 4 * (LANES * i + q);
                float(&v)[4] = values[0][i];
                scale_by_half4(v, svh + item.expert * columns + start + run);
                if (matrix == 2)
                    *reinterpret_cast<uint2*>(static_cast<u16*>(y) + i64(pick) * span + run) = {bf16_pair(v[0], v[1]),
                                                                                               bf16_pair(v[2], v[3])};
                else
                    *reinterpret_cast<float4*>(static_cast<float*>(y) + i64(pick) * span + run) = {v[0], v[1], v[2], v[3]};
            }
        });
}

