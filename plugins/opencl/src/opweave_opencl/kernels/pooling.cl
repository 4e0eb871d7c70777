// The largest element, or the mean, of each window of two axes. Macros: T; LARGEST; FLOATS, whether T is a float type.

#include "types.cl"

typedef struct {
    long channels, places[2], length[2];
    long kernel_size[2], stride[2], padding[2], dilation[2];
    long out_step[4], x_step[4], offset[2];
    long include_pad, divisor;
} Params;

__kernel void pool(__global MEM(T) *out, __global const MEM(T) *x, const Params p)
{
    const long at[2] = {get_global_id(1), get_global_id(0)};
    const long image = get_global_id(2) / p.channels, channel = get_global_id(2) % p.channels;
    if (at[0] >= p.places[0] || at[1] >= p.places[1]) return;
    out += p.offset[0] + image * p.out_step[0] + channel * p.out_step[1] + at[0] * p.out_step[2] + at[1] * p.out_step[3];
    x += p.offset[1] + image * p.x_step[0] + channel * p.x_step[1];
    // Which elements of the window lie in x, and how many count.
    long first[2], begin[2], end[2], count = 1;
    for (int axis = 0; axis < 2; axis++) {
        first[axis] = at[axis] * p.stride[axis] - p.padding[axis];
        begin[axis] = first[axis] < 0 ? (-first[axis] + p.dilation[axis] - 1) / p.dilation[axis] : 0;
        const long inside = p.length[axis] - first[axis];
        end[axis] = min(p.kernel_size[axis], inside > 0 ? (inside + p.dilation[axis] - 1) / p.dilation[axis] : 0);
        count *= p.include_pad ? min(p.kernel_size[axis], inside + p.padding[axis]) : end[axis] - begin[axis];
    }
#if LARGEST
    VAL(T) value = 0;
    bool none = true;
#else
    float value = 0.0f;
#endif
    for (long i = begin[0]; i < end[0]; i++)
        for (long j = begin[1]; j < end[1]; j++) {
            const VAL(T) other = LOAD(T, x, (first[0] + i * p.dilation[0]) * p.x_step[2]
                                             + (first[1] + j * p.dilation[1]) * p.x_step[3]);
#if LARGEST
            // A NaN is the largest element from here on.
            if (none || other > value || other != other) value = other;
            none = false;
#else
            value += other;
#endif
        }
#if LARGEST
#if FLOATS
    if (none) value = -INFINITY;
#endif
#else
    value /= p.divisor ? p.divisor : count;
#endif
    STORE(T, value, out, 0);
}
