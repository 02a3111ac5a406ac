// From rows of logits to tokens, as tfglm/engine/sampler.py defines it: top_k, then top_p, then min_p, then the greatest of
// value / temperature + Gumbel noise keyed by (seed, position, id); equal scores go to the greater value, then the lower id.
//
// Five launches: sample_tops (the best of each 1,024 logits), sample_masses (integer probability masses), sample_cut (one block
// a row: the order key of the last token that top_k and top_p keep), sample_scores (the best score of each 1,024), sample_tokens.
// The cuts are integer arithmetic, so no order of sums matters; values after the logits are float64.
//! spills 16
#include "block.cuh"

constexpr int CHUNK = 1024, THREADS = 256, EACH = CHUNK / THREADS;
constexpr int CUT_THREADS = 1024, BINS = 2 * CUT_THREADS;
constexpr double MASS_ONE = 1099511627776.0;  // 2^40

struct Best {
    double score;
    float value;
    int id;
};

__device__ __forceinline__ u32 order_key(float value) {
    const u32 bits = __float_as_uint(value + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
constexpr u32 KEY_OF_MINUS_INFINITY = 0x007fffffu;

__device__ __forceinline__ bool better(const Best& a, const Best& b) {
    if (a.score != b.score) return a.score > b.score;
    if (a.value != b.value) return a.value > b.value;
    return a.id < b.id;
}

__device__ __forceinline__ Best warp_best(Best mine) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) {
        Best other;
        other.score = __longlong_as_double(__shfl_xor_sync(0xffffffffu, __double_as_longlong(mine.score), step));
        other.value = __shfl_xor_sync(0xffffffffu, mine.value, step);
        other.id = __shfl_xor_sync(0xffffffffu, mine.id, step);
        if (better(other, mine)) mine = other;
    }
    return mine;
}

__device__ __forceinline__ Best block_best(Best mine) {
    __shared__ Best of_warp[MAX_WARPS];
    mine = warp_best(mine);
    __syncthreads();
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = mine;
    __syncthreads();
    Best best = of_warp[0];
    for (int warp = 1; warp < static_cast<int>(blockDim.x) / 32; warp++)
        if (better(of_warp[warp], best)) best = of_warp[warp];
    return best;
}

__device__ __forceinline__ Best none() {
    return {__longlong_as_double(0xfff0000000000000ll), __uint_as_float(0xff800000u), 0x7fffffff};
}

// splitmix64's finalizer (public domain, S. Vigna)
__device__ __forceinline__ u64 mix(u64 x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    return x ^ x >> 31;
}

__device__ __forceinline__ double gumbel(u64 key, int id) {
    const u64 word = mix(key ^ static_cast<u64>(id)) >> 11;
    const double uniform = __dadd_rn(static_cast<double>(word) * 0x1p-53, 0x1p-54);
    return -log(-log(uniform));
}

// The best of the row from the bests of its chunks; every thread gets it.
__device__ __forceinline__ Best row_best(const Best* bests, int chunks) {
    Best mine = none();
    for (int i = threadIdx.x; i < chunks; i += blockDim.x)
        if (better(bests[i], mine)) mine = bests[i];
    return block_best(mine);
}

// ---- launches

// logits [R, stride] float32, of which the first `vocabulary` count -> bests [R, chunks]; NaN is reported as the best.
extern "C" __global__ void __launch_bounds__(THREADS)
    sample_tops(const float* logits, int stride, int vocabulary, Best* bests) {
    chain_start();
    logits += static_cast<long long>(blockIdx.y) * stride;
    Best mine = none();
    for (int i = 0; i < EACH; i++) {
        const int id = blockIdx.x * CHUNK + i * THREADS + threadIdx.x;
        if (id < vocabulary) {
            const float value = logits[id];
            const Best here = {value != value ? __longlong_as_double(0x7ff0000000000000ll) : static_cast<double>(value), value, id};
            if (better(here, mine)) mine = here;
        }
    }
    const Best best = block_best(mine);
    if (threadIdx.x == 0) bests[blockIdx.y * gridDim.x + blockIdx.x] = best;
}

// masses [R, vocabulary]: exp(scaled - greatest) in units of 2^-40, rounded down.
extern "C" __global__ void __launch_bounds__(THREADS)
    sample_masses(const float* logits, int stride, int vocabulary, const Best* bests, const double* temperature, const double* top_p,
                  u64* masses) {
    chain_start();
    const int row = blockIdx.y;
    if (temperature[row] == 0.0 || top_p[row] >= 1.0) return;
    const double t = temperature[row], top = static_cast<double>(row_best(bests + row * gridDim.x, gridDim.x).value) / t;
    for (int i = 0; i < EACH; i++) {
        const int id = blockIdx.x * CHUNK + i * THREADS + threadIdx.x;
        if (id < vocabulary) {
            const double value = static_cast<double>(logits[static_cast<long long>(row) * stride + id]);
            masses[static_cast<long long>(row) * vocabulary + id] = static_cast<u64>(exp(value / t - top) * MASS_ONE);
        }
    }
}

