// Cumulative sums along an axis. Macros: T, the type of the source; ACC, the type in which elements add up.

#include "lines.cl"

typedef struct {
    LINES
    long segment, segments; // elements of a part of a line, and parts of each
} Params;

// Some consecutive additions make a sum of their own, and these are added up with what rounding loses carried along
// (Kahan, "Further Remarks on Reducing Truncation Errors", 1965), so that large sums keep small addends.
#define BLOCK 128
#define ADD_EXACTLY(total, lost, v) \
    do { \
        const VAL(ACC) more_ = (v) - lost, next_ = total + more_; \
        lost = next_ - total - more_; \
        total = next_; \
    } while (0)

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
            ADD_EXACTLY(total, lost, sum);
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
        for (long k = 0; k < part; k++) ADD_EXACTLY(total, lost, parts[p.base[0] + line * p.segments + k]);
        for (long first = start; first < end; first += BLOCK) {
            VAL(ACC) sum = 0;
            for (long i = first; i < min(first + BLOCK, end); i++) {
                sum += TO(ACC, LOAD(T, source, i * p.step[0]));
                STORE(T, total + sum, target, i * p.step[1]);
            }
            ADD_EXACTLY(total, lost, sum);
        }
    }
}
