// Quantized blocks in the public GGUF layout: BYTES bytes hold COUNT consecutive elements of a row.
//
// Macros: BLOCKS_<name>, the type; CODEBOOK, the numbers of the levels of its codebook, if it has one.
//   decode(block, part)        elements 16 * part .. 16 * part + 15 of a block; fastest where ``part`` is a constant
//   decode_row(block, to, n)   the first n elements of a row of blocks, into local memory
// ONE_SCALE is defined for types whose blocks have one scale and no offset; decode is the product of
//   scale_of(block)            the scale, 16 times
//   quants(block, part)        what it multiplies
//
// Wherever there are two ways to order the arithmetic, it is that of opweave's reference, which is that of gguf.

#define PARTS (COUNT / 16)

// Blocks may begin at any byte.
typedef uchar16 Bytes16 __attribute__((aligned(1)));
typedef char16 Chars16 __attribute__((aligned(1)));
#ifdef __clang__
typedef ushort Bytes2 __attribute__((aligned(1)));
#define BYTES2(p) (*(__global const Bytes2 *)(p))
#define BYTES16(p) (*(__global const Bytes16 *)(p))
#define CHARS16(p) (*(__global const Chars16 *)(p))
#else
#define BYTES2(p) ((p)[0] | (p)[1] << 8)
#define BYTES16(p) vload16(0, p)
#define CHARS16(p) vload16(0, (__global const char *)(p))
#endif

// Prefetches a block to the first cache, by default two pages ahead. Decoding takes so many instructions for each byte that
// processors do not see the next cache misses in time, and what they prefetch by themselves ends with a page.
#ifdef __clang__
#define FETCH(block) \
    __attribute__((opencl_unroll_hint)) for (int i_ = 0; i_ < BYTES; i_ += 64) __builtin_prefetch((block) + i_, 0, 3);
#else
#define FETCH(block)
#endif
#define FETCH_AHEAD(block) FETCH((block) + 8192)

// The f16 in the upper half of a word: shifted to the bits of a float, which is 2^-112 of it, and given its exponent; those
// of infinities and NaN become the largest beforehand. No branches and only integers, because each block waits for it.
static inline int small_above(const int word)
{
    const int shifted = word >> 3 & (int)0x8fffe000, largest = (0x0f7fffff - (shifted & 0x0fffffff)) >> 31 & 0x7f800000;
    return shifted | largest;
}
static inline float half_above(const int word) { return as_float(small_above(word)) * 0x1p112f; }

// The f16 at ``p``: half_at may read the six bytes behind it, last_half the six before it. halves_at is half_at 16 times.
#ifdef __x86_64__
// For compilers that know the processor; PoCL calls a function for vload_half. The vector takes fewer instructions than to
// multiply one float and repeat it.
static inline float half_at(__global const uchar *p) { return half_above(BYTES2(p) << 16); }
static inline float16 halves_at(__global const uchar *p)
{
    return as_float16((int16)small_above(BYTES2(p) << 16)) * 0x1p112f;
}
#define last_half half_at
#else
// One instruction converts four. Intel's compiler puts a single one into any register, perhaps that of a sum, which the
// conversion then waits for. Blocks with an f16 have an even number of bytes.
#define HALVES4(p) vload_half4(0, (__global const half *)(p))
static inline float half_at(__global const uchar *p) { return HALVES4(p).x; }
static inline float last_half(__global const uchar *p) { return HALVES4(p - 6).w; }
static inline float16 halves_at(__global const uchar *p) { return (float16)half_at(p); }
#endif

// Low halves of 16 bytes, or high halves.
static inline int16 nibbles(const uchar16 bytes, const int high)
{
    const int16 wide = convert_int16(bytes);
    return high ? wide >> 4 : wide & 15;
}

#define SIXTEEN (float16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
#ifdef __AVX512F__ // only processors' compilers, all of them clang, say so
#if __has_builtin(__builtin_ia32_permvarsf512)
// One instruction permutes 16 floats: what the lowest four bits of q mean is looked up in a register.
#define PICK(levels, q) __builtin_ia32_permvarsf512(levels, q)
#endif
#endif

