// EXL3 trellis -> fp16 weights in the rotated basis, and the codebook's table; for loading odd tensors and for tests.
//
//   trellis  u32 [k/16, n/16, 8 * bits]  (the file's int16 words, little-endian)
//   out      fp16 [k, n]
//   grid     (n/16/8 rounded up, k/16), 8 warps a block, a warp a tile
//
//! variant: CODEBOOK=0
//! variant: CODEBOOK=1
//! variant: CODEBOOK=2
//! no-spills
#include "exl3_decode.cuh"

template <int K2> __device__ __forceinline__ void reconstruct(const u32* tile, u32* out, int n, int lane) {
    u32 a[4];
    decode_tile<K2, CODEBOOK>(a, LaneCursors<K2>(lane), [&](int i) { return tile[i]; });
    // Fragment a[i]: column lane / 4 (+ 8 for odd i), inputs 2 * (lane % 4) and the next (+ 8 for i >= 2).
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        u16* place = reinterpret_cast<u16*>(out) + i64(2 * (lane % 4) + i / 2 * 8) * n + lane / 4 + i % 2 * 8;
        place[0] = a[i] & 0xFFFF;
        place[n] = a[i] >> 16;
    }
}

extern "C" __global__ void __launch_bounds__(256) exl3_reconstruct(const u32* trellis, u16* out, int k2, int k, int n) {
    const int lane = threadIdx.x % 32, column = blockIdx.x * 8 + threadIdx.x / 32, row = blockIdx.y;
    if (column >= n / 16) return;
    const u32* tile = trellis + (i64(row) * (n / 16) + column) * 4 * k2;
    u32* place = reinterpret_cast<u32*>(out + i64(row) * 16 * n + column * 16);
    switch (k2) {
        case 2: return reconstruct<2>(tile, place, n, lane);
        case 3: return reconstruct<3>(tile, place, n, lane);
        case 4: return reconstruct<4>(tile, place, n, lane);
        case 5: return reconstruct<5>(tile, place, n, lane);
        case 6: return reconstruct<6>(tile, place, n, lane);
        case 7: return reconstruct<7>(tile, place, n, lane);
        case 8: return reconstruct<8>(tile, place, n, lane);
        case 10: return reconstruct<10>(tile, place, n, lane);
        case 12: return reconstruct<12>(tile, place, n, lane);
        case 14: return reconstruct<14>(tile, place, n, lane);
        case 16: return reconstruct<16>(tile, place, n, lane);
    }
}

// out: fp16 [65536], the weight of every state; 256 blocks of 256 threads.
extern "C" __global__ void exl3_codebook(u16* out) {
    const u32 state = blockIdx.x * 256 + threadIdx.x;
    out[state] = weights<CODEBOOK>(hash<CODEBOOK>(state), 0) & 0xFFFF;
}
