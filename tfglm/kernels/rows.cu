// Work on the rows of a window that is neither a matrix product nor attention. One block a row (and, where named, a head or a
// part of the row), so a row's bits depend on nothing else. Activations are bfloat16, norm weights float32.
//! no-spills
#include "block.cuh"

// Eight neighbours of a bfloat16 row as float32 and back.
struct Eight {
    float v[8];
};

__device__ __forceinline__ Eight load_eight(const u16* p) {
    const uint4 raw = *reinterpret_cast<const uint4*>(p);
    return {bf16_low(raw.x), bf16_high(raw.x), bf16_low(raw.y), bf16_high(raw.y),
            bf16_low(raw.z), bf16_high(raw.z), bf16_low(raw.w), bf16_high(raw.w)};
}

__device__ __forceinline__ void store_eight(u16* p, const Eight& e) {
    *reinterpret_cast<uint4*>(p) = make_uint4(bf16_pair(e.v[0], e.v[1]), bf16_pair(e.v[2], e.v[3]), bf16_pair(e.v[4], e.v[5]),
                                              bf16_pair(e.v[6], e.v[7]));
}

// out [R, width] = table [vocab, width] at tokens [R]; width a multiple of 8.
extern "C" __global__ void __launch_bounds__(256) embed(const u16* table, const long long* tokens, u16* out, int width) {
    chain_start();
    const u16* from = table + tokens[blockIdx.x] * width;
    u16* to = out + static_cast<long long>(blockIdx.x) * width;
    for (int i = threadIdx.x * 8; i < width; i += 256 * 8)
        *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(from + i);
}

// cos, sin [R, half] float32, rounded to bfloat16 as the model's activations are. The angle is a float32 product; its cosine is
// taken in float64, because at positions near a million a float32 angle already carries the whole error that is allowed.
extern "C" __global__ void angles(const long long* positions, const float* frequencies, float* cosines, float* sines, int half) {
    chain_start();
    const float position = static_cast<float>(positions[blockIdx.x]);
    for (int i = threadIdx.x; i < half; i += blockDim.x) {
        const double angle = static_cast<double>(__fmul_rn(position, frequencies[i]));
        cosines[blockIdx.x * half + i] = bf16_round(static_cast<float>(cos(angle)));
        sines[blockIdx.x * half + i] = bf16_round(static_cast<float>(sin(angle)));
    }
}

// x [R, heads, .]: the `2 * half` values at x + row * row_stride + head * head_stride are rotated as adjacent pairs and written to
// out as halves. out may be x: a warp holds a head's values in registers before it writes. One warp a head.
extern "C" __global__ void __launch_bounds__(256)
    rotate(const u16* x, int row_stride, int head_stride, u16* out, int out_row_stride, int out_head_stride, const float* cosines,
           const float* sines, int heads, int half) {
    chain_start();
    const int row = blockIdx.x, head = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (head >= heads) return;
    x += static_cast<long long>(row) * row_stride + head * head_stride;
    out += static_cast<long long>(row) * out_row_stride + head * out_head_stride;
    constexpr int MOST = 4;  // half <= 128
    float first[MOST], second[MOST];
#pragma unroll
    for (int j = 0; j < MOST; j++) {
        const int i = lane + 32 * j;
        if (i < half) {
            const u32 pair = *reinterpret_cast<const u32*>(x + 2 * i);
            const float c = cosines[row * half + i], s = sines[row * half + i], even = bf16_low(pair), odd = bf16_high(pair);
            first[j] = even * c - odd * s;
            second[j] = odd * c + even * s;
        }
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < MOST; j++) {
        const int i = lane + 32 * j;
        if (i < half) {
            out[i] = bf16_bits(first[j]);
            out[half + i] = bf16_bits(second[j]);
        }
    }
}

