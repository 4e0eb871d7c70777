// The work-items of a group combine a number of each of them to one number.
//
// Macros: GROUP, work-items of a group, a power of two. SUBGROUPS is defined where the device's sub-groups combine their numbers
// first, in registers, and is then the option by which the compiler has the functions for that; else it is done by
// halves in local memory. The results differ by rounding only.
//   COMBINED_BY_GROUP(T, name, COMBINE)  defines name_group(value, scratch), which gives each work-item the result. All of
//                                        them call it; ``scratch`` holds GROUP numbers of type VAL(T). COMBINE is SUM,
//                                        PRODUCT, LARGER, SMALLER or FEWER.

#include "types.cl"

// A NaN is the largest number, and the smallest.
#define LARGER(a, b) (b > a || b != b ? b : a)
#define SMALLER(a, b) (b < a || b != b ? b : a)
#define SUM(a, b) (a + b)
#define PRODUCT(a, b) (a * b)

#if GROUP == 1
#define COMBINED_BY_GROUP(T, name, COMBINE) \
    static inline VAL(T) name##_group(const VAL(T) value, __local VAL(T) *scratch) { return value; }
#else
#define COMBINED_BY_HALVES(T, name, COMBINE) \
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

#ifdef SUBGROUPS
#ifdef cl_khr_subgroups
#pragma OPENCL EXTENSION cl_khr_subgroups : enable
#endif

// There are no functions for numbers of fewer than 32 bits.
#define lane_double double
#define lane_float float
#define lane_long long
#define lane_int int
#define lane_short int
#define lane_char int
#define lane_uchar int
#define LANE_(type) lane_##type
#define LANE(type) LANE_(type)

// Where a work-item has a NaN the sum is one; what the largest and smallest of such numbers are is left to the driver.
#define IN_SUBGROUP_SUM(v) sub_group_reduce_add(v)
#define IN_SUBGROUP_LARGER(v) (sub_group_any(v != v) ? sub_group_reduce_add(v) : sub_group_reduce_max(v))
#define IN_SUBGROUP_SMALLER(v) (sub_group_any(v != v) ? sub_group_reduce_add(v) : sub_group_reduce_min(v))
#define IN_SUBGROUP_FEWER(v) sub_group_reduce_min(v)

// Sub-groups may be of any size, and the last one smaller than the others. Every work-item combines their results in the
// same order, so all get the same.
#define COMBINED_BY_SUBGROUPS(T, name, COMBINE) \
    static inline VAL(T) name##_group(const VAL(T) value, __local VAL(T) *scratch) \
    { \
        const LANE(VAL(T)) mine = value; \
        VAL(T) all = (VAL(T))GLUE(IN_SUBGROUP_, COMBINE)(mine); \
        const uint count = get_num_sub_groups(); \
        if (count == 1) return all; \
        if (get_sub_group_local_id() == 0) scratch[get_sub_group_id()] = all; \
        barrier(CLK_LOCAL_MEM_FENCE); \
        all = scratch[0]; \
        for (uint i = 1; i < count; i++) all = COMBINE(all, scratch[i]); \
        barrier(CLK_LOCAL_MEM_FENCE); \
        return all; \
    }

#define COMBINED_BY_GROUP(T, name, COMBINE) GLUE(COMBINED_BY_, COMBINE)(T, name, COMBINE)
#define COMBINED_BY_SUM COMBINED_BY_SUBGROUPS
#define COMBINED_BY_LARGER COMBINED_BY_SUBGROUPS
#define COMBINED_BY_SMALLER COMBINED_BY_SUBGROUPS
#define COMBINED_BY_FEWER COMBINED_BY_SUBGROUPS
#define COMBINED_BY_PRODUCT COMBINED_BY_HALVES // sub-groups have no products
#else
#define COMBINED_BY_GROUP COMBINED_BY_HALVES
#endif
#endif
