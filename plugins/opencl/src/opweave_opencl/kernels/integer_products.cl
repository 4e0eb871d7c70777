// Products of rows with quantized weights in int8, on processors. Rows are rounded to bytes, 32 elements at a time with a
// scale, and multiplied with the integers of the blocks in lanes of 16 bits.
//
// Kernels, and the macros that choose them:
//   ROUNDING  round_rows, the integers of rows; for each 32 of them their scale, and the scaled sums of their halves and of
//           all, by which offsets of blocks are multiplied. PAIRED, whether for across: of each four integers, the second
//           and the third then change places, so that they lie as the pairs of lanes do.
//   ALONG   along, one row after the other: lanes are elements of a column. A block of 32 is unpacked in registers.
//   ACROSS  across, several rows: a work-item takes 16 columns, each in a pair of lanes. It unpacks DEPTH elements of them,
//           at most BLOCK rows are multiplied by them, ROWS at a time.
//
// Macros: T, the type of out and a; BIAS, that of the bias; BLOCKS_<name>, the type of the weights.

#define DIRECT 0
#define INTEGERS
#include "types.cl"
#include "vectors.cl"
#ifndef ROUNDING
#include "blocks.cl"
#include "unpacking.cl"
#endif

typedef short16 Shorts __attribute__((aligned(2)));
typedef short Pairs __attribute__((ext_vector_type(32)));

#include "linear.cl" // share: groups of 32 elements of round_rows, columns of along, rows of across

#define PARAMETERS \
    __global MEM(T) *out, __global const uchar *b, __global const MEM(BIAS) *bias, __global const short *levels, \
        __global const float4 *about, const Params p

#define PUT(row, column, sum) \
    STORE(T, (sum) + (p.biased ? LOAD(BIAS, bias, p.offset[3] + (column)) : 0), out, p.offset[0] + (row) * p.n + (column))

#ifdef ROUNDING
static inline float sum_of(const int16 q)
{
    const int8 eight = q.lo + q.hi;
    const int4 four = eight.lo + eight.hi;
    return four.x + four.y + four.z + four.w;
}

__kernel UNVECTORIZED void round_rows(__global const MEM(T) *a, __global short *levels, __global float4 *about, const Params p)
{
    levels += p.offset[4], about += p.offset[5] / 4;
    const long end = min(((long)get_global_id(0) + 1) * p.share, p.m * p.k / 32);
    for (long i = get_global_id(0) * p.share; i < end; i++) {
        const float16 x = LOADN(T, 16, a, p.offset[1] + 32 * i), y = LOADN(T, 16, a, p.offset[1] + 32 * i + 16);
        const float16 both = fmax(fabs(x), fabs(y));
        const float8 eight = fmax(both.lo, both.hi);
        const float4 four = fmax(eight.lo, eight.hi);
        const float largest = fmax(fmax(four.x, four.y), fmax(four.z, four.w));
        const float scale = any(isnan(x + y)) ? NAN : largest / 127.0f;
        const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
        int16 q = convert_int16_rte(x * inverse), r = convert_int16_rte(y * inverse);
        const float one = scale * sum_of(q), two = scale * sum_of(r);
        about[i] = (float4)(scale, one, two, one + two);
#if PAIRED
        q = q.s021346578a9bcedf, r = r.s021346578a9bcedf;
#endif
        vstore16(convert_short16(q), 2 * i, levels), vstore16(convert_short16(r), 2 * i + 1, levels);
    }
}
#endif

#ifdef ALONG
#define AT_ONCE 4L // blocks, so many that the compiler does not keep what is unpacked in registers

// The products of 16 integers of a column, those of part ``at`` of a block; two of them fit into 16 bits.
#if COUNT == 32
#define SIXTEEN(block, at, x) (integers(block, at) * *(__global const Shorts *)((x) + 16 * (at)))
#else
#define SIXTEEN(block, at, x) \
    (CONVERT(short16)(*(__local const GLUE(Q, 16) *)((block)->q + 16 * (at))) * \
     *(__global const Shorts *)((x) + 16 * (at)))
#endif
#define FLOATS(products) convert_float16(convert_int16(products))

__kernel UNVECTORIZED void along(PARAMETERS)
{
#if COUNT > 32
    __local Unpacked ready[AT_ONCE];
#endif
    const long end = min((long)(get_global_id(0) + 1) * p.share, p.n), row = get_global_id(1);
    levels += p.offset[4] + row * p.k, about += p.offset[5] / 4 + row * p.k / 32;
    for (long column = get_global_id(0) * p.share; column < end; column++) {
        __global const uchar *block = b + p.offset[2] + column * p.b_n;
        __global const short *x = levels;
        __global const float4 *of = about;
        float16 sum = 0.0f, two = 0.0f;
        float less = 0.0f;
#if COUNT == 32
        for (long left = p.k / 32; left > 0; left--, block += BYTES, x += 32, of++) {
            FETCH_AHEAD(block);
            sum += FLOATS(SIXTEEN(block, 0, x) + SIXTEEN(block, 1, x)) * (half_at(block) * of->x);
#ifdef OFFSETS
            less -= half_at(block + 2) * of->w;
#endif
        }
#else
        for (long left = p.k / COUNT; left > 0; left -= AT_ONCE) {
            const int blocks = min(left, AT_ONCE);
            for (int i = 0; i < blocks; i++, block += BYTES) {
                FETCH_AHEAD(block);
                unpack(block, &ready[i]);
            }
            for (int i = 0; i < blocks; i++, x += COUNT)
                UNROLL for (int part = 0; part < PARTS; part += 2, of++)
                {
                    __local const float *scale = ready[i].scales + part / SHARING;
                    __local const float *offset = ready[i].scales + (PARTS + part) / SHARING;
#if SHARING == 1
                    sum += FLOATS(SIXTEEN(&ready[i], part, x)) * (scale[0] * of->x);
                    two += FLOATS(SIXTEEN(&ready[i], part + 1, x)) * (scale[1] * of->x);
#ifdef OFFSETS
                    less += offset[0] * of->y + offset[1] * of->z;
#endif
#else
                    sum += FLOATS(SIXTEEN(&ready[i], part, x) + SIXTEEN(&ready[i], part + 1, x)) * (scale[0] * of->x);
#ifdef OFFSETS
                    less += offset[0] * of->w;
#endif
#endif
                }
        }
#endif
        PUT(row, column, lanes_sum(sum + two) - less);
    }
}
#endif

