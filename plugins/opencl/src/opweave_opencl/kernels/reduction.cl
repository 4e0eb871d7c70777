// One number for each output element, from the elements along the reduced axes, or from parts of them.
//
//   rows     the work-items of a group go along the innermost reduced axis; a group takes consecutive outputs
//   columns  each work-item computes consecutive outputs, up to STRIP vectors of them
//
// Macros: those of groups.cl; COLUMNS, which of the kernels; STRIP; BLOCK, vectors that are combined on their own, so that
// large sums keep small addends; ACCESSES, ACCESS of each type; A, ACC and OUT, the types of the source, of what is
// combined, and of the output; COMBINE, a macro of combining.cl, and START, its neutral element; SCALED, whether results are multiplied by a number; what elements are mapped to before: CENTERED, the squares of their
// distances from a number for each output; EQUAL, whether they equal those of a second source of type A.

#include "groups.cl"

typedef struct {
    long kept_rank, kept[8]; // axes of the output, innermost first
    long rank, shape[8];     // reduced axes, innermost first
    long outer;              // elements of the reduced axes but the innermost
    long parts, part_outer, part_inner; // a part is so many of the outer ones, and of the innermost axis
    long offset[3];          // of the output, of the source, of the second one or of the centers
    long kept_stride[3][8];
    long stride[2][8];       // along the reduced axes, of the sources
    long all, strip;         // parts of all outputs; vectors of columns that a work-item computes
    long scale;              // a number as a word, by which results are multiplied
} Params;

ACCESSES

#if SCALED
#define RESULT(v) ((v) * SCALE)
#else
#define RESULT(v) (v)
#endif
#define SCALE GLUE(scale_as_, VAL(ACC))(p.scale)
#define scale_as_float(word) as_float((uint)(word))
#define scale_as_double(word) as_double(word)

#if CENTERED
#define SECOND __global const MEM(ACC) *center,
#define MAP(v, w) ((v - middle) * (v - middle))
#elif EQUAL
#define SECOND __global const MEM(A) *y,
#define MAP(v, w) TON(ACC, VEC, (v == w) & (MASK(A))(1))
#else
#define SECOND
#define MAP(v, w) TON(ACC, VEC, v)
#endif


// Sets ``i`` to the first of the innermost reduced elements of part ``part``, and so on.
#define ENTER_PART(part) \
    const long inner_parts = (p.shape[0] + p.part_inner - 1) / p.part_inner; \
    const long first = (part) % inner_parts * p.part_inner, last = FEWER(first + p.part_inner, p.shape[0]); \
    const long outer_first = (part) / inner_parts * p.part_outer; \
    const long outer_last = FEWER(outer_first + p.part_outer, p.outer);

// Where outer element ``o`` begins in a source.
static inline long offset_of(long o, const long rank, const long *shape, const long *stride)
{
    long at = 0;
    for (int axis = 1; axis < rank; axis++) {
        at += o % shape[axis] * stride[axis];
        o /= shape[axis];
    }
    return at;
}

COMBINED(ACC, reduced, COMBINE)

