// What attention.cu reads: queries, and rows of the latent cache in every format, as operands of mma.m16n8k16.
//
// A tile is 32 keys. Warp w works on keys w / 8 * 16 .. + 15 of it and on column group w % 8: 64 latent columns, of which lane
// (g, t) = (lane / 4, lane % 4) holds the 16 columns from t * 16 on, of keys g and g + 8. A sum over columns may be taken in any
// order, so matrix step s multiplies columns 4s .. 4s + 3 of each lane's 16 and nothing is exchanged between lanes. The group's
// number names its 16 rotary columns too, four a lane; groups past the last ones have none.
#pragma once
#include "narrow.cuh"

#ifndef KV
#define KV 0
#define LATENT 512
#define ROTARY 64
#define HEAD_TILES 3
#endif

constexpr int THREADS = 512, WARPS = 16;
constexpr int TILE = 32, CHUNK = 64, TILES_A_CHUNK = CHUNK / TILE;
constexpr int HEADS = HEAD_TILES * 8;  // of a block
constexpr int GROUPS = WARPS / (TILE / 16), GROUP_COLUMNS = 64, LANE_COLUMNS = 16;
constexpr int LATENT_GROUPS = (LATENT + GROUP_COLUMNS - 1) / GROUP_COLUMNS, ROTARY_GROUPS = ROTARY / 16;
constexpr int USED_GROUPS = LATENT_GROUPS > ROTARY_GROUPS ? LATENT_GROUPS : ROTARY_GROUPS;
static_assert(LATENT % 16 == 0 && ROTARY % 16 == 0 && USED_GROUPS <= GROUPS, "columns that the warps' groups cover");

constexpr int aligned(int n) { return (n + 15) / 16 * 16; }
constexpr int LATENT_BYTES = KV == 0 ? 2 * LATENT : KV == 1 ? aligned(LATENT + 4) : aligned(LATENT / 2 + LATENT / 16 + 8);
constexpr int ROTARY_BYTES = KV == 3 ? ROTARY : 2 * ROTARY;

// Where a lane works when scores are made.
struct Place {
    int key;     // first of the tile's keys that are its own: key and key + 8
    int group;   // of columns
    int column;  // first of its 16 latent columns
    int t;
    __device__ __forceinline__ Place(int warp, int lane)
        : key(warp / GROUPS * 16 + lane / 4), group(warp % GROUPS), column(group * GROUP_COLUMNS + lane % 4 * LANE_COLUMNS), t(lane % 4) {}
    __device__ __forceinline__ bool has_latent() const { return LATENT == GROUPS * GROUP_COLUMNS || column < LATENT; }
    __device__ __forceinline__ bool has_rotary() const { return group < ROTARY_GROUPS; }
    __device__ __forceinline__ int rotary_column() const { return group * 16 + t * 4; }
};

// ---- queries: B operands

struct Query {
    u32 latent[4][HEAD_TILES][2];
    u32 rotary[HEAD_TILES][2];
};

// Columns column and column + 1 of a head's rotary query: adjacent pairs of q rotated and laid out as halves.
__device__ __forceinline__ u32 rotated_pair(const u16* q, int column, const float* cosines, const float* sines) {
    const int i = column % (ROTARY / 2);
    const uint2 pairs = *reinterpret_cast<const uint2*>(q + 2 * i);
    const float2 c = *reinterpret_cast<const float2*>(cosines + i), s = *reinterpret_cast<const float2*>(sines + i);
    const auto turned = [&](u32 pair, float c, float s) {
        const float even = bf16_low(pair), odd = bf16_high(pair);
        return column < ROTARY / 2 ? __fmaf_rn(even, c, -__fmul_rn(odd, s)) : __fmaf_rn(odd, c, __fmul_rn(even, s));
    };
    return bf16_pair(turned(pairs.x, c.x, s.x), turned(pairs.y, c.y, s.y));
}