// Low halves of 16 bytes, or high halves, minus a constant, as floats. Without PICK four bits become the lowest bits of the
// fraction of 2^23, or of 2^19 where they lie four bits higher.
static inline float16 nibbles_less(const uchar16 bytes, const int high, const float less)
{
    const int16 wide = convert_int16(bytes);
#ifdef PICK
    return PICK(SIXTEEN - less, high ? wide >> 4 : wide);
#else
    return high ? as_float16((wide & 0xf0) | 0x49000000) - (0x1p19f + less)
                : as_float16((wide & 15) | 0x4b000000) - (0x1p23f + less);
#endif
}

// scale · q - offset for q of four bits.
static inline float16 scaled(const float scale, const float offset, const int16 q)
{
#ifdef PICK
    const float16 levels = scale * SIXTEEN - offset;
    return PICK(levels, q);
#else
    return scale * convert_float16(q) - offset;
#endif
}

// scale · (q - centre) for q of four bits.
static inline float16 centred(const float scale, const float centre, const int16 q)
{
#ifdef PICK
    const float16 levels = scale * (SIXTEEN - centre);
    return PICK(levels, q);
#else
    return scale * (convert_float16(q) - centre);
#endif
}

// 16 consecutive bits as 0 or 16, the lowest of the first byte first.
static inline int16 sixteen_bits(__global const uchar *p)
{
    const int bits = (p[0] | p[1] << 8) << 4;
    return ((int16)bits >> (int16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)) & 16;
}

#if defined(BLOCKS_iq4_nl) || defined(BLOCKS_iq4_xs)
__constant float levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static inline float16 levelled(const float scale, const int16 q)
{
#ifdef PICK
    return PICK(scale * vload16(0, levels), q);
#else
    return scale * (float16)(
        levels[q.s0], levels[q.s1], levels[q.s2], levels[q.s3], levels[q.s4], levels[q.s5], levels[q.s6], levels[q.s7],
        levels[q.s8], levels[q.s9], levels[q.sa], levels[q.sb], levels[q.sc], levels[q.sd], levels[q.se], levels[q.sf]);
#endif
}
#endif

// Twice the values of E2M1: 0 1 2 3, then 4 6, then 8 12, and the sign above.
static inline float16 doubled_e2m1(const int16 q)
{
    const int16 size = q & 7, step = q & 1;
    const int16 doubled = size < 4 ? size : size < 6 ? 4 + 2 * step : 8 + 4 * step;
    return as_float16(as_int16(convert_float16(doubled)) | (q & 8) << 28);
}

#if defined(BLOCKS_q4_0)
#define BYTES 18
#define COUNT 32
#define ONE_SCALE
#define scale_of halves_at
static inline float16 quants(__global const uchar *b, const int part)
{
    return nibbles_less(BYTES16(b + 2), part, 8.0f);
}

#elif defined(BLOCKS_q4_1)
#define BYTES 20
#define COUNT 32
static inline float16 decode(__global const uchar *b, const int part)
{
#ifdef PICK
    return scaled(half_at(b), -half_at(b + 2), nibbles(BYTES16(b + 4), part));
#else
    return half_at(b) * nibbles_less(BYTES16(b + 4), part, 0.0f) + half_at(b + 2);
#endif
}

#elif defined(BLOCKS_q5_0)
#define BYTES 22
#define COUNT 32
#define ONE_SCALE
#define scale_of halves_at
static inline float16 quants(__global const uchar *b, const int part)
{
    return convert_float16(nibbles(BYTES16(b + 6), part) | sixteen_bits(b + 2 + 2 * part)) - 16.0f;
}

#elif defined(BLOCKS_q5_1)
#define BYTES 24
#define COUNT 32
static inline float16 decode(__global const uchar *b, const int part)
{
    const int16 q = nibbles(BYTES16(b + 8), part) | sixteen_bits(b + 4 + 2 * part);
    return half_at(b) * convert_float16(q) + half_at(b + 2);
}