#if !COLUMNS
__kernel UNVECTORIZED void rows(__global MEM(OUT) *out, __global const MEM(A) *x, SECOND const Params p)
{
    __local VAL(ACC) scratch[GROUP];
    const long first_one = p.all * (long)get_group_id(0) / (long)get_num_groups(0);
    const long end_of_all = p.all * (long)(get_group_id(0) + 1) / (long)get_num_groups(0);
    for (long at = first_one; at < end_of_all; at++) {
        long rest = at / p.parts;
        ENTER_PART(at % p.parts)
        __global MEM(OUT) *target = out + p.offset[0] + at % p.parts;
        __global const MEM(A) *source = x + p.offset[1];
        long other = p.offset[2];
        for (int axis = 0; axis < p.kept_rank; axis++) {
            const long i = rest % p.kept[axis];
            rest /= p.kept[axis];
            target += i * p.kept_stride[0][axis], source += i * p.kept_stride[1][axis], other += i * p.kept_stride[2][axis];
        }
#if CENTERED
        const V(ACC) middle = (V(ACC))(LOAD(ACC, center, other));
#endif
        V(ACC) all = (V(ACC))(START), partial = (V(ACC))(START);
        int left = BLOCK;
        for (long o = outer_first; o < outer_last; o++) {
            __global const MEM(A) *row = source + offset_of(o, p.rank, p.shape, p.stride[0]) + first * p.stride[0][0];
#if EQUAL
            __global const MEM(A) *second = y + other + offset_of(o, p.rank, p.shape, p.stride[1]) + first * p.stride[1][0];
#endif
            FOR_SHARE(i, last - first) {
                const int count = COUNT(i, last - first);
                const V(A) v = TAKE(A)(row, i, p.stride[0][0], count);
#if EQUAL
                const V(A) w = TAKE(A)(second, i, p.stride[1][0], count);
#endif
                V(ACC) mapped = MAP(v, w);
                if (count < VEC) mapped = AMONG_FIRST(ACC, count) ? mapped : (V(ACC))(START);
                partial = COMBINE(partial, mapped);
                if (--left > 0) continue;
                left = BLOCK;
                all = COMBINE(all, partial);
                partial = (V(ACC))(START);
            }
        }
        all = COMBINE(all, partial);
        const VAL(ACC) result = reduced_group(reduced_lanes(all), scratch);
        if (get_local_id(0) == 0) STORE(OUT, TO(OUT, RESULT(result)), target, 0);
    }
}

#else
#define FOR_STRIP(k) for (int k = 0; k * VEC < width; k++)

// The innermost kept axis is walked by vectors.
__kernel UNVECTORIZED void columns(__global MEM(OUT) *out, __global const MEM(A) *x, SECOND const Params p)
{
    const long column = (long)get_global_id(0) * p.strip * VEC;
    if (column >= p.kept[0]) return;
    const long width = FEWER(p.strip * VEC, p.kept[0] - column);
    long rest = get_global_id(1);
    ENTER_PART(rest % p.parts)
    out += p.offset[0] + rest % p.parts + column * p.kept_stride[0][0], x += p.offset[1] + column * p.kept_stride[1][0];
    rest /= p.parts;
    long other = p.offset[2] + column * p.kept_stride[2][0];
    for (int axis = 1; axis < p.kept_rank; axis++) {
        const long i = rest % p.kept[axis];
        rest /= p.kept[axis];
        out += i * p.kept_stride[0][axis], x += i * p.kept_stride[1][axis], other += i * p.kept_stride[2][axis];
    }
    V(ACC) all[STRIP], partial[STRIP];
    int left = BLOCK;
    FOR_STRIP(k) all[k] = partial[k] = (V(ACC))(START);
#if CENTERED
    V(ACC) middles[STRIP];
    FOR_STRIP(k) middles[k] = TAKE(ACC)(center + other, k * VEC, p.kept_stride[2][0], COUNT(k * VEC, width));
#endif
    for (long o = outer_first; o < outer_last; o++) {
        __global const MEM(A) *row = x + offset_of(o, p.rank, p.shape, p.stride[0]);
        for (long i = first; i < last; i++) {
            FOR_STRIP(k) {
                const V(A) v = TAKE(A)(row + i * p.stride[0][0], k * VEC, p.kept_stride[1][0], COUNT(k * VEC, width));
#if CENTERED
                const V(ACC) middle = middles[k];
#endif
                partial[k] = COMBINE(partial[k], MAP(v, v));
            }
            if (--left > 0) continue;
            left = BLOCK;
            FOR_STRIP(k) all[k] = COMBINE(all[k], partial[k]), partial[k] = (V(ACC))(START);
        }
    }
    FOR_STRIP(k) all[k] = COMBINE(all[k], partial[k]);
    FOR_STRIP(k) PUT(OUT)(TON(OUT, VEC, RESULT(all[k])), out, k * VEC, p.kept_stride[0][0], COUNT(k * VEC, width));
}
#endif
