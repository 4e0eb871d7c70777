// Softmax and normalizations. A row is normalised by one group of work-items; it has some lines of n elements.
//
// Macros: those of groups.cl; BLOCK, additions to a vector that make a sum of their own (sums.cl); T, the type of all
// operands; OPERANDS, how many there are: out, x, and what the kernel names then; WHOLE, whether all their lines consist of whole vectors without gaps. One of
//   SOFTMAX  MASKED: the index of the mask among the operands, or 0; LOGARITHM: the logarithm is the result; HEADS: sinks,
//            one for each head, come before the mask, and the mask is multiplied by the head's slope; WIDE: T does not round
//   GRADIENT of softmax if SOFT, of log_softmax if LOGARITHM, else of a norm, with a weight if WEIGHT: the operands are out,
//            the gradient of the result, then the result of softmax or what the norm is of; CENTER: as for NORM
//   NORM     weight if WEIGHT, bias if BIAS; CENTER: the mean is taken off; EUCLIDEAN: divided by the length of the row

#include "groups.cl"
#include "slopes.cl"
#include "functions.cl"
#include "sums.cl"

#define R VAL(T)

typedef struct {
    long rows, rank, shape[8]; // rows, and their axes, innermost first
    long lines, n;             // of a row
    long offset[OPERANDS];
    long line[OPERANDS];       // from one line of a row to the next
    long step[OPERANDS];       // from one element of a line to the next
    long stride[OPERANDS][8];  // along the axes of rows
    long heads, head_rows;     // and rows of a head
    long a, b;                 // numbers as words
} Params;

#define NUMBER(word) GLUE(number_as_, R)(word)
#define number_as_float(word) as_float((uint)(word))
#define number_as_double(word) as_double(word)

ACCESS(T)
COMBINED(T, sum, SUM)
COMBINED(T, largest, LARGER)

// Where a row begins in operand k.
static inline long row_of(const Params *p, const int k, long row)
{
    long at = p->offset[k];
    for (int axis = 0; axis < p->rank; axis++) {
        at += row % p->shape[axis] * p->stride[k][axis];
        row /= p->shape[axis];
    }
    return at;
}

