// y[..., i, ...] = x[..., ids[..., i, ...], ...] along an axis; 0 where an index is outside of it, which is recorded.
//
// Macros: CHECKED; VEC; T, the type of elements, one that needs no conversion; ID, the type of indices.

#include "walk.cl"
#include "wrong_index.cl"

typedef struct {
    WALK(3) // of x, whose stride along the axis is 0 here, the indices, and the output
    long n, step; // the axis of x
    long site;
} Params;

__kernel UNVECTORIZED void gather(__global const MEM(T) *m0, __global const MEM(ID) *m1, __global MEM(T) *m2, WRONG_INDEX
                                  const Params p)
{
    FOR_PLANES(plane) FOR_ROWS(j) {
        __global const MEM(T) *x = m0 + ROW_OF(0, plane, j);
        __global const MEM(ID) *ids = m1 + ROW_OF(1, plane, j);
        __global MEM(T) *out = m2 + ROW_OF(2, plane, j);
        FOR_VECTORS(i) {
            for (long k = i; k < i + COUNT(i); k++) {
                const long id = ids[k * p.stride[1][0]];
                out[k * p.stride[2][0]] = INSIDE(id, p.n) ? x[k * p.stride[0][0] + id * p.step] : (MEM(T))0;
            }
        }
    }
}
