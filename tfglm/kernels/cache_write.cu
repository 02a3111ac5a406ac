// What a token leaves in a layer's cache: the normalised latent and the rotated key, packed in format KV, and on layers with an
// indexer the index key. One block a row, a pure function of that row; bytes equal those of tfglm/formats/latent.py.
//
// KV: 0 bf16, 1 fp8, 2 fp4, 3 fp4x (tfglm/formats/latent.py has the layouts). At most 2048 query, 512 latent and 128 rotary values, index keys
// of at most 256 values; latent a multiple of 16, rotary and index key of 4.
//! variant: KV=0
//! variant: KV=1
//! variant: KV=2
//! variant: KV=3
//! no-spills
#include "block.cuh"

#ifndef KV
#define KV 0
#endif

constexpr int THREADS = 128;
constexpr int MAX_QUERIES = 2048, MAX_LATENT = 512, MAX_ROTARY = 128, MAX_INDEX = 256;

// ---- numbers

// Biased exponent of the row scale 2^(ceil(log2 amax) - 8), at least 2^-126.
__device__ __forceinline__ int scale_exponent(float amax) {
    const u32 bits = __float_as_uint(amax);
    const int exponent = static_cast<int>(bits >> 23) + ((bits & 0x7fffffu) != 0) - 8;
    return min(max(exponent, 1), 254);
}
__device__ __forceinline__ float scale_of(int exponent) { return __uint_as_float(static_cast<u32>(exponent) << 23); }
__device__ __forceinline__ float reciprocal_of(int exponent) { return __uint_as_float(static_cast<u32>(254 - exponent) << 23); }

// float32 to e4m3fn in integer arithmetic: nearest even, saturating at 448.
__device__ __forceinline__ u32 e4m3_code(float x) {
    const u32 magnitude = __float_as_uint(x) & 0x7fffffffu;
    u32 code;
    if (magnitude >= 0x3c800000u)  // 2^-6, the least normal number: round the mantissa to three bits, rebias by 120
        code = min((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20, 960u + 0x7eu) - 960u;
    else  // subnormals are multiples of 2^-9, the spacing of float32 at 2^14
        code = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), 16384.0f)) - 0x46800000u;
    return code | ((__float_as_uint(x) >> 24) & 0x80u);
}

__device__ __forceinline__ float e4m3_value(u32 code) {  // of a code without sign
    const u32 mantissa = code & 7u, exponent = code >> 3;
    return exponent ? __uint_as_float(((exponent + 120u) << 23) | (mantissa << 20)) : static_cast<float>(mantissa) * 0x1p-9f;
}

// float32 to e2m1; a tie takes the larger magnitude, zero has no sign.
__device__ __forceinline__ u32 e2m1_code(float x) {
    const float a = fabsf(x);
    const u32 code = (a >= 0.25f) + (a >= 0.75f) + (a >= 1.25f) + (a >= 1.75f) + (a >= 2.5f) + (a >= 3.5f) + (a >= 5.0f);
    return code | (x < 0.0f && code ? 8u : 0u);
}

// ---- rows in shared memory

// values [count], exact in bfloat16, as bfloat16 bytes.
__device__ __forceinline__ void store_bf16(const float* values, int count, u8* to) {
    for (int i = threadIdx.x; i < count / 2; i += THREADS)
        reinterpret_cast<u32*>(to)[i] = bf16_pair(values[2 * i], values[2 * i + 1]);
}

// Greatest magnitude of values [count], for the row's scale.
__device__ __forceinline__ float greatest(const float* values, int count) {
    float top = 0.0f;
    for (int i = threadIdx.x; i < count; i += THREADS) top = fmaxf(top, fabsf(values[i]));
    return block_max(top);
}

// values, at most `top`, as e4m3 codes; returns the row's scale.
__device__ __forceinline__ float store_e4m3(const float* values, int count, float top, u8* to) {
    const int exponent = scale_exponent(top);
    const float reciprocal = reciprocal_of(exponent);
    for (int i = threadIdx.x; i < count / 4; i += THREADS) {
        u32 word = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) word |= e4m3_code(values[4 * i + j] * reciprocal) << (8 * j);
        reinterpret_cast<u32*>(to)[i] = word;
    }
    return scale_of(exponent);
}

