// Dense linear layers of decode windows (linear.cuh).
//
//   linear_decode_*   up to 8 or 16 rows of x a block. A block is one warp a slice; each brings its slice of 16 weight rows
//                     through a ring of its own in shared memory, which is under way before the kernel's turn comes.
//                     Bound by the bytes of W.
//   experts_*         the same tile over lists of rows, one list an expert: routed experts kept as plain bf16.
//! variant: WEIGHT=0
//! variant: WEIGHT=1
//! variant: WEIGHT=2
//! variant: WEIGHT=3
//! variant: WEIGHT=4
//! spills 24
#include "linear.cuh"

// ---- decode

constexpr int RING_STAGE = PIECE_BYTES + (GROUPED_SCALES ? 64 : 0);

// Pieces in a warp's ring (ops/cuda_linear.py has the same). H200, q4: 12 instead of 9 gain 3 to 16 % at up to 8 rows, 2 % of a layer.
#ifndef RING
#if WEIGHT == 0
#define RING 5
#elif WEIGHT == 2
#define RING 12
#else
#define RING 8
#endif
#endif

// A lane's way along 16 weight rows, piece by piece.
struct Pieces {
    const u8* from;
#if WEIGHT == 0
    long long four_rows;  // bytes
    u32 inside;           // bit i: row 4 * i + lane / 8 is one of the matrix
    int columns_left;     // from this lane's first column on
#else
    const u8* scales;
#endif

    __device__ __forceinline__ Pieces(const Matrix& w, int n, int k, int lane) {
#if WEIGHT == 0
        const int row = n + lane / 8, column = k + lane % 8 * 8;
        from = w.data + (static_cast<long long>(row) * w.columns + column) * 2;
        four_rows = static_cast<long long>(w.columns) * 8;
        inside = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) inside |= (row + 4 * i < w.rows ? 1u : 0u) << i;
        columns_left = w.columns - column;
#else
        const long long index = static_cast<long long>(n / 16) * ((w.columns + COLUMNS - 1) / COLUMNS) + k / COLUMNS;
        from = w.data + index * PIECE_BYTES + lane * 16;
        scales = reinterpret_cast<const u8*>(w.scales) + index * 64 + lane * 16;
#endif
    }

    // Starts copying the piece (zero outside a bf16 matrix) to a stage of the ring, and goes on to the next one.
    __device__ __forceinline__ void fetch(u8* ring, u32 address, int offset, int lane) {
#if WEIGHT == 0
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const bool take = (inside >> i & 1u) && columns_left > 0;
            cp_async_16(ring + offset + swizzled(i * 4 + lane / 8, lane % 8), from + (take ? i * four_rows : 0), take);
        }
        from += COLUMNS * 2;
        columns_left -= COLUMNS;
#else
#pragma unroll
        for (int i = 0; i < PIECE_BYTES; i += 512)
            cp_async_16_if(address + offset + i + lane * 16, from + i, i + 512 <= PIECE_BYTES || i + lane * 16 < PIECE_BYTES);
        from += PIECE_BYTES;
#if WEIGHT >= 2
        cp_async_16_if(address + offset + PIECE_BYTES + lane * 16, scales, lane < 4);
        scales += 64;
#endif
#endif
    }
};

// Sums one slice of 16 weight rows from n on. rows[j]: the row of x for column g of tile j, or null. ring: RING stages.
// CHAINED: nothing but weights may be read before the kernels before this one have ended, so the first of them come early.
template <int NT, bool CHAINED>
__device__ __forceinline__ void slice_sum(float (&acc)[NT][4], const Matrix& w, const u16* const (&rows)[NT], int n, int begin,
                                          int end, int lane, u8* ring) {
    Pieces pieces(w, n, begin, lane);
    const u32 address = shared_address(ring);
#pragma unroll
    for (int s = 0; s < RING - 1; s++) {
        if (begin + s * COLUMNS < end) pieces.fetch(ring, address, s * RING_STAGE, lane);
        cp_async_commit();
    }
    if (CHAINED) grid_wait();
    const DecodeConstants constants(w.columns);
    const u16* at[NT];
#pragma unroll
    for (int j = 0; j < NT; j++) at[j] = rows[j] + begin + lane % 4 * 8;
    const auto load = [&](Activations(&x)[NT], int k) {
        const uint4 zero = {0, 0, 0, 0};
#pragma unroll
        for (int j = 0; j < NT; j++) {
#pragma unroll
            for (int part = 0; part < 2; part++) {
                const bool inside = rows[j] != nullptr && (WEIGHT != 0 || k + part * 32 + lane % 4 * 8 < w.columns);
                x[j].part[part] = inside ? *reinterpret_cast<const uint4*>(at[j] + part * 32) : zero;
            }
            at[j] += COLUMNS;
        }
    };
    int read = 0, write = (RING - 1) * RING_STAGE;
    const auto step = [&](const Activations(&x)[NT], Activations(&next)[NT], int k) {
        cp_async_wait<RING - 2>();
        __syncwarp();  // the piece has come, and all lanes are done with the stage that is filled next
        if (k + (RING - 1) * COLUMNS < end) pieces.fetch(ring, address, write, lane);
        cp_async_commit();
        if (k + COLUMNS < end) load(next, k + COLUMNS);
        const RawPiece raw = shared_piece(ring + read, ring + read + PIECE_BYTES, 0, lane);
        write = read;
        read = read == (RING - 1) * RING_STAGE ? 0 : read + RING_STAGE;
#pragma unroll
        for (int part = 0; part < 2; part++) {
            const Fragments a = fragments_of(raw, part, constants);
#pragma unroll
            for (int s = 0; s < 2; s++)
#pragma unroll
                for (int j = 0; j < NT; j++) {
                    u32 b[2];
                    step_operand(b, x[j].part[part], s);
                    mma_bf16(acc[j], a.matrix[s], b);
                }
        }
    };
    Activations x[2][NT];
    if (begin < end) load(x[0], begin);
#pragma unroll 1
    for (int k = begin; k < end; k += 2 * COLUMNS) {
        step(x[0], x[1], k);
        if (k + COLUMNS < end) step(x[1], x[0], k + COLUMNS);
    }
    cp_async_wait<0>();
}

