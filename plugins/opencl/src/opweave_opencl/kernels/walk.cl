// A walk over up to eight axes, element by element.
//
// Macros: VEC, elements that are computed at once. A kernel's block of parameters is called p and begins with WALK.

#include "access.cl"

// The axes are in an order that suits the operands: the first is walked by vectors, the second is the longest of the
// others. A work-item computes chunk[0] x chunk[1] elements of some planes, the combinations of the remaining axes.
#define WALK(operands) \
    long rank, planes, chunk[2], shape[8]; \
    long offset[operands]; \
    long stride[operands][8];

#define FOR_PLANES(plane) for (long plane = get_global_id(2); plane < p.planes; plane += get_global_size(2))

#define FOR_ROWS(j) \
    for (long j = get_global_id(1) * p.chunk[1], end_of_##j = FEWER(j + p.chunk[1], p.shape[1]); j < end_of_##j; j++)

#define FOR_VECTORS(i) \
    for (long i = get_global_id(0) * p.chunk[0], end_of_##i = FEWER(i + p.chunk[0], p.shape[0]); i < end_of_##i; i += VEC)

#define COUNT(i) ((int)FEWER((long)VEC, end_of_##i - i))

// Where row j of a plane begins in operand k.
#define ROW_OF(k, plane, j) row_of(p.rank, p.shape, p.offset[k], p.stride[k], plane, j)

static inline long row_of(
    const long rank, const long *shape, const long offset, const long *stride, long plane, const long j)
{
    long at = offset + j * stride[1];
    for (int axis = 2; axis < rank; axis++) {
        at += plane % shape[axis] * stride[axis];
        plane /= shape[axis];
    }
    return at;
}
