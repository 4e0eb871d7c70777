// Linear algebra beyond products. Macros: T, the type of the result; HADAMARD; SOLVE, with A, the type of the matrix;
// SINKHORN, with the SIZE of the matrices; WIDE where numbers are f64.

#include "types.cl"

typedef struct {
    long lead, shape[8]; // axes in front of the last two, or of the last one, innermost first
    long n, columns;     // elements of a row, or rows and columns of a solution
    long out_lead[8], x_lead[8], a_lead[8];
    long out_step[2], x_step[2], a_step[2];
    long offset[3];
    long upper, unit, iterations; // or, instead of iterations, where ``known`` begins
    long number; // the bits of the scale, or of epsilon
} Params;

#ifdef WIDE
#define NUMBER as_double(p.number)
#else
#define NUMBER as_float((uint)p.number)
#endif

static inline long place(const long lead, const long *shape, const long *stride, long i)
{
    long at = 0;
    for (int axis = 0; axis < lead; axis++) {
        at += i % shape[axis] * stride[axis];
        i /= shape[axis];
    }
    return at;
}

// Whether number i is behind the last row or matrix: a work-item that fills up a group.
static inline bool is_behind(const long lead, const long *shape, long i)
{
    for (int axis = 0; axis < lead; axis++) i /= shape[axis];
    return i > 0;
}

#ifdef HADAMARD
// One work-item for each element: a sum over its row with the signs of the matrix.
__kernel void hadamard(__global MEM(T) *out, __global const MEM(T) *x, const Params p)
{
    const long i = get_global_id(0), row = get_global_id(1);
    if (i >= p.n || is_behind(p.lead, p.shape, row)) return;
    x += p.offset[1] + place(p.lead, p.shape, p.x_lead, row);
    VAL(T) sum = 0;
    for (long j = 0; j < p.n; j++) {
        const VAL(T) v = LOAD(T, x, j * p.x_step[1]);
        sum += popcount((int)(i & j)) & 1 ? -v : v;
    }
    STORE(T, sum * NUMBER, out, p.offset[0] + place(p.lead, p.shape, p.out_lead, row) + i * p.out_step[1]);
}
#endif

#ifdef SOLVE
// One work-item for each column. ``known`` holds the solution so far, before it is rounded to T.
__kernel void solve(__global MEM(T) *out, __global const MEM(A) *a, __global const MEM(T) *b, __global VAL(T) *known,
                    const Params p)
{
    const long column = get_global_id(0), matrix = get_global_id(1);
    if (column >= p.columns || is_behind(p.lead, p.shape, matrix)) return;
    a += p.offset[2] + place(p.lead, p.shape, p.a_lead, matrix);
    b += p.offset[1] + place(p.lead, p.shape, p.x_lead, matrix) + column * p.x_step[1];
    out += p.offset[0] + place(p.lead, p.shape, p.out_lead, matrix) + column * p.out_step[1];
    known += p.iterations + matrix * p.n * p.columns + column;
    for (long k = 0; k < p.n; k++) {
        const long i = p.upper ? p.n - 1 - k : k;
        VAL(T) sum = LOAD(T, b, i * p.x_step[0]);
        const long first = p.upper ? i + 1 : 0, end = p.upper ? p.n : i;
        for (long j = first; j < end; j++) sum -= LOAD(A, a, i * p.a_step[0] + j * p.a_step[1]) * known[j * p.columns];
        if (!p.unit) sum /= LOAD(A, a, i * (p.a_step[0] + p.a_step[1]));
        known[i * p.columns] = sum;
        STORE(T, sum, out, i * p.out_step[0]);
    }
}
#endif

#ifdef SINKHORN
// One work-item for each matrix, which stays in its registers.
__kernel UNVECTORIZED void sinkhorn(__global MEM(T) *out, __global const MEM(T) *x, const Params p)
{
    const long matrix = get_global_id(0);
    const VAL(T) eps = NUMBER;
    VAL(T) m[SIZE][SIZE];
    x += p.offset[1] + place(p.lead, p.shape, p.x_lead, matrix);
    out += p.offset[0] + place(p.lead, p.shape, p.out_lead, matrix);
    for (int i = 0; i < SIZE; i++) {
        VAL(T) most = -INFINITY, sum = 0;
        for (int j = 0; j < SIZE; j++) {
            m[i][j] = LOAD(T, x, i * p.x_step[0] + j * p.x_step[1]);
            most = fmax(most, m[i][j]);
        }
        for (int j = 0; j < SIZE; j++) {
            m[i][j] = exp(m[i][j] - most);
            sum += m[i][j];
        }
        for (int j = 0; j < SIZE; j++) m[i][j] = m[i][j] / sum + eps;
    }
    for (long k = 0; k < p.iterations; k++) {
        for (int i = 0; k && i < SIZE; i++) {
            VAL(T) sum = eps;
            for (int j = 0; j < SIZE; j++) sum += m[i][j];
            for (int j = 0; j < SIZE; j++) m[i][j] /= sum;
        }
        for (int j = 0; j < SIZE; j++) {
            VAL(T) sum = eps;
            for (int i = 0; i < SIZE; i++) sum += m[i][j];
            for (int i = 0; i < SIZE; i++) m[i][j] /= sum;
        }
    }
    for (int i = 0; i < SIZE; i++)
        for (int j = 0; j < SIZE; j++) STORE(T, m[i][j], out, i * p.out_step[0] + j * p.out_step[1]);
}
#endif
