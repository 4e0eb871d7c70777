// Rows by expert. An index that is not that of an expert is recorded.
//
// Macros: CHECKED; ROUTE or ADD; ID, the type of indices; T, that of rows.

#include "types.cl"
#include "wrong_index.cl"

#ifdef ROUTE
typedef struct {
    long rows, used, experts; // rows in all; rows of one token
    long offset, token, next; // of ids, and steps from one token and one row to the next
    long route;               // offset of the result
    long site;
} Params;

// route[e] is where the rows of expert e begin in the list that follows; after those of the last expert come the rows
// that are sent to none. One work-item for each expert, and one for these.
__kernel UNVECTORIZED void sort_rows(__global int *route, __global const MEM(ID) *ids, WRONG_INDEX const Params p)
{
    const long me = get_global_id(0);
    route += p.route, ids += p.offset;
    __global int *list = route + p.experts + 2;
    int first = 0;
    for (long row = 0; row < p.rows; row++) {
        const long id = LOAD(ID, ids, row / p.used * p.token + row % p.used * p.next);
        first += (is_inside(id, p.experts) ? id : p.experts) < me;
    }
    route[me] = first;
    for (long row = 0; row < p.rows; row++) {
        const long id = LOAD(ID, ids, row / p.used * p.token + row % p.used * p.next);
        if ((INSIDE(id, p.experts) ? id : p.experts) == me) list[first++] = row;
    }
    if (me == p.experts) route[me + 1] = first;
}
#endif

#ifdef ADD
typedef struct {
    long rank, shape[8];                                 // axes of ids, innermost first
    long stride[3][8];                                   // along them: of out, x, ids
    long offset[4];                                      // of out, x, table, ids
    long out_step, x_step, table_row, table_step, rows;
    long site;
} Params;

__kernel UNVECTORIZED void add_rows(__global MEM(T) *out, __global const MEM(T) *x, __global const MEM(T) *table,
                                    __global const MEM(ID) *ids, WRONG_INDEX const Params p)
{
    const long column = get_global_id(0);
    long rest = get_global_id(1);
    long offset[3] = {p.offset[0], p.offset[1], p.offset[3]};
    for (int axis = 0; axis < p.rank; axis++) {
        const long i = rest % p.shape[axis];
        rest /= p.shape[axis];
        for (int j = 0; j < 3; j++) offset[j] += i * p.stride[j][axis];
    }
    const long id = LOAD(ID, ids, offset[2]);
    VAL(T) value = LOAD(T, x, offset[1] + column * p.x_step);
    if (INSIDE(id, p.rows)) value += LOAD(T, table, p.offset[2] + id * p.table_row + column * p.table_step);
    STORE(T, value, out, offset[0] + column * p.out_step);
}
#endif
