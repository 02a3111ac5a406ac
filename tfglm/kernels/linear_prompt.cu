// Dense linear layers of prompts: any number of rows (linear.cuh).
//
// A warp multiplies 16 or 32 weight rows, brought to bfloat16 in registers, with 32 or 64 rows of x; both come through asynchronous
// stages in shared memory. The host takes the tile with which the multiprocessor that has most to do is done first:
//
//   linear_prompt_wide   128 weight rows by 64 rows of x, a warp 32 by 64: fewest instructions besides the products
//   linear_prompt_small  64 by 64, a warp 16 by 64: where the last wide tiles would leave too many multiprocessors idle
//   linear_prompt_few    64 by 64 on twice as many warps, each 16 by 32: where there are not enough tiles for all multiprocessors
//
// What binds it. H200, q4, 2,048 rows of o_proj: 318 TFLOP/s. A matrix instruction takes its scheduler about 8 cycles, and everything
// else adds to that: 3.5 other instructions each in a wide tile, 6.7 with warps of 32 by 32, which take 28 % longer. Warps of 32 by 128 or
// 64 by 64 spill their slices' sums and take 8 to 20 % longer, three blocks a multiprocessor 3 %; a fourth stage changes nothing. GB10
// (not measured) has a fifth of the tensor rate a clock: there the rest should hide behind the products.
//! variant: WEIGHT=0
//! variant: WEIGHT=1
//! variant: WEIGHT=2
//! variant: WEIGHT=3
//! variant: WEIGHT=4
//! spills 160
#include "linear.cuh"

constexpr int STAGES = 3;

// A block's tile, WARPS_N by WARPS_R warps of PIECES * 16 weight rows by WARP_R rows of x, and one of its stages.
template <int PIECES_, int WARP_R_, int WARPS_N_, int WARPS_R_>
struct Tile {
    static constexpr int PIECES = PIECES_, WARP_N = PIECES * 16, WARP_R = WARP_R_, WARPS_N = WARPS_N_, WARPS_R = WARPS_R_;
    static constexpr int N = WARPS_N * WARP_N, R = WARPS_R * WARP_R, THREADS = WARPS_N * WARPS_R * 32;
    static constexpr int GROUPS = WARP_R / 8;  // of 8 rows of x, a warp
    static constexpr int W_BYTES = N / 16 * PIECE_BYTES, SCALE_BYTES = GROUPED_SCALES ? N * 4 : 0;
    static constexpr int BYTES = W_BYTES + SCALE_BYTES + R * 128;
    static constexpr int OUT_STRIDE = N + 4;  // floats; four lanes' rows then lie in different banks
    static_assert(R * OUT_STRIDE * 4 <= STAGES * BYTES, "results pass through the stages' memory");
    typedef float Sums[PIECES][GROUPS][4];
    u8* base;
    __device__ __forceinline__ u8* w() const { return base; }
    __device__ __forceinline__ u8* scales() const { return base + W_BYTES; }
    __device__ __forceinline__ u8* x() const { return base + W_BYTES + SCALE_BYTES; }
};

constexpr u32 NOWHERE = 0xffffffffu;

// Where a thread's 16-byte pieces of the first step lie, in bytes from the matrices' beginnings; each step is a fixed way on.
template <typename At>
struct Source {
    static constexpr int X = At::R * 8 / At::THREADS, W = (At::W_BYTES / 16 + At::THREADS - 1) / At::THREADS;
    static constexpr int W_STEP = WEIGHT == 0 ? 128 : PIECE_BYTES;
    u32 x[X], w[W], scale;

    __device__ __forceinline__ Source(int ldx, const Matrix& matrix, int rows, int r0, int n0) {
        const int thread = threadIdx.x;
#pragma unroll
        for (int i = 0; i < X; i++) {
            const int row = r0 + thread / 8 + i * (At::THREADS / 8);
            x[i] = row < rows ? static_cast<u32>(row * ldx + thread % 8 * 8) * 2 : NOWHERE;
        }
#if WEIGHT == 0
#pragma unroll
        for (int i = 0; i < W; i++) {
            const int row = n0 + thread / 8 + i * (At::THREADS / 8);
            w[i] = row < matrix.rows ? static_cast<u32>(row * matrix.columns + thread % 8 * 8) * 2 : NOWHERE;
        }
#else
        const int across = (matrix.columns + COLUMNS - 1) / COLUMNS, pieces = (matrix.rows + 15) / 16;
#pragma unroll
        for (int i = 0; i < W; i++) {
            const int at = thread + i * At::THREADS, piece = n0 / 16 + at / (PIECE_BYTES / 16);
            w[i] = piece < pieces ? static_cast<u32>(piece * across) * PIECE_BYTES + at % (PIECE_BYTES / 16) * 16 : NOWHERE;
        }
        scale = n0 / 16 + thread / 4 < pieces ? static_cast<u32>((n0 / 16 + thread / 4) * across) * 64 + thread % 4 * 16 : NOWHERE;
#endif
    }

