// Rows of values to quantized blocks, and back. A work-item encodes a block; it decodes 16 elements.
//
// Macros: those of blocks.cl; ENCODE, to encode, then WEIGHTED: errors are weighted by importances.
//
// Encoding follows opweave.ops.encoding operation by operation, so that the bytes are the same: nothing is fused, sums
// are added by halves, and quotients are rounded correctly.

#pragma OPENCL FP_CONTRACT OFF

#include "types.cl"
#include "blocks.cl"

typedef struct {
    long rank, shape[8];  // axes before the last one, innermost first
    long stride[3][8];    // of the blocks in bytes, of values and importances in elements
    long offset[3];
} Params;

#define FIND_ROW(count) \
    long rest = get_global_id(1), at[3] = {p.offset[0], p.offset[1], p.offset[2]}; \
    for (int axis = 0; axis < p.rank; axis++) { \
        const long i = rest % p.shape[axis]; \
        rest /= p.shape[axis]; \
        for (int k = 0; k < count; k++) at[k] += i * p.stride[k][axis]; \
    }

#ifndef ENCODE

__kernel UNVECTORIZED void decode_blocks(__global float *out, __global const uchar *blocks, const Params p)
{
    FIND_ROW(2)
    const long part = get_global_id(0);
    const float16 values = decode(blocks + at[0] + part / PARTS * BYTES, part % PARTS);
    STOREN(f32, 16, values, out + at[1], part * 16);
}

#else

// Drivers may divide with an error of some units in the last place.
static inline float quotient(const float a, const float b)
{
    float q = a / b;
    for (int i = 0; i < 2; i++) {
        const float next = fma(fma(-q, b, a), 1.0f / b, q);
        if (isfinite(next)) q = next;
    }
    return q;
}

static inline float inverse(const float x) { return x == 0 ? 0.0f : quotient(1.0f, x); }

static inline float rounded_half(const float x, uchar *to)
{
    ushort bits;
    vstore_half_rte(x, 0, (half *)&bits);
    to[0] = bits, to[1] = bits >> 8;
    return half_above((int)bits << 16);
}

// Fields of ``width`` bits of each ``group`` of bytes: all lowest ones first, then the next ones.
static inline void pack(const uchar *q, const int shift, const int width, const int group, const int n, uchar *to)
{
    for (int i = 0; i < n; i++) {
        const int first = i / group * (8 / width) * group + i % group;
        int byte = 0;
        for (int k = 0; k < 8 / width; k++) byte |= (q[first + k * group] >> shift & (1 << width) - 1) << k * width;
        to[i] = byte;
    }
}

// 0, or NaN where a value is not finite; fmin and fmax leave NaN out.
static inline float unless_finite(const float *x, const int n)
{
    float result = 0;
    for (int i = 0; i < n; i++) result += x[i] - x[i];
    return result;
}

static inline void extremes(const float *x, const int n, float *low, float *high)
{
    *low = *high = x[0];
    for (int i = 1; i < n; i++) *low = fmin(*low, x[i]), *high = fmax(*high, x[i]);
    const float wrong = unless_finite(x, n);
    if (isnan(wrong)) *low = *high = wrong;
}

static inline float largest_size(const float *x, const int n)
{
    float result = 0;
    for (int i = 0; i < n; i++) result = fmax(result, fabs(x[i]));
    return result + unless_finite(x, n);
}

#if (defined(BLOCKS_q4_0) || defined(BLOCKS_q5_0)) && !WEIGHTED

// Scale and integers 0 .. 2 · highest - 1: the value of largest magnitude, the first of them, becomes 0.
static inline float steps(const float *x, const int highest, uchar *q)
{
    float largest = x[0];
    for (int i = 1; i < COUNT; i++) largest = fabs(x[i]) > fabs(largest) ? x[i] : largest;
    const float scale = largest / -highest, by = inverse(scale); // a power of two
    for (int i = 0; i < COUNT; i++) q[i] = min((int)(x[i] * by + (highest + 0.5f)), 2 * highest - 1);
    const float wrong = unless_finite(x, COUNT);
    return isnan(wrong) ? wrong : scale;
}

