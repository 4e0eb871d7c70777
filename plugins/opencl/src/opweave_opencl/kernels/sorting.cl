// Sorting along an axis, and cumulative sums.
//
// Short lines are ordered by `order`. Long ones are merged: `rank` sorts runs, each pass of `merge` makes runs twice as long,
// and `pick` writes the first positions. Of equal elements the one with the lower position comes first.
//
// Macros: T, the type of the source; OUT, that of positions, for orders; ACC, the type in which elements add up, for sums.

#include "types.cl"

typedef struct {
    long lines, rank, shape[8];        // lines along the axis, and their axes, innermost first
    long n, run, chunk, k;             // elements of a line; of a run; that a work-item makes; that are written
    long offset[2];                    // of the source, of the output
    long step[2];                      // along the axis
    long stride[2][8];                 // along the axes of lines
    long segment, segments;            // elements of a part of a line, and parts of each
    long descending;
    long base[2];                      // of operands in scratch memory, whose lines are packed
} Params;

static inline long line_of(const Params *p, const int operand, long line)
{
    long at = p->offset[operand];
    for (int axis = 0; axis < p->rank; axis++) {
        at += line % p->shape[axis] * p->stride[operand][axis];
        line /= p->shape[axis];
    }
    return at;
}

#define FOR_LINES(line) for (long line = get_global_id(1); line < p.lines; line += get_global_size(1))

#ifdef OUT
// Whether a comes before b, whatever their positions. NaN counts as the largest.
#define LESS(a, b) (a < b || (b != b && a == a))
#define BEFORE(a, b) (p.descending ? LESS(b, a) : LESS(a, b))
#define VALUE(position) LOAD(T, source, (position) * p.step[0])

// How many elements first .. last - 1 come before element i.
static inline long count_before(
    __global const MEM(T) *source, const long i, const long first, const long last, const Params p)
{
    const VAL(T) own = VALUE(i);
    long before = 0;
    for (long k = first; k < i; k++) {
        const VAL(T) other = VALUE(k);
        before += !BEFORE(own, other);
    }
    for (long k = i + 1; k < last; k++) {
        const VAL(T) other = VALUE(k);
        before += BEFORE(other, own);
    }
    return before;
}

// The first p.k positions of the order of a whole line.
__kernel void order(__global const MEM(T) *x, __global MEM(OUT) *out, const Params p)
{
    FOR_LINES(line) {
        __global const MEM(T) *source = x + line_of(&p, 0, line);
        __global MEM(OUT) *target = out + line_of(&p, 1, line);
        for (long i = get_global_id(0); i < p.n; i += get_global_size(0)) {
            const long before = count_before(source, i, 0, p.n, p);
            if (before < p.k) target[before * p.step[1]] = i;
        }
    }
}

// The orders of runs of p.run elements.
__kernel void rank(__global const MEM(T) *x, __global int *positions, const Params p)
{
    FOR_LINES(line) {
        __global const MEM(T) *source = x + line_of(&p, 0, line);
        for (long i = get_global_id(0); i < p.n; i += get_global_size(0)) {
            const long first = i / p.run * p.run;
            const long before = count_before(source, i, first, min(first + p.run, p.n), p);
            positions[p.base[0] + line * p.n + first + before] = i;
        }
    }
}

// Makes p.chunk positions of the run that two neighbouring runs make together, from the point where both halves of what comes
// before are found by bisection.
__kernel void merge(
    __global const MEM(T) *x, __global const int *from, __global int *to, const Params p)
{
    const long start = (long)get_global_id(0) * p.chunk;
    if (start >= p.n) return;
    const long first = start / (2 * p.run) * (2 * p.run);
    const long middle = min(first + p.run, p.n), last = min(first + 2 * p.run, p.n);
    const long done = start - first, lefts = middle - first, rights = last - middle;
    FOR_LINES(line) {
        __global const MEM(T) *source = x + line_of(&p, 0, line);
        __global const int *old = from + p.base[0] + line * p.n;
        __global int *new_ = to + p.base[1] + line * p.n;
        long low = max(done - rights, 0L), high = min(done, lefts);
        while (low < high) {
            const long half_ = (low + high) / 2;
            const VAL(T) a = VALUE(old[first + half_]), b = VALUE(old[middle + done - half_ - 1]);
            if (BEFORE(b, a)) high = half_;
            else low = half_ + 1;
        }
        long i = first + low, j = middle + done - low;
        const long end = min(start + p.chunk, last);
        for (long at = start; at < end; at++) {
            bool left = i < middle;
            if (left && j < last) {
                const VAL(T) a = VALUE(old[i]), b = VALUE(old[j]);
                left = !BEFORE(b, a);
            }
            new_[at] = left ? old[i++] : old[j++];
        }
    }
}

__kernel void pick(__global const int *positions, __global MEM(OUT) *out, const Params p)
{
    FOR_LINES(line) {
        __global const int *order = positions + p.base[0] + line * p.n;
        __global MEM(OUT) *target = out + line_of(&p, 1, line);
        for (long i = get_global_id(0); i < p.k; i += get_global_size(0)) target[i * p.step[1]] = order[i];
    }
}
#endif

#ifdef ACC
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
__kernel void sums(__global const MEM(T) *x, __global MEM(ACC) *parts, const Params p)
{
    const long part = get_global_id(0), start = part * p.segment, end = min(start + p.segment, p.n);
    if (part >= p.segments) return;
    FOR_LINES(line) {
        __global const MEM(T) *source = x + line_of(&p, 0, line);
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
__kernel void scan(
    __global const MEM(T) *x, __global MEM(T) *out, __global const MEM(ACC) *parts, const Params p)
{
    const long part = get_global_id(0), start = part * p.segment, end = min(start + p.segment, p.n);
    if (part >= p.segments) return;
    FOR_LINES(line) {
        __global const MEM(T) *source = x + line_of(&p, 0, line);
        __global MEM(T) *target = out + line_of(&p, 1, line);
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
#endif