    __device__ __forceinline__ void fetch(const At& to, const u16* from_x, const Matrix& matrix, int step) const {
        const int thread = threadIdx.x;
        const u8* x_base = reinterpret_cast<const u8*>(from_x) + step * 128;
        const u8* w_base = matrix.data + static_cast<long long>(step) * W_STEP;
        const bool inside = WEIGHT != 0 || step * COLUMNS + thread % 8 * 8 < matrix.columns;
#pragma unroll
        for (int i = 0; i < X; i++) {
            const bool take = x[i] != NOWHERE && inside;
            cp_async_16(to.x() + swizzled(thread / 8 + i * (At::THREADS / 8), thread % 8), x_base + (take ? x[i] : 0), take);
        }
#pragma unroll
        for (int i = 0; i < W; i++) {
            const bool take = w[i] != NOWHERE && inside;
#if WEIGHT == 0
            cp_async_16(to.w() + swizzled(thread / 8 + i * (At::THREADS / 8), thread % 8), w_base + (take ? w[i] : 0), take);
#else
            const int at = thread + i * At::THREADS;
            if (At::W_BYTES / 16 % At::THREADS == 0 || at < At::W_BYTES / 16)
                cp_async_16(to.w() + at * 16, w_base + (take ? w[i] : 0), take);
#endif
        }
#if WEIGHT >= 2
        if (thread < At::N / 4) {
            const bool take = scale != NOWHERE;
            cp_async_16(to.scales() + thread * 16, reinterpret_cast<const u8*>(matrix.scales) + step * 64 + (take ? scale : 0), take);
        }
#endif
    }
};

// sums += the warp's part of one stage.
template <typename At>
__device__ __forceinline__ void multiply(typename At::Sums& sums, const At& here, int warp_n, int warp_r, int lane,
                                         const DecodeConstants& constants) {
    const int g = lane / 4, t = lane % 4;
    RawPiece raw[At::PIECES];
#pragma unroll
    for (int m = 0; m < At::PIECES; m++) raw[m] = shared_piece(here.w(), here.scales(), warp_n * At::PIECES + m, lane);
#pragma unroll
    for (int part = 0; part < 2; part++) {
        Fragments a[At::PIECES];
#pragma unroll
        for (int m = 0; m < At::PIECES; m++) a[m] = fragments_of(raw[m], part, constants);
#pragma unroll
        for (int j = 0; j < At::GROUPS; j++) {
            const uint4 b = *reinterpret_cast<const uint4*>(here.x() + swizzled(warp_r * At::WARP_R + j * 8 + g, part * 4 + t));
#pragma unroll
            for (int s = 0; s < 2; s++) {
                u32 operand[2];
                step_operand(operand, b, s);
#pragma unroll
                for (int m = 0; m < At::PIECES; m++) mma_bf16(sums[m][j], a[m].matrix[s], operand);
            }
        }
    }
}