#elif (defined(BLOCKS_q4_1) || defined(BLOCKS_q5_1)) && !WEIGHTED

// Scale, offset and integers 0 .. highest, which reach from the smallest value to the largest one.
static inline float steps(const float *x, const int highest, uchar *q, float *low)
{
    float high;
    extremes(x, COUNT, low, &high);
    *low += 0.0f, high += 0.0f; // of 0.0 and -0.0
    const float scale = quotient(high - *low, highest), by = inverse(scale);
    for (int i = 0; i < COUNT; i++) q[i] = min((int)((x[i] - *low) * by + 0.5f), highest);
    return scale;
}

#endif

#if defined(BLOCKS_q2_k) || defined(BLOCKS_q3_k) || defined(BLOCKS_q6_k)
#define SIZE 16
#else
#define SIZE 32
#endif

#define EQUAL 0x1p-16f

static inline float tree_sum(float *x)
{
    for (int half_ = SIZE / 2; half_; half_ /= 2)
        for (int i = 0; i < half_; i++) x[i] += x[i + half_];
    return x[0];
}

#if defined(BLOCKS_iq4_nl) || defined(BLOCKS_iq4_xs)
// The number of the level that is nearest, of two the upper one; the level; and the numbers to which the value of largest
// magnitude is scaled in trials.
static inline int nearest(const float x, const int highest)
{
    int result = 0;
    for (int i = 0; i < 15; i++) result += x >= 0.5f * (levels[i] + levels[i + 1]);
    return result;
}
#define LEVEL(q) levels[q]
#define TRIALS 18
#define END(i) ((i < 9 ? -127.0f : 113.0f) - 6 * (i % 9 - 4))
#else
static inline int nearest(const float x, const int highest)
{
    return (int)clamp(rint(x), (float)-highest, highest - 1.0f) + highest;
}
#define LEVEL(q) ((float)(q) - highest)
#define TRIALS 17
#define END(i) (-highest - (i - 8) * 0.125f)
#endif

#if defined(BLOCKS_q3_k) || defined(BLOCKS_q6_k) || defined(BLOCKS_iq4_nl) || defined(BLOCKS_iq4_xs) || \
    (WEIGHTED && (defined(BLOCKS_q4_0) || defined(BLOCKS_q5_0)))

// The scale of a part.
static inline float fit(const float *x, const float *weight, const int highest)
{
    float low, high, best = 0;
    extremes(x, SIZE, &low, &high);
    const float largest = -low > high ? low : high;
    float scales = largest - largest;
    for (int trial = 0; trial < TRIALS; trial++) {
        const float by = largest == 0 ? 0.0f : quotient(END(trial), largest);
        float products[SIZE], squares[SIZE];
        for (int i = 0; i < SIZE; i++) {
            const float q = LEVEL(nearest(x[i] * by, highest));
            products[i] = x[i] * weight[i] * q, squares[i] = q * weight[i] * q;
        }
        const float product = tree_sum(products), square = tree_sum(squares);
        const float scale = square > 0 ? quotient(product, square) : 0.0f, less = scale * product;
        if (less > best) best = less, scales = scale;
    }
    return scales;
}

// Scale of the block, integers of parts (plus most) and of elements (the numbers of levels).
static inline void symmetric(
    const float *x, const float *weight, const int highest, const int most, uchar *d, uchar *parts, uchar *q)
{
    float scales[COUNT / SIZE], low, high;
    for (int i = 0; i < COUNT / SIZE; i++) scales[i] = fit(x + SIZE * i, weight + SIZE * i, highest);
    extremes(scales, COUNT / SIZE, &low, &high);
    const float whole = rounded_half((-low > high ? low : high) / -most, d), by = inverse(whole); // a power of two
    for (int i = 0; i < COUNT / SIZE; i++) {
        const float part = clamp(rint(scales[i] * by), (float)-most, most - 1.0f), each = inverse(whole * part);
        parts[i] = (int)part + most;
        for (int j = SIZE * i; j < SIZE * i + SIZE; j++) q[j] = nearest(x[j] * each, highest);
    }
}

