// Dense linear layers: out [R, N] = x [R, K] . W [N, K]^T, and batches of them (one matrix a head).
//
// x bfloat16 with row stride ldx (a multiple of 8), W in the format that WEIGHT names (weights.cuh), out bfloat16 or float32.
// The sum over K is cut into `slices` equal parts of whole 64 columns; each part is added up by matrix instructions in order,
// the parts then in order in float32. The number of slices depends on K alone (ops/cuda_linear.py), so an output's bits depend
// on its row of x and its row of W and on nothing else: not on R, and not on which kernel below computed it.
//
//   linear_decode_*   R <= 8 or 16. A block is one warp a slice; each reads its slice of 16 weight rows once, straight to
//                     registers. Bound by the bytes of W.
//   linear_prompt_*   any R. A block is 128 weight rows by 128 (or 64) rows of x in three asynchronous stages.
//   experts_*         the same decode tile over lists of rows, one list an expert: routed experts kept as plain bf16.
//! variant: WEIGHT=0
//! variant: WEIGHT=1
//! variant: WEIGHT=2
//! variant: WEIGHT=3
//! variant: WEIGHT=4
//! no-spills
#include "weights.cuh"

constexpr int MAX_SLICES = 8;
constexpr int COLUMNS = 64;  // of a piece

struct Matrix {
    const u8* data;      // pieces, or bf16 rows
    const u32* scales;   // groups (q4, q6, q8) or row scales (fp8)
    int rows, columns;   // N, K
};

__device__ __forceinline__ int slice_columns(int columns, int slices) {
    const int pieces = (columns + COLUMNS - 1) / COLUMNS;
    return (pieces + slices - 1) / slices * COLUMNS;
}

// A lane's part of the piece at rows n.. and columns k..; zero outside the matrix.
__device__ __forceinline__ RawPiece load_piece(const Matrix& w, int n, int k, int lane) {
    RawPiece raw;
#if WEIGHT == 0
    const int g = lane / 4, t = lane % 4;
    const uint4 zero = {0, 0, 0, 0};
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int part = 0; part < 2; part++) {
            const int row = n + half * 8 + g, column = k + part * 32 + t * 8;
            const bool inside = row < w.rows && column < w.columns;
            raw.row[half][part] = inside ? load_once(w.data + (static_cast<long long>(row) * w.columns + column) * 2) : zero;
        }
    }
#else
    const long long index = static_cast<long long>(n / 16) * ((w.columns + COLUMNS - 1) / COLUMNS) + k / COLUMNS;
    const u8* piece = w.data + index * PIECE_BYTES;
#if WEIGHT == 2 || WEIGHT == 3
    raw.codes = load_once(piece + lane * 16);
#if WEIGHT == 3
    raw.high = *reinterpret_cast<const uint2*>(piece + 512 + lane * 8);
#endif
#else
    raw.codes[0] = load_once(piece + lane * 16);
    raw.codes[1] = load_once(piece + 512 + lane * 16);
#endif
#if WEIGHT >= 2
    raw.scale[0] = w.scales[index * 16 + lane / 4];
    raw.scale[1] = w.scales[index * 16 + lane / 4 + 8];
#endif
#endif
    return raw;
}

__device__ __forceinline__ float row_factor(const Matrix& w, int row) {
#if WEIGHT == 1
    return __uint_as_float(w.scales[row]);
#else
    return 1.0f;
#endif
}

// ---- decode

// Pieces in flight a warp: enough bytes to cover the latency of memory, few enough registers for two blocks a multiprocessor.
#ifndef DEPTH
#if WEIGHT == 2
#define DEPTH 3
#else
#define DEPTH 2
#endif
#endif

