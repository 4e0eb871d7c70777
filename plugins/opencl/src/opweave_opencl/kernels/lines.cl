// Work along one axis, line by line: a line is the elements along the axis. Includes types.cl.
//
// A kernel's block of parameters is called p and begins with LINES:
//   lines, rank, shape   how many lines there are, and their axes, innermost first
//   n                    elements of a line
//   offset, step         of x and the output: of the first element, and along the axis
//   stride               of x and the output along the axes of lines
//   base                 offsets of up to two arrays of scratch memory, in which lines follow each other

#include "types.cl"

#define LINES \
    long lines, rank, shape[8]; \
    long n, offset[2], step[2]; \
    long stride[2][8]; \
    long base[2];

#define FOR_LINES(line) for (long line = get_global_id(1); line < p.lines; line += get_global_size(1))

// Where a line begins in x (0) or the output (1).
#define LINE_OF(operand, line) line_of(p.rank, p.shape, p.offset[operand], p.stride[operand], line)

static inline long line_of(const long rank, const long *shape, long at, const long *stride, long line)
{
    for (int axis = 0; axis < rank; axis++) {
        at += line % shape[axis] * stride[axis];
        line /= shape[axis];
    }
    return at;
}
