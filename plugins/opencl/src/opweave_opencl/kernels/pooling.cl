// The largest element, or the mean, of each window of two axes. Macros: T; LARGEST; FLOATS, whether T is a float type;
// BACKWARD for the gradient of the largest element, MEAN_BACKWARD for that of the mean.

#include "types.cl"

typedef struct {
    long channels, places[2], length[2];
    long kernel_size[2], stride[2], padding[2], dilation[2];
    long out_step[4], x_step[4], dx_step[4], offset[3];
    long include_pad, divisor;
} Params;

#ifdef BACKWARD

__kernel void max_pool_backward(__global const MEM(T) *grad, __global const MEM(T) *x, __global MEM(T) *dx, const Params p)
{
    const long at[2] = {get_global_id(1), get_global_id(0)};
    const long image = get_global_id(2) / p.channels, channel = get_global_id(2) % p.channels;
    if (at[0] >= p.length[0] || at[1] >= p.length[1]) return;
    grad += p.offset[0] + image * p.out_step[0] + channel * p.out_step[1];
    x += p.offset[1] + image * p.x_step[0] + channel * p.x_step[1];
    dx += p.offset[2] + image * p.dx_step[0] + channel * p.dx_step[1] + at[0] * p.dx_step[2] + at[1] * p.dx_step[3];
    const float mine = LOAD(T, x, at[0] * p.x_step[2] + at[1] * p.x_step[3]);
    float sum = 0.0f;
    // (k, l): the place of this element in a window.
    for (long k = 0; k < p.kernel_size[0]; k++) {
        const long top = at[0] + p.padding[0] - k * p.dilation[0];
        if (top < 0 || top % p.stride[0] || top / p.stride[0] >= p.places[0]) continue;
        for (long l = 0; l < p.kernel_size[1]; l++) {
            const long left = at[1] + p.padding[1] - l * p.dilation[1];
            if (left < 0 || left % p.stride[1] || left / p.stride[1] >= p.places[1]) continue;
            bool largest = true;
            for (long i = 0; i < p.kernel_size[0] && largest; i++)
                for (long j = 0; j < p.kernel_size[1] && largest; j++) {
                    const long row = top - p.padding[0] + i * p.dilation[0];
                    const long column = left - p.padding[1] + j * p.dilation[1];
                    if (row < 0 || row >= p.length[0] || column < 0 || column >= p.length[1]) continue;
                    const float other = LOAD(T, x, row * p.x_step[2] + column * p.x_step[3]);
                    largest = i < k || (i == k && j < l) ? other < mine : other <= mine;
                }
            if (largest) sum += LOAD(T, grad, top / p.stride[0] * p.out_step[2] + left / p.stride[1] * p.out_step[3]);
        }
    }
    STORE(T, sum, dx, 0);
}

#elif defined(MEAN_BACKWARD)

// How many elements the window at ``place`` counts along an axis.
static inline long counted(const Params *p, const int axis, const long place)
{
    const long first = place * p->stride[axis] - p->padding[axis];
    const long last = min(first + p->kernel_size[axis], p->length[axis] + p->padding[axis]);
    return p->include_pad ? last - first : min(last, p->length[axis]) - max(first, 0L);
}

__kernel void avg_pool_backward(__global const MEM(T) *grad, __global MEM(T) *dx, const Params p)
{
    const long at[2] = {get_global_id(1), get_global_id(0)};
    const long image = get_global_id(2) / p.channels, channel = get_global_id(2) % p.channels;
    if (at[0] >= p.length[0] || at[1] >= p.length[1]) return;
    grad += p.offset[0] + image * p.out_step[0] + channel * p.out_step[1];
    // The windows in which this element lies, along each axis.
    long first[2], last[2];
    for (int axis = 0; axis < 2; axis++) {
        const long place = at[axis] + p.padding[axis], before = place - p.kernel_size[axis];
        first[axis] = before < 0 ? 0 : before / p.stride[axis] + 1;
        last[axis] = min(place / p.stride[axis], p.places[axis] - 1);
    }
    float sum = 0.0f;
    for (long i = first[0]; i <= last[0]; i++)
        for (long j = first[1]; j <= last[1]; j++) {
            const float share = LOAD(T, grad, i * p.out_step[2] + j * p.out_step[3]);
            sum += p.divisor ? share : share / (counted(&p, 0, i) * counted(&p, 1, j));
        }
    if (p.divisor) sum /= p.divisor;
    STORE(T, sum, dx, p.offset[1] + image * p.x_step[0] + channel * p.x_step[1] + at[0] * p.x_step[2] + at[1] * p.x_step[3]);
}

#else

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

#endif
