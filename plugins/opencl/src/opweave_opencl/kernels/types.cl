// Element types. Every other source includes this file, is built with names of opweave's types as macros, e.g. A=f16 and
// OUT=f32, and then says MEM(A), LOAD(A, p, i) and so on, whatever the types are.
//
//   MEM(T)                        an element as it lies in memory: __global const MEM(A) *a
//   VAL(T), VALN(T, n)            what an element, or n of them, are to compute with: float for f16 and bf16
//   LOAD(T, p, i)                 element i of p
//   STORE(T, v, p, i)             v, rounded to nearest, as element i of p
//   LOADN(T, n, p, i)             elements i .. i + n - 1; n is 1, 2, 4, 8 or 16, perhaps by a macro
//   STOREN(T, n, v, p, i)
//   TO(T, v), TON(T, n, v)        v as VAL(T), VALN(T, n); floats become integers towards zero
//   ROUND(T, v), ROUNDN(T, n, v)  v as it comes back after it was stored as T
//
// Memory may be global, local or private. VALN(T, 1) is VAL(T). Beside opweave's types there are w8 w16 w32 w64: words
// that are only moved, whatever they mean.

#ifndef TYPES
#define TYPES

#ifdef cl_khr_fp64
#pragma OPENCL EXTENSION cl_khr_fp64 : enable
#endif

// Of kernels that processors run in groups of one work-item: compilers are not to put several work-items into a vector. Intel's
// compiler tries that otherwise, which takes up to 30 times as long as the rest.
#define UNVECTORIZED __attribute__((vec_type_hint(float16)))

#define GLUE_(a, b) a##b
#define GLUE(a, b) GLUE_(a, b)

#define MEM(T) GLUE(mem_, T)
#define VAL(T) GLUE(val_, T)
#define VALN(T, n) GLUE(VAL(T), n)
#define LOAD(T, p, i) LOADN(T, 1, p, i)
#define STORE(T, v, p, i) STOREN(T, 1, v, p, i)
#define LOADN(T, n, p, i) GLUE(load_, T)(n, p, i)
#define STOREN(T, n, v, p, i) GLUE(store_, T)(n, v, p, i)
#define TO(T, v) TON(T, 1, v)
#define TON(T, n, v) CONVERT(VALN(T, n))(v)
#define ROUND(T, v) ROUNDN(T, 1, v)
#define ROUNDN(T, n, v) GLUE(round_, T)(n, v)

// Names of built-in functions are pasted here only: drivers may make macros of the whole names.
#define CONVERT_(type) convert_##type
#define CONVERT(type) CONVERT_(type)
#define AS_(type) as_##type
#define AS(type) AS_(type)
#define VLOAD_(n) vload##n
#define VLOAD(n) VLOAD_(n)
#define VSTORE_(n) vstore##n
#define VSTORE(n) VSTORE_(n)
#define VLOAD_HALF_(n) vload_half##n
#define VLOAD_HALF(n) VLOAD_HALF_(n)
#define VSTORE_HALF_(n) vstore_half##n##_rte
#define VSTORE_HALF(n) VSTORE_HALF_(n)

// One element is a vector of one.
#define char1 char
#define uchar1 uchar
#define short1 short
#define ushort1 ushort
#define int1 int
#define uint1 uint
#define long1 long
#define ulong1 ulong
#define float1 float
#define double1 double
#define vload1(i, p) ((p)[i])
#define vstore1(v, i, p) ((p)[i] = (v))
#define vload_half1(i, p) vload_half(i, p)
#define vstore_half1_rte(v, i, p) vstore_half_rte(v, i, p)

#define LOAD_AS_IS(n, p, i) VLOAD(n)(0, (p) + (i))
#define STORE_AS_IS(n, v, p, i) VSTORE(n)(v, 0, (p) + (i))
#define SAME(n, v) (v)

#define mem_f64 double
#define val_f64 double
#define load_f64 LOAD_AS_IS
#define store_f64 STORE_AS_IS
#define round_f64 SAME

#define mem_f32 float
#define val_f32 float
#define load_f32 LOAD_AS_IS
#define store_f32 STORE_AS_IS
#define round_f32 SAME

// The conversions of the core language, which need no extension.
#define mem_f16 half
#define val_f16 float
#define load_f16(n, p, i) VLOAD_HALF(n)(0, (p) + (i))
#define store_f16(n, v, p, i) VSTORE_HALF(n)(v, 0, (p) + (i))
#define round_f16(n, v) GLUE(half_and_back, n)(v)

// The upper half of a float.
#define mem_bf16 ushort
#define val_bf16 float
#define load_bf16(n, p, i) GLUE(from_bf16_, n)(LOAD_AS_IS(n, p, i))
#define store_bf16(n, v, p, i) STORE_AS_IS(n, GLUE(to_bf16_, n)(v), p, i)
#define round_bf16(n, v) GLUE(from_bf16_, n)(GLUE(to_bf16_, n)(v))

#define mem_i64 long
#define val_i64 long
#define load_i64 LOAD_AS_IS
#define store_i64 STORE_AS_IS
#define round_i64 SAME

#define mem_i32 int
#define val_i32 int
#define load_i32 LOAD_AS_IS
#define store_i32 STORE_AS_IS
#define round_i32 SAME

#define mem_i16 short
#define val_i16 short
#define load_i16 LOAD_AS_IS
#define store_i16 STORE_AS_IS
#define round_i16 SAME

#define mem_i8 char
#define val_i8 char
#define load_i8 LOAD_AS_IS
#define store_i8 STORE_AS_IS
#define round_i8 SAME

#define mem_u8 uchar
#define val_u8 uchar
#define load_u8 LOAD_AS_IS
#define store_u8 STORE_AS_IS
#define round_u8 SAME

#define mem_bool uchar
#define val_bool uchar
#define load_bool LOAD_AS_IS
#define store_bool STORE_AS_IS
#define round_bool SAME

#define mem_w64 ulong
#define val_w64 ulong
#define load_w64 LOAD_AS_IS
#define store_w64 STORE_AS_IS

#define mem_w32 uint
#define val_w32 uint
#define load_w32 LOAD_AS_IS
#define store_w32 STORE_AS_IS

#define mem_w16 ushort
#define val_w16 ushort
#define load_w16 LOAD_AS_IS
#define store_w16 STORE_AS_IS

#define mem_w8 uchar
#define val_w8 uchar
#define load_w8 LOAD_AS_IS
#define store_w8 STORE_AS_IS

// bfloat16 is rounded to nearest, ties to even. A NaN keeps its upper bits, and the highest
// of its fraction is set, because the others may be 0.
#define HALF_TYPES(n, floats, uints, ushorts) \
    static inline floats from_bf16_##n(const ushorts bits) { return AS(floats)(CONVERT(uints)(bits) << 16); } \
    static inline ushorts to_bf16_##n(const floats v) \
    { \
        const uints bits = AS(uints)(v); \
        const uints nearest = bits + 0x7fffu + ((bits >> 16) & 1u); \
        return CONVERT(ushorts)((v != v ? bits | 0x400000u : nearest) >> 16); \
    } \
    static inline floats half_and_back##n(const floats v) \
    { \
        ushort memory[n]; \
        store_f16(n, v, (half *)memory, 0); \
        return load_f16(n, (half *)memory, 0); \
    }

HALF_TYPES(1, float, uint, ushort)
HALF_TYPES(2, float2, uint2, ushort2)
HALF_TYPES(4, float4, uint4, ushort4)
HALF_TYPES(8, float8, uint8, ushort8)
HALF_TYPES(16, float16, uint16, ushort16)

#endif
