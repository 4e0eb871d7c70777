// Rows by number. A number outside of the table names no row: such a row of the result is zeros, such a write is left out.
//
// Macros: ELEMENT, a word of the size of an element; ID, the type of numbers.

typedef struct {
    long rank, shape[8];         // axes of ids, innermost first
    long count, rows;            // numbers in all; rows of the table
    long width;                  // elements of a row
    long row_rank, row_shape[8]; // axes of a row, innermost first
    long offset[3];              // of the picked rows (output or source), the table, ids
    long stride[2][8];           // along the axes of ids: of the picked rows, of ids
    long row_stride[2][8];       // along the axes of a row: of the picked rows, of the table
    long table_stride;           // from one row of the table to the next
} Params;

// The two places of element ``index`` of a row.
#define ENTER_ROW(index, picked, table) \
    do { \
        long rest_ = (index); \
        picked += p.offset[0], table += p.offset[1]; \
        for (int axis = 0; axis < p.row_rank; axis++) { \
            const long i_ = rest_ % p.row_shape[axis]; \
            rest_ /= p.row_shape[axis]; \
            picked += i_ * p.row_stride[0][axis], table += i_ * p.row_stride[1][axis]; \
        } \
    } while (0)

// Where number ``index`` lies, and its row among the picked ones.
#define FIND(index, id_place, row_place) \
    long id_place = p.offset[2], row_place = 0; \
    { \
        long rest_ = (index); \
        for (int axis = 0; axis < p.rank; axis++) { \
            const long i_ = rest_ % p.shape[axis]; \
            rest_ /= p.shape[axis]; \
            row_place += i_ * p.stride[0][axis], id_place += i_ * p.stride[1][axis]; \
        } \
    }

__kernel void take(__global ELEMENT *out, __global const ELEMENT *table, __global const ID *ids, const Params p)
{
    const long column = get_global_id(0), number = get_global_id(1);
    if (column >= p.width || number >= p.count) return;
    ENTER_ROW(column, out, table);
    FIND(number, id_place, row_place);
    const long id = ids[id_place];
    out[row_place] = id >= 0 && id < p.rows ? table[id * p.table_stride] : (ELEMENT)0;
}

// One work-item writes all rows, at its place in them, in order: of equal numbers the last one counts.
__kernel void put(__global const ELEMENT *picked, __global ELEMENT *table, __global const ID *ids, const Params p)
{
    const long column = get_global_id(0);
    if (column >= p.width) return;
    ENTER_ROW(column, picked, table);
    for (long number = 0; number < p.count; number++) {
        FIND(number, id_place, row_place);
        const long id = ids[id_place];
        if (id >= 0 && id < p.rows) table[id * p.table_stride] = picked[row_place];
    }
}