// Adds the block's slices in order and hands each sum to store(row index 0..8*NT-1, weight row, value).
template <int NT, typename Store>
__device__ __forceinline__ void combine_slices(const float (&acc)[NT][4], const Matrix& w, int n, int row_count, const Store& store) {
    __shared__ float partial[MAX_SLICES][8 * NT][16 + 1];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, slices = blockDim.x / 32;
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) partial[warp][j * 8 + lane % 4 * 2 + i % 2][lane / 4 + i / 2 * 8] = acc[j][i];
    __syncthreads();
    for (int element = threadIdx.x; element < 16 * 8 * NT; element += blockDim.x) {
        const int row = element / 16, column = element % 16;
        if (row < row_count && n + column < w.rows) {
            float sum = 0.0f;
#pragma unroll
            for (int s = 0; s < MAX_SLICES; s++)
                if (s < slices) sum += partial[s][row][column];
            store(row, n + column, sum * row_factor(w, n + column));
        }
    }
}

// 8 * NT rows of x by 16 rows of W a block.
template <int NT>
__device__ __forceinline__ void decode(const u16* x, int ldx, Matrix w, void* out, int ldo, int as_float, int rows,
                                       int x_batch, int w_batch, int out_batch) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, slices = blockDim.x / 32;
    const int n = blockIdx.x * 16, first = blockIdx.y * 8 * NT, batch = blockIdx.z;
    x += static_cast<long long>(batch) * x_batch;
    w.data += static_cast<long long>(batch) * w_batch * 2;
    const u16* pointers[NT];
#pragma unroll
    for (int j = 0; j < NT; j++) {
        const int row = first + j * 8 + lane / 4;
        pointers[j] = row < rows ? x + static_cast<long long>(row) * ldx : nullptr;
    }
    const int length = slice_columns(w.columns, slices), begin = warp * length;
    float acc[NT][4] = {};
    extern __shared__ __align__(128) u8 dynamic_smem[];
    grid_release();
    slice_sum<NT, true>(acc, w, pointers, n, begin, min(begin + length, w.columns), lane, dynamic_smem + warp * RING * RING_STAGE);
    combine_slices<NT>(acc, w, n, rows - first, [&](int row, int column, float value) {
        const long long at = static_cast<long long>(batch) * out_batch + static_cast<long long>(first + row) * ldo + column;
        store_value(out, at, value, as_float);
    });
}

#define DECODE(name, NT)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(32 * MAX_SLICES, 5 - NT)                                                 \
        name(const u16* x, int ldx, const u8* w, const u32* scales, void* out, int ldo, int as_float, int rows, int n,    \
             int k, int x_batch, int w_batch, int out_batch) {                                                            \
        decode<NT>(x, ldx, Matrix{w, scales, n, k}, out, ldo, as_float, rows, x_batch, w_batch, out_batch);           \
    }
DECODE(linear_decode_8, 1)
DECODE(linear_decode_16, 2)

// ---- routed experts kept as bf16: group z multiplies its rows with matrix group_expert[z]

#if WEIGHT == 0
// pairs [P]: (row, pick) as row * picks + pick, sorted by expert; group z owns pairs group_start[z] .. group_start[z + 1].
// x is read at pair / x_divide, out is written at pair, so a pair's bits do not depend on its group.
extern "C" __global__ void __launch_bounds__(32 * MAX_SLICES)
    experts_bf16(const u16* x, int ldx, int x_divide, const u8* w, void* out, int ldo, int as_float, int n, int k,
                 const int* pairs, const int* group_start, const int* group_expert) {
    chain_start();
    constexpr int NT = 2;
    extern __shared__ __align__(128) u8 dynamic_smem[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, slices = blockDim.x / 32;
    const int row0 = blockIdx.x * 16, group = blockIdx.z;
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
        float acc[NT][4] = {};
        slice_sum<NT, false>(acc, matrix, pointers, row0, begin, min(begin + length, k), lane, dynamic_smem + warp * RING * RING_STAGE);
        combine_slices<NT>(acc, matrix, row0, min(stop - first, 8 * NT), [&](int row, int column, float value) {
            store_value(out, static_cast<long long>(pairs[first + row]) * ldo + column, value, as_float);
        });
        __syncthreads();  // the next round reuses the partial sums
    }
}
#endif