// latent [heads, LATENT] and rotary [heads, ROTARY] of one row, heads strided.
__device__ __forceinline__ Query load_query(const u16* latent, int latent_stride, const u16* rotary, int rotary_stride,
                                            const float* cosines, const float* sines, int head0, int heads, const Place& place, int lane) {
    Query query;
#pragma unroll
    for (int j = 0; j < HEAD_TILES; j++) {
        const int head = head0 + j * 8 + lane / 4;
        const long long at = head;
#pragma unroll
        for (int s = 0; s < 4; s++) {
            uint2 four = {0u, 0u};
            if (head < heads && place.has_latent())
                four = *reinterpret_cast<const uint2*>(latent + at * latent_stride + place.column + 4 * s);
            query.latent[s][j][0] = four.x;
            query.latent[s][j][1] = four.y;
        }
#pragma unroll
        for (int half = 0; half < 2; half++)
            query.rotary[j][half] = head < heads && place.has_rotary()
                                        ? rotated_pair(rotary + at * rotary_stride, place.rotary_column() + 2 * half, cosines, sines)
                                        : 0u;
    }
    return query;
}

// ---- keys: A operands

struct Planes {
    const u8* latent;
    const u8* rotary;
};

// The same number, as the compiler cannot find it anew: short of registers, it would compute it over and over instead of keeping it.
__device__ __forceinline__ int kept(int x) { return __shfl_sync(0xffffffffu, x, threadIdx.x % 32); }
template <typename T>
__device__ __forceinline__ const T* kept(const T* p) {
    const unsigned long long bits = reinterpret_cast<unsigned long long>(p);
    const u32 low = kept(static_cast<int>(bits)), high = kept(static_cast<int>(bits >> 32));
    return reinterpret_cast<const T*>(static_cast<unsigned long long>(high) << 32 | low);
}

// Where a lane finds its columns of slot 0.
struct Columns {
    const u8* latent;
    const u8* rotary;
#if KV >= 2
    const u8* block;
#endif
    __device__ __forceinline__ Columns(const Planes& planes, const Place& place)
        : latent(kept(planes.latent + (KV == 0 ? place.column * 2 : KV == 1 ? place.column : place.column / 2))),
          rotary(kept(planes.rotary + place.rotary_column() * (KV == 3 ? 1 : 2)))
#if KV >= 2
          , block(kept(planes.latent + LATENT / 2 + place.column / 16))
#endif
    {}
};

// A lane's columns of its two keys as they lie in the cache, on their way.
struct Incoming {
#if KV == 0
    uint4 values[2][2];
#elif KV == 1
    uint4 codes[2];
#else
    uint2 codes[2];
    u32 block[2];  // code of the block's scale
#endif
#if KV == 3
    u32 rotary[2];
#else
    uint2 rotary[2];
#endif
};

// A float32 at some byte of a row; rows begin at multiples of 16.
template <int AT>
__device__ __forceinline__ float float_at(const u8* row) {
    if (AT % 4 == 0) return *reinterpret_cast<const float*>(row + AT);
    const u8* p = row + AT;  // rows of small models only
    return __uint_as_float(p[0] | p[1] << 8 | p[2] << 16 | static_cast<u32>(p[3]) << 24);
}

// Starts loading what a lane needs of the rows at two slots.
__device__ __forceinline__ void fetch(Incoming& in, const Columns& columns, const int (&slots)[2], const Place& place) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const long long slot = slots[h];
        if (place.has_latent()) {
            const u8* latent = columns.latent + slot * LATENT_BYTES;
#if KV == 0
            in.values[h][0] = *reinterpret_cast<const uint4*>(latent);
            in.values[h][1] = *reinterpret_cast<const uint4*>(latent + 16);
#elif KV == 1
            in.codes[h] = *reinterpret_cast<const uint4*>(latent);
#else
            in.codes[h] = *reinterpret_cast<const uint2*>(latent);
            in.block[h] = columns.block[slot * LATENT_BYTES];
#endif
        }
        if (place.has_rotary()) {
            const u8* rotary = columns.rotary + slot * ROTARY_BYTES;
#if KV == 3
            in.rotary[h] = *reinterpret_cast<const u32*>(rotary);
#else
            in.rotary[h] = *reinterpret_cast<const uint2*>(rotary);
#endif
        }
    }
}

