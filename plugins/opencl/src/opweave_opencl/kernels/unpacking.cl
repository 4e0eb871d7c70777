// Blocks of the types q2_k to q6_k unpacked for processors: to bytes, and to floats that scale them, in local memory. One instruction
// then moves the bit fields of 64 weights, and scales are read from memory. When 16 weights are unpacked at a time, as
// decode does it, moving elements between lanes takes longer than the arithmetic.
//
// Macros: BLOCKS_<name>, as blocks.cl, which comes before, as does vectors.cl; INTEGERS, whether smaller blocks are
// unpacked, too, for products of their integers. UNPACKED is defined for types with such blocks:
//   unpack(block, to)      a block as an Unpacked
//   unpacked(from, part)   elements 16 * part .. 16 * part + 15 of it; ``part`` is a constant. They are made of
//                          levels_of(from, part), q, and of SCALE_OF(from, part) and OFFSET_OF(from, part).
//   unpack_row(block, to, n, ready)
//
// Where fields lie, and the order of the arithmetic, are those of decode.

#if defined(BLOCKS_q2_k) || defined(BLOCKS_q3_k) || defined(BLOCKS_q4_k) || defined(BLOCKS_q5_k) || \
    defined(BLOCKS_q6_k) || defined(INTEGERS)
#define UNPACKED

// Elements are scale · q for signed q, or scale · q - offset; SHARING parts have one scale. Offsets lie behind the scales.
#if defined(BLOCKS_q3_k) || defined(BLOCKS_q6_k) || defined(BLOCKS_q4_0) || defined(BLOCKS_q5_0) || defined(BLOCKS_q8_0)
#define Q char
#else
#define Q uchar
#define OFFSETS
#endif
#if defined(BLOCKS_q2_k) || defined(BLOCKS_q3_k) || defined(BLOCKS_q6_k)
#define SHARING 1
#else
#define SHARING 2
#endif

typedef struct {
    Q q[COUNT];
    float scales[COUNT == 32 ? 8 : 32];
} Unpacked __attribute__((aligned(64)));

static inline float16 levels_of(__local const Unpacked *from, const int part)
{
    return CONVERT(float16)(*(__local const GLUE(Q, 16) *)(from->q + 16 * part));
}
#define SCALE_OF(from, part) ((from)->scales[(part) / SHARING])
#define OFFSET_OF(from, part) ((from)->scales[(PARTS + (part)) / SHARING])

static inline float16 unpacked(__local const Unpacked *from, const int part)
{
    const float16 q = levels_of(from, part);
    const float scale = SCALE_OF(from, part);
#ifdef OFFSETS
    return scale * q - OFFSET_OF(from, part);
#else
    return scale * q;
#endif
}

typedef uint16 Bytes64 __attribute__((aligned(1)));
typedef uint8 Bytes32 __attribute__((aligned(1)));
typedef uint Bytes4 __attribute__((aligned(1)));
#define BYTES64(p) (*(__global const Bytes64 *)(p))
#define TWICE32(p) (uint16)(*(__global const Bytes32 *)(p), *(__global const Bytes32 *)(p))
#define BYTES4(p) (*(__global const Bytes4 *)(p))

// Bits of every byte: moved to the right, then those of ``mask``.
#define FIELDS(bytes, right, mask) ((bytes) >> (right) & 0x01010101u * (mask))

// The same of 64 bytes, of which the second half is moved further by ``step``; to the left if ``right`` is negative.
#define BY(first, second) (uint16)((uint8)(first), (uint8)(second))
#define FIELDS64(bytes, right, step, mask) \
    (((right) < 0 ? (bytes) << BY(-(right), -(right) - (step)) : (bytes) >> BY(right, (right) + (step))) & \
     0x01010101u * (mask))

typedef char Chars64 __attribute__((ext_vector_type(64)));
#define MINUS(bytes, less) __builtin_astype(__builtin_astype(bytes, Chars64) - (char)(less), uint16)