// ceil(share * total) for a share in (0, 1), exactly: the share's 53-bit mantissa times total in 128 bits.
__device__ __forceinline__ u64 share_of(double share, u64 total) {
    const u64 bits = static_cast<u64>(__double_as_longlong(share));
    const int exponent = static_cast<int>(bits >> 52);  // of a positive number below 1
    const u64 mantissa = (bits & 0xfffffffffffffull) | (exponent ? 0x10000000000000ull : 0ull);
    const int shift = 1075 - (exponent ? exponent : 1);  // share = mantissa * 2^-shift, shift >= 53
    const u64 low = mantissa * total, high = __umul64hi(mantissa, total);
    if (shift >= 128) return low | high ? 1 : 0;
    if (shift >= 64) {
        const u64 rest = shift == 64 ? low : low | (high << (128 - shift));
        const u64 whole = shift == 64 ? high : high >> (shift - 64);
        return whole + (rest ? 1 : 0);
    }
    return (high << (64 - shift) | low >> shift) + (low << (64 - shift) ? 1 : 0);
}

struct Cut {
    u32 key;      // tokens of greater order keys are kept,
    int last_id;  // and those of this one up to this id
};

// The digit of a radix pass in which the running sum of weights, from the highest digit down, reaches `wanted`, and what lies above.
__device__ __forceinline__ u32 find_digit(const u64* histogram, u64 wanted, u64& above) {
    __shared__ u64 of_warp[32];
    __shared__ u64 found[2];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 high = BINS - 1 - 2 * threadIdx.x;
    const u64 upper = histogram[high], both = upper + histogram[high - 1];
    u64 inclusive = both;
    for (int step = 1; step < 32; step <<= 1) {
        const u64 below = __shfl_up_sync(0xffffffffu, inclusive, step);
        if (lane >= step) inclusive += below;
    }
    if (lane == 31) of_warp[warp] = inclusive;
    __syncthreads();
    u64 before = inclusive - both;
    for (int w = 0; w < warp; w++) before += of_warp[w];
    if (before < wanted && wanted <= before + both) {
        const bool first = wanted <= before + upper;
        found[0] = first ? high : high - 1;
        found[1] = first ? before : before + upper;
    }
    __syncthreads();
    above = found[1];
    return static_cast<u32>(found[0]);
}

// f(id, order key) for every token, ids ascending by thread; loads of four tokens are in flight at a time.
template <typename F>
__device__ __forceinline__ void each_token(const float* logits, int vocabulary, const F& f) {
    for (int base = threadIdx.x; base < vocabulary; base += 4 * CUT_THREADS) {
        float value[4];
#pragma unroll
        for (int i = 0; i < 4; i++) value[i] = logits[min(base + i * CUT_THREADS, vocabulary - 1)];
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (base + i * CUT_THREADS < vocabulary) f(base + i * CUT_THREADS, order_key(value[i]));
    }
}

// The order key at which the sum of weight(id, key), over tokens from the best down, reaches `wanted`; `above`: the sum before it.
// The whole sum must reach it.
template <typename Weight>
__device__ __forceinline__ u32 weighted_key(const float* logits, int vocabulary, u64 wanted, u64* histogram, const Weight& weight,
                                            u64& above) {
    constexpr int SHIFTS[4] = {32, 21, 10, 0};
    u32 prefix = 0;
    above = 0;
#pragma unroll 1
    for (int pass = 1; pass < 4; pass++) {
        const int shift = SHIFTS[pass], from = SHIFTS[pass - 1];
        const u32 mask = (1u << (from - shift)) - 1u;
        __syncthreads();
        for (int i = threadIdx.x; i < BINS; i += CUT_THREADS) histogram[i] = 0;
        __syncthreads();
        each_token(logits, vocabulary, [&](int id, u32 key) {
            if (pass == 1 || key >> (from & 31) == prefix) {
                const u64 w = weight(id, key);
                if (w) atomicAdd(&histogram[(key >> shift) & mask], w);
            }
        });
        __syncthreads();
        u64 higher;
        const u32 digit = find_digit(histogram, wanted, higher);
        prefix = pass == 1 ? digit : prefix << (from - shift) | digit;
        wanted -= higher;
        above += higher;
    }
    return prefix;
}

