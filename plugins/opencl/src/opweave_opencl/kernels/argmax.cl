// The place of the largest element along the reduced axes in row-major order: the first of equal ones, and the first NaN
// if there is one. One group of work-items an output.
//
// Macros: those of rows.cl; INDEX, the type of the output.

#include "rows.cl"

typedef struct {
    long kept_rank, kept[8], out_stride[8], x_stride[8]; // axes of the output, innermost first
    long rank, shape[8], stride[8];                      // reduced axes of x, innermost first
    long out_offset, x_offset;
    long outer;                                          // elements of the reduced axes but the innermost
} Params;

inline bool better(float a, long at_a, float b, long at_b)
{
    if (isnan(a) || isnan(b)) return isnan(b) && (!isnan(a) || at_b < at_a);
    return b > a || (b == a && at_b < at_a);
}

__kernel void argmax(__global INDEX *out, __global const float *x, const Params p)
{
    __local float values[GROUP];
    __local long places[GROUP];
    const int me = get_local_id(0);
    long rest = get_group_id(0);
    out += p.out_offset, x += p.x_offset;
    for (int axis = 0; axis < p.kept_rank; axis++) {
        const long i = rest % p.kept[axis];
        rest /= p.kept[axis];
        out += i * p.out_stride[axis], x += i * p.x_stride[axis];
    }
    const long n = p.shape[0], step = p.stride[0];
    float best = -INFINITY;
    long place = LONG_MAX;
    for (long o = 0; o < p.outer; o++) {
        __global const float *row = x;
        rest = o;
        for (int axis = 1; axis < p.rank; axis++) {
            row += rest % p.shape[axis] * p.stride[axis];
            rest /= p.shape[axis];
        }
        for (long i = me; i < n; i += GROUP) {
            const float value = row[i * step];
            if (better(best, place, value, o * n + i)) best = value, place = o * n + i;
        }
    }
    values[me] = best, places[me] = place;
    for (int half_ = GROUP / 2; half_ > 0; half_ /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (me < half_ && better(values[me], places[me], values[me + half_], places[me + half_]))
            values[me] = values[me + half_], places[me] = places[me + half_];
    }
    if (me == 0) *out = places[0];
}