#elif defined(BLOCKS_q8_0)
#define BYTES 34
#define COUNT 32
#define ONE_SCALE
#define scale_of halves_at
static inline float16 quants(__global const uchar *b, const int part)
{
    return convert_float16(CHARS16(b + 2 + 16 * part));
}

#elif defined(BLOCKS_iq4_nl)
#define BYTES 18
#define COUNT 32
#define ONE_SCALE
#define scale_of halves_at
static inline float16 quants(__global const uchar *b, const int part)
{
    return levelled(1.0f, nibbles(BYTES16(b + 2), part));
}

#elif defined(BLOCKS_mxfp4)
#define BYTES 17
#define COUNT 32
#define ONE_SCALE
// The scale is an exponent, 127 is 1.
#define scale_of(b) (float16)(b[0] < 2 ? as_float(0x00200000u << b[0]) : as_float((uint)(b[0] - 1) << 23))
static inline float16 quants(__global const uchar *b, const int part)
{
    return doubled_e2m1(nibbles(BYTES16(b + 1), part));
}

#elif defined(BLOCKS_nvfp4)
#define BYTES 36
#define COUNT 64
static inline float16 decode(__global const uchar *b, const int part)
{
    // Four scales of 4 exponent and 3 mantissa bits, of which all set are 0; then 8 bytes for each.
    const int code = b[part], exponent = code >> 3 & 15;
    const float scale = exponent ? as_float((exponent + 119) << 23 | (code & 7) << 20) : 0x1p-10f * (code & 7);
    const uchar8 bytes = vload8(0, b + 4 + 8 * part);
    return (code == 127 ? 0.0f : scale) * doubled_e2m1(convert_int16((uchar16)(bytes & (uchar8)15, bytes >> (uchar8)4)));
}

#elif defined(BLOCKS_q2_k)
#define BYTES 84
#define COUNT 256
static inline float16 decode(__global const uchar *b, const int part)
{
    // 16 scales, 2-bit fields of two times 32 bytes, f16 scale and offset
    const int16 q = convert_int16(BYTES16(b + 16 + part / 8 * 32 + part % 2 * 16)) >> part % 8 / 2 * 2 & 3;
    return scaled(last_half(b + 80) * (b[part] & 15), last_half(b + 82) * (b[part] >> 4), q);
}

#elif defined(BLOCKS_q3_k)
#define BYTES 110
#define COUNT 256
static inline float16 decode(__global const uchar *b, const int part)
{
    // third bits, inverted, of 32 bytes; 2-bit fields of two times 32 bytes; 16 scales of 6 bits in 12 bytes; f16 scale
    const int16 low = convert_int16(BYTES16(b + 32 + part / 8 * 32 + part % 2 * 16)) >> part % 8 / 2 * 2 & 3;
    const int16 third = convert_int16(BYTES16(b + part % 2 * 16)) >> part / 2 & 1;
    const int four = part < 8 ? b[96 + part] & 15 : b[96 + part - 8] >> 4;
    const int six = four | (b[104 + part % 4] >> part / 4 * 2 & 3) << 4;
    return centred(last_half(b + 108) * (six - 32), 4.0f, low | third << 2);
}

#elif defined(BLOCKS_q4_k) || defined(BLOCKS_q5_k)
#define COUNT 256
// The eight scales and eight offsets of 6 bits are in the 12 bytes after the two f16 that scale them.
#define SCALE(b, eighth) \
    (half_at(b) * ((eighth) < 4 ? (b)[4 + (eighth)] & 63 : ((b)[8 + (eighth)] & 15) | (b)[(eighth)] >> 6 << 4))
#define OFFSET(b, eighth) \
    (half_at((b) + 2) * ((eighth) < 4 ? (b)[8 + (eighth)] & 63 : (b)[8 + (eighth)] >> 4 | (b)[4 + (eighth)] >> 6 << 4))

