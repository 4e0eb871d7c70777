// out[m, n] = sum over k of a[m, k] * b[k, n] (+ bias[n]), for any strides and up to six axes of batches.
//
// Three kernels share one set of parameters:
//   panel  one work-item computes COLS columns of a block of rows, with ROWS x COLS sums in registers, from a copy of
//          b's panel that it packs into local memory. For processors that run work-items one after another.
//   tile   a group of 16 x 16 work-items computes 64 x 64 elements from tiles in local memory.
//   dots   few rows: one group a column, along rows of a and columns of b that lie without gaps.

#include "rows.cl"

typedef struct {
    long m, n, k;
    long rank;          // axes of batches
    long batch[8];      // their lengths, innermost first
    long offset[4];     // of out, a, b, bias
    long stride[3][8];  // along the axes of batches, of out, a, b
    long out_m, out_n, a_m, a_k, b_k, b_n, bias_n;
} Params;

#define ENTER_BATCH(index) \
    do { \
        long rest_ = (index); \
        out += p.offset[0], a += p.offset[1], b += p.offset[2]; \
        for (int axis = 0; axis < p.rank; axis++) { \
            const long i_ = rest_ % p.batch[axis]; \
            rest_ /= p.batch[axis]; \
            out += i_ * p.stride[0][axis], a += i_ * p.stride[1][axis], b += i_ * p.stride[2][axis]; \
        } \
    } while (0)

#if BIAS
#define BIAS_PARAMETER __global const float *bias,
#define BIAS_AT(column) bias[p.offset[3] + (column) * p.bias_n]
#else
#define BIAS_PARAMETER
#define BIAS_AT(column) 0.0f
#endif

#ifdef PANEL
// ROWS is written out below: the sums have to be variables, or they do not stay in registers.
#define COLS 16
#define DEPTH 256

#define EACH_ROW(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7)
#define ROWS 8

__kernel void panel(__global float *out, __global const float *a, __global const float *b, BIAS_PARAMETER
                    const Params p)
{
    __local float packed[DEPTH * COLS];
    ENTER_BATCH(get_global_id(2));
    const long column = (long)get_global_id(0) * COLS;
    const long columns = min((long)COLS, p.n - column);
    const long first = (long)get_global_id(1) * BLOCK;
    const long last = min(first + BLOCK, p.m);

    for (long k0 = 0; k0 < p.k; k0 += DEPTH) {
        const long depth = min((long)DEPTH, p.k - k0);
        __global const float *from = b + k0 * p.b_k + column * p.b_n;
        if (columns == COLS && p.b_n == 1) {
            for (long k = 0; k < depth; k++) vstore16(vload16(0, from + k * p.b_k), k, packed);
        } else if (p.b_k == 1) {
            for (long j = 0; j < COLS; j++)
                for (long k = 0; k < depth; k++) packed[k * COLS + j] = j < columns ? from[k + j * p.b_n] : 0.0f;
        } else {
            for (long k = 0; k < depth; k++)
                for (long j = 0; j < COLS; j++)
                    packed[k * COLS + j] = j < columns ? from[k * p.b_k + j * p.b_n] : 0.0f;
        }
        for (long row = first; row < last; row += ROWS) {
            // Rows past the end are computed from the last one and thrown away.
#define START(r) \
    __global const float *a##r = a + min(row + r, last - 1) * p.a_m + k0 * p.a_k; \
    float16 c##r = 0.0f;
            EACH_ROW(START)
#undef START
            const long step = p.a_k;
            for (long k = 0; k < depth; k++) {
                const float16 y = vload16(k, packed);
#define ADD(r) c##r += a##r[k * step] * y;
                EACH_ROW(ADD)
#undef ADD
            }
#define FINISH(r) \
    if (row + r < last) { \
        __global float *to = out + (row + r) * p.out_m + column * p.out_n; \
        if (columns == COLS && p.out_n == 1) { \
            vstore16(k0 ? c##r + vload16(0, to) : c##r, 0, to); \
        } else { \
            float part[COLS]; \
            vstore16(c##r, 0, part); \
            for (long j = 0; j < columns; j++) to[j * p.out_n] = k0 ? part[j] + to[j * p.out_n] : part[j]; \
        } \
    }
            EACH_ROW(FINISH)
#undef FINISH
        }
    }
#if BIAS
    for (long row = first; row < last; row++)
        for (long j = 0; j < columns; j++) out[row * p.out_m + (column + j) * p.out_n] += BIAS_AT(column + j);
#endif
}
#endif

#ifdef TILE
#define SIDE 64
#define DEPTH 16
#define EACH 4

__kernel __attribute__((reqd_work_group_size(16, 16, 1)))
void tile(__global float *out, __global const float *a, __global const float *b, BIAS_PARAMETER const Params p)
{
    __local float as[DEPTH][SIDE + 1], bs[DEPTH][SIDE + 1]; // one more: no two rows begin in one memory bank
    ENTER_BATCH(get_global_id(2));
    const int x = get_local_id(0), y = get_local_id(1), me = y * 16 + x;
    const long m0 = (long)get_group_id(1) * SIDE, n0 = (long)get_group_id(0) * SIDE;
    float sum[EACH][EACH] = {{0.0f}};

    for (long k0 = 0; k0 < p.k; k0 += DEPTH) {
        for (int i = 0; i < EACH; i++) {
            // Neighbours load neighbours, whichever axis has no gaps.
            const int ak = p.a_k == 1 ? me % DEPTH : me / SIDE + i * 4;
            const int am = p.a_k == 1 ? me / DEPTH + i * 16 : me % SIDE;
            const int bk = p.b_k == 1 ? me % DEPTH : me / SIDE + i * 4;
            const int bn = p.b_k == 1 ? me / DEPTH + i * 16 : me % SIDE;
            as[ak][am] = m0 + am < p.m && k0 + ak < p.k ? a[(m0 + am) * p.a_m + (k0 + ak) * p.a_k] : 0.0f;
            bs[bk][bn] = n0 + bn < p.n && k0 + bk < p.k ? b[(k0 + bk) * p.b_k + (n0 + bn) * p.b_n] : 0.0f;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int k = 0; k < DEPTH; k++) {
            float bv[EACH];
            for (int j = 0; j < EACH; j++) bv[j] = bs[k][x + j * 16];
            for (int i = 0; i < EACH; i++) {
                const float av = as[k][y + i * 16];
                for (int j = 0; j < EACH; j++) sum[i][j] += av * bv[j];
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    for (int i = 0; i < EACH; i++)
        for (int j = 0; j < EACH; j++) {
            const long m = m0 + y + i * 16, n = n0 + x + j * 16;
            if (m < p.m && n < p.n) out[m * p.out_m + n * p.out_n] = sum[i][j] + BIAS_AT(n);
        }
}
#endif

#ifdef DOTS
__kernel void dots(__global float *out, __global const float *a, __global const float *b, BIAS_PARAMETER
                   const Params p)
{
    __local float scratch[GROUP];
    ENTER_BATCH(get_global_id(2));
    const long n = get_group_id(0);
    b += n * p.b_n, out += n * p.out_n;
    for (long m = 0; m < p.m; m++, a += p.a_m, out += p.out_m) {
        Vec sums = 0.0f;
        float sum = 0.0f;
        FOR_VECTORS(k, p.k) sums += LOAD(a + k) * LOAD(b + k);
        FOR_TAIL(k, p.k) sum += a[k] * b[k];
        sum = group_sum(sum + lanes_sum(sums), scratch);
        if (get_local_id(0) == 0) *out = sum + BIAS_AT(n);
    }
}
#endif
