// Cumulative sums along an axis. Macros: T, the type of the source; ACC, the type in which elements add up.

#include "lines.cl"
#include "sums.cl"

typedef struct {
    LINES
    long segment, segments; // elements of a part of a line, and parts of each
} Params;

// So many consecutive elements make a sum of their own (sums.cl): few, since sums of parts that nearly cancel out show the
// errors of all elements before them.
#define BLOCK 16

// The sum of each part of a line.
__kernel UNVECTORIZED void sums(__global const MEM(T) *x, __global MEM(ACC) *parts, const Params p)
{
    const long part = get_global_id(0), start = part * p.segment, end = min(start + p.segment, p.n);
    if (part >= p.segments) return;
    FOR_LINES(line) {
        __global const MEM(T) *source = x + LINE_OF(0, line);
        VAL(ACC) total = 0, lost = 0;
        for (long first = start; first < end; first += BLOCK) {
            VAL(ACC) sum = 0;
            for (long i = first; i < min(first + BLOCK, end); i++) sum += TO(ACC, LOAD(T, source, i * p.step[0]));
            ADD_EXACTLY(VAL(ACC), total, lost, sum);
        }
        parts[p.base[0] + line * p.segments + part] = total;
    }
}

// The cumulative sums of each part, from the sum of the parts before it on.
__kernel UNVECTORIZED void scan(
    __global const MEM(T) *x, __global MEM(T) *out, __global const MEM(ACC) *parts, const Params p)
{
    const long part = get_global_id(0), start = part * p.segment, end = min(start + p.segment, p.n);
    if (part >= p.segments) return;
    FOR_LINES(line) {
        __global const MEM(T) *source = x + LINE_OF(0, line);
        __global MEM(T) *target = out + LINE_OF(1, line);
        VAL(ACC) total = 0, lost = 0;
        for (long k = 0; k < part; k++) ADD_EXACTLY(VAL(ACC), total, lost, parts[p.base[0] + line * p.segments + k]);
        for (long first = start; first < end; first += BLOCK) {
            VAL(ACC) sum = 0;
            for (long i = first; i < min(first + BLOCK, end); i++) {
                sum += TO(ACC, LOAD(T, source, i * p.step[0]));
                STORE(T, total + sum, target, i * p.step[1]);
            }
            ADD_EXACTLY(VAL(ACC), total, lost, sum);
        }
    }
}
