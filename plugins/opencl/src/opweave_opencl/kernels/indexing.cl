// Elements and rows by number. A number outside of the table is noted; what it would pick is zero, what it would write is
// left out.
//
// Macros: VEC; ACCESSES, ACCESS of each type; T, the type of elements; ID, the type of numbers; SUM, the type in which rows
// add up.

#include "access.cl"
#include "wrong_index.cl"

ACCESSES

#define FOR_COLUMNS(i, first, last) for (long i = first; i < last; i += VEC)
#define HERE(i, last) ((int)FEWER((long)VEC, last - i))

// --- rows -------------------------------------------------------------------------------------------------------------

typedef struct {
    long rank, shape[8];           // axes of numbers, innermost first
    long count, rows;              // numbers in all; rows of the table
    long row_rank, row_shape[8];   // axes of a row, innermost first
    long lines;                    // of a row: combinations of its axes but the innermost
    long columns, numbers, ranges; // elements of a line, numbers, rows of the table that a work-item handles
    long offset[3];                // of the picked rows, the table, the numbers
    long stride[2][8];             // along the axes of numbers: of the picked rows, of the numbers
    long row_stride[2][8];         // along the axes of a row: of the picked rows, of the table
    long table_stride;             // from one row of the table to the next
    long site;
} Rows;

static inline long place_of(long index, const int first, const long rank, const long *shape, const long *stride)
{
    long at = 0;
    for (int axis = first; axis < rank; axis++) {
        at += index % shape[axis] * stride[axis];
        index /= shape[axis];
    }
    return at;
}

#define ID_AT(number) ids[p.offset[2] + place_of(number, 0, p.rank, p.shape, p.stride[1])]
#define PICKED_AT(number) (p.offset[0] + place_of(number, 0, p.rank, p.shape, p.stride[0]))

// Sets the columns of this work-item, and the line that they are in, as places in a picked row and in one of the table.
#define ENTER_LINE(line, picked_line, table_line, first, last) \
    const long first = get_global_id(0) * p.columns, last = min(first + p.columns, p.row_shape[0]); \
    const long picked_line = place_of(line, 1, p.row_rank, p.row_shape, p.row_stride[0]); \
    const long table_line = p.offset[1] + place_of(line, 1, p.row_rank, p.row_shape, p.row_stride[1]);

__kernel void take(__global MEM(T) *out, __global const MEM(T) *table, __global const MEM(ID) *ids, WRONG_INDEX
                   const Rows p)
{
    const long start = get_global_id(1) * p.numbers, end = min(start + p.numbers, p.count);
    for (long line = get_global_id(2); line < p.lines; line += get_global_size(2)) {
        ENTER_LINE(line, to, from, first, last)
        for (long number = start; number < end; number++) {
            const long id = ID_AT(number);
            __global MEM(T) *target = out + PICKED_AT(number) + to;
            const bool there = INSIDE(id, p.rows);
            __global const MEM(T) *source = table + from + (there ? id * p.table_stride : 0);
            FOR_COLUMNS(i, first, last) {
                const V(T) v = TAKE(T)(source, i, p.row_stride[1][0], HERE(i, last));
                PUT(T)(there ? v : (V(T))(0), target, i, p.row_stride[0][0], HERE(i, last));
            }
        }
    }
}

// A work-item owns some columns of a range of rows, and looks for numbers in that range: so what is written to a row is
// written in the order of numbers.
#define FOR_OWN_NUMBERS(number, id) \
    for (long number = 0; number < p.count; number++) \
        for (long id = ID_AT(number), once = 1; once && INSIDE(id, p.rows) && id >= range && id < range_end; once = 0)

#define ENTER_RANGE(range, range_end) \
    const long range = get_global_id(1) * p.ranges, range_end = min(range + p.ranges, p.rows);

__kernel void put(__global const MEM(T) *picked, __global MEM(T) *table, __global const MEM(ID) *ids, WRONG_INDEX
                  const Rows p)
{
    ENTER_RANGE(range, range_end)
    for (long line = get_global_id(2); line < p.lines; line += get_global_size(2)) {
        ENTER_LINE(line, from, to, first, last)
        FOR_OWN_NUMBERS(number, id) {
            __global const MEM(T) *source = picked + PICKED_AT(number) + from;
            __global MEM(T) *target = table + to + id * p.table_stride;
            FOR_COLUMNS(i, first, last) {
                const int here = HERE(i, last);
                PUT(T)(TAKE(T)(source, i, p.row_stride[0][0], here), target, i, p.row_stride[1][0], here);
            }
        }
    }
}

#ifdef SUM
__kernel void add(__global const MEM(T) *picked, __global MEM(SUM) *table, __global const MEM(ID) *ids, WRONG_INDEX
                  const Rows p)
{
    ENTER_RANGE(range, range_end)
    for (long line = get_global_id(2); line < p.lines; line += get_global_size(2)) {
        ENTER_LINE(line, from, to, first, last)
        for (long row = range; row < range_end; row++)
            FOR_COLUMNS(i, first, last)
                PUT(SUM)((V(SUM))(0), table + to + row * p.table_stride, i, p.row_stride[1][0], HERE(i, last));
        FOR_OWN_NUMBERS(number, id) {
            __global const MEM(T) *source = picked + PICKED_AT(number) + from;
            __global MEM(SUM) *target = table + to + id * p.table_stride;
            FOR_COLUMNS(i, first, last) {
                const int here = HERE(i, last);
                const V(SUM) sum = TAKE(SUM)(target, i, p.row_stride[1][0], here);
                const V(SUM) more = TON(SUM, VEC, TAKE(T)(source, i, p.row_stride[0][0], here));
                PUT(SUM)(TON(SUM, VEC, W(SUM, sum) + W(SUM, more)), target, i, p.row_stride[1][0], here);
            }
        }
    }
}
#endif