// Scale of a block of one part, and the numbers of levels.
static inline void one_scale(const float *x, const float *weight, const int highest, uchar *d, uchar *q)
{
    const float by = inverse(rounded_half(fit(x, weight, highest), d));
    for (int i = 0; i < SIZE; i++) q[i] = nearest(x[i] * by, highest);
}

#elif defined(BLOCKS_q2_k) || defined(BLOCKS_q4_k) || defined(BLOCKS_q5_k) || \
    (WEIGHTED && (defined(BLOCKS_q4_1) || defined(BLOCKS_q5_1)))

// Offsets of blocks of several parts are not negative.
#define ANY_OFFSET (COUNT == SIZE)

// Scale and offset of a part for values scale · q - offset, integers 0 .. highest; the scale is not negative.
static inline void fit(const float *x, const float *weight, const int highest, float *scales, float *offsets)
{
    float low, high, sums[SIZE], weighted[SIZE];
    extremes(x, SIZE, &low, &high);
    if (!ANY_OFFSET && !(low < 0)) low = low - low;
    const float width = high - low;
    float best = width == 0 ? 0.0f : INFINITY;
    *scales = width - width, *offsets = -low;
    for (int i = 0; i < SIZE; i++) sums[i] = weight[i];
    const float count = tree_sum(sums);
    for (int i = 0; i < SIZE; i++) sums[i] = weighted[i] = x[i] * weight[i];
    const float total = tree_sum(sums);
    for (int step = -8; step <= 8; step++) {
        const float by = width == 0 ? 0.0f : quotient(highest + step * 0.125f, width);
        float q[SIZE], of_q[SIZE], squares[SIZE], products[SIZE], errors[SIZE];
        for (int i = 0; i < SIZE; i++) {
            q[i] = clamp(rint((x[i] - low) * by), 0.0f, (float)highest);
            of_q[i] = q[i] * weight[i];
            squares[i] = of_q[i] * q[i], products[i] = weighted[i] * q[i];
        }
        const float sum_q = tree_sum(of_q), square = tree_sum(squares), product = tree_sum(products);
        // The least squares of scale and offset, or of the scale alone where the offset would be negative.
        const float determinant = count * square - sum_q * sum_q;
        float scale = determinant > EQUAL * (count * square) ? quotient(count * product - total * sum_q, determinant)
                                                             : quotient(width, highest + step * 0.125f);
        float offset = count > 0 ? quotient(scale * sum_q - total, count) : 0.0f;
        if (!ANY_OFFSET && offset < 0) scale = square > 0 ? quotient(product, square) : 0.0f, offset = 0;
        for (int i = 0; i < SIZE; i++) {
            const float difference = q[i] * scale - offset - x[i];
            errors[i] = difference * weight[i] * difference;
        }
        const float error = tree_sum(errors);
        if (error < best && scale >= 0) best = error, *scales = scale, *offsets = offset;
    }
}

// Scale and offset of a block of one part, and integers of elements.
static inline void one_offset(const float *x, const float *weight, const int highest, uchar *d, uchar *m, uchar *q)
{
    float scale, offset;
    uchar unused[2];
    fit(x, weight, highest, &scale, &offset);
    scale = rounded_half(scale, d), offset = rounded_half(offset, unused);
    rounded_half(0.0f - offset, m);
    const float by = inverse(scale);
    for (int i = 0; i < SIZE; i++) q[i] = (int)clamp(rint((x[i] + offset) * by), 0.0f, (float)highest);
}

// Scale and offset of the block, integers of parts and of elements.
static inline void with_offsets(const float *x, const float *weight, const int highest, const int most, uchar *d,
                                uchar *m, uchar *scales, uchar *offsets, uchar *q)
{
    float fitted[2][COUNT / SIZE], whole[2];
    for (int i = 0; i < COUNT / SIZE; i++) fit(x + SIZE * i, weight + SIZE * i, highest, fitted[0] + i, fitted[1] + i);
    for (int k = 0; k < 2; k++) {
        float low, high;
        extremes(fitted[k], COUNT / SIZE, &low, &high);
        whole[k] = rounded_half(quotient(high, most) + 0.0f, k ? m : d);
    }
    const float by = inverse(whole[0]), by_offset = inverse(whole[1]);
    for (int i = 0; i < COUNT / SIZE; i++) {
        scales[i] = (int)clamp(rint(fitted[0][i] * by), 0.0f, (float)most);
        offsets[i] = (int)clamp(rint(fitted[1][i] * by_offset), 0.0f, (float)most);
        const float shift = whole[1] * offsets[i], each = inverse(whole[0] * scales[i]);
        for (int j = SIZE * i; j < SIZE * i + SIZE; j++)
            q[j] = (int)clamp(rint((x[j] + shift) * each), 0.0f, (float)highest);
    }
}

