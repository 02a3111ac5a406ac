// EXL3 trellis words -> fp16 weights in registers, bit exact. Format: exllamav3 (QTIP trellis, L = 16).
//
// A 16x16 tile is a ring of 256 * bits stream bits, most significant bit of each u32 word first. Position p of the tile
// is the 16-bit window that ends at stream bit floor((p + 1) * bits); its weight is a hash of that window. Lane l of a
// warp owns positions 8l .. 8l+7, which are exactly its mma fragments, so a tile is decoded without any exchange.
//
// K2 = 2 * bits: 2..8 (1 to 4 bits in halves), 10, 12, 14, 16. CB: a Codebook.
//
// How a lane reads its windows. Its 8 windows are cut into GROUPS of consecutive windows that span at most two stream
// words (first, second). A view is 32 consecutive stream bits out of these two words (one funnel shift); a window that
// ends t bits before the end of a view (t <= 16) is moved to a byte boundary by a left shift (which ptxas may issue as
// an IMAD, off the busy ALU pipe) and taken out, zero-extended, by one PRMT: no masks. Windows whose t agree modulo 8
// share the shift.
#pragma once
#include "half.cuh"

enum Codebook { THREE_INST = 0, MCG = 1, MUL1 = 2 };

// Words that hold the windows of one group for this lane, the same in every tile.
struct Cursor {
    int first, second;  // word indices inside the tile
    int shift;          // stream bits of `second` after the group's last window
};

template <int K2> struct Trellis {
    static constexpr int WORDS = 4 * K2;                       // u32 words a tile
    static constexpr int GROUPS = K2 == 7 || K2 == 10 || K2 == 12 || K2 == 16 ? 2 : K2 == 14 ? 4 : 1;
    static constexpr int PER_GROUP = 8 / GROUPS;
    static constexpr bool LEGAL = (K2 >= 2 && K2 <= 8) || K2 == 10 || K2 == 12 || K2 == 14 || K2 == 16;

    // End of window j (0..7) of a lane, in stream bits after the lane's first bit.
    __device__ static constexpr int end(int j) { return (j + 1) * K2 / 2; }

    __device__ static Cursor cursor(int lane, int group) {
        const int last_bit = 4 * K2 * lane + end(group * PER_GROUP + PER_GROUP - 1) - 1;
        const int second = last_bit / 32;
        return {second == 0 ? WORDS - 1 : second - 1, second, 31 - last_bit % 32};
    }
};

// The window that ends T bits before the end of `view`, as a number 0..65535.
template <int T> __device__ __forceinline__ u32 window(u32 view) {
    static_assert(T >= 0 && T <= 16);
    if constexpr (T % 8 != 0) asm("shl.b32 %0, %1, %2;" : "=r"(view) : "r"(view), "n"(8 - T % 8));
    constexpr int AT = (T + 7) / 8;  // first byte
    return __byte_perm(view, 0, 0x4400 | (AT + 1) << 4 | AT);
}

// State -> the hash word whose halves (or bytes) make the weight.
template <int CB> __device__ __forceinline__ u32 hash(u32 state) {
    if constexpr (CB == THREE_INST) return and_xor(state * 89226354u + 64248484u, 0x8FFF8FFFu, 0x3B603B60u);
    if constexpr (CB == MCG) return and_xor(state * 0xCBAC1FEDu, 0x8FFF8FFFu, 0x3B603B60u);
    return __dp4a(state * 0x83DCD12Du, 0x01010101u, 0x6400u);
}

// Two hash words -> two fp16 weights (one fp16 rounding each), the first in the low half.
template <int CB> __device__ __forceinline__ u32 weights(u32 a, u32 b) {
    if constexpr (CB == MUL1) return half2_fma(__byte_perm(a, b, 0x5410), 0x1EEE1EEEu, 0xC931C931u);
    u32 pair;
    asm("{.reg .f16 al, ah, bl, bh;\n"
        "mov.b32 {al, ah}, %1; mov.b32 {bl, bh}, %2;\n"
        "add.rn.f16 al, al, ah; add.rn.f16 bl, bl, bh;\n"
        "mov.b32 %0, {al, bl};}" : "=r"(pair) : "r"(a), "r"(b));
    return pair;
}

