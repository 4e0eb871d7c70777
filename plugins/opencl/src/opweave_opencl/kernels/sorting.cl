// Sorting along an axis.
//
// Short lines are ordered by `order`. Long ones are merged: `rank` sorts runs, each pass of `merge` makes runs twice as long,
// and `pick` writes the first positions. Few first positions are found by `keep` in one pass, by one work-item of a processor
// for each line. Of equal elements the one with the lower position comes first.
//
// Macros: the kernel's name in capitals; T, the type of the source; OUT, that of positions; KEPT, the most positions that
// `keep` finds.

#include "lines.cl"

typedef struct {
    LINES
    long run, chunk;    // elements of a run; that a work-item makes
    long k, descending; // positions that are written for each line
} Params;

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

#ifdef ORDER
// The first p.k positions of the order of a whole line.
__kernel void order(__global const MEM(T) *x, __global MEM(OUT) *out, const Params p)
{
    FOR_LINES(line) {
        __global const MEM(T) *source = x + LINE_OF(0, line);
        __global MEM(OUT) *target = out + LINE_OF(1, line);
        for (long i = get_global_id(0); i < p.n; i += get_global_size(0)) {
            const long before = count_before(source, i, 0, p.n, p);
            if (before < p.k) target[before * p.step[1]] = i;
        }
    }
}
#endif

#ifdef RANK
// The orders of runs of p.run elements.
__kernel void rank(__global const MEM(T) *x, __global int *positions, const Params p)
{
    FOR_LINES(line) {
        __global const MEM(T) *source = x + LINE_OF(0, line);
        for (long i = get_global_id(0); i < p.n; i += get_global_size(0)) {
            const long first = i / p.run * p.run;
            const long before = count_before(source, i, first, min(first + p.run, p.n), p);
            positions[p.base[0] + line * p.n + first + before] = i;
        }
    }
}
#endif

#ifdef MERGE
// Makes up to p.chunk positions of the run that two neighbouring runs make together, from the point where both halves of what comes
// before are found by bisection.
__kernel void merge(
    __global const MEM(T) *x, __global const int *from, __global int *to, const Params p)
{
    const long each = (2 * p.run + p.chunk - 1) / p.chunk; // work-items of two runs
    const long first = (long)get_global_id(0) / each * (2 * p.run), start = first + (long)get_global_id(0) % each * p.chunk;
    if (start >= p.n) return;
    const long middle = min(first + p.run, p.n), last = min(first + 2 * p.run, p.n);
    const long done = start - first, lefts = middle - first, rights = last - middle;
    FOR_LINES(line) {
        __global const MEM(T) *source = x + LINE_OF(0, line);
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
#endif

#ifdef PICK
__kernel void pick(__global const int *positions, __global MEM(OUT) *out, const Params p)
{
    FOR_LINES(line) {
        __global const int *order = positions + p.base[0] + line * p.n;
        __global MEM(OUT) *target = out + LINE_OF(1, line);
        for (long i = get_global_id(0); i < p.k; i += get_global_size(0)) target[i * p.step[1]] = order[i];
    }
}
#endif

#ifdef KEEP
__kernel void keep(__global const MEM(T) *x, __global MEM(OUT) *out, const Params p)
{
    FOR_LINES(line) {
        __global const MEM(T) *source = x + LINE_OF(0, line);
        __global MEM(OUT) *target = out + LINE_OF(1, line);
        VAL(T) values[KEPT];
        long positions[KEPT], count = 0;
        for (long i = 0; i < p.n; i++) {
            const VAL(T) own = VALUE(i);
            if (count == p.k && !BEFORE(own, values[count - 1])) continue;
            long at = count < p.k ? count++ : count - 1;
            for (; at > 0 && BEFORE(own, values[at - 1]); at--) {
                values[at] = values[at - 1];
                positions[at] = positions[at - 1];
            }
            values[at] = own;
            positions[at] = i;
        }
        for (long i = 0; i < count; i++) target[i * p.step[1]] = positions[i];
    }
}
#endif
