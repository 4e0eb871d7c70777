// The place of the largest element along an axis: the first of equal ones, and the first NaN if there is one. One group of
// work-items an output.
//
// Macros: those of groups.cl; A and OUT, the types of source and output; START, the smallest number of type A.

#include "groups.cl"

typedef struct {
    long kept_rank, kept[8], out_stride[8], x_stride[8]; // axes of the output, innermost first
    long n, step;                                        // the axis
    long out_offset, x_offset;
} Params;

ACCESS(A)
COMBINED(A, largest, LARGER)
SHARED(i64, first, min)

__kernel void argmax(__global MEM(OUT) *out, __global const MEM(A) *x, const Params p)
{
    __local VAL(A) values[GROUP];
    __local long places[GROUP];
    long rest = get_group_id(0);
    out += p.out_offset, x += p.x_offset;
    for (int axis = 0; axis < p.kept_rank; axis++) {
        const long i = rest % p.kept[axis];
        rest /= p.kept[axis];
        out += i * p.out_stride[axis], x += i * p.x_stride[axis];
    }
    V(A) all = (V(A))(START);
    FOR_SHARE(i, p.n) {
        const V(A) v = TAKE(A)(x, i, p.step, COUNT(i, p.n));
        all = LARGER(all, v);
    }
    const VAL(A) most = largest_group(largest_lanes(all), values);
    const bool is_nan = most != most;
    long place = LONG_MAX;
    for (long i = (long)get_local_id(0) * VEC; i < p.n && place == LONG_MAX; i += GROUP * VEC) {
        VAL(A) each[VEC];
        STORE_AS_IS(VEC, TAKE(A)(x, i, p.step, COUNT(i, p.n)), each, 0);
        for (int k = VEC - 1; k >= 0; k--)
            if (i + k < p.n && (is_nan ? each[k] != each[k] : each[k] == most)) place = i + k;
    }
    place = first_group(place, places);
    if (get_local_id(0) == 0) STORE(OUT, TO(OUT, place), out, 0);
}