#ifdef BLOCKS_q4_k
#define BYTES 144
static inline float16 decode(__global const uchar *b, const int part)
{
    const int16 q = nibbles(BYTES16(b + 16 + part / 4 * 32 + part % 2 * 16), part / 2 % 2);
    return scaled(SCALE(b, part / 2), OFFSET(b, part / 2), q);
}
#else
#define BYTES 176
static inline float16 decode(__global const uchar *b, const int part)
{
    const int16 low = nibbles(BYTES16(b + 48 + part / 4 * 32 + part % 2 * 16), part / 2 % 2);
    const int16 fifth = convert_int16(BYTES16(b + 16 + part % 2 * 16)) >> part / 2 & 1;
    return SCALE(b, part / 2) * convert_float16(low | fifth << 4) - OFFSET(b, part / 2);
}
#endif

#elif defined(BLOCKS_q6_k)
#define BYTES 210
#define COUNT 256
static inline float16 decode(__global const uchar *b, const int part)
{
    // low halves of two times 64 bytes, 2-bit fields of two times 32 bytes, 16 signed scales, f16 scale
    const int16 low = nibbles(BYTES16(b + part / 8 * 64 + part % 4 * 16), part % 8 / 4);
    const int16 high = convert_int16(BYTES16(b + 128 + part / 8 * 32 + part % 2 * 16)) >> part % 8 / 2 * 2 & 3;
    return last_half(b + 208) * (char)b[192 + part] * convert_float16((low | high << 4) - 32);
}

#elif defined(BLOCKS_iq4_xs)
#define BYTES 136
#define COUNT 256
static inline float16 decode(__global const uchar *b, const int part)
{
    // f16 scale; eight scales of 6 bits, two bits each in a word, four in the halves of four bytes
    const int eighth = part / 2, high = (b[2] | b[3] << 8) >> 2 * eighth & 3, low = b[4 + part / 4] >> eighth % 2 * 4;
    return levelled(half_at(b) * (((low & 15) | high << 4) - 32), nibbles(BYTES16(b + 8 + 16 * eighth), part % 2));
}

#elif defined(BLOCKS_tq1_0)
#define BYTES 54
#define COUNT 256
static inline float16 decode(__global const uchar *b, const int part)
{
    // A byte is a fraction of 256 with five digits in base 3, of which the last four bytes have four: first those of 32
    // bytes, all first digits, all second ones, ...; then those of 16; then those of 4.
    uchar16 fraction;
    if (part == 15) {
        const uchar4 last = vload4(0, b + 48);
        fraction = (uchar16)(last, last * (uchar4)3, last * (uchar4)9, last * (uchar4)27);
    }
    else {
        const int digit = part < 10 ? part / 2 : part - 10;
        const uchar power = digit == 0 ? 1 : digit == 1 ? 3 : digit == 2 ? 9 : digit == 3 ? 27 : 81;
        fraction = BYTES16(b + (part < 10 ? part % 2 * 16 : 32)) * (uchar16)power;
    }
    return last_half(b + 52) * convert_float16((convert_int16(fraction) * 3 >> 8) - 1);
}

#elif defined(BLOCKS_tq2_0)
#define BYTES 66
#define COUNT 256
static inline float16 decode(__global const uchar *b, const int part)
{
    const int16 q = convert_int16(BYTES16(b + part / 8 * 32 + part % 2 * 16)) >> part % 8 / 2 * 2 & 3;
    return last_half(b + 64) * convert_float16(q - 1);
}

#elif defined(CODEBOOK)
#include "codebook_blocks.cl"
#endif

#ifdef ONE_SCALE
static inline float16 decode(__global const uchar *b, const int part) { return scale_of(b) * quants(b, part); }
#endif

static inline void decode_row(__global const uchar *b, __local float *to, const int n)
{
    for (int i = 0; i < n; i += COUNT, b += BYTES) {
        FETCH_AHEAD(b);
        // All of a block before any of it is stored: the compiler cannot know that ``to`` is not the block.
        __attribute__((opencl_unroll_hint)) for (int part = 0; part < PARTS; part += 2)
        {
            const float16 one = decode(b, part), two = decode(b, part + 1);
            *(__local float16 *)(to + i + 16 * part) = one;
            *(__local float16 *)(to + i + 16 * part + 16) = two;
        }
    }
}