template <int NT>
__device__ __forceinline__ void load_activations(Activations (&x)[NT], const u16* const (&rows)[NT], int k, int columns, int t) {
    const uint4 zero = {0, 0, 0, 0};
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
        for (int part = 0; part < 2; part++) {
            const int column = k + part * 32 + t * 8;
            const bool inside = rows[j] != nullptr && column < columns;
            x[j].part[part] = inside ? *reinterpret_cast<const uint4*>(rows[j] + column) : zero;
        }
}

// Sums one slice. rows[j]: the row of x for column g of tile j, or null. acc: [m tile][row tile].
// A ring of DEPTH pieces: each is replaced, as soon as it is multiplied, by the one DEPTH pieces further on.
// CHAINED: nothing but weights may be read before the kernels before this one have ended, so the first of them come early.
template <int MT, int NT, bool CHAINED>
__device__ __forceinline__ void slice_sum(float (&acc)[MT][NT][4], const Matrix& w, const u16* const (&rows)[NT], int n,
                                          int begin, int end, int lane) {
    RawPiece raw[DEPTH][MT];
    Activations x[DEPTH][NT];
    auto load_pieces = [&](RawPiece (&piece)[MT], int k) {
#pragma unroll
        for (int m = 0; m < MT; m++) piece[m] = load_piece(w, n + 16 * m, k, lane);
    };
#pragma unroll
    for (int d = 0; d < DEPTH; d++)
        if (begin + d * COLUMNS < end) load_pieces(raw[d], begin + d * COLUMNS);
    if (CHAINED) grid_wait();
#pragma unroll
    for (int d = 0; d < DEPTH; d++)
        if (begin + d * COLUMNS < end) load_activations<NT>(x[d], rows, begin + d * COLUMNS, w.columns, lane % 4);
#pragma unroll 1
    for (int k0 = begin; k0 < end; k0 += COLUMNS * DEPTH) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            const int k = k0 + d * COLUMNS;
            if (k >= end) break;
#pragma unroll
            for (int m = 0; m < MT; m++) {
                const Fragments a = fragments_of(raw[d][m]);
#pragma unroll
                for (int step = 0; step < 4; step++) {
#pragma unroll
                    for (int j = 0; j < NT; j++) {
                        u32 b[2];
                        step_operand(b, x[d][j], step);
                        mma_bf16(acc[m][j], a.matrix[step], b);
                    }
                }
            }
            if (const int ahead = k + COLUMNS * DEPTH; ahead < end) {
                load_pieces(raw[d], ahead);
                load_activations<NT>(x[d], rows, ahead, w.columns, lane % 4);
            }
        }
    }
}

// Adds the block's slices in order and hands each sum to store(row index 0..8*NT-1, weight row, value).
template <int MT, int NT, typename Store>
__device__ __forceinline__ void combine_slices(const float (&acc)[MT][NT][4], const Matrix& w, int n, int row_count,
                                               const Store& store) {
    __shared__ float partial[MAX_SLICES][8 * NT][16 * MT + 1];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, slices = blockDim.x / 32;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                partial[warp][j * 8 + lane % 4 * 2 + i % 2][m * 16 + lane / 4 + i / 2 * 8] = acc[m][j][i];
    __syncthreads();
    for (int element = threadIdx.x; element < 16 * MT * 8 * NT; element += blockDim.x) {
        const int row = element / (16 * MT), column = element % (16 * MT);
        if (row < row_count && n + column < w.rows) {
            float sum = 0.0f;
            for (int s = 0; s < slices; s++) sum += partial[s][row][column];
            store(row, n + column, sum * row_factor(w, n + column));
        }
    }
}

__device__ __forceinline__ void store_value(void* out, long long at, float value, int as_float) {
    if (as_float)
        static_cast<float*>(out)[at] = value;
    else
        static_cast<u16*>(out)[at] = bf16_bits(value);
}

template <int MT, int NT>
__device__ __forceinline__ void decode(const u16* x, int ldx, Matrix w, void* out, int ldo, int as_float, int rows,
                                       int x_batch, int w_batch, int out_batch) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, slices = blockDim.x / 32;
    const int n = blockIdx.x * 16 * MT, batch = blockIdx.z;
    x += static_cast<long long>(batch) * x_batch;
    w.data += static_cast<long long>(batch) * w_batch * 2;
    const u16* pointers[NT];
