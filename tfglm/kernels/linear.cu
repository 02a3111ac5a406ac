// Dense linear layers: out [R, N] = x [R, K] . W [N, K]^T, and batches of them (one matrix a head).
//
// x bfloat16 with row stride ldx (a multiple of 8), W in the format that WEIGHT names (weights.cuh), out bfloat16 or float32.
// The sum over K is cut into `slices` equal parts of whole 64 columns; each part is added up by matrix instructions in order,
// the parts then in order in float32. The number of slices depends on K alone (ops/cuda_linear.py), so an output's bits depend
// on its row of x and its row of W and on nothing else: not on R, and not on which kernel below computed it.
//
//   linear_decode_*   up to 8 or 16 rows of x a block. A block is one warp a slice; each brings its slice of 16 weight rows
//                     through a ring of its own in shared memory, which is under way before the kernel's turn comes.
//                     Bound by the bytes of W.
//   linear_prompt     any R. A warp is 32 weight rows by 32 rows of x; a block 128 by 64 in three asynchronous stages,
//                     two blocks a multiprocessor. H200: issue slots bind (63 % busy); blocks of 512 threads, 128 by 128 or 256 by
//                     64, take 5 to 45 % longer.
//   experts_*         the same decode tile over lists of rows, one list an expert: routed experts kept as plain bf16.
//! variant: WEIGHT=0
//! variant: WEIGHT=1
//! variant: WEIGHT=2
//! variant: WEIGHT=3
//! variant: WEIGHT=4
//! spills 24
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

__device__ __forceinline__ float row_factor(const Matrix& w, int row) {
#if WEIGHT == 1
    return __uint_as_float(w.scales[row]);
#else
    return 1.0f;
#endif
}

// Rows of 128 bytes; flipping the half by the row's parity keeps the reads of two neighbouring rows in different banks.
__device__ __forceinline__ int swizzled(int row, int chunk) { return row * 128 + ((chunk ^ ((row & 1) << 2)) << 4); }

// A lane's part of a piece in shared memory: pieces (or, of bf16, swizzled rows) one after another, and their scales.
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

// ---- decode

constexpr int RING_STAGE = PIECE_BYTES + (GROUPED_SCALES ? 64 : 0);

// Pieces in a warp's ring (ops/cuda_linear.py has the same). H200, q4: 12 instead of 9 gain 3 to 18 % at one row, lose 6 % at 16.
#ifndef RING
#if WEIGHT == 0
#define RING 5
#elif WEIGHT == 2
#define RING 9
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

__device__ __forceinline__ void store_value(void* out, long long at, float value, int as_float) {
    if (as_float)
        static_cast<float*>(out)[at] = value;
    else
        static_cast<u16*>(out)[at] = bf16_bits(value);
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

// ---- prompt

constexpr int STAGES = 3, WARP_N = 32, WARP_R = 32;

// WARPS_N by WARPS_R warps; the parts of a stage.
template <int WARPS_N, int WARPS_R>
struct Stage {
    static constexpr int TILE_N = WARPS_N * WARP_N, TILE_R = WARPS_R * WARP_R, THREADS = WARPS_N * WARPS_R * 32;
    static constexpr int W_BYTES = TILE_N / 16 * PIECE_BYTES, SCALE_BYTES = GROUPED_SCALES ? TILE_N * 4 : 0;
    static constexpr int BYTES = W_BYTES + SCALE_BYTES + TILE_R * 128;
    u8* base;
    __device__ __forceinline__ u8* w() const { return base; }
    __device__ __forceinline__ u8* scales() const { return base + W_BYTES; }
    __device__ __forceinline__ u8* x() const { return base + W_BYTES + SCALE_BYTES; }
};

constexpr u32 NOWHERE = 0xffffffffu;

// Where a thread's 16-byte pieces of the first step lie, in bytes from the matrices' beginnings; each step is a fixed way on.
template <int WARPS_N, int WARPS_R>
struct Source {
    using At = Stage<WARPS_N, WARPS_R>;
    static constexpr int X = At::TILE_R * 8 / At::THREADS, W = (At::W_BYTES / 16 + At::THREADS - 1) / At::THREADS;
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
        if (thread < At::TILE_N / 4) {
            const bool take = scale != NOWHERE;
            cp_async_16(to.scales() + thread * 16, reinterpret_cast<const u8*>(matrix.scales) + step * 64 + (take ? scale : 0), take);
        }
#endif
    }
};

