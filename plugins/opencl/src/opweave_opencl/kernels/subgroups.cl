// What sub-groups are tried with: combining.cl itself. Not one of opweave's operations.

#include "combining.cl"

#define FEWER(a, b) ((a) < (b) ? (a) : (b))

#define TRIED(T, AT_LEAST) \
    COMBINED_BY_GROUP(T, sum_##T, SUM) \
    COMBINED_BY_GROUP(T, largest_##T, LARGER) \
    COMBINED_BY_GROUP(T, smallest_##T, AT_LEAST) \
    __kernel void combine_##T(__global const MEM(T) *x, __global MEM(T) *out) \
    { \
        __local VAL(T) scratch[GROUP]; \
        const VAL(T) value = x[get_global_id(0)]; \
        const VAL(T) sum = sum_##T##_group(value, scratch), largest = largest_##T##_group(value, scratch); \
        const VAL(T) smallest = smallest_##T##_group(value, scratch); \
        __global MEM(T) *to = out + 3 * get_global_id(0); \
        to[0] = sum, to[1] = largest, to[2] = smallest; \
    }

TRIED(f32, SMALLER)
TRIED(i32, SMALLER)
TRIED(i64, FEWER)
#ifdef cl_khr_fp64
TRIED(f64, SMALLER)
#endif