// values, at most `top`, as e2m1 codes with an e4m3 scale for each 16; returns the row's scale.
__device__ __forceinline__ float store_e2m1(const float* values, int count, float top, u8* to) {
    const int exponent = scale_exponent(top);
    const float reciprocal = reciprocal_of(exponent);
    for (int block = threadIdx.x; block < count / 16; block += THREADS) {
        float y[16], most = 0.0f;
#pragma unroll
        for (int j = 0; j < 16; j++) {
            y[j] = values[block * 16 + j] * reciprocal;
            most = fmaxf(most, fabsf(y[j]));
        }
        const u32 scale_code = e4m3_code(__fdiv_rn(most, 6.0f));
        const float scale = e4m3_value(scale_code), divisor = scale == 0.0f ? 1.0f : scale;
        u32 words[2] = {0, 0};
#pragma unroll
        for (int j = 0; j < 16; j++) words[j / 8] |= e2m1_code(__fdiv_rn(y[j], divisor)) << (4 * (j % 8));
        reinterpret_cast<uint2*>(to)[block] = make_uint2(words[0], words[1]);
        to[count / 2 + block] = static_cast<u8>(scale_code);
    }
    return scale_of(exponent);
}

// Rotates the first 2 * half of x [R, .] (bfloat16 values) into `to` as halves.
template <typename Read>
__device__ __forceinline__ void rotate_row(const Read& x, const float* cosines, const float* sines, int half, float* to) {
    for (int i = threadIdx.x; i < half; i += THREADS) {
        const float even = x(2 * i), odd = x(2 * i + 1);
        to[i] = bf16_round(even * cosines[i] - odd * sines[i]);
        to[half + i] = bf16_round(odd * cosines[i] + even * sines[i]);
    }
}

// out = rms(x) * weight over `count` values, a multiple of 2 and at most MAX_QUERIES; the normalised value is rounded before it is
// weighted. Waits for the kernels before once the weights are under way.
__device__ __forceinline__ void normalise(const u16* x, const float* weight, float eps, u16* out, int count) {
    constexpr int PAIRS = MAX_QUERIES / (2 * THREADS);
    float2 gain[PAIRS];
    u32 pair[PAIRS];
#pragma unroll
    for (int n = 0; n < PAIRS; n++)
        if (const int i = (threadIdx.x + n * THREADS) * 2; i < count) gain[n] = *reinterpret_cast<const float2*>(weight + i);
    grid_wait();
    float square = 0.0f;
#pragma unroll
    for (int n = 0; n < PAIRS; n++)
        if (const int i = (threadIdx.x + n * THREADS) * 2; i < count) pair[n] = *reinterpret_cast<const u32*>(x + i);
#pragma unroll
    for (int n = 0; n < PAIRS; n++)
        if ((threadIdx.x + n * THREADS) * 2 < count)
            square += bf16_low(pair[n]) * bf16_low(pair[n]) + bf16_high(pair[n]) * bf16_high(pair[n]);
    const float factor = rsqrtf(block_sum(square) / static_cast<float>(count) + eps);
#pragma unroll
    for (int n = 0; n < PAIRS; n++)
        if (const int i = (threadIdx.x + n * THREADS) * 2; i < count)
            *reinterpret_cast<u32*>(out + i) = bf16_pair(gain[n].x * bf16_round(bf16_low(pair[n]) * factor),
                                                         gain[n].y * bf16_round(bf16_high(pair[n]) * factor));
}

// ---- kernels

