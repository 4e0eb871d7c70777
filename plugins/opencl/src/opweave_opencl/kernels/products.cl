// out[m, n] = sum over k of a[m, k] * b[k, n] (+ bias), for any strides and up to eight axes of batches.
//
// Kernels, which share one set of parameters; the first two are for processors that run work-items one after another:
//   panel  one work-item computes a block of rows of PANELS x COLUMNS columns. It packs what it needs of b into local
//          memory, and keeps ROWS x COLUMNS sums in registers: vectors along n.
//   dots   a and b both lie along k without gaps: ROWS x 4 sums in registers, which are vectors along k.
//   decoded  one row of a and quantized b, which is decoded in registers, or unpacked by unpacking.cl; PAIRED: whether
//            two columns at once may pay.
//   tile   a group of 16 x 16 work-items computes a square of elements, EACH x EACH by each, from tiles in local memory.
//   strip  few rows of a, which lie along k without gaps as those of b do: a group shares each column.
//
// Macros: T, the type of out and a, which is also b's unless b consists of the quantized blocks of blocks.cl; BIAS, that of
// the bias;
// DIRECT, whether elements are computed with as they lie; ROUTED, for rows that choose their b (the batches are then b's,
// see experts.cl); CONVOLUTION, for a b whose elements are found as convolution.cl says, and EVEN, whether those of a
// still lie at even steps then.

#include "types.cl"
#include "vectors.cl"
#ifdef BLOCKS
#include "blocks.cl"
#if defined(DOTS) || defined(DECODED)
#include "unpacking.cl"
#endif
#define B_MEM uchar
#else
#define B_MEM MEM(T)
#endif

typedef VAL(T) Sum;
#ifndef CONVOLUTION
typedef VALN(T, 16) Sums;
#endif
typedef VALN(T, 4) Four;

typedef struct {
    long m, n, k;
    long rank;          // axes of batches
    long batch[8];      // their lengths, innermost first
    long offset[4];     // of out, a, b, bias; in bytes for a quantized b
    long stride[4][8];  // along the axes of batches, of out, a, b, bias
    long out_m, out_n, a_m, a_k, b_k, b_n, bias_m, bias_n;
    long biased;        // whether there is a bias
    long block, width;  // rows and columns of one work-item of dots, rows of one of panel
    // ROUTED: rows of one token, which out_m and a_m step over; steps from one to the next; offset of the route
    long used, out_u, a_u, route;
#ifdef CONVOLUTION
    Windows windows;
#endif
} Params;

#define BIAS_AT(row, column) (p.biased ? LOAD(BIAS, bias, (row) * p.bias_m + (column) * p.bias_n) : 0)

#if ROUTED
#define ROUTE_PARAMETER __global const int *route,
// The batches after the last one are the rows that no b belongs to, whose products are 0.
#define M_AND_K \
    route += p.route; \
    const long expert = get_global_id(2); \
    const long m = route[expert + 1] - route[expert], depth = expert < p.batch[0] ? p.k : 0; \
    __global const int *row_of = route + p.batch[0] + 2 + route[expert]
#define OUT_ROW(i) (row_of[i] / p.used * p.out_m + row_of[i] % p.used * p.out_u)
#define A_ROW(i) (row_of[i] / p.used * p.a_m + row_of[i] % p.used * p.a_u)
#else
#define ROUTE_PARAMETER
#define M_AND_K const long m = p.m, depth = p.k
#define OUT_ROW(i) ((i) * p.out_m)
#define A_ROW(i) ((i) * p.a_m)
#endif

#define PARAMETERS \
    __global MEM(T) *out, __global const MEM(T) *a, __global const B_MEM *b, __global const MEM(BIAS) *bias, \
        ROUTE_PARAMETER const Params p

#define ENTER_BATCH(index) \
    do { \
        long rest_ = (index); \
        out += p.offset[0], a += p.offset[1], b += p.offset[2], bias += p.offset[3]; \
        for (int axis = 0; axis < p.rank; axis++) { \
            const long i_ = rest_ % p.batch[axis]; \
            rest_ /= p.batch[axis]; \
            out += i_ * p.stride[0][axis], a += i_ * p.stride[1][axis]; \
            b += i_ * p.stride[2][axis], bias += i_ * p.stride[3][axis]; \
        } \
    } while (0)

