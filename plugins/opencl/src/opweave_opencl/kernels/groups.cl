// Work-items that share a row: their results are combined to one.
//
// Macros: VEC, elements that a work-item handles at once; those of combining.cl, GROUP being the work-items that share a row.

#include "access.cl"
#include "combining.cl"

// The elements of a row that this work-item handles: VEC from each i on, COUNT(i, n) of them in the row of n.
#define FOR_SHARE(i, n) for (long i = (long)get_local_id(0) * VEC; i < (n); i += GROUP * VEC)
#define COUNT(i, n) ((int)FEWER((long)VEC, (n) - (i)))

// COMBINED(T, name, COMBINE) defines name_lanes, which combines the elements of a vector, and name_group, which combines
// those of all work-items.

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
    COMBINED_BY_GROUP(T, name, COMBINE)