// The block's results through shared memory, so that whole runs of a row are stored together.
template <typename At>
__device__ __forceinline__ void store_tile(const typename At::Sums& total, float* memory, const Matrix& w, void* out, long long base,
                                           int ldo, int as_float, int rows, int r0, int n0, int warp_n, int warp_r, int lane) {
    const int g = lane / 4, t = lane % 4;
    __syncthreads();  // the last stage has been read
#pragma unroll
    for (int m = 0; m < At::PIECES; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int column = warp_n * At::WARP_N + m * 16 + g + i / 2 * 8;
            const float factor = n0 + column < w.rows ? row_factor(w, n0 + column) : 0.0f;
#pragma unroll
            for (int j = 0; j < At::GROUPS; j++)
                memory[(warp_r * At::WARP_R + j * 8 + t * 2 + i % 2) * At::OUT_STRIDE + column] = total[m][j][i] * factor;
        }
    __syncthreads();
    constexpr int ACROSS = At::N / 8;  // threads that share a row, 8 columns each
    const int column = threadIdx.x % ACROSS * 8;
    const int size = as_float ? 4 : 2, left = w.rows - n0 - column;
    const bool whole = left >= 8 && (reinterpret_cast<u64>(out) + (base + n0) * size) % 16 == 0 && ldo * size % 16 == 0;
#pragma unroll 1
    for (int row = threadIdx.x / ACROSS; row < At::R && r0 + row < rows; row += At::THREADS / ACROSS) {
        const float* from = memory + row * At::OUT_STRIDE + column;
        const long long at = base + static_cast<long long>(r0 + row) * ldo + n0 + column;
        const float4 low = *reinterpret_cast<const float4*>(from), high = *reinterpret_cast<const float4*>(from + 4);
        if (!whole) {
            for (int i = 0; i < min(left, 8); i++) store_value(out, at + i, from[i], as_float);
        } else if (as_float) {
            *reinterpret_cast<float4*>(static_cast<float*>(out) + at) = low;
            *reinterpret_cast<float4*>(static_cast<float*>(out) + at + 4) = high;
        } else {
            *reinterpret_cast<uint4*>(static_cast<u16*>(out) + at) =
                make_uint4(bf16_pair(low.x, low.y), bf16_pair(low.z, low.w), bf16_pair(high.x, high.y), bf16_pair(high.z, high.w));
        }
    }
}

template <typename At>
__device__ __forceinline__ void prompt(const u16* x, int ldx, Matrix w, void* out, int ldo, int as_float, int rows,
                                       int slices, int x_batch, int w_batch, int out_batch) {
    chain_start();
    extern __shared__ __align__(128) u8 dynamic_smem[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warp_n = warp / At::WARPS_R, warp_r = warp % At::WARPS_R;
    const int r0 = blockIdx.x * At::R, n0 = blockIdx.y * At::N, batch = blockIdx.z;
    x += static_cast<long long>(batch) * x_batch;
    w.data += static_cast<long long>(batch) * w_batch * 2;
    const int steps = (w.columns + COLUMNS - 1) / COLUMNS, per_slice = slice_columns(w.columns, slices) / COLUMNS;
    const Source<At> source(ldx, w, rows, r0, n0);

#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < steps) source.fetch(At{dynamic_smem + s * At::BYTES}, x, w, s);
        cp_async_commit();
    }
    typename At::Sums total = {};
    const DecodeConstants constants(w.columns);
    int slot = 0, step = 0;
#pragma unroll 1
    while (step < steps) {
        const int stop = min(step + per_slice, steps);
        typename At::Sums slice = {};
#pragma unroll 1
        for (; step < stop; step++) {
            cp_async_wait<STAGES - 2>();
            __syncthreads();
            if (const int next = step + STAGES - 1; next < steps)
                source.fetch(At{dynamic_smem + (slot == 0 ? STAGES - 1 : slot - 1) * At::BYTES}, x, w, next);
            cp_async_commit();
            multiply(slice, At{dynamic_smem + slot * At::BYTES}, warp_n, warp_r, lane, constants);
            slot = slot == STAGES - 1 ? 0 : slot + 1;
        }
#pragma unroll
        for (int m = 0; m < At::PIECES; m++)
#pragma unroll
            for (int j = 0; j < At::GROUPS; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) total[m][j][i] += slice[m][j][i];
    }
    cp_async_wait<0>();
    store_tile<At>(total, reinterpret_cast<float*>(dynamic_smem), w, out, static_cast<long long>(batch) * out_batch, ldo, as_float, rows,
                   r0, n0, warp_n, warp_r, lane);
}

#define PROMPT(name, blocks, ...)                                                                                             \
    extern "C" __global__ void __launch_bounds__(Tile<__VA_ARGS__>::THREADS, blocks)                                          \
        name(const u16* x, int ldx, const u8* w, const u32* scales, void* out, int ldo, int as_float, int rows, int n, int k, \
             int slices, int x_batch, int w_batch, int out_batch) {                                                           \
        prompt<Tile<__VA_ARGS__>>(x, ldx, Matrix{w, scales, n, k}, out, ldo, as_float, rows, slices, x_batch, w_batch,        \
                                  out_batch);                                                                                 \
    }
PROMPT(linear_prompt_wide, 2, 2, 64, 4, 1)
PROMPT(linear_prompt_small, 4, 1, 64, 4, 1)
PROMPT(linear_prompt_few, 2, 1, 32, 4, 2)
