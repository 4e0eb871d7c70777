// Rotations of pairs of elements by their row's position, and embeddings of time steps. Macros: ROPE or WAVES; T; for ROPE the type ID of
// positions and FACTORS, whether each pair's frequency is divided by a number of type F.

#include "types.cl"
#include "turning.cl"

#ifdef ROPE
typedef struct {
    long rank, shape[8];  // axes of rows, innermost first
    long stride[3][8];    // along them: of out, x, positions
    long offset[5];       // of out, x, positions, frequencies, factors
    long out_step, x_step, section_step, factor_step;
    long pairs, size;     // pairs; elements of a row
    long adjacent;        // whether pairs are neighbours, else halves
    long row[8], start[8], stop[8], step[8]; // rows of positions, and the pairs that take their angle from them
    long parts;           // how many of these there are
    long heads, out_head, x_head; // rows that a work-item turns by the same angles, and the steps between them
    float magnitude;
} Params;

// One work-item for each pair of `heads` rows, then one for each element behind them.
__kernel void rope(__global MEM(T) *out, __global const MEM(T) *x, __global const MEM(ID) *positions,
                   __global const float *frequency, __global const MEM(F) *factors, const Params p)
{
    const long i = get_global_id(0);
    if (i >= p.size - p.pairs) return;
    long rest = get_global_id(1);
    out += p.offset[0], x += p.offset[1], positions += p.offset[2];
    for (int axis = 0; axis < p.rank; axis++) {
        const long j = rest % p.shape[axis];
        rest /= p.shape[axis];
        out += j * p.stride[0][axis], x += j * p.stride[1][axis], positions += j * p.stride[2][axis];
    }
    if (rest) return; // work-items that fill up the last group
    if (i >= p.pairs) {
        for (long head = 0; head < p.heads; head++, out += p.out_head, x += p.x_head)
            STORE(T, LOAD(T, x, (i + p.pairs) * p.x_step), out, (i + p.pairs) * p.out_step);
        return;
    }
    long row = 0;
    for (int k = 0; k < p.parts; k++)
        if (i >= p.start[k] && i < p.stop[k] && (i - p.start[k]) % p.step[k] == 0) row = p.row[k];
    const long exact = LOAD(ID, positions, row * p.section_step);
    const float position = exact, missing = exact - (long)position;
    float high = frequency[p.offset[3] + i], low = frequency[p.offset[3] + p.pairs + i];
#if FACTORS
    const float factor = LOAD(F, factors, p.offset[4] + i * p.factor_step), quotient = high / factor;
    low = isinf(factor) ? 0.0f : (fma(-quotient, factor, high) + low) / factor;
    high = quotient;
#endif
    const float angle = TURN * (part_of_turn(position, high, low) + missing * high);
    const float c = cos(angle) * p.magnitude, s = sin(angle) * p.magnitude;
    const long one = p.adjacent ? 2 * i : i, two = p.adjacent ? 2 * i + 1 : i + p.pairs;
    for (long head = 0; head < p.heads; head++, out += p.out_head, x += p.x_head) {
        const float a = LOAD(T, x, one * p.x_step), b = LOAD(T, x, two * p.x_step);
        STORE(T, a * c - b * s, out, one * p.out_step);
        STORE(T, a * s + b * c, out, two * p.out_step);
    }
}
#endif

#ifdef WAVES
typedef struct {
    long pairs, dim, rows, out_row, out_step, t_step, offset[2];
} Params;

__kernel void waves(__global MEM(T) *out, __global const MEM(T) *t, __global const float *frequency, const Params p)
{
    const long i = get_global_id(0), row = get_global_id(1), wave = i % p.pairs;
    if (i >= p.dim || row >= p.rows) return;
    const float time = LOAD(T, t, p.offset[1] + row * p.t_step);
    const float angle = TURN * part_of_turn(time, frequency[wave], frequency[p.pairs + wave]);
    const float value = i >= 2 * p.pairs ? 0.0f : i < p.pairs ? cos(angle) : sin(angle);
    STORE(T, value, out, p.offset[0] + row * p.out_row + i * p.out_step);
}
#endif