#pragma unroll
    for (int j = 0; j < NT; j++) {
        const int row = j * 8 + lane / 4;
        pointers[j] = row < rows ? x + static_cast<long long>(row) * ldx : nullptr;
    }
    const int length = slice_columns(w.columns, slices), begin = warp * length;
    float acc[MT][NT][4] = {};
    grid_release();
    slice_sum<MT, NT, true>(acc, w, pointers, n, begin, min(begin + length, w.columns), lane);
    combine_slices<MT, NT>(acc, w, n, rows, [&](int row, int column, float value) {
        const long long at = static_cast<long long>(batch) * out_batch + static_cast<long long>(row) * ldo + column;
        store_value(out, at, value, as_float);
    });
}

#define DECODE(name, MT, NT)                                                                                              \
    extern "C" __global__ void __launch_bounds__(32 * MAX_SLICES)                                                         \
        name(const u16* x, int ldx, const u8* w, const u32* scales, void* out, int ldo, int as_float, int rows, int n,    \
             int k, int x_batch, int w_batch, int out_batch) {                                                            \
        decode<MT, NT>(x, ldx, Matrix{w, scales, n, k}, out, ldo, as_float, rows, x_batch, w_batch, out_batch);           \
    }
DECODE(linear_decode_8, 1, 1)
DECODE(linear_decode_16, 1, 2)

// ---- routed experts kept as bf16: group z multiplies its rows with matrix group_expert[z]

#if WEIGHT == 0
// pairs [P]: (row, pick) as row * picks + pick, sorted by expert; group z owns pairs group_start[z] .. group_start[z + 1].
// x is read at pair / x_divide, out is written at pair, so a pair's bits do not depend on its group.
extern "C" __global__ void __launch_bounds__(32 * MAX_SLICES)
    experts_bf16(const u16* x, int ldx, int x_divide, const u8* w, void* out, int ldo, int as_float, int n, int k,
                 const int* pairs, const int* group_start, const int* group_expert) {
    chain_start();
    constexpr int MT = 2, NT = 2;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, slices = blockDim.x / 32;
    const int row0 = blockIdx.x * 16 * MT, group = blockIdx.z;
    const int start = group_start[group], stop = group_start[group + 1];
    if (start >= stop) return;
    const Matrix matrix{w + static_cast<long long>(group_expert[group]) * n * k * 2, nullptr, n, k};
    const int length = slice_columns(k, slices), begin = warp * length;
    for (int first = start; first < stop; first += 8 * NT) {
        const u16* pointers[NT];
#pragma unroll
        for (int j = 0; j < NT; j++) {
            const int at = first + j * 8 + lane / 4;
            pointers[j] = at < stop ? x + static_cast<long long>(pairs[at] / x_divide) * ldx : nullptr;
        }
        float acc[MT][NT][4] = {};
        slice_sum<MT, NT, false>(acc, matrix, pointers, row0, begin, min(begin + length, k), lane);
        combine_slices<MT, NT>(acc, matrix, row0, min(stop - first, 8 * NT), [&](int row, int column, float value) {
            store_value(out, static_cast<long long>(pairs[first + row]) * ldo + column, value, as_float);
        });
        __syncthreads();  // the next round reuses the partial sums
    }
}
#endif

// ---- prompt

constexpr int TILE_N = 128, STAGES = 3;
constexpr int W_STAGE_BYTES = TILE_N / 16 * PIECE_BYTES;
constexpr int SCALE_STAGE_BYTES = GROUPED_SCALES ? TILE_N * 4 : 0;

// Rows of 128 bytes; flipping the half by the row's parity keeps the reads of two neighbouring rows in different banks.
__device__ __forceinline__ int swizzled(int row, int chunk) { return row * 128 + ((chunk ^ ((row & 1) << 2)) << 4); }

