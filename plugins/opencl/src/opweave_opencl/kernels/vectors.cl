// Vectors of 16 in the kernels of processors, which compute with the type of T; and their sums.
//
// PoCL calls vload16 as a function wherever a kernel is large, and puts all registers aside for it. A vector type that
// may lie at any element is loaded by one instruction. All processors' compilers are clang.
//
// Macros: T, a type of types.cl; DIRECT, whether its elements are what is computed with.

#ifndef VECTORS
#define VECTORS

typedef VALN(T, 16) Loose __attribute__((aligned(sizeof(VAL(T)))));

#if DIRECT
#define LOAD16(p) (*(__global const Loose *)(p))
#define STORE16(v, p) (*(__global Loose *)(p) = (v))
#else
#define LOAD16(p) LOADN(T, 16, p, 0)
#define STORE16(v, p) STOREN(T, 16, v, p, 0)
#endif

#define UNROLL __attribute__((opencl_unroll_hint))

// ``n`` elements of type ``type`` from ``from`` to ``to`` in local memory.
#define UNPACK(type, from, to, n) \
    do { \
        __global const MEM(type) *from_ = (from); \
        __local VAL(type) *to_ = (to); \
        int i_ = 0; \
        for (; i_ + 16 <= (n); i_ += 16) *(__local VALN(type, 16) *)(to_ + i_) = LOADN(type, 16, from_, i_); \
        for (; i_ < (n); i_++) to_[i_] = LOAD(type, from_, i_); \
    } while (0)

static inline VAL(T) lanes_sum(const VALN(T, 16) v)
{
    const VALN(T, 8) eight = v.lo + v.hi;
    const VALN(T, 4) four = eight.lo + eight.hi;
    const VALN(T, 2) two = four.lo + four.hi;
    return two.x + two.y;
}

#endif