#endif

#if defined(BLOCKS_mxfp4) || defined(BLOCKS_nvfp4)

// The numbers of the levels, multiples of ``step``, that are nearest.
static inline void nearest_e2m1(const float *x, const float step, const int n, uchar *q)
{
    for (int i = 0; i < n; i++) {
        const float size = fmin(fabs(x[i]), step * 12);
        float before = size;
        int k = 0;
        for (int j = 1; j < 8; j++) {
            const float error = fabs(step * (j < 4 ? j : j < 6 ? 2 * j - 4 : 4 * j - 16) - size);
            k += error < before;
            before = error;
        }
        q[i] = x[i] < 0 && k ? k + 8 : k;
    }
}

#endif

#if WEIGHTED
#define HALF_STEPS(highest, b) one_scale(x, weight, highest, b, q)
#define ALL_STEPS(highest, b) one_offset(x, weight, highest, b, b + 2, q)
#else
#define HALF_STEPS(highest, b) rounded_half(steps(x, highest, q), b)
#define ALL_STEPS(highest, b) \
    float low; \
    rounded_half(steps(x, highest, q, &low), b); \
    rounded_half(low, b + 2)
#endif

static inline void encode(const float *x, const float *weight, uchar *b)
{
    uchar q[COUNT];
#if defined(BLOCKS_q4_0)
    HALF_STEPS(8, b);
    pack(q, 0, 4, 16, 16, b + 2);

#elif defined(BLOCKS_q4_1)
    ALL_STEPS(15, b);
    pack(q, 0, 4, 16, 16, b + 4);

#elif defined(BLOCKS_q5_0)
    HALF_STEPS(16, b);
    pack(q, 0, 4, 16, 16, b + 6);
    for (int i = 0; i < 4; i++) b[2 + i] = 0;
    for (int i = 0; i < 32; i++) b[2 + i / 8] |= q[i] >> 4 << i % 8;

#elif defined(BLOCKS_q5_1)
    ALL_STEPS(31, b);
    pack(q, 0, 4, 16, 16, b + 8);
    for (int i = 0; i < 4; i++) b[4 + i] = 0;
    for (int i = 0; i < 32; i++) b[4 + i / 8] |= q[i] >> 4 << i % 8;

#elif defined(BLOCKS_q8_0)
    const float scale = quotient(largest_size(x, COUNT), 127), by = inverse(scale);
    rounded_half(scale, b);
    for (int i = 0; i < 32; i++) b[2 + i] = (int)round(x[i] * by);

#elif defined(BLOCKS_mxfp4)
    const float largest = largest_size(x, COUNT);
    const int exponent = largest > 0 ? max(ilogb(largest) + 125, 0) : 0;
    const float step = exponent < 2 ? as_float(0x00200000u << exponent) : as_float((uint)(exponent - 1) << 23);
    b[0] = exponent;
    nearest_e2m1(x, step, 32, q);
    pack(q, 0, 4, 16, 16, b + 1);

#elif defined(BLOCKS_nvfp4)
    for (int i = 0; i < 4; i++) {
        const float wanted = quotient(largest_size(x + 16 * i, 16), 6);
        // Three bits of the fraction, rounded; below 2^-6 steps of 2^-9; 126 for all of the largest exponent.
        int code = wanted < 0x1p-6f ? (int)(wanted * 512 + 0.5f) : (as_int(wanted) + (1 << 19) >> 20) - 120 * 8;
        b[i] = code = code >= 120 ? 126 : code;
        const float step = code > 7 ? as_float(((code >> 3) + 119) << 23 | (code & 7) << 20) : 0x1p-10f * code;
        nearest_e2m1(x + 16 * i, step, 16, q + 16 * i);
        pack(q + 16 * i, 0, 4, 8, 8, b + 4 + 8 * i);
    }

#elif defined(BLOCKS_iq4_nl)
    one_scale(x, weight, 0, b, q);
    pack(q, 0, 4, 16, 16, b + 2);

#elif defined(BLOCKS_iq4_xs)
    uchar scales[8];
    symmetric(x, weight, 0, 32, b, scales, q);
    pack(scales, 4, 2, 1, 2, b + 2);
    pack(scales, 0, 4, 1, 4, b + 4);
    pack(q, 0, 4, 16, 128, b + 8);

#elif defined(BLOCKS_tq1_0) || defined(BLOCKS_tq2_0)
    const float scale = largest_size(x, COUNT), by = inverse(scale);
    for (int i = 0; i < COUNT; i++) q[i] = (int)round(x[i] * by) + 1;
#ifdef BLOCKS_tq2_0
    pack(q, 0, 2, 32, 64, b);
    rounded_half(scale, b + 64);
#else
    for (int i = 0; i < 52; i++) {
        const int group = i < 32 ? 32 : i < 48 ? 16 : 4, first = i < 32 ? i : i < 48 ? 128 + i : 192 + i;
        int number = 0;
        for (int k = 0; k < 5; k++) number = 3 * number + (k < 4 || i < 48 ? q[first + k * group] : 0);
        b[i] = (number * 256 + 242) / 243; // number / 243 as a fraction of 256, rounded up
    }
    rounded_half(scale, b + 52);
#endif

#elif defined(BLOCKS_q2_k)
    uchar scales[16], offsets[16];
    with_offsets(x, weight, 3, 15, b + 80, b + 82, scales, offsets, q);
    for (int i = 0; i < 16; i++) b[i] = scales[i] | offsets[i] << 4;
    pack(q, 0, 2, 32, 64, b + 16);

#elif defined(BLOCKS_q3_k)
    uchar scales[16];
    symmetric(x, weight, 4, 32, b + 108, scales, q);
    pack(q, 2, 1, 32, 32, b);
    pack(q, 0, 2, 32, 64, b + 32);
    pack(scales, 0, 4, 8, 8, b + 96);
    pack(scales, 4, 2, 4, 4, b + 104);

#elif defined(BLOCKS_q4_k) || defined(BLOCKS_q5_k)
    uchar scales[8], offsets[8];
    with_offsets(x, weight, BYTES == 144 ? 15 : 31, 63, b, b + 2, scales, offsets, q);
    for (int i = 0; i < 4; i++) {
        b[4 + i] = scales[i] | scales[4 + i] >> 4 << 6;
        b[8 + i] = offsets[i] | offsets[4 + i] >> 4 << 6;
        b[12 + i] = (scales[4 + i] & 15) | offsets[4 + i] << 4;
    }
#ifdef BLOCKS_q5_k
    pack(q, 4, 1, 32, 32, b + 16);
#endif
    pack(q, 0, 4, 32, 128, b + BYTES - 128);

#elif defined(BLOCKS_q6_k)
    uchar scales[16];
    symmetric(x, weight, 32, 128, b + 208, scales, q);
    pack(q, 0, 4, 64, 128, b);
    pack(q, 4, 2, 32, 64, b + 128);
    for (int i = 0; i < 16; i++) b[192 + i] = scales[i] - 128;
#endif
}

__kernel UNVECTORIZED void encode_blocks(
    __global uchar *out, __global const float *values, __global const float *importance, const Params p)
{
    FIND_ROW(3)
    const long block = get_global_id(0);
    float x[COUNT], weight[COUNT];
    uchar bytes[BYTES];
    for (int i = 0; i < COUNT; i++) {
        x[i] = values[at[1] + block * COUNT + i];
        weight[i] = WEIGHTED ? importance[at[2] + block * COUNT + i] : 1.0f;
    }
    encode(x, weight, bytes);
    for (int i = 0; i < BYTES; i++) out[at[0] + block * BYTES + i] = bytes[i];
}
#endif
