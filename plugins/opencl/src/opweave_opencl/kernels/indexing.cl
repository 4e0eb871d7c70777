// Rows by index. An index outside of the table is recorded; what it would read is zero, what it would write is
// left out.
//
// Macros: VEC; ACCESSES, ACCESS of each type; T, the type of elements; ID, the type of indices; which kernel it is for, TAKE_ROWS,
// PUT_ROWS or ADD_ROWS; SUM, the type in which rows add up.

#include "access.cl"
#include "wrong_index.cl"

ACCESSES

#define FOR_COLUMNS(i, first, last) for (long i = first; i < last; i += VEC)
#define HERE(i, last) ((int)FEWER((long)VEC, last - i))

// --- rows -------------------------------------------------------------------------------------------------------------

typedef struct {
    long rank, shape[8];           // axes of indices, innermost first
    long count, rows;              // indices in all; rows of the table
    long row_rank, row_shape[8];   // axes of a row, innermost first
    long lines;                    // of a row: combinations of its axes but the innermost
    long columns, indices, ranges; // elements of a line, indices, rows of the table that a work-item handles
    long offset[3];                // of the picked rows, the table, the indices
    long stride[2][8];             // along the axes of indices: of the picked rows, of the indices
    long row_stride[2][8];         // along the axes of a row: of the picked rows, of the table
    long table_stride;             // from one row of the table to the next
    long site;
} Rows;

static inline long offset_of(long index, const int first, const long rank, const long *shape, const long *stride)
{
    long at = 0;
    for (int axis = first; axis < rank; axis++) {
        at += index % shape[axis] * stride[axis];
        index /= shape[axis];
    }
    return at;
}

#define ID_AT(entry) ids[p.offset[2] + offset_of(entry, 0, p.rank, p.shape, p.stride[1])]
#define PICKED_AT(entry) (p.offset[0] + offset_of(entry, 0, p.rank, p.shape, p.stride[0]))

// Sets the columns of this work-item, and the line that they are in, as offsets in a picked row and in one of the table.
#define ENTER_LINE(line, picked_line, table_line, first, last) \
    const long first = get_global_id(0) * p.columns, last = min(first + p.columns, p.row_shape[0]); \
    const long picked_line = offset_of(line, 1, p.row_rank, p.row_shape, p.row_stride[0]); \
    const long table_line = p.offset[1] + offset_of(line, 1, p.row_rank, p.row_shape, p.row_stride[1]);

#ifdef TAKE_ROWS
__kernel UNVECTORIZED void take(__global MEM(T) *out, __global const MEM(T) *table, __global const MEM(ID) *ids, WRONG_INDEX
                                const Rows p)
{
    const long start = get_global_id(1) * p.indices, end = min(start + p.indices, p.count);
    for (long line = get_global_id(2); line < p.lines; line += get_global_size(2)) {
        ENTER_LINE(line, to, from, first, last)
        for (long entry = start; entry < end; entry++) {
            const long id = ID_AT(entry);
            __global MEM(T) *target = out + PICKED_AT(entry) + to;
            const bool there = INSIDE(id, p.rows);
            __global const MEM(T) *source = table + from + (there ? id * p.table_stride : 0);
            FOR_COLUMNS(i, first, last) {
                const V(T) v = TAKE(T)(source, i, p.row_stride[1][0], HERE(i, last));
                PUT(T)(there ? v : (V(T))(0), target, i, p.row_stride[0][0], HERE(i, last));
            }
        }
    }
}
#endif

// A work-item owns some columns of a range of rows, and looks for indices in that range, so that writes to a row are made in the
// order of the indices.
#define FOR_OWN_INDICES(entry, id) \
    for (long entry = 0; entry < p.count; entry++) \
        for (long id = ID_AT(entry), once = 1; once && INSIDE(id, p.rows) && id >= range && id < range_end; once = 0)

#define ENTER_RANGE(range, range_end) \
    const long range = get_global_id(1) * p.ranges, range_end = min(range + p.ranges, p.rows);

#ifdef PUT_ROWS
__kernel UNVECTORIZED void put(__global const MEM(T) *picked, __global MEM(T) *table, __global const MEM(ID) *ids, WRONG_INDEX
                               const Rows p)
{
    ENTER_RANGE(range, range_end)
    for (long line = get_global_id(2); line < p.lines; line += get_global_size(2)) {
        ENTER_LINE(line, from, to, first, last)
        FOR_OWN_INDICES(entry, id) {
            __global const MEM(T) *source = picked + PICKED_AT(entry) + from;
            __global MEM(T) *target = table + to + id * p.table_stride;
            FOR_COLUMNS(i, first, last) {
                const int here = HERE(i, last);
                PUT(T)(TAKE(T)(source, i, p.row_stride[0][0], here), target, i, p.row_stride[1][0], here);
            }
        }
    }
}
#endif

#ifdef ADD_ROWS
__kernel UNVECTORIZED void add(__global const MEM(T) *picked, __global MEM(SUM) *table, __global const MEM(ID) *ids, WRONG_INDEX
                               const Rows p)
{
    ENTER_RANGE(range, range_end)
    for (long line = get_global_id(2); line < p.lines; line += get_global_size(2)) {
        ENTER_LINE(line, from, to, first, last)
        for (long row = range; row < range_end; row++)
            FOR_COLUMNS(i, first, last)
                PUT(SUM)((V(SUM))(0), table + to + row * p.table_stride, i, p.row_stride[1][0], HERE(i, last));
        FOR_OWN_INDICES(entry, id) {
            __global const MEM(T) *source = picked + PICKED_AT(entry) + from;
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