// out [R, width] = rms(x) * weight; the normalised value is rounded before it is weighted. x and out may be strided.
extern "C" __global__ void __launch_bounds__(256)
    rms_norm(const u16* x, int x_stride, const float* weight, u16* out, int out_stride, int width, float eps) {
    chain_start();
    x += static_cast<long long>(blockIdx.x) * x_stride;
    out += static_cast<long long>(blockIdx.x) * out_stride;
    float square = 0.0f;
    for (int i = threadIdx.x * 8; i < width; i += 256 * 8) {
        const Eight e = load_eight(x + i);
#pragma unroll
        for (int j = 0; j < 8; j++) square += e.v[j] * e.v[j];
    }
    const float factor = rsqrtf(block_sum(square) / static_cast<float>(width) + eps);
    for (int i = threadIdx.x * 8; i < width; i += 256 * 8) {
        Eight e = load_eight(x + i);
#pragma unroll
        for (int j = 0; j < 8; j++) e.v[j] = weight[i + j] * bf16_round(e.v[j] * factor);
        store_eight(out + i, e);
    }
}

// sum [R, width] = x + branch, and out = rms_norm(sum). branch is bfloat16, or float32 to be rounded first. sum may be x. A thread has eight values: block = width / 8 rounded up to warps, at most 768.
extern "C" __global__ void __launch_bounds__(768, 2)
    add_rms_norm(const u16* x, const void* branch, int branch_is_float, const float* weight, u16* sum, u16* out, int width,
                 float eps) {
    grid_release();
    const int i = threadIdx.x * 8;
    const bool inside = i < width;
    const long long base = static_cast<long long>(blockIdx.x) * width + i;
    const auto eight_floats = [](const float* p) {
        const float4 low = *reinterpret_cast<const float4*>(p), high = *reinterpret_cast<const float4*>(p + 4);
        return Eight{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    };
    Eight gain = {}, e = {};
    if (inside) gain = eight_floats(weight + i);
    grid_wait();
    float square = 0.0f;
    if (inside) {
        e = load_eight(x + base);
        const Eight b =
            branch_is_float ? eight_floats(static_cast<const float*>(branch) + base) : load_eight(static_cast<const u16*>(branch) + base);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            e.v[j] = bf16_round(e.v[j] + bf16_round(b.v[j]));
            square += e.v[j] * e.v[j];
        }
        store_eight(sum + base, e);
    }
    const float factor = rsqrtf(block_sum(square) / static_cast<float>(width) + eps);
    if (!inside) return;
#pragma unroll
    for (int j = 0; j < 8; j++) e.v[j] = gain.v[j] * bf16_round(e.v[j] * factor);
    store_eight(out + base, e);
}

// out [R, inner] = silu(gate) * up of x [R, 2 * inner] (gate first); silu(gate) is rounded before the product. inner % 8 == 0.
extern "C" __global__ void __launch_bounds__(256) swiglu(const u16* x, u16* out, int inner) {
    chain_start();
    const int i = (blockIdx.y * 256 + threadIdx.x) * 8;
    if (i >= inner) return;
    const u16* gate = x + static_cast<long long>(blockIdx.x) * 2 * inner + i;
    Eight g = load_eight(gate);
    const Eight u = load_eight(gate + inner);
#pragma unroll
    for (int j = 0; j < 8; j++) g.v[j] = bf16_round(g.v[j] / (1.0f + __expf(-g.v[j]))) * u.v[j];
    store_eight(out + static_cast<long long>(blockIdx.x) * inner + i, g);
}

// out [R, width] = sum over picks, in order, of weights [R, picks] * slots [R * picks, width], and then last [R, width] if it is given; all
// float32, width % 4 == 0.
extern "C" __global__ void __launch_bounds__(256)
    combine(const float* slots, const float* weights, const float* last, float* out, int picks, int width) {
    chain_start();
    const int i = (blockIdx.y * 256 + threadIdx.x) * 4;
    if (i >= width) return;
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int pick = 0; pick < picks; pick++) {
        const long long slot = static_cast<long long>(blockIdx.x) * picks + pick;
        const float4 v = *reinterpret_cast<const float4*>(slots + slot * width + i);
        const float w = weights[slot];
        total.x += w * v.x;
        total.y += w * v.y;
        total.z += w * v.z;
        total.w += w * v.w;
    }
    if (last != nullptr) {
        const float4 v = *reinterpret_cast<const float4*>(last + static_cast<long long>(blockIdx.x) * width + i);
        total = make_float4(total.x + v.x, total.y + v.y, total.z + v.z, total.w + v.w);
    }
    *reinterpret_cast<float4*>(out + static_cast<long long>(blockIdx.x) * width + i) = total;
}