// The work-items of a group share the lines of a row; a group takes consecutive rows.
#define FIRST_ROW(group) (p.rows * (long)(group) / (long)get_num_groups(0))
#define FOR_ROWS(row) \
    for (long row = FIRST_ROW(get_group_id(0)), end_of_##row = FIRST_ROW(get_group_id(0) + 1); row < end_of_##row; row++)
#define FOR_ELEMENTS for (long l = 0; l < p.lines; l++) FOR_SHARE(i, p.n)
#if WHOLE
#define HERE VEC
#define STEP(k) 1
#else
#define HERE COUNT(i, p.n)
#define STEP(k) p.step[k]
#endif
#define GET(operand, k) TAKE(T)(operand + l * p.line[k], i, STEP(k), HERE)
#define ROW(k) (m##k + row_of(&p, k, row))

// Processors load a row only once they are done with the row before, so the group's next row is prefetched: its elements
// of x lie AHEAD elements further on. Longer rows would not stay in caches until then.
#define AHEAD (row_of(&p, 1, row + 1 < end_of_row && p.lines * p.n <= 1 << 16 ? row + 1 : row) - row_of(&p, 1, row))
#if WHOLE && GROUP == 1 && defined(__clang__)
#define FETCH_NEXT __builtin_prefetch(x + l * p.line[1] + i + ahead, 0, 3)
#else
#define FETCH_NEXT
#endif

// Elements beyond the last one of a line count as ``other``.
#define OR(v, other) (HERE < VEC ? (AMONG_FIRST(T, HERE) ? v : (V(T))(other)) : v)

// Let ``all`` be a vector that combines an expression over the elements that this work-item handles of a row. Where rows consist
// of whole vectors there are four of them, since each addition to one waits for the addition before it. After BLOCK
// additions they become part of ``all``, by GATHER.
#if WHOLE
#define CHAINS 4
#else
#define CHAINS 1
#endif
#define COLLECT(all, COMBINE, GATHER, start, expression)                                           \
    V(T) all = (V(T))(start), lost_of_##all = (V(T))(0);                                           \
    {                                                                                              \
        V(T) chain[CHAINS];                                                                        \
        int left = BLOCK;                                                                          \
        EACH_CHAIN(k) chain[k] = (V(T))(start);                                                    \
        for (long l = 0; l < p.lines; l++)                                                         \
            for (long first = (long)get_local_id(0) * VEC; first < p.n; first += CHAINS * GROUP * VEC) { \
                EACH_CHAIN(k)                                                                      \
                {                                                                                  \
                    const long i = first + k * GROUP * VEC;                                        \
                    if (i >= p.n) break;                                                           \
                    const V(T) value = expression;                                                 \
                    chain[k] = COMBINE(chain[k], OR(value, start));                                \
                }                                                                                  \
                if (--left > 0) continue;                                                          \
                left = BLOCK;                                                                      \
                EACH_CHAIN(k)                                                                      \
                {                                                                                  \
                    GATHER(all, lost_of_##all, chain[k]);                                          \
                    chain[k] = (V(T))(start);                                                      \
                }                                                                                  \
            }                                                                                      \
        EACH_CHAIN(k) GATHER(all, lost_of_##all, chain[k]);                                        \
    }
#define ADD(all, lost, v) ADD_EXACTLY(V(T), all, lost, v)
#define EACH_CHAIN(k) __attribute__((opencl_unroll_hint(CHAINS))) for (int k = 0; k < CHAINS; k++)

// Let ``total`` be the sum of an expression over the elements of a row.
#define TOTAL(total, expression) \
    COLLECT(sums_of_##total, SUM, ADD, 0, expression) \
    const R total = sum_group(sum_lanes(sums_of_##total), scratch);

#if OPERANDS > 2
#define THIRD __global const MEM(T) *m2,
#else
#define THIRD
#endif
#if OPERANDS > 3
#define FOURTH __global const MEM(T) *m3,
#else
#define FOURTH
#endif

#ifdef SOFTMAX
#if MASKED
#define LOGITS (GET(x, 1) * scale + GET(mask, MASKED) * slope)
#else
#define LOGITS (GET(x, 1) * scale)
#endif

// Powers of e are kept in the output, where it does not round them.
#define KEPT (!LOGARITHM && WIDE)
#if KEPT
#define POWER TAKE(T)(out + l * p.line[0], i, STEP(0), HERE)
#else
#define POWER FUNCTION(exp, T)(LOGITS - most)
#endif

// Not a NaN, which appears in the sum.
#define NUMBER_LARGER(a, b) (b > a ? b : a)
#define KEEP_LARGER(all, lost, v) all = NUMBER_LARGER(all, v)

#if HEADS
SLOPES(R)
#endif

__kernel UNVECTORIZED void softmax(__global MEM(T) *m0, __global const MEM(T) *m1, THIRD FOURTH const Params p)
{
    __local R scratch[GROUP];
    const R scale = NUMBER(p.a);
    FOR_ROWS(row) {
        __global MEM(T) *out = ROW(0);
        __global const MEM(T) *x = ROW(1);
        const long ahead = AHEAD;
        R slope = 1;
        R most = -INFINITY;
#if HEADS
        const R sink = LOAD(T, ROW(2), 0);
        slope = slope_of(row / p.head_rows % p.heads, p.heads, NUMBER(p.b));
        most = sink;
#endif
#if MASKED
        __global const MEM(T) *mask = GLUE(m, MASKED) + row_of(&p, MASKED, row);
#endif
        COLLECT(each, NUMBER_LARGER, KEEP_LARGER, -INFINITY, LOGITS)
        const R found = largest_group(largest_lanes(each), scratch);
        most = LARGER(most, found);

        V(T) sums = (V(T))(0), lost = (V(T))(0), some = (V(T))(0);
        int left = BLOCK;
        FOR_ELEMENTS {
            FETCH_NEXT;
            const V(T) e = FUNCTION(exp, T)(LOGITS - most);
#if KEPT
            PUT(T)(e, out + l * p.line[0], i, STEP(0), HERE);
#endif
            some += OR(e, 0);
            if (--left > 0) continue;
            left = BLOCK;
            ADD(sums, lost, some);
            some = (V(T))(0);
        }
        ADD(sums, lost, some);
        R sum = sum_group(sum_lanes(sums), scratch);
#if HEADS
        sum += exp(sink - most);
#endif
#if LOGARITHM
        // Not minus the sum of both: the largest logit may be so large that the logarithm is lost in it.
        const R rest = log(sum);
        FOR_ELEMENTS PUT(T)(LOGITS - most - rest, out + l * p.line[0], i, STEP(0), HERE);
#else
        const R factor = 1 / sum;
        FOR_ELEMENTS PUT(T)(POWER * factor, out + l * p.line[0], i, STEP(0), HERE);
#endif
    }
}
#endif

#define SQUARE(v) ((v) * (v))

#ifdef NORM
__kernel UNVECTORIZED void norm(__global MEM(T) *m0, __global const MEM(T) *m1, THIRD FOURTH const Params p)
{
    __local R scratch[GROUP];
    const R count = p.lines * p.n;
    FOR_ROWS(row) {
        __global MEM(T) *out = ROW(0);
        __global const MEM(T) *x = ROW(1);
        const long ahead = AHEAD;
#if WEIGHT
        __global const MEM(T) *weight = ROW(2);
#endif
#if BIAS
        __global const MEM(T) *bias = ROW(3);
#endif
        R mean = 0;
#if CENTER
        TOTAL(sum, GET(x, 1))
        mean = sum / count;
#endif
        TOTAL(square, SQUARE(GET(x, 1) - mean))
#if EUCLIDEAN
        const R least = NUMBER(p.a), length = sqrt(square);
        const R factor = 1 / (length < least ? least : length);
#else
        const R factor = 1 / sqrt(square / count + NUMBER(p.a));
#endif
        FOR_ELEMENTS {
            FETCH_NEXT;
            V(T) v = (GET(x, 1) - mean) * factor;
#if WEIGHT
            v *= GET(weight, 2);
#endif
#if BIAS
            v += GET(bias, 3);
#endif
            PUT(T)(v, out + l * p.line[0], i, STEP(0), HERE);
        }
    }
}
#endif

#ifdef GRADIENT
#if WEIGHT
#define GIVEN (GET(grad, 1) * GET(weight, 3))
#else
#define GIVEN GET(grad, 1)
#endif

__kernel UNVECTORIZED void gradient(__global MEM(T) *m0, __global const MEM(T) *m1, THIRD FOURTH const Params p)
{
    __local R scratch[GROUP];
    const R count = p.lines * p.n;
    FOR_ROWS(row) {
        __global MEM(T) *out = ROW(0);
        __global const MEM(T) *grad = ROW(1);
        __global const MEM(T) *x = ROW(2);
#if WEIGHT
        __global const MEM(T) *weight = ROW(3);
#endif
#if SOFT
        TOTAL(along, GET(grad, 1) * GET(x, 2))
        FOR_ELEMENTS {
            const V(T) v = (GET(grad, 1) - along) * GET(x, 2) * NUMBER(p.a);
            PUT(T)(v, out + l * p.line[0], i, STEP(0), HERE);
        }
#elif LOGARITHM
        TOTAL(total, GET(grad, 1))
        FOR_ELEMENTS {
            const V(T) v = GET(grad, 1) - FUNCTION(exp, T)(GET(x, 2)) * total;
            PUT(T)(v, out + l * p.line[0], i, STEP(0), HERE);
        }
#else
        R mean = 0, given_mean = 0;
#if CENTER
        TOTAL(sum, GET(x, 2))
        TOTAL(given_sum, GIVEN)
        mean = sum / count;
        given_mean = given_sum / count;
#endif
        TOTAL(square, SQUARE(GET(x, 2) - mean))
        TOTAL(product, (GIVEN - given_mean) * (GET(x, 2) - mean))
        const R spread = square / count + NUMBER(p.a);
        const R factor = 1 / sqrt(spread), along = product / count / spread;
        FOR_ELEMENTS {
            const V(T) given = GIVEN; // rounded by itself, so that rows of one element give 0
            const V(T) v = ((given - given_mean) - (GET(x, 2) - mean) * along) * factor;
            PUT(T)(v, out + l * p.line[0], i, STEP(0), HERE);
        }
#endif
    }
}
#endif
