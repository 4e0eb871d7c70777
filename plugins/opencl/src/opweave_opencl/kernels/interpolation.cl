// Resampling of up to three axes. Macros: T; TAPS, how many elements of an axis make one; RANK, the number of axes.

#include "types.cl"

typedef struct {
    long channels, size[3];     // the last axes of out; RANK of these are there, the others are of length 1
    long out_step[5], x_step[5];
    long offset[2];
} Params;

__kernel void interpolate(__global MEM(T) *out, __global const MEM(T) *x, __global const int *index,
                          __global const float *weight, const Params p)
{
    const long at[3] = {get_global_id(1) / p.size[1], get_global_id(1) % p.size[1], get_global_id(0)};
    const long image = get_global_id(2) / p.channels, channel = get_global_id(2) % p.channels;
    if (at[2] >= p.size[2] || at[0] >= p.size[0]) return;
    out += p.offset[0] + image * p.out_step[0] + channel * p.out_step[1];
    x += p.offset[1] + image * p.x_step[0] + channel * p.x_step[1];
    for (int axis = 0; axis < 3; axis++) out += at[axis] * p.out_step[2 + axis];
    // Tables of the axes follow each other.
    const long c = at[2] * TAPS + (RANK > 1 ? p.size[1] * TAPS : 0) + (RANK > 2 ? p.size[0] * TAPS : 0);
#if TAPS == 1
    long from = index[c] * p.x_step[4];
    if (RANK > 1) from += index[at[1] + (RANK > 2 ? p.size[0] : 0)] * p.x_step[3];
    if (RANK > 2) from += index[at[0]] * p.x_step[2];
    STORE(T, LOAD(T, x, from), out, 0);
#else
    const long b = at[1] * TAPS + (RANK > 2 ? p.size[0] * TAPS : 0), a = at[0] * TAPS;
    float sum = 0.0f;
    for (int i = 0; i < (RANK > 2 ? TAPS : 1); i++) {
        __global const MEM(T) *plane = x + (RANK > 2 ? index[a + i] * p.x_step[2] : 0);
        float of_plane = 0.0f;
        for (int j = 0; j < (RANK > 1 ? TAPS : 1); j++) {
            __global const MEM(T) *line = plane + (RANK > 1 ? index[b + j] * p.x_step[3] : 0);
            float of_line = 0.0f;
            for (int k = 0; k < TAPS; k++) of_line += weight[c + k] * LOAD(T, line, index[c + k] * p.x_step[4]);
            of_plane += RANK > 1 ? weight[b + j] * of_line : of_line;
        }
        sum += RANK > 2 ? weight[a + i] * of_plane : of_plane;
    }
    STORE(T, sum, out, 0);
#endif
}