#if COUNT == 32
// The integers of half a block.
static inline short16 integers(__global const uchar *b, const int half_)
{
#ifdef BLOCKS_q8_0
    return convert_short16(CHARS16(b + 2 + 16 * half_));
#else
    const uchar16 both = BYTES16(b + BYTES - 16);
    const short16 low = convert_short16(half_ ? both >> (uchar)4 : both & (uchar)15);
#if defined(BLOCKS_q4_0)
    return low - (short)8;
#elif defined(BLOCKS_q4_1)
    return low;
#elif defined(BLOCKS_q5_0)
    return (low | convert_short16(sixteen_bits(b + 2 + 2 * half_))) - (short)16;
#else
    return low | convert_short16(sixteen_bits(b + 4 + 2 * half_));
#endif
#endif
}
#endif

static inline void unpack(__global const uchar *b, __local Unpacked *to)
{
    __local float16 *scales = (__local float16 *)to->scales;
    __local uint16 *q = (__local uint16 *)to->q;

#if defined(BLOCKS_q2_k)
    const uchar16 both = BYTES16(b);
    scales[0] = last_half(b + 80) * convert_float16(both & (uchar)15);
    scales[1] = last_half(b + 82) * convert_float16(both >> (uchar)4);
    UNROLL for (int i = 0; i < 4; i++) q[i] = FIELDS64(TWICE32(b + 16 + i / 2 * 32), i % 2 * 4, 2, 3);

#elif defined(BLOCKS_q3_k)
    const uint one = BYTES4(b + 96), two = BYTES4(b + 100), high = BYTES4(b + 104);
    const uint4 fours = FIELDS((uint4)(one, two, one, two), (uint4)(0, 0, 4, 4), 15);
    const uint4 pairs = FIELDS((uint4)high, (uint4)(0, 2, 4, 6), 3) << 4;
    scales[0] = last_half(b + 108) * convert_float16(as_char16(fours | pairs) - (char)32);
    UNROLL for (int i = 0; i < 4; i++)
    {
        const uint16 low = FIELDS64(TWICE32(b + 32 + i / 2 * 32), i % 2 * 4, 2, 3);
        q[i] = MINUS(low | FIELDS64(TWICE32(b), 2 * i - 2, 1, 4), 4);
    }

#elif defined(BLOCKS_q6_k)
    scales[0] = last_half(b + 208) * convert_float16(CHARS16(b + 192));
    UNROLL for (int i = 0; i < 4; i++)
    {
        const uint16 low = FIELDS(BYTES64(b + i / 2 * 64), i % 2 * 4, 15);
        q[i] = MINUS(low | FIELDS64(TWICE32(b + 128 + i / 2 * 32), i % 2 * 4 - 4, 2, 48), 32);
    }

#elif COUNT == 32
    to->scales[0] = half_at(b);
#ifdef OFFSETS
    to->scales[1] = -half_at(b + 2);
#endif
    UNROLL for (int i = 0; i < 2; i++) ((__local uchar16 *)q)[i] = as_uchar16(convert_char16(integers(b, i)));

#else
    const uint4 head = as_uint4(BYTES16(b));
    const uint4 low = FIELDS(head.s1323, (uint4)(0, 0, 0, 4), (uint4)(63, 15, 63, 15));
    const uint4 high = FIELDS(head.s1122, 2, (uint4)(0, 48, 0, 48));
    const float8 scale = half_at(b), offset = half_at(b + 2);
    scales[0] = (float16)(scale, offset) * convert_float16(as_uchar16(low | high));
    UNROLL for (int i = 0; i < 4; i++)
    {
#ifdef BLOCKS_q4_k
        q[i] = FIELDS64(TWICE32(b + 16 + i * 32), 0, 4, 15);
#else
        q[i] = FIELDS64(TWICE32(b + 48 + i * 32), 0, 4, 15) | FIELDS64(TWICE32(b + 16), 2 * i - 4, 1, 16);
#endif
    }
#endif
}

// decode_row by way of ``ready``, which holds as many blocks.
static inline void unpack_row(__global const uchar *b, __local float *to, const int n, __local Unpacked *ready)
{
    const int blocks = n / COUNT;
    for (int i = 0; i < blocks; i++, b += BYTES) {
        FETCH_AHEAD(b);
        unpack(b, &ready[i]);
    }
    for (int i = 0; i < blocks; i++)
        UNROLL for (int part = 0; part < PARTS; part++, to += 16)
            *(__local float16 *)to = unpacked(&ready[i], part);
}
#endif