// Where element k of a row of a lies in it, and element k of column ``column`` of b.
#ifdef CONVOLUTION
#define B_AT(k, column) element_of_window(b, &p.windows, k, column)
#else
#define EVEN 1
#define B_AT(k, column) LOAD(T, b, (k) * p.b_k + (column) * p.b_n)
#endif
#if EVEN
#define A_AT(k) ((k) * p.a_k)
#else
#define A_AT(k) weight_at(&p.windows, k)
#endif

// A vector of 16 floats takes two registers of AVX2, which has 16: sums of more rows would not stay in them. Compilers of
// intermediate code do not say what they compile for; it is taken to be enough.
#if defined(__x86_64__) && !defined(__AVX512F__)
#define FEW_REGISTERS
#endif

#ifdef PANEL
// The sums are written out below: they have to be variables, or they do not stay in registers.
#ifdef FEW_REGISTERS
#define ROWS 2
#define EACH_ROW(DO) DO(0) DO(1)
#else
#define ROWS 8
#define EACH_ROW(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7)
#endif
#define COLUMNS 32
#define A_DIRECT (DIRECT && EVEN)

#if A_DIRECT
#define A_SPACE __global
#else
#define A_SPACE __local
#endif

__kernel UNVECTORIZED void panel(PARAMETERS)
{
    __local Sums packed[PANELS][DEPTH][2], sums[BLOCK][PANELS][2];
#if !A_DIRECT
    __local Sum rows[BLOCK][DEPTH];
#endif
    ENTER_BATCH(get_global_id(2));
    const long column = (long)get_global_id(0) * COLUMNS * PANELS;
    const int columns = min((long)COLUMNS * PANELS, p.n - column);
    const long first = (long)get_global_id(1) * p.block;
    const long count = min(p.block, p.m - first);

    for (long k0 = 0; k0 < p.k; k0 += DEPTH) {
        const int depth = min((long)DEPTH, p.k - k0);
#ifdef CONVOLUTION
        for (int panel = 0; panel * COLUMNS < columns; panel++)
            gather_windows(b, &p.windows, (__local Sum *)packed[panel], k0, depth, column + panel * COLUMNS,
                           min(columns - panel * COLUMNS, COLUMNS));
#else
        __global const MEM(T) *from = b + k0 * p.b_k + column * p.b_n;
#define CELL(k, j) ((__local Sum *)packed[(j) / COLUMNS][k])[(j) % COLUMNS]
        if (columns == COLUMNS * PANELS && p.b_n == 1) {
            for (int k = 0; k < depth; k++, from += p.b_k)
                for (int panel = 0; panel < PANELS; panel++) {
                    packed[panel][k][0] = LOAD16(from + panel * COLUMNS);
                    packed[panel][k][1] = LOAD16(from + panel * COLUMNS + 16);
                }
        } else if (p.b_k == 1) {
            for (int j = 0; j < COLUMNS * PANELS; j++)
                for (int k = 0; k < depth; k++) CELL(k, j) = j < columns ? LOAD(T, from, k + j * p.b_n) : 0;
        } else {
            for (int k = 0; k < depth; k++)
                for (int j = 0; j < COLUMNS * PANELS; j++)
                    CELL(k, j) = j < columns ? LOAD(T, from, k * p.b_k + j * p.b_n) : 0;
        }
#endif
#if A_DIRECT
        const long step = p.a_k;
#define ROW(i) (a + (first + (i)) * p.a_m + k0 * p.a_k)
#else
        const int step = 1;
        for (long i = 0; i < count; i++)
            for (int k = 0; k < depth; k++) rows[i][k] = LOAD(T, a, (first + i) * p.a_m + A_AT(k0 + k));
#define ROW(i) rows[i]
#endif
        for (int panel = 0; panel * COLUMNS < columns; panel++)
            for (long row = 0; row < count; row += ROWS) {
                // Rows past the end are computed from the last one and thrown away.
#define START(r) \
    A_SPACE const Sum *a##r = ROW(min(row + r, count - 1)); \
    Sums c##r = 0, d##r = 0;
                EACH_ROW(START)
#undef START
                for (int k = 0; k < depth; k++) {
                    const Sums x = packed[panel][k][0], y = packed[panel][k][1];
#define ADD(r) \
    c##r += a##r[k * step] * x; \
    d##r += a##r[k * step] * y;
                    EACH_ROW(ADD)
#undef ADD
                }
#define FINISH(r) \
    if (row + r < count) { \
        __local Sums *to = sums[row + r][panel]; \
        to[0] = k0 ? to[0] + c##r : c##r, to[1] = k0 ? to[1] + d##r : d##r; \
    }
                EACH_ROW(FINISH)
#undef FINISH
            }
    }
    for (long row = 0; row < count; row++) {
        __global MEM(T) *to = out + (first + row) * p.out_m + column * p.out_n;
        __local const Sum *sum = (__local const Sum *)sums[row];
        if (p.out_n == 1) {
            for (int j = 0; j < columns; j++) STORE(T, sum[j] + BIAS_AT(first + row, column + j), to, j);
        } else {
            for (int j = 0; j < columns; j++) STORE(T, sum[j] + BIAS_AT(first + row, column + j), to, j * p.out_n);
        }
    }
}
#endif