// a [R, queries + latent + 2 * half] with row stride a_stride: the first part normalised -> out [R, queries]; the rest -> the latent plane
// and the rotary plane at slots [R]. Two blocks a row.
extern "C" __global__ void __launch_bounds__(THREADS)
    split_latents(const u16* a, int a_stride, const float* query_norm, const float* norm, float eps, const float* cosines,
                  const float* sines, const long long* slots, u8* latent_plane, int latent_bytes, u8* rotary_plane, int rotary_bytes,
                  u16* out, int queries, int latent, int half) {
    grid_release();
    __shared__ float values[MAX_LATENT], rotary[MAX_ROTARY];
    const int row = blockIdx.x;
    a += static_cast<long long>(row) * a_stride;
    if (blockIdx.y == 1) {
        normalise(a, query_norm, eps, out + static_cast<long long>(row) * queries, queries);
        return;
    }
    a += queries;
    constexpr int MOST = MAX_LATENT / THREADS;
    float gain[MOST] = {}, x[MOST] = {}, square = 0.0f, top = 0.0f;
#pragma unroll
    for (int n = 0; n < MOST; n++)
        if (const int i = threadIdx.x + n * THREADS; i < latent) gain[n] = norm[i];
    grid_wait();
    const long long slot = slots[row];
#pragma unroll
    for (int n = 0; n < MOST; n++)
        if (const int i = threadIdx.x + n * THREADS; i < latent) x[n] = bf16_float(a[i]);
    rotate_row([&](int i) { return bf16_float(a[latent + i]); }, cosines + row * half, sines + row * half, half, rotary);
#pragma unroll
    for (int n = 0; n < MOST; n++) square += x[n] * x[n];
    const float factor = rsqrtf(block_sum(square) / static_cast<float>(latent) + eps);
#pragma unroll
    for (int n = 0; n < MOST; n++)
        if (const int i = threadIdx.x + n * THREADS; i < latent) {
            const float value = bf16_round(gain[n] * bf16_round(x[n] * factor));
            values[i] = value;
            top = fmaxf(top, fabsf(value));
        }
    top = KV == 0 ? 0.0f : block_max(top);
    __syncthreads();

    u8* to = latent_plane + slot * latent_bytes;
    u8* rotary_to = rotary_plane + slot * rotary_bytes;
#if KV == 0
    store_bf16(values, latent, to);
#elif KV == 1
    const float scale = store_e4m3(values, latent, top, to);
    for (int i = latent / 4 + threadIdx.x; i < latent_bytes / 4; i += THREADS)
        reinterpret_cast<u32*>(to)[i] = i == latent / 4 ? __float_as_uint(scale) : 0u;
#else
    const float scale = store_e2m1(values, latent, top, to);
#if KV == 3
    const u32 rotary_scale = __float_as_uint(store_e4m3(rotary, 2 * half, greatest(rotary, 2 * half), rotary_to));
#else
    const u32 rotary_scale = 0u;
#endif
    const int used = latent / 2 + latent / 16;  // may be no multiple of 4
    for (int i = used + threadIdx.x; i < latent_bytes; i += THREADS) {
        const u32 word = i < used + 4 ? __float_as_uint(scale) : i < used + 8 ? rotary_scale : 0u;
        to[i] = static_cast<u8>(word >> (8 * ((i - used) % 4)));
    }
#endif
#if KV != 3
    store_bf16(rotary, 2 * half, rotary_to);
#endif
}

// key [R, width] with row stride -> LayerNorm (weight, bias), its first 2 * half values rotated -> the index plane.
extern "C" __global__ void __launch_bounds__(THREADS)
    write_index_key(const u16* key, int key_stride, const float* weight, const float* bias, float eps, const float* cosines,
                    const float* sines, const long long* slots, u8* plane, int row_bytes, int width, int half) {
    chain_start();
    __shared__ float normed[MAX_INDEX], rotated[MAX_INDEX];
    const int row = blockIdx.x;
    key += static_cast<long long>(row) * key_stride;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < width; i += THREADS) sum += bf16_float(key[i]);
    const float mean = block_sum(sum) / static_cast<float>(width);
    float square = 0.0f;
    for (int i = threadIdx.x; i < width; i += THREADS) {
        const float d = bf16_float(key[i]) - mean;
        square += d * d;
    }
    const float factor = rsqrtf(block_sum(square) / static_cast<float>(width) + eps);
    for (int i = threadIdx.x; i < width; i += THREADS) {
        const float y = bf16_round((bf16_float(key[i]) - mean) * factor * weight[i] + bias[i]);
        normed[i] = y;
        rotated[i] = y;
    }
    __syncthreads();
    rotate_row([&](int i) { return normed[i]; }, cosines + row * half, sines + row * half, half, rotated);
    __syncthreads();
    u8* to = plane + slots[row] * row_bytes;
#if KV == 3
    const float scale = store_e4m3(rotated, width, greatest(rotated, width), to);
    if (threadIdx.x == 0) *reinterpret_cast<float*>(to + width) = scale;
#else
    store_bf16(rotated, width, to);
#endif
}