template <int TILE_R>
struct PromptStage {
    static constexpr int BYTES = W_STAGE_BYTES + SCALE_STAGE_BYTES + TILE_R * 128;
    u8* base;
    __device__ __forceinline__ u8* w() const { return base; }
    __device__ __forceinline__ u8* scales() const { return base + W_STAGE_BYTES; }
    __device__ __forceinline__ u8* x() const { return base + W_STAGE_BYTES + SCALE_STAGE_BYTES; }
};

template <int TILE_R>
__device__ __forceinline__ void fetch_stage(const PromptStage<TILE_R>& stage, const u16* x, int ldx, const Matrix& w,
                                            int rows, int r0, int n0, int k) {
#pragma unroll
    for (int i = threadIdx.x; i < TILE_R * 8; i += 256) {
        const int row = i / 8, chunk = i % 8, column = k + chunk * 8;
        const bool take = r0 + row < rows && column < w.columns;
        cp_async_16(stage.x() + swizzled(row, chunk), x + (take ? static_cast<long long>(r0 + row) * ldx + column : 0), take);
    }
#if WEIGHT == 0
#pragma unroll
    for (int i = threadIdx.x; i < TILE_N * 8; i += 256) {
        const int row = i / 8, chunk = i % 8, column = k + chunk * 8;
        const bool take = n0 + row < w.rows && column < w.columns;
        const long long at = take ? (static_cast<long long>(n0 + row) * w.columns + column) * 2 : 0;
        cp_async_16(stage.w() + swizzled(row, chunk), w.data + at, take);
    }
#else
    const long long across = (w.columns + COLUMNS - 1) / COLUMNS;
    const int pieces = (w.rows + 15) / 16;
    for (int i = threadIdx.x; i < W_STAGE_BYTES / 16; i += 256) {
        const int piece = i / (PIECE_BYTES / 16), chunk = i % (PIECE_BYTES / 16);
        const bool take = n0 / 16 + piece < pieces;
        const long long at = take ? ((n0 / 16 + piece) * across + k / COLUMNS) * PIECE_BYTES + chunk * 16 : 0;
        cp_async_16(stage.w() + i * 16, w.data + at, take);
    }
#if WEIGHT >= 2
    for (int i = threadIdx.x; i < SCALE_STAGE_BYTES / 16; i += 256) {
        const int piece = i / 4, chunk = i % 4;
        const bool take = n0 / 16 + piece < pieces;
        const long long at = take ? ((n0 / 16 + piece) * across + k / COLUMNS) * 16 + chunk * 4 : 0;
        cp_async_16(stage.scales() + i * 16, w.scales + at, take);
    }
#endif
#endif
}

__device__ __forceinline__ RawPiece shared_piece(const u8* w, const u8* scales, int piece, int lane) {
    RawPiece raw;
    const int g = lane / 4, t = lane % 4;
#if WEIGHT == 0
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int part = 0; part < 2; part++)
            raw.row[half][part] =
                *reinterpret_cast<const uint4*>(w + swizzled(piece * 16 + half * 8 + g, part * 4 + t));
#else
    const u8* at = w + piece * PIECE_BYTES;
#if WEIGHT == 2 || WEIGHT == 3
    raw.codes = *reinterpret_cast<const uint4*>(at + lane * 16);
#if WEIGHT == 3
    raw.high = *reinterpret_cast<const uint2*>(at + 512 + lane * 8);
#endif
#else
    raw.codes[0] = *reinterpret_cast<const uint4*>(at + lane * 16);
    raw.codes[1] = *reinterpret_cast<const uint4*>(at + 512 + lane * 16);
#endif
#if WEIGHT >= 2
    raw.scale[0] = *reinterpret_cast<const u32*>(scales + (piece * 16 + g) * 4);
    raw.scale[1] = *reinterpret_cast<const u32*>(scales + (piece * 16 + g + 8) * 4);
