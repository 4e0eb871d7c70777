// Elements in another order: y[i] = x[f(i)] axis by axis, or a value where that is outside of x; and parts of matrices.
//
// Macros: FRAME, or the kernel is triangle; VEC; T, the type of elements, one that needs no conversion.

#include "access.cl"

typedef struct {
    long rank, shape[8];  // axes of the output, innermost first
    long rows, chunk;     // combinations of all axes but the innermost; elements of it that a work-item makes
    long length[8];       // of the source
    long before[8];       // elements of the frame before the source
    long x_stride[8], out_stride[8];
    long x_offset, out_offset;
    long mode;
    long value;           // as the bits of an element
    long k;               // the diagonal
} Params;

enum { CONSTANT, EDGE, REFLECT, WRAP };

// The element of the source that element i of the output is along an axis; -1: none.
static inline long origin(const long i, const long length, const long mode)
{
    if (i >= 0 && i < length) return i;
    if (mode == EDGE) return i < 0 ? 0 : length - 1;
    if (mode == REFLECT) return i < 0 ? -i : 2 * (length - 1) - i;
    if (mode == WRAP) return i < 0 ? i + length : i - length;
    return -1;
}

#define FOR_OUTPUT_ROWS(row) for (long row = get_global_id(1); row < p.rows; row += get_global_size(1))
ACCESS(T)

#define FOR_CHUNK(i) \
    for (long i = get_global_id(0) * p.chunk, end_of_##i = FEWER(i + p.chunk, p.shape[0]); i < end_of_##i; i++)

#ifdef FRAME
#define BETWEEN(least, i, most) ((i) < (least) ? (least) : FEWER(i, most))
#define FOR_FRAME(first, last) \
    for (long i = first; i < last; i++) { \
        const long source = origin(i - p.before[0], p.length[0], p.mode); \
        out[to + i * p.out_stride[0]] = inside && source >= 0 ? x[from + source * p.x_stride[0]] : value; \
    }

__kernel UNVECTORIZED void frame(__global const MEM(T) *x, __global MEM(T) *out, const Params p)
{
    const MEM(T) value = (MEM(T))p.value;
    FOR_OUTPUT_ROWS(row) {
        long rest = row, to = p.out_offset, from = p.x_offset;
        bool inside = true;
        for (int axis = 1; axis < p.rank; axis++) {
            const long i = rest % p.shape[axis], source = origin(i - p.before[axis], p.length[axis], p.mode);
            rest /= p.shape[axis];
            inside = inside && source >= 0;
            to += i * p.out_stride[axis], from += source * p.x_stride[axis];
        }
        // What comes before the source, its own elements, and what comes after it.
        const long start = get_global_id(0) * p.chunk, end = FEWER(start + p.chunk, p.shape[0]);
        const long first = inside ? BETWEEN(start, p.before[0], end) : end;
        const long last = BETWEEN(first, p.before[0] + p.length[0], end);
        __global const MEM(T) *own = x + from - p.before[0] * p.x_stride[0];
        FOR_FRAME(start, first)
        for (long i = first; i < last; i += VEC) {
            const int count = (int)FEWER((long)VEC, last - i);
            PUT(T)(TAKE(T)(own, i, p.x_stride[0], count), out + to, i, p.out_stride[0], count);
        }
        FOR_FRAME(last, end)
    }
}
#else
// Sets elements above diagonal p.k of matrices (p.mode 0) or below it (p.mode 1) to 0.
__kernel UNVECTORIZED void triangle(__global const MEM(T) *x, __global MEM(T) *out, const Params p)
{
    FOR_OUTPUT_ROWS(row) {
        const long j = row % p.shape[1];
        long rest = row, to = p.out_offset, from = p.x_offset;
        for (int axis = 1; axis < p.rank; axis++) {
            const long i = rest % p.shape[axis];
            rest /= p.shape[axis];
            to += i * p.out_stride[axis], from += i * p.x_stride[axis];
        }
        FOR_CHUNK(i) {
            const bool keep = p.mode ? i - j >= p.k : i - j <= p.k;
            out[to + i * p.out_stride[0]] = keep ? x[from + i * p.x_stride[0]] : (MEM(T))0;
        }
    }
}
#endif
