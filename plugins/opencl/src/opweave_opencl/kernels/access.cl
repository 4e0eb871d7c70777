// Vectors of elements in memory with any stride: VEC of them, or fewer.
//
// Macros: VEC, elements that are computed at once. ACCESS(T) defines the functions for a type.

#ifndef ACCESS
#include "types.cl"

#define V(T) VALN(T, VEC)
#define FEWER(a, b) ((a) < (b) ? (a) : (b))

#define TAKE(T) GLUE(take_, T)
#define PUT(T) GLUE(put_, T)

// WHOLE_IN(T, p) loads VEC elements from p on; WHOLE_OUT(T, v, p) stores a vector there.
#if VEC == 16
// 16 is the width for processors. PoCL calls vload16 and vstore16 as functions, and saves all registers for each call; a
// vector type with the alignment of an element takes one instruction. All compilers for processors are clang.
#define LOOSE(type) typedef type##16 loose_##type __attribute__((aligned(sizeof(type))));
LOOSE(float) LOOSE(long) LOOSE(int) LOOSE(short) LOOSE(char) LOOSE(uchar) LOOSE(ushort)
#ifdef cl_khr_fp64
LOOSE(double)
#endif
#define IN_AS_IS(T, p) (*(__global const GLUE(loose_, MEM(T)) *)(p))
#define OUT_AS_IS(T, v, p) (*(__global GLUE(loose_, MEM(T)) *)(p) = (v))
#define WHOLE_IN(T, p) GLUE(in_, T)(T, p)
#define WHOLE_OUT(T, v, p) GLUE(out_, T)(T, v, p)
#define in_f64 IN_AS_IS
#define in_f32 IN_AS_IS
#define in_f16(T, p) LOADN(T, VEC, p, 0)
#define in_bf16(T, p) from_bf16_16(IN_AS_IS(T, p))
#define in_i64 IN_AS_IS
#define in_i32 IN_AS_IS
#define in_i16 IN_AS_IS
#define in_i8 IN_AS_IS
#define in_u8 IN_AS_IS
#define in_bool IN_AS_IS
#define out_f64 OUT_AS_IS
#define out_f32 OUT_AS_IS
#define out_f16(T, v, p) STOREN(T, VEC, v, p, 0)
#define out_bf16(T, v, p) OUT_AS_IS(T, to_bf16_16(v), p)
#define out_i64 OUT_AS_IS
#define out_i32 OUT_AS_IS
#define out_i16 OUT_AS_IS
#define out_i8 OUT_AS_IS
#define out_u8 OUT_AS_IS
#define out_bool OUT_AS_IS
#else
#define WHOLE_IN(T, p) LOADN(T, VEC, p, 0)
#define WHOLE_OUT(T, v, p) STOREN(T, VEC, v, p, 0)
#endif

// ELEMENTS(T): a union of a vector and its elements.
#define ELEMENTS(T) union { V(T) whole; VAL(T) each[VEC]; }

// take_T: elements i .. i + count - 1 of a row as a vector; put_T: stores a vector there.
#define ACCESS(T) \
    static inline V(T) GLUE(take_, T)(__global const MEM(T) *row, const long i, const long step, const int count) \
    { \
        if (step == 1 && count == VEC) return WHOLE_IN(T, row + i); \
        if (step == 0) return (V(T))(LOAD(T, row, 0)); \
        ELEMENTS(T) elements; \
        for (int k = 0; k < VEC; k++) elements.each[k] = LOAD(T, row, (k < count ? i + k : i) * step); \
        return elements.whole; \
    } \
    static inline void GLUE(put_, T)( \
        const V(T) v, __global MEM(T) *row, const long i, const long step, const int count) \
    { \
        if (step == 1 && count == VEC) { \
            WHOLE_OUT(T, v, row + i); \
            return; \
        } \
        ELEMENTS(T) elements; \
        elements.whole = v; \
        for (int k = 0; k < count; k++) STORE(T, elements.each[k], row, (i + k) * step); \
    }

// The vectors of integers that comparisons of such vectors give, and that select takes.
#define mask_f64 long
#define mask_f32 int
#define mask_f16 int
#define mask_bf16 int
#define mask_i64 long
#define mask_i32 int
#define mask_i16 short
#define mask_i8 char
#define mask_u8 char
#define mask_bool char
#define MASK(T) GLUE(GLUE(mask_, T), VEC)

// Integers wrap around: where C leaves their overflow undefined they are computed with as unsigned ones, W(T, x).
#define wrap_f64 double
#define wrap_f32 float
#define wrap_f16 float
#define wrap_bf16 float
#define wrap_i64 ulong
#define wrap_i32 uint
#define wrap_i16 short
#define wrap_i8 char
#define wrap_u8 uchar
#define WRAP(T) GLUE(GLUE(wrap_, T), VEC)
#define W(T, x) CONVERT(WRAP(T))(x)

// Which elements of a vector are among its first ones.
#define NUMBERS_1 0
#define NUMBERS_2 0, 1
#define NUMBERS_4 NUMBERS_2, 2, 3
#define NUMBERS_8 NUMBERS_4, 4, 5, 6, 7
#define NUMBERS_16 NUMBERS_8, 8, 9, 10, 11, 12, 13, 14, 15
#define AMONG_FIRST(T, count) (CONVERT(MASK(T))((GLUE(char, VEC))(GLUE(NUMBERS_, VEC))) < (MASK(T))(count))

#endif
