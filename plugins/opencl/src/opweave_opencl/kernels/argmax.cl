// The index of the largest element along an axis: of the first of equal ones, or of the first NaN if there is one.
//
//   rows     the work-items of a group go along the axis; a group takes consecutive outputs
//   columns  each work-item computes consecutive outputs, up to STRIP vectors of them; the axis has fewer than 2^31 elements
//
// Macros: those of groups.cl; COLUMNS, which of the kernels; STRIP; BLOCK, vectors whose largest element is found before its index is
// searched for; ACCESSES, ACCESS of each type; A and OUT, the types of
// source and output; START, the smallest number of type A.

#include "groups.cl"

typedef struct {
    long kept_rank, kept[8], out_stride[8], x_stride[8]; // axes of the output, innermost first
    long n, step;                                        // the axis
    long out_offset, x_offset;
    long all, strip;                                     // outputs; vectors of them that a work-item computes
} Params;

ACCESSES
COMBINED(A, largest, LARGER)
COMBINED_BY_GROUP(i64, first, FEWER)

#define SPAN (BLOCK * GROUP * VEC)

#if !COLUMNS
__kernel UNVECTORIZED void rows(__global MEM(OUT) *out, __global const MEM(A) *x, const Params p)
{
    __local VAL(A) values[GROUP];
    __local long indices[GROUP];
    const long first_one = p.all * (long)get_group_id(0) / (long)get_num_groups(0);
    const long end_of_all = p.all * (long)(get_group_id(0) + 1) / (long)get_num_groups(0);
    for (long at = first_one; at < end_of_all; at++) {
        long rest = at;
        __global MEM(OUT) *target = out + p.out_offset;
        __global const MEM(A) *source = x + p.x_offset;
        for (int axis = 0; axis < p.kept_rank; axis++) {
            const long i = rest % p.kept[axis];
            rest /= p.kept[axis];
            target += i * p.out_stride[axis], source += i * p.x_stride[axis];
        }
        const long mine = (long)get_local_id(0) * VEC;
        long found = mine;
        VAL(A) best = START;
        for (long start = mine; start < p.n; start += SPAN) {
            V(A) part = (V(A))(START);
            for (long i = start; i < FEWER(start + SPAN, p.n); i += GROUP * VEC) {
                const V(A) v = TAKE(A)(source, i, p.step, COUNT(i, p.n));
                part = LARGER(part, v);
            }
            const VAL(A) one = largest_lanes(part);
            if (one > best || (one != one && best == best)) best = one, found = start;
        }
        const VAL(A) most = largest_group(best, values);
        const bool is_nan = most != most;
        long index = LONG_MAX;
        if (is_nan ? best != best : best == most) {
            for (long i = found; i < FEWER(found + SPAN, p.n) && index == LONG_MAX; i += GROUP * VEC) {
                ELEMENTS(A) elements;
                elements.whole = TAKE(A)(source, i, p.step, COUNT(i, p.n));
                for (int k = VEC - 1; k >= 0; k--) {
                    const VAL(A) one = elements.each[k];
                    if (i + k < p.n && (is_nan ? one != one : one == most)) index = i + k;
                }
            }
        }
        index = first_group(index, indices);
        if (get_local_id(0) == 0) STORE(OUT, TO(OUT, index), target, 0);
    }
}

#else
#define FOR_STRIP(k) for (int k = 0; k * VEC < width; k++)
#define INDICES GLUE(int, VEC)

__kernel UNVECTORIZED void columns(__global MEM(OUT) *out, __global const MEM(A) *x, const Params p)
{
    const long column = (long)get_global_id(0) * p.strip * VEC;
    if (column >= p.kept[0]) return;
    const long width = FEWER(p.strip * VEC, p.kept[0] - column);
    long rest = get_global_id(1);
    out += p.out_offset + column * p.out_stride[0], x += p.x_offset + column * p.x_stride[0];
    for (int axis = 1; axis < p.kept_rank; axis++) {
        const long i = rest % p.kept[axis];
        rest /= p.kept[axis];
        out += i * p.out_stride[axis], x += i * p.x_stride[axis];
    }
    V(A) best[STRIP];
    INDICES index[STRIP];
    FOR_STRIP(k) best[k] = TAKE(A)(x, k * VEC, p.x_stride[0], COUNT(k * VEC, width)), index[k] = (INDICES)(0);
    for (long i = 1; i < p.n; i++) {
        FOR_STRIP(k) {
            const V(A) v = TAKE(A)(x + i * p.step, k * VEC, p.x_stride[0], COUNT(k * VEC, width));
            index[k] = CONVERT(INDICES)(v > best[k] || (v != v && best[k] == best[k])) ? (INDICES)(i) : index[k];
            best[k] = LARGER(best[k], v);
        }
    }
    FOR_STRIP(k) PUT(OUT)(TON(OUT, VEC, index[k]), out, k * VEC, p.out_stride[0], COUNT(k * VEC, width));
}
#endif
