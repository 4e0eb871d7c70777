// Rows of a quantized table by index, decoded. An index outside of the table gives zeros, and is recorded.
//
// Macros: those of blocks.cl; CHECKED; ID, the type of indices.

#include "types.cl"
#include "blocks.cl"
#include "wrong_index.cl"

typedef struct {
    long rank, shape[8];             // axes of ids, innermost first
    long inner_rank, inner_shape[8]; // axes of the table between the first and the last
    long stride[2][8];               // along the axes of ids: of out, of ids
    long inner[2][8];                // along the inner ones: of out in elements, of the table in bytes
    long offset[3];                  // of out, the table (in bytes), ids
    long row, rows;                  // bytes from one row to the next, rows
    long width, site;
} Params;

__kernel UNVECTORIZED void take_blocks(__global float *out, __global const uchar *table, __global const MEM(ID) *ids, WRONG_INDEX
                                       const Params p)
{
    long rest = get_global_id(2);
    out += p.offset[0], table += p.offset[1], ids += p.offset[2];
    for (int axis = 0; axis < p.rank; axis++) {
        const long i = rest % p.shape[axis];
        rest /= p.shape[axis];
        out += i * p.stride[0][axis], ids += i * p.stride[1][axis];
    }
    rest = get_global_id(1);
    for (int axis = 0; axis < p.inner_rank; axis++) {
        const long i = rest % p.inner_shape[axis];
        rest /= p.inner_shape[axis];
        out += i * p.inner[0][axis], table += i * p.inner[1][axis];
    }
    const long id = LOAD(ID, ids, 0), part = get_global_id(0);
    float16 values = 0.0f;
    if (INSIDE(id, p.rows)) values = decode(table + id * p.row + part / PARTS * BYTES, part % PARTS);
    STOREN(f32, 16, values, out, part * 16);
}
