// Copies that transpose two axes: elements are contiguous along one axis in the source, along another in the output.
// Blocks of 16 x 16 are transposed in registers, for processors.
//
// Macros: VEC, which is 16; SIDE, elements along each axis that a work-item copies, by way of a block that fits into the first
// cache, so that it reads and writes several whole cache lines in a row; T, the type of elements, one that needs no conversion.

#include "access.cl"

typedef struct {
    long n, m;                       // lengths of the axes where the output and the source have their neighbours
    long x_step, out_step;           // of the source along the first, of the output along the second
    long planes, rank, shape[8];     // of the other axes, innermost first
    long x_stride[8], out_stride[8]; // along them
    long x_offset, out_offset;
} Params;

#define UNROLL __attribute__((opencl_unroll_hint(16)))
// The elements of two vectors interleaved: of their first halves, and of their second ones.
#define FIRST(a, b) \
    (V(T))(a.s0, b.s0, a.s1, b.s1, a.s2, b.s2, a.s3, b.s3, a.s4, b.s4, a.s5, b.s5, a.s6, b.s6, a.s7, b.s7)
#define SECOND(a, b) \
    (V(T))(a.s8, b.s8, a.s9, b.s9, a.sa, b.sa, a.sb, b.sb, a.sc, b.sc, a.sd, b.sd, a.se, b.se, a.sf, b.sf)
#define SHUFFLE(from, to) \
    UNROLL for (int k = 0; k < 8; k++) { \
        to[2 * k] = FIRST(from[k], from[k + 8]); \
        to[2 * k + 1] = SECOND(from[k], from[k + 8]); \
    }

static inline void transpose_block(__global const MEM(T) *x, const long x_step, MEM(T) *block)
{
    V(T) a[16], b[16];
    UNROLL for (int k = 0; k < 16; k++) a[k] = WHOLE_IN(T, x + k * x_step);
    SHUFFLE(a, b)
    SHUFFLE(b, a)
    SHUFFLE(a, b)
    SHUFFLE(b, a)
    UNROLL for (int k = 0; k < 16; k++) *(V(T) *)(block + k * SIDE) = a[k];
}

__kernel UNVECTORIZED void transpose(__global const MEM(T) *x, __global MEM(T) *out, const Params p)
{
    const long i_first = (long)get_global_id(0) * SIDE, i_end = FEWER(i_first + SIDE, p.n);
    const long j_first = (long)get_global_id(1) * SIDE, j_end = FEWER(j_first + SIDE, p.m);
    V(T) block[SIDE * SIDE / 16];
    for (long plane = get_global_id(2); plane < p.planes; plane += get_global_size(2)) {
        __global const MEM(T) *from = x + p.x_offset;
        __global MEM(T) *to = out + p.out_offset;
        long rest = plane;
        for (int axis = 0; axis < p.rank; axis++) {
            from += rest % p.shape[axis] * p.x_stride[axis], to += rest % p.shape[axis] * p.out_stride[axis];
            rest /= p.shape[axis];
        }
        const long wide = (i_end - i_first) / 16 * 16, high = (j_end - j_first) / 16 * 16;
        for (long i = 0; i < wide; i += 16)
            for (long j = 0; j < high; j += 16)
                transpose_block(from + (i_first + i) * p.x_step + j_first + j, p.x_step, (MEM(T) *)block + j * SIDE + i);
        for (long j = 0; j < high; j++)
            for (long i = 0; i < wide; i += 16)
                WHOLE_OUT(T, block[(j * SIDE + i) / 16], to + (j_first + j) * p.out_step + i_first + i);
        for (long j = j_first; j < j_end; j++)
            for (long i = j < j_first + high ? i_first + wide : i_first; i < i_end; i++)
                to[j * p.out_step + i] = from[i * p.x_step + j];
    }
}
