// Products of several rows with weights, whose columns lie along k, on processors: a lane for each row. Vectors hold one
// element of 16 rows each, and each is multiplied by single elements of b, so that no lanes have to be added up and b is
// read as it lies.
//
// Kernels, and the macros that choose them:
//   TRANSPOSING  transpose_rows, which writes panels of 16 rows: the vector of their first elements, that of their second
//                ones, ... Rows past the end repeat the last one.
//   else         lanes: a work-item computes 16 columns of at most PANELS panels, DEPTH elements of each column at a time.
//                Weights that are not floats are converted to local memory first.
//
// Macros: T, the type of out and a, which is also b's unless b consists of the quantized blocks of blocks.cl; BIAS, that of
// the bias; DIRECT, whether T is computed with as it lies; PAIRED, whether two panels are multiplied at once, which
// needs an even number of them.

#include "types.cl"
#include "vectors.cl"
#ifdef BLOCKS
#include "blocks.cl"
#include "unpacking.cl"
#define B_MEM uchar
#else
#define B_MEM MEM(T)
#endif

#include "linear.cl" // share: elements of transpose_rows along k, panels of lanes

// 16 vectors of 16 become their transpose. Each of the four rounds interleaves every vector with the one eight further on.
// (Of vectors that are written out element by element, compilers make one of single elements of all 16.)
#define INTERLEAVED(x, y) \
    __builtin_shufflevector(x, y, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23), \
    __builtin_shufflevector(x, y, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#define INTERLEAVE(from, to) \
    const float16 to[16] = {INTERLEAVED(from[0], from[8]),  INTERLEAVED(from[1], from[9]), \
                            INTERLEAVED(from[2], from[10]), INTERLEAVED(from[3], from[11]), \
                            INTERLEAVED(from[4], from[12]), INTERLEAVED(from[5], from[13]), \
                            INTERLEAVED(from[6], from[14]), INTERLEAVED(from[7], from[15])};
#define TRANSPOSE(from, to) \
    INTERLEAVE(from, one_##to) \
    INTERLEAVE(one_##to, two_##to) \
    INTERLEAVE(two_##to, three_##to) \
    INTERLEAVE(three_##to, to)

#ifdef TRANSPOSING
__kernel UNVECTORIZED void transpose_rows(__global const MEM(T) *a, __global float16 *panels, const Params p)
{
    const long first = (long)get_global_id(0) * 16, begin = (long)get_global_id(1) * p.share, end = min(begin + p.share, p.k);
    a += p.offset[1];
    panels += p.offset[4] / 16 + get_global_id(0) * p.k;
    long k = begin;
    for (; k + 16 <= end; k += 16) {
        float16 rows[16];
        UNROLL for (int r = 0; r < 16; r++) rows[r] = LOAD16(a + min(first + r, p.m - 1) * p.k + k);
        TRANSPOSE(rows, transposed)
        UNROLL for (int i = 0; i < 16; i++) panels[k + i] = transposed[i];
    }
    for (; k < end; k++)
        for (int r = 0; r < 16; r++) ((__global float *)(panels + k))[r] = LOAD(T, a, min(first + r, p.m - 1) * p.k + k);
}

#else
// Columns whose sums stay in registers, of which AVX2 has 16 and each vector takes two. Compilers of intermediate code do
// not say what they compile for; it is taken to be enough.
#if defined(__x86_64__) && !defined(__AVX512F__)
#undef PAIRED
#define PAIRED 0
#define COLUMNS 4
#define EACH_COLUMN(DO) DO(0) DO(1) DO(2) DO(3)
#else
#define COLUMNS 8 // more would share the ways of a set of the first cache, where columns are a power of two apart
#define EACH_COLUMN(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7)
#endif
#if PAIRED
#define IF_PAIRED(...) __VA_ARGS__
#else
#define IF_PAIRED(...)
#endif

#if DIRECT && !defined(BLOCKS)
#define B_SPACE __global
#else
#define B_SPACE __local
#define GAP 16 // which keeps columns out of one set of the first cache
#endif

#define COLUMN(c) (b + min(column + (c), p.n - 1) * p.b_n)

__kernel UNVECTORIZED void lanes(
    __global MEM(T) *out, __global const float16 *panels, __global const B_MEM *b, __global const MEM(BIAS) *bias,
    const Params p)
{
    __local float16 sums[PANELS][16];
    const long column = (long)get_global_id(0) * 16, first = (long)get_global_id(1) * p.share;
    const int columns = min(16L, p.n - column), count = min(p.share, (p.m + 15) / 16 - first);
    out += p.offset[0], b += p.offset[2], bias += p.offset[3], panels += p.offset[4] / 16 + first * p.k;
#ifdef GAP
    __local float tile[16][DEPTH + GAP] __attribute__((aligned(64)));
#endif
#ifdef UNPACKED
    __local Unpacked ready[DEPTH / COUNT];
#endif

    for (long k0 = 0; k0 < p.k; k0 += DEPTH) {
        const int depth = min((long)DEPTH, p.k - k0);
#ifdef GAP
        for (int c = 0; c < columns; c++) {
#if defined(UNPACKED)
            unpack_row(COLUMN(c) + k0 / COUNT * BYTES, tile[c], depth, ready);
#elif defined(BLOCKS)
            decode_row(COLUMN(c) + k0 / COUNT * BYTES, tile[c], depth);
#else
            UNPACK(T, COLUMN(c) + k0, tile[c], depth);
#endif
        }
#endif
        for (int panel = 0; panel < count; panel += 1 + PAIRED) {
            __global const float16 *x = panels + panel * p.k + k0;
            IF_PAIRED(__global const float16 *y = x + p.k;)
            for (int c = 0; c < columns; c += COLUMNS) {
                __local float16 *to = sums[panel] + c;
                // Columns past the end are computed from others and thrown away. The sums have to be variables.
#ifdef GAP
#define FROM(i) tile[c + i]
#define FETCH_NEXT(i)
#else
#define FROM(i) (COLUMN(c + i) + k0)
// The columns that come next are prefetched by lines of 16 floats: of 16 rows, and so short columns, processors by
// themselves load each one only when it begins, and the product takes up to 1.6 times as long.
#define FETCH_NEXT(i) __builtin_prefetch(w##i + line + COLUMNS * p.b_n, 0, 3);
#endif
#define START(i) \
    B_SPACE const float *w##i = FROM(i); \
    float16 s##i = 0.0f; \
    IF_PAIRED(float16 t##i = 0.0f;)
                EACH_COLUMN(START)
                for (int line = 0; line < depth; line += 16) {
                    EACH_COLUMN(FETCH_NEXT)
                    for (int k = line, end = min(line + 16, depth); k < end; k++) {
                        const float16 x_k = x[k];
                        IF_PAIRED(const float16 y_k = y[k];)
#define ADD(i) \
    s##i += w##i[k] * x_k; \
    IF_PAIRED(t##i += w##i[k] * y_k;)
                        EACH_COLUMN(ADD)
                    }
                }
#define FINISH(i) \
    to[i] = k0 ? to[i] + s##i : s##i; \
    IF_PAIRED(to[i + 16] = k0 ? to[i + 16] + t##i : t##i;)
                EACH_COLUMN(FINISH)
            }
        }
    }
    float16 offsets = 0.0f;
    if (p.biased) {
        float lanes[16];
        UNROLL for (int c = 0; c < 16; c++) lanes[c] = LOAD(BIAS, bias, min(column + c, p.n - 1));
        offsets = vload16(0, lanes);
    }
    for (int panel = 0; panel < count; panel++) {
        float16 by_column[16];
        UNROLL for (int c = 0; c < 16; c++) by_column[c] = sums[panel][c];
        TRANSPOSE(by_column, by_row)
        const long row = (first + panel) * 16;
        const int rows = min(16L, p.m - row);
        for (int r = 0; r < rows; r++) {
            __global MEM(T) *to = out + (row + r) * p.n + column;
            const float16 sum = by_row[r] + offsets;
            if (columns == 16)
                STORE16(sum, to);
            else {
                float lanes[16];
                vstore16(sum, 0, lanes);
                for (int c = 0; c < columns; c++) STORE(T, lanes[c], to, c);
            }
        }
    }
}
#endif