#ifdef DOTS
#if ROWS == 1 || defined(FEW_REGISTERS)
#undef ROWS
#define ROWS 1
#define EACH_ROW(DO) DO(0)
#else
#define EACH_ROW(DO) DO(0) DO(1) DO(2) DO(3)
#endif
#define WIDTH 16 // the most columns of one work-item

// Elements that are not stored as floats or integers are converted to local memory first.
#if DIRECT
#define A_SPACE __global
#else
#define A_SPACE __local
#endif
#if DIRECT && !defined(BLOCKS)
#define B_SPACE __global
#else
#define B_SPACE __local
#endif

__kernel UNVECTORIZED void dots(PARAMETERS)
{
    __local Sum sums[BLOCK][WIDTH] __attribute__((aligned(64)));
#if !DIRECT
    __local Sum rows[BLOCK][DEPTH] __attribute__((aligned(64)));
#endif
#if !DIRECT || defined(BLOCKS)
    __local Sum tile[4][DEPTH] __attribute__((aligned(64)));
#endif
#ifdef UNPACKED
    __local Unpacked ready[DEPTH / COUNT];
#define DECODE_ROW(row, c) unpack_row(row, tile[c], chunk, ready)
#else
#define DECODE_ROW(row, c) decode_row(row, tile[c], chunk)
#endif
    M_AND_K;
    const long column = (long)get_global_id(0) * p.width;
    const long columns = min(p.width, p.n - column);
    ENTER_BATCH(get_global_id(2));

    for (long first = (long)get_global_id(1) * p.block; first < m; first += (long)get_global_size(1) * p.block) {
        const long count = min(p.block, m - first);
        for (long i = 0; i < count; i++)
            for (int j = 0; j < WIDTH; j++) sums[i][j] = 0;
        for (long k0 = 0; k0 < depth; k0 += DEPTH) {
            const int chunk = min((long)DEPTH, depth - k0), whole = chunk / 16 * 16;
#if DIRECT
#define ROW(i) (a + A_ROW(first + (i)) + k0)
#else
            for (long i = 0; i < count; i++) UNPACK(T, a + A_ROW(first + i) + k0, rows[i], chunk);
#define ROW(i) rows[i]
#endif
            for (int j = 0; j < columns; j += 4) {
#if defined(BLOCKS)
                for (int c = 0; c < 4; c++) DECODE_ROW(b + min(column + j + c, p.n - 1) * p.b_n + k0 / COUNT * BYTES, c);
#define COLUMN(c) tile[c]
#elif DIRECT
#define COLUMN(c) (b + min(column + j + c, p.n - 1) * p.b_n + k0)
#else
                for (int c = 0; c < 4; c++) UNPACK(T, b + min(column + j + c, p.n - 1) * p.b_n + k0, tile[c], chunk);
#define COLUMN(c) tile[c]
#endif
                B_SPACE const Sum *b0 = COLUMN(0), *b1 = COLUMN(1), *b2 = COLUMN(2), *b3 = COLUMN(3);
                for (long row = 0; row < count; row += ROWS) {
                    // Rows past the end are computed from the last one and thrown away.
#define START(r) \
    A_SPACE const Sum *a##r = ROW(min(row + r, count - 1)); \
    Sums s##r##0 = 0, s##r##1 = 0, s##r##2 = 0, s##r##3 = 0;
                    EACH_ROW(START)
#undef START
                    for (int k = 0; k < whole; k += 16) {
                        const Sums y0 = *(B_SPACE const Loose *)(b0 + k), y1 = *(B_SPACE const Loose *)(b1 + k);
                        const Sums y2 = *(B_SPACE const Loose *)(b2 + k), y3 = *(B_SPACE const Loose *)(b3 + k);
#define ADD(r) \
    { \
        const Sums x = *(A_SPACE const Loose *)(a##r + k); \
        s##r##0 += x * y0, s##r##1 += x * y1, s##r##2 += x * y2, s##r##3 += x * y3; \
    }
                        EACH_ROW(ADD)
#undef ADD
                    }
#define FINISH(r) \
    { \
        Four part = (Four)(lanes_sum(s##r##0), lanes_sum(s##r##1), lanes_sum(s##r##2), lanes_sum(s##r##3)); \
        for (int k = whole; k < chunk; k++) part += a##r[k] * (Four)(b0[k], b1[k], b2[k], b3[k]); \
        __local Sum *to = sums[min(row + r, count - 1)] + j; \
        if (row + r < count) to[0] += part.x, to[1] += part.y, to[2] += part.z, to[3] += part.w; \
    }
                    EACH_ROW(FINISH)
#undef FINISH
                }
            }
        }
        for (long i = 0; i < count; i++) {
            __global MEM(T) *to = out + OUT_ROW(first + i) + column * p.out_n;
            for (int j = 0; j < columns; j++) sums[i][j] += BIAS_AT(first + i, column + j);
            int j = 0;
            if (p.out_n == 1)
                for (; j + 4 <= columns; j += 4) STOREN(T, 4, *(__local const Four *)(sums[i] + j), to, j);
            for (; j < columns; j++) STORE(T, sums[i][j], to, j * p.out_n);
        }
    }
}
#endif

#ifdef DECODED
#define X(part) LOAD16(x + 16 * (part))

// Adds the products of two vectors with two parts of a block to two sums.
#if defined(UNPACKED) && defined(OFFSETS) && SHARING == 2
#define ADD_PARTS(sum, less, block, part, even, odd) \
    sum += SCALE_OF(block, part) * (even * levels_of(block, part) + odd * levels_of(block, part + 1)); \
    less -= OFFSET_OF(block, part) * (even + odd);
#else
#ifdef UNPACKED
#define ELEMENTS unpacked
#else
#define ELEMENTS decode
#endif
#define ADD_PARTS(sum, second, block, part, even, odd) \
    sum += even * ELEMENTS(block, part); \
    second += odd * ELEMENTS(block, part + 1);
#endif

// Two columns at once, which share what is loaded of a, where there are registers for their sums; else sums for every other
// pair of parts, since each addition to one waits for the addition before it.
#if defined(UNPACKED) && PAIRED && !defined(FEW_REGISTERS)
#define STEP 2
#define ADD_BLOCK(block, other) \
    UNROLL for (int part = 0; part < PARTS; part += 2) \
    { \
        const float16 even = X(part), odd = X(part + 1); \
        ADD_PARTS(one, two, block, part, even, odd) \
        ADD_PARTS(three, four, other, part, even, odd) \
    }
#else
#define STEP 1
#define ADD_BLOCK(block, other) \
    UNROLL for (int part = 0; part < PARTS; part += 4) \
    { \
        ADD_PARTS(one, two, block, part, X(part), X(part + 1)) \
        if (part + 2 < PARTS) { ADD_PARTS(three, four, block, part + 2, X(part + 2), X(part + 3)) } \
    }
#endif

#define ADD_SCALED(sum) sum += scale_of(block) * (X(0) * quants(block, 0) + X(1) * quants(block, 1));

__kernel UNVECTORIZED void decoded(PARAMETERS)
{
#ifdef UNPACKED
#define BLOCKS_AT_ONCE 4L // so many that the compiler does not keep what is unpacked in registers
    __local Unpacked ready[STEP][BLOCKS_AT_ONCE];
#endif
    M_AND_K;
    ENTER_BATCH(get_global_id(2));
    const long end = min((long)(get_global_id(0) + 1) * p.width, p.n);
    for (long row = 0; row < m; row++)
        for (long column = get_global_id(0) * p.width; column < end; column += STEP) {
            __global const float *x = a + A_ROW(row);
            __global const uchar *block = b + column * p.b_n;
            float16 one = 0.0f, two = 0.0f;
#ifndef ONE_SCALE
            float16 three = 0.0f, four = 0.0f;
#endif
#ifdef UNPACKED
            // A column past the end is computed from the last one and thrown away.
            const long next = column + 1 < end ? p.b_n : 0;
            for (long left = depth / COUNT; left > 0; left -= BLOCKS_AT_ONCE) {
                const int blocks = min(left, BLOCKS_AT_ONCE);
                for (int i = 0; i < blocks; i++, block += BYTES)
                    UNROLL for (int c = 0; c < STEP; c++)
                    {
#if STEP == 2
                        FETCH(block + c * next + 2 * p.b_n); // in the columns that come next
#else
                        FETCH_AHEAD(block);
#endif
                        unpack(block + c * next, &ready[c][i]);
                    }
                for (int i = 0; i < blocks; i++, x += COUNT) ADD_BLOCK(&ready[0][i], &ready[STEP - 1][i])
            }
#elif defined(ONE_SCALE)
            for (long k = 0; k < depth; k += COUNT, x += COUNT, block += BYTES) {
                FETCH_AHEAD(block);
                ADD_SCALED(one)
                if ((k += COUNT) == depth) break;
                x += COUNT, block += BYTES;
                ADD_SCALED(two)
            }
#else
            for (long k = 0; k < depth; k += COUNT, x += COUNT, block += BYTES) {
                FETCH_AHEAD(block);
                ADD_BLOCK(block, block)
            }
#endif
#ifdef ONE_SCALE
#define TOTAL (one + two)
#elif STEP == 1
#define TOTAL ((one + two) + (three + four))
#else
#define TOTAL (one + two)
            if (next)
                STORE(T, lanes_sum(three + four) + BIAS_AT(row, column + 1), out, OUT_ROW(row) + (column + 1) * p.out_n);
#endif
            STORE(T, lanes_sum(TOTAL) + BIAS_AT(row, column), out, OUT_ROW(row) + column * p.out_n);
        }
}
#endif

#ifdef TILE
#define SIDE (16 * EACH)
#define DEPTH 16

__kernel __attribute__((reqd_work_group_size(16, 16, 1))) void tile(PARAMETERS)
{
    __local Sum as[DEPTH][SIDE] __attribute__((aligned(64))), bs[DEPTH][SIDE] __attribute__((aligned(64)));
    M_AND_K;
    ENTER_BATCH(get_global_id(2));
    const int x = get_local_id(0), y = get_local_id(1), me = y * 16 + x;
    const long n0 = (long)get_group_id(0) * SIDE;

    for (long m0 = (long)get_group_id(1) * SIDE; m0 < m; m0 += (long)get_num_groups(1) * SIDE) {
        Four sum[EACH][EACH / 4];
        UNROLL for (int i = 0; i < EACH; i++)
            UNROLL for (int j = 0; j < EACH / 4; j++) sum[i][j] = 0;
        for (long k0 = 0; k0 < depth; k0 += DEPTH) {
            barrier(CLK_LOCAL_MEM_FENCE);
            for (int i = me; i < SIDE * DEPTH; i += 256) {
                // Neighbouring work-items load neighbouring elements, along whichever axis has no gaps.
                const int k = p.a_k == 1 ? i % DEPTH : i / SIDE, row = p.a_k == 1 ? i / DEPTH : i % SIDE;
                as[k][row] = m0 + row < m && k0 + k < depth ? LOAD(T, a, A_ROW(m0 + row) + A_AT(k0 + k)) : 0;
            }
#ifdef BLOCKS
            for (int j = me; j < SIDE; j += 256) {
                const long at = k0 / 16;
                const Sums part = n0 + j < p.n ? decode(b + (n0 + j) * p.b_n + at / PARTS * BYTES, at % PARTS) : (Sums)0;
                Sum lanes[16];
                vstore16(part, 0, lanes);
                UNROLL for (int k = 0; k < DEPTH; k++) bs[k][j] = lanes[k];
            }
#else
            for (int i = me; i < SIDE * DEPTH; i += 256) {
                const int k = p.b_k == 1 ? i % DEPTH : i / SIDE, j = p.b_k == 1 ? i / DEPTH : i % SIDE;
                bs[k][j] = n0 + j < p.n && k0 + k < depth ? B_AT(k0 + k, n0 + j) : 0;
            }
#endif
            barrier(CLK_LOCAL_MEM_FENCE);
            for (int k = 0; k < DEPTH; k++) {
                Four columns[EACH / 4];
                UNROLL for (int j = 0; j < EACH / 4; j++) columns[j] = ((__local const Four *)bs[k])[x + 16 * j];
                UNROLL for (int i = 0; i < EACH; i++)
                    UNROLL for (int j = 0; j < EACH / 4; j++) sum[i][j] += as[k][y * EACH + i] * columns[j];
            }
        }
        UNROLL for (int i = 0; i < EACH; i++)
            UNROLL for (int j = 0; j < EACH / 4; j++) {
                const long row = m0 + y * EACH + i, column = n0 + x * 4 + 64 * j;
                Sum lanes[4];
                vstore4(sum[i][j], 0, lanes);
                if (row < m)
                    for (int l = 0; l < 4 && column + l < p.n; l++)
                        STORE(T, lanes[l] + BIAS_AT(row, column + l), out, OUT_ROW(row) + (column + l) * p.out_n);
            }
    }
}
#endif

#ifdef STRIP
#include "combining.cl"
COMBINED_BY_GROUP(T, sum, SUM)

__kernel __attribute__((reqd_work_group_size(GROUP, 1, 1))) void strip(PARAMETERS)
{
    __local Sum scratch[GROUP];
    M_AND_K;
    ENTER_BATCH(get_global_id(2));
    const long column = get_group_id(0);
    const int me = get_local_id(0);
    b += column * p.b_n;
    for (long row = (long)get_group_id(1) * 4; row < m; row += (long)get_num_groups(1) * 4) {
        Sum sum[4] = {0, 0, 0, 0};
        __global const MEM(T) *rows[4];
        UNROLL for (int r = 0; r < 4; r++) rows[r] = a + A_ROW(min(row + r, m - 1));
#ifdef BLOCKS
        for (long at = me; at < depth / 16; at += GROUP) {
            const Sums y = decode(b + at / PARTS * BYTES, at % PARTS);
            UNROLL for (int r = 0; r < 4; r++)
                if (r == 0 || row + r < m) sum[r] += lanes_sum(LOADN(T, 16, rows[r], at * 16) * y);
        }
#else
        for (long k = me * 4; k < depth / 4 * 4; k += GROUP * 4) {
            const Four y = LOADN(T, 4, b, k);
            UNROLL for (int r = 0; r < 4; r++)
                if (r == 0 || row + r < m) {
                    const Four xy = LOADN(T, 4, rows[r], k) * y;
                    sum[r] += (xy.x + xy.y) + (xy.z + xy.w);
                }
        }
        for (long k = depth / 4 * 4 + me; k < depth; k += GROUP)
            UNROLL for (int r = 0; r < 4; r++) sum[r] += LOAD(T, rows[r], k) * LOAD(T, b, k);
#endif
        for (int r = 0; r < 4 && row + r < m; r++) {
            const Sum total = sum_group(sum[r], scratch);
            if (me == 0) STORE(T, total + BIAS_AT(row + r, column), out, OUT_ROW(row + r) + column * p.out_n);
        }
    }
}
#endif