// The id of the count-th token, in ascending order, whose key is `key`; the vocabulary's size if there are no more.
__device__ __forceinline__ int tie_id(const float* logits, int vocabulary, u32 key, u64 count) {
    __shared__ int found, ties;
    __syncthreads();
    if (threadIdx.x == 0) found = vocabulary, ties = 0;
    __syncthreads();
    each_token(logits, vocabulary, [&](int, u32 one) {
        if (one == key) atomicAdd(&ties, 1);
    });
    __syncthreads();
    if (static_cast<u64>(ties) <= count) return vocabulary;  // nearly always one: no order among them to be found
    u64 seen = 0;
    for (int base = 0; base < vocabulary && seen < count; base += CUT_THREADS) {
        const int id = base + static_cast<int>(threadIdx.x);
        const u32 equal = id < vocabulary && order_key(logits[id]) == key;
        u32 here;
        const u32 before = block_scan(equal, here);
        if (equal && seen + before + 1 == count) found = id;
        seen += here;
    }
    __syncthreads();
    return found;
}

__device__ __forceinline__ u64 block_total(u64 mine) {
    __shared__ u64 total;
    __syncthreads();
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    if (mine) atomicAdd(&total, mine);
    __syncthreads();
    return total;
}

// cuts [R]. Rows that take the greatest value need none.
extern "C" __global__ void __launch_bounds__(CUT_THREADS, 1)
    sample_cut(const float* logits, int stride, int vocabulary, const double* temperature, const int* top_k, const double* top_p,
               const u64* masses, Cut* cuts) {
    chain_start();
    __shared__ u64 histogram[BINS];
    const int row = blockIdx.x;
    if (temperature[row] == 0.0) return;
    logits += static_cast<long long>(row) * stride;
    masses += static_cast<long long>(row) * vocabulary;
    Cut cut = {KEY_OF_MINUS_INFINITY, -1};  // everything but -inf
    u64 finite = 0;
    const int k = top_k[row];
    if (k > 0) {
        each_token(logits, vocabulary, [&](int, u32 key) { finite += key > KEY_OF_MINUS_INFINITY; });
        finite = block_total(finite);
        if (static_cast<u64>(k) < finite) {
            u64 above;
            const auto one = [](int, u32) { return 1ull; };
            cut.key = weighted_key(logits, vocabulary, static_cast<u64>(k), histogram, one, above);
            cut.last_id = tie_id(logits, vocabulary, cut.key, static_cast<u64>(k) - above);
        }
    }
    if (top_p[row] < 1.0) {
        const Cut first = cut;
        const auto mass = [&](int id, u32 key) {
            return key > first.key || (key == first.key && id <= first.last_id) ? masses[id] : 0ull;
        };
        u64 mine = 0;
        each_token(logits, vocabulary, [&](int id, u32 key) { mine += mass(id, key); });
        const u64 need = share_of(top_p[row], block_total(mine));
        u64 above;
        cut.key = weighted_key(logits, vocabulary, need ? need : 1, histogram, mass, above);
        // Tokens of one key have one mass; enough of them to reach the share.
        __shared__ u64 each;
        each_token(logits, vocabulary, [&](int id, u32 key) {
            if (key == cut.key) each = masses[id];
        });
        __syncthreads();
        cut.last_id = tie_id(logits, vocabulary, cut.key, ((need ? need : 1) - above + each - 1) / each);
    }
    if (threadIdx.x == 0) cuts[row] = cut;
}

// The best score of each chunk -> scored [R, chunks].
extern "C" __global__ void __launch_bounds__(THREADS)
    sample_scores(const float* logits, int stride, int vocabulary, const Best* bests, const double* temperature, const double* log_min_p,
                  const u64* keys, const Cut* cuts, Best* scored) {
    chain_start();
    const int row = blockIdx.y;
    const double t = temperature[row];
    if (t == 0.0) return;
    logits += static_cast<long long>(row) * stride;
    const double least = static_cast<double>(row_best(bests + row * gridDim.x, gridDim.x).value) / t + log_min_p[row];
    const Cut cut = cuts[row];
    Best mine = none();
    for (int i = 0; i < EACH; i++) {
        const int id = blockIdx.x * CHUNK + i * THREADS + threadIdx.x;
        if (id < vocabulary) {
            const float value = logits[id];
            const u32 key = order_key(value);
            const double scaled = static_cast<double>(value) / t;
            if ((key > cut.key || (key == cut.key && id <= cut.last_id)) && scaled >= least) {
                const Best here = {__dadd_rn(scaled, gumbel(keys[row], id)), value, id};
                if (better(here, mine)) mine = here;
            }
        }
    }
    const Best best = block_best(mine);
    if (threadIdx.x == 0) scored[row * gridDim.x + blockIdx.x] = best;
}

// tokens [R]; -1 for a row whose best logit is NaN or infinite.
extern "C" __global__ void __launch_bounds__(THREADS)
    sample_tokens(const Best* bests, const Best* scored, const double* temperature, int chunks, int* tokens) {
    chain_start();
    const int row = blockIdx.x;
    const Best top = row_best(bests + row * chunks, chunks);
    const bool finite = top.score - top.score == 0.0;
    const int id = temperature[row] == 0.0 ? top.id : row_best(scored + row * chunks, chunks).id;
    if (threadIdx.x == 0) tokens[row] = finite ? id : -1;
}