// State of window J of the group that (first, second, shift) hold; GROUP_END is end() of the group's last window.
template <int K2, int J> __device__ __forceinline__ u32 state(u32 first, u32 second, int shift) {
    constexpr int PER = Trellis<K2>::PER_GROUP, FIRST = J / PER * PER, LAST = FIRST + PER - 1;
    constexpr int BACK = Trellis<K2>::end(LAST) - Trellis<K2>::end(J);         // bits after this window in its group
    constexpr int SPAN = Trellis<K2>::end(LAST) - Trellis<K2>::end(FIRST);
    static_assert(SPAN <= 32);
    constexpr int SKIP = BACK <= 16 ? 0 : SPAN - 16;                            // the second view ends SKIP bits earlier
    const u32 view = K2 == 8 && SKIP == 0 ? second : __funnelshift_rc(second, first, shift + SKIP);
    return window<BACK - SKIP>(view);
}

// Weights of positions 2*PAIR, 2*PAIR + 1 of this lane.
template <int K2, int CB, int PAIR> __device__ __forceinline__ u32 weight_pair(u32 first, u32 second, int shift) {
    return weights<CB>(hash<CB>(state<K2, 2 * PAIR>(first, second, shift)),
                             hash<CB>(state<K2, 2 * PAIR + 1>(first, second, shift)));
}

// A lane's place in every tile of one width.
template <int K2> struct LaneCursors {
    Cursor group[Trellis<K2>::GROUPS];
    __device__ explicit LaneCursors(int lane) {
#pragma unroll
        for (int g = 0; g < Trellis<K2>::GROUPS; ++g) group[g] = Trellis<K2>::cursor(lane, g);
    }
};

// The words of a tile that this lane needs; `read(i)` returns word i of the tile.
template <int K2> struct TileWords {
    u32 first[Trellis<K2>::GROUPS], second[Trellis<K2>::GROUPS];
    template <class Read> __device__ __forceinline__ void load(const LaneCursors<K2>& at, Read read) {
#pragma unroll
        for (int g = 0; g < Trellis<K2>::GROUPS; ++g) {
            first[g] = read(at.group[g].first);
            second[g] = read(at.group[g].second);
        }
    }
};

// Register `i` of this lane's 8 weights as the A fragment of the transposed tile (m = 16 output columns, k = 16 inputs).
// The pairs of positions lie in the tile as: columns 0-7 with inputs 0-7, then 8-15; columns 8-15 likewise.
template <int K2, int CB>
__device__ __forceinline__ u32 decode_register(int i, const LaneCursors<K2>& at, const TileWords<K2>& words) {
    constexpr int PER = Trellis<K2>::PER_GROUP, G1 = 2 / PER, G2 = 4 / PER, G3 = 6 / PER;
    switch (i) {
        case 0: return weight_pair<K2, CB, 0>(words.first[0], words.second[0], at.group[0].shift);
        case 2: return weight_pair<K2, CB, 1>(words.first[G1], words.second[G1], at.group[G1].shift);
        case 1: return weight_pair<K2, CB, 2>(words.first[G2], words.second[G2], at.group[G2].shift);
        default: return weight_pair<K2, CB, 3>(words.first[G3], words.second[G3], at.group[G3].shift);
    }
}

template <int K2, int CB, class Read>
__device__ __forceinline__ void decode_tile(u32 (&a)[4], const LaneCursors<K2>& at, Read read) {
    TileWords<K2> words;
    words.load(at, read);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = decode_register<K2, CB>(i, at, words);
}
