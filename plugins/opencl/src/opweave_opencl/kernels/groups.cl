// Work-items that share a row: their results are combined to one.
//
// Macros: VEC, elements that a work-item handles at once; GROUP, work-items that share a row, a power of two.

#include "access.cl"

// The elements of a row that this work-item handles: VEC from each i on, COUNT(i, n) of them in the row of n.
#define FOR_SHARE(i, n) for (long i = (long)get_local_id(0) * VEC; i < (n); i += GROUP * VEC)
#define COUNT(i, n) ((int)FEWER((long)VEC, (n) - (i)))

// A NaN is the largest number, and the smallest.
#define LARGER(a, b) (b > a || b != b ? b : a)
#define SMALLER(a, b) (b < a || b != b ? b : a)
#define SUM(a, b) (a + b)
#define PRODUCT(a, b) (a * b)

// NAME_lanes: of the elements of a vector; NAME_group: of all work-items of the group, in each of them.
#if GROUP > 1
#define SHARED(T, name, COMBINE) \
    static inline VAL(T) name##_group(VAL(T) value, __local VAL(T) *scratch) \
    { \
        const int me = get_local_id(0); \
        scratch[me] = value; \
        for (int left = GROUP / 2; left > 0; left /= 2) { \
            barrier(CLK_LOCAL_MEM_FENCE); \
            if (me < left) scratch[me] = COMBINE(scratch[me], scratch[me + left]); \
        } \
        barrier(CLK_LOCAL_MEM_FENCE); \
        value = scratch[0]; \
        barrier(CLK_LOCAL_MEM_FENCE); \
        return value; \
    }
#else
#define SHARED(T, name, COMBINE) \
    static inline VAL(T) name##_group(const VAL(T) value, __local VAL(T) *scratch) { return value; }
#endif

// Combines the halves of a vector until one element is left: v1.
#define HALVE_16(T, COMBINE, v) const VALN(T, 8) v8 = COMBINE(v.lo, v.hi); HALVE_8(T, COMBINE, v8)
#define HALVE_8(T, COMBINE, v) const VALN(T, 4) v4 = COMBINE(v.lo, v.hi); HALVE_4(T, COMBINE, v4)
#define HALVE_4(T, COMBINE, v) const VALN(T, 2) v2 = COMBINE(v.lo, v.hi); HALVE_2(T, COMBINE, v2)
#define HALVE_2(T, COMBINE, v) const VAL(T) v1 = COMBINE(v.lo, v.hi);
#define HALVE_1(T, COMBINE, v) const VAL(T) v1 = v;

#define COMBINED(T, name, COMBINE) \
    static inline VAL(T) name##_lanes(const V(T) v) \
    { \
        GLUE(HALVE_, VEC)(T, COMBINE, v) \
        return v1; \
    } \
    SHARED(T, name, COMBINE)