// Scales of a row, which one warp brings for all: of the latents, and with fp4x of the rotary part.
constexpr int SCALES = KV == 0 ? 0 : KV == 3 ? 2 : 1;
struct Scales {
    float v[SCALES ? SCALES : 1];
    __device__ __forceinline__ Scales(const Planes& planes, int slot) {
        const u8* row = planes.latent + static_cast<long long>(slot) * LATENT_BYTES;
        constexpr int AT = KV == 1 ? LATENT : LATENT / 2 + LATENT / 16;
        if (SCALES > 0) v[0] = float_at<AT>(row);
        if (SCALES > 1) v[SCALES - 1] = float_at<AT + 4>(row);
    }
};

__device__ __forceinline__ u32 bf16_twice(float x) { return both_highs(__float_as_uint(x)); }  // x exact in bfloat16

// Whether both powers of two of an e4m3 value can be applied at once: their product leaves bfloat16 where a row has values beyond 2^14.
// The same for the whole warp. scale: of the lane's two keys' rows, of what has e4m3 codes.
__device__ __forceinline__ bool all_small(const float (&scale)[2]) {
    return KV % 2 == 0 || __all_sync(0xffffffffu, fmaxf(scale[0], scale[1]) < 128.0f);
}

// Pair 0 or 1 of four neighbouring e4m3 codes to bfloat16 bits that are too small by 2^120: first the high and the low bytes of all
// four (which the compiler makes once for both pairs), then two of each.
__device__ __forceinline__ u32 e4m3_bits_of(u32 word, int pair) {
    const u32 high = (word & 0x80808080u) | ((word >> 4) & 0x07070707u), low = (word << 4) & 0xf0f0f0f0u;
    return __byte_perm(low, high, pair ? 0x7362 : 0x5140);
}

// Numbers twice: as they are stored and as operands. Both take registers of their own in a fixed order, so a second multiplication (that
// adds a zero of another sign, or the compiler would make one of the two) is as cheap as a move, and the compiler would make three.
struct Twice {
    u32 stored, operand;
};
__device__ __forceinline__ Twice product_twice(u32 a, u32 b) { return {bf16_mul2(a, b), bf16_fma2(a, b, 0u)}; }

// Two e4m3 codes as e4m3_bits has them times a power of two, of rows that are all_small or not.
template <bool SMALL>
__device__ __forceinline__ Twice e4m3_values(u32 bits, float scale) {
    return SMALL ? product_twice(bits, bf16_twice(scale * 0x1p120f)) : product_twice(bf16_mul2(bits, bf16_twice(0x1p120f)), bf16_twice(scale));
}

// Columns 8 * part .. + 7 of the lane's 16, of its key h. Row scales are powers of two and block scales have four bits, so every
// value is exact.
template <bool SMALL>
__device__ __forceinline__ void latent_values(Twice (&out)[4], const Incoming& in, float scale, int h, int part) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
#if KV == 0
        const uint4 v = in.values[h][part];
        const u32 two = i < 2 ? (i ? v.y : v.x) : i == 2 ? v.z : v.w;
        out[i] = {two, two};
#elif KV == 1
        const uint4 v = in.codes[h];
        const u32 word = part ? (i / 2 ? v.w : v.z) : i / 2 ? v.y : v.x;
        out[i] = e4m3_values<SMALL>(e4m3_bits_of(word, i % 2), scale);
#else
        const u32 two = (part ? in.codes[h].y : in.codes[h].x) >> (8 * i);
        const u32 factor = bf16_twice(bf16_low(e4m3_pair(in.block[h])) * scale);
        out[i] = product_twice(e2m1_pair((two & 0xfu) | ((two & 0xf0u) << 12)), factor);
#endif
    }
}

// The lane's four rotary columns of its key h.
template <bool SMALL>
__device__ __forceinline__ void rotary_values(u32 (&out)[2], const Incoming& in, float scale, int h) {
#if KV == 3
    out[0] = e4m3_values<SMALL>(e4m3_bits_of(in.rotary[h], 0), scale).stored;
    out[1] = e4m3_values<SMALL>(e4m3_bits_of(in.rotary[h], 1), scale).stored;
#else
    out[0] = in.rotary[h].x;
    out[1] = in.rotary[h].y;
#endif
}
