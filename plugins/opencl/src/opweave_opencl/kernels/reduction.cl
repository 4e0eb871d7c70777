// One number for each output element, from all elements along the reduced axes. One group of work-items an output.
//
// Macros: those of rows.cl (VEC is 1 unless the innermost reduced axis has no gaps); MAXIMUM, 1 for max, 0 for sum.

#include "rows.cl"

typedef struct {
    long kept_rank, kept[8], out_stride[8], x_stride[8]; // axes of the output, innermost first
    long rank, shape[8], stride[8];                      // reduced axes of x, innermost first
    long out_offset, x_offset;
    long outer;                                          // elements of the reduced axes but the innermost
    float scale;
} Params;

// Partial sums of this many vectors are added up by themselves, so that long rows keep their small addends.
#define BLOCK 256

__kernel void reduce(__global float *out, __global const float *x, const Params p)
{
    __local float scratch[GROUP];
    long rest = get_group_id(0);
    out += p.out_offset, x += p.x_offset;
    for (int axis = 0; axis < p.kept_rank; axis++) {
        const long i = rest % p.kept[axis];
        rest /= p.kept[axis];
        out += i * p.out_stride[axis], x += i * p.x_stride[axis];
    }
    const long n = p.shape[0], step = p.stride[0];
#if MAXIMUM
    Vec all = -INFINITY;
#else
    Vec all = 0.0f;
#endif
    float tail = MAXIMUM ? -INFINITY : 0.0f;

    for (long o = 0; o < p.outer; o++) {
        __global const float *row = x;
        rest = o;
        for (int axis = 1; axis < p.rank; axis++) {
            row += rest % p.shape[axis] * p.stride[axis];
            rest /= p.shape[axis];
        }
#if VEC > 1
        for (long start = 0; start < WHOLE(n); start += BLOCK * GROUP * VEC) {
            const long end = min(start + BLOCK * GROUP * VEC, WHOLE(n));
#if MAXIMUM
            for (long i = start + get_local_id(0) * VEC; i < end; i += GROUP * VEC)
                all = larger_each(all, LOAD(row + i));
#else
            Vec part = 0.0f;
            for (long i = start + get_local_id(0) * VEC; i < end; i += GROUP * VEC) part += LOAD(row + i);
            all += part;
#endif
        }
        FOR_TAIL(i, n) tail = MAXIMUM ? larger(tail, row[i]) : tail + row[i];
#else
        for (long start = 0; start < n; start += BLOCK * GROUP) {
            const long end = min(start + BLOCK * GROUP, n);
            float part = MAXIMUM ? -INFINITY : 0.0f;
            for (long i = start + get_local_id(0); i < end; i += GROUP)
                part = MAXIMUM ? larger(part, row[i * step]) : part + row[i * step];
            tail = MAXIMUM ? larger(tail, part) : tail + part;
        }
#endif
    }
#if MAXIMUM
    const float result = group_largest(larger(tail, lanes_largest(all)), scratch);
#else
    const float result = group_sum(tail + lanes_sum(all), scratch) * p.scale;
#endif
    if (get_local_id(0) == 0) *out = result;
}