#ifdef ACROSS
#define EACH(i, n) UNROLL for (int i = 0; i < n; i++)
#if SHARING == 1 || defined(BLOCKS_q5_1) || defined(BLOCKS_q5_k)
#define PER 16 // so many products of a column can be added up in two lanes of 16 bits
#else
#define PER 32
#endif

__kernel UNVECTORIZED void across(PARAMETERS)
{
    __local Pairs tile[DEPTH / 2];
    __local uint bytes[COUNT / 4][16] __attribute__((aligned(64)));
    __local float scales[DEPTH / 16][16] __attribute__((aligned(64))), offsets[DEPTH / 16][16] __attribute__((aligned(64)));
    __local float16 sums[BLOCK];
    __local Unpacked ready[1];
    const long column = (long)get_global_id(0) * 16, first = (long)get_global_id(1) * p.share;
    levels += p.offset[4], about += p.offset[5] / 4;
    const int columns = min(16L, p.n - column), count = min(p.share, p.m - first);
    for (int i = 0; i < count; i++) sums[i] = 0.0f;
    for (long k0 = 0; k0 < p.k; k0 += DEPTH) {
        const int depth = min((long)DEPTH, p.k - k0);
        for (int k = 0; k < depth; k += COUNT) {
            for (int c = 0; c < 16; c++) {
                // Columns past the end are computed from the last one and thrown away.
                const long from = (column + min(c, columns - 1)) * p.b_n + (k0 + k) / COUNT * BYTES;
                FETCH_AHEAD(b + p.offset[2] + from);
                unpack(b + p.offset[2] + from, ready);
                EACH(i, COUNT / 4) bytes[i][c] = ((__local const uint *)ready->q)[i];
                EACH(i, COUNT / 16 / SHARING)
                {
                    scales[k / 16 / SHARING + i][c] = ready->scales[i];
#ifdef OFFSETS
                    offsets[k / 16 / SHARING + i][c] = ready->scales[PARTS / SHARING + i];
#endif
                }
            }
            for (int i = 0; i < COUNT / 4; i++) {
                const uint16 four = *(__local const uint16 *)bytes[i];
                __local Pairs *to = tile + k / 2 + 2 * i;
#ifdef OFFSETS
                to[0] = __builtin_astype(four & 0x00ff00ffu, Pairs), to[1] = __builtin_astype(four >> 8 & 0x00ff00ffu, Pairs);
#else
                to[0] = __builtin_astype(four << 8, Pairs) >> (short)8, to[1] = __builtin_astype(four, Pairs) >> (short)8;
#endif
            }
        }
        for (int row = 0; row < count; row += ROWS) {
            float16 sum[ROWS];
            __global const uint *x[ROWS];
            __global const float4 *of_x[ROWS];
            EACH(r, ROWS)
            {
                const long from = (first + min(row + r, count - 1)) * p.k + k0;
                sum[r] = 0.0f, x[r] = (__global const uint *)(levels + from), of_x[r] = about + from / 32;
            }
            for (int k = 0; k < depth; k += PER) {
                Pairs dot[ROWS];
                EACH(r, ROWS) dot[r] = 0;
                EACH(i, PER / 2) EACH(r, ROWS) dot[r] += tile[k / 2 + i] * __builtin_astype((uint16)(x[r][k / 2 + i]), Pairs);
                const float16 scale = *(__local const float16 *)scales[k / 16 / SHARING];
                EACH(r, ROWS)
                {
                    const int16 both = __builtin_astype(dot[r], int16);
                    const float4 of = of_x[r][k / 32];
                    sum[r] += convert_float16((both << 16 >> 16) + (both >> 16)) * (scale * of.x);
#ifdef OFFSETS
                    sum[r] -= *(__local const float16 *)offsets[k / 16 / SHARING] * (PER == 32 ? of.w : k & 16 ? of.z : of.y);
#endif
                }
            }
            EACH(r, ROWS) if (row + r < count) sums[row + r] += sum[r];
        }
    }
    for (int i = 0; i < count; i++)
        for (int c = 0; c < columns; c++) PUT(first + i, column + c, ((__local const float *)&sums[i])[c]);
}
#endif