#endif
#endif
    return raw;
}

template <int TILE_R>
__device__ __forceinline__ void prompt(const u16* x, int ldx, Matrix w, void* out, int ldo, int as_float, int rows,
                                       int slices, int x_batch, int w_batch, int out_batch) {
    chain_start();
    extern __shared__ __align__(128) u8 dynamic_smem[];
    constexpr int NT = TILE_R / 2 / 8;  // 4 warps along N of 32 weight rows, 2 along R
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int warp_n = warp / 2, warp_r = warp % 2;
    const int r0 = blockIdx.x * TILE_R, n0 = blockIdx.y * TILE_N, batch = blockIdx.z;
    x += static_cast<long long>(batch) * x_batch;
    w.data += static_cast<long long>(batch) * w_batch * 2;
    const int steps = (w.columns + COLUMNS - 1) / COLUMNS, per_slice = slice_columns(w.columns, slices) / COLUMNS;
    auto stage = [&](int step) { return PromptStage<TILE_R>{dynamic_smem + step % STAGES * PromptStage<TILE_R>::BYTES}; };

    for (int step = 0; step < STAGES - 1; step++) {
        if (step < steps) fetch_stage<TILE_R>(stage(step), x, ldx, w, rows, r0, n0, step * COLUMNS);
        cp_async_commit();
    }
    float acc[2][NT][4] = {}, total[2][NT][4] = {};
    for (int step = 0, in_slice = 0; step < steps; step++) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        const int next = step + STAGES - 1;
        if (next < steps) fetch_stage<TILE_R>(stage(next), x, ldx, w, rows, r0, n0, next * COLUMNS);
        cp_async_commit();
        const PromptStage<TILE_R> here = stage(step);
        Fragments a[2];
#pragma unroll
        for (int m = 0; m < 2; m++) a[m] = fragments_of(shared_piece(here.w(), here.scales(), warp_n * 2 + m, lane));
#pragma unroll
        for (int j = 0; j < NT; j++) {
            Activations b;
#pragma unroll
            for (int part = 0; part < 2; part++)
                b.part[part] = *reinterpret_cast<const uint4*>(
                    here.x() + swizzled(warp_r * (TILE_R / 2) + j * 8 + g, part * 4 + t));
#pragma unroll
            for (int s = 0; s < 4; s++) {
                u32 operand[2];
                step_operand(operand, b, s);
#pragma unroll
                for (int m = 0; m < 2; m++) mma_bf16(acc[m][j], a[m].matrix[s], operand);
            }
        }
        if (++in_slice == per_slice || step + 1 == steps) {
            in_slice = 0;
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int j = 0; j < NT; j++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        total[m][j][i] += acc[m][j][i];
                        acc[m][j][i] = 0.0f;
                    }
        }
    }
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = r0 + warp_r * (TILE_R / 2) + j * 8 + t * 2 + i % 2;
                const int column = n0 + warp_n * 32 + m * 16 + g + i / 2 * 8;
                if (row < rows && column < w.rows) {
                    const long long at = static_cast<long long>(batch) * out_batch + static_cast<long long>(row) * ldo + column;
                    store_value(out, at, total[m][j][i] * row_factor(w, column), as_float);
                }
            }
}

#define PROMPT(name, TILE_R)                                                                                              \
    extern "C" __global__ void __launch_bounds__(256, 1)                                                                  \
        name(const u16* x, int ldx, const u8* w, const u32* scales, void* out, int ldo, int as_float, int rows, int n,    \
             int k, int slices, int x_batch, int w_batch, int out_batch) {                                                \
        prompt<TILE_R>(x, ldx, Matrix{w, scales, n, k}, out, ldo, as_float, rows, slices, x_batch, w_batch, out_batch);   \
    }
PROMPT(linear_prompt_64, 64)
PROMPT(linear_prompt_128, 128)