template <int WARPS_N, int WARPS_R>
__device__ __forceinline__ void prompt(const u16* x, int ldx, Matrix w, void* out, int ldo, int as_float, int rows,
                                       int slices, int x_batch, int w_batch, int out_batch) {
    using At = Stage<WARPS_N, WARPS_R>;
    constexpr int NT = WARP_R / 8;
    chain_start();
    extern __shared__ __align__(128) u8 dynamic_smem[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int warp_n = warp / WARPS_R, warp_r = warp % WARPS_R;
    const int r0 = blockIdx.x * At::TILE_R, n0 = blockIdx.y * At::TILE_N, batch = blockIdx.z;
    x += static_cast<long long>(batch) * x_batch;
    w.data += static_cast<long long>(batch) * w_batch * 2;
    const int steps = (w.columns + COLUMNS - 1) / COLUMNS, per_slice = slice_columns(w.columns, slices) / COLUMNS;
    const Source<WARPS_N, WARPS_R> source(ldx, w, rows, r0, n0);

#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < steps) source.fetch(At{dynamic_smem + s * At::BYTES}, x, w, s);
        cp_async_commit();
    }
    float acc[2][NT][4] = {}, total[2][NT][4] = {};
    const DecodeConstants constants(w.columns);
    int slot = 0;
#pragma unroll 1
    for (int step = 0, in_slice = 0; step < steps; step++) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        if (const int next = step + STAGES - 1; next < steps)
            source.fetch(At{dynamic_smem + (slot == 0 ? STAGES - 1 : slot - 1) * At::BYTES}, x, w, next);
        cp_async_commit();
        const At here{dynamic_smem + slot * At::BYTES};
        slot = slot == STAGES - 1 ? 0 : slot + 1;
        RawPiece raw[2];
#pragma unroll
        for (int m = 0; m < 2; m++) raw[m] = shared_piece(here.w(), here.scales(), warp_n * 2 + m, lane);
#pragma unroll
        for (int part = 0; part < 2; part++) {
            Fragments a[2];
#pragma unroll
            for (int m = 0; m < 2; m++) a[m] = fragments_of(raw[m], part, constants);
#pragma unroll
            for (int j = 0; j < NT; j++) {
                const uint4 b = *reinterpret_cast<const uint4*>(here.x() + swizzled(warp_r * WARP_R + j * 8 + g, part * 4 + t));
#pragma unroll
                for (int s = 0; s < 2; s++) {
                    u32 operand[2];
                    step_operand(operand, b, s);
#pragma unroll
                    for (int m = 0; m < 2; m++) mma_bf16(acc[m][j], a[m].matrix[s], operand);
                }
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
                const int row = r0 + warp_r * WARP_R + j * 8 + t * 2 + i % 2;
                const int column = n0 + warp_n * WARP_N + m * 16 + g + i / 2 * 8;
                if (row < rows && column < w.rows) {
                    const long long at = static_cast<long long>(batch) * out_batch + static_cast<long long>(row) * ldo + column;
                    store_value(out, at, total[m][j][i] * row_factor(w, column), as_float);
                }
            }
}

extern "C" __global__ void __launch_bounds__(256, 2)
    linear_prompt(const u16* x, int ldx, const u8* w, const u32* scales, void* out, int ldo, int as_float, int rows, int n, int k,
                  int slices, int x_batch, int w_batch, int out_batch) {
    prompt<4, 2>(x, ldx, Matrix{w, scales, n, k}, out, ldo, as_float, rows, slices, x_batch, w_batch, out_batch);
}
