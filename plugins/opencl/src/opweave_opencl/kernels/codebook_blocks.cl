// Blocks that hold indices into a codebook for 4 or 8 elements each, and signs apart. Included by blocks.cl.

#define COUNT 256

// An entry has two bits for each of 8 elements, of iq3 three bits for each of 4; the first element lowest.
__constant ushort codebook[] = {CODEBOOK};

static inline uint word_at(__global const uchar *p) { return p[0] | p[1] << 8 | p[2] << 16 | (uint)p[3] << 24; }
static inline int short_at(__global const uchar *p) { return p[0] | p[1] << 8; }

// 16 fields of two bits, lowest first.
static inline int16 pairs(const int first, const int second)
{
    const int bits = codebook[first] | codebook[second] << 16;
    return (int16)bits >> (int16)(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) & 3;
}

// 16 fields of three bits, of four entries.
static inline int16 triples(const int4 i)
{
    const int16 entries = (int16)((int4)codebook[i.x], (int4)codebook[i.y], (int4)codebook[i.z], (int4)codebook[i.w]);
    return entries >> (int16)(0, 3, 6, 9, 0, 3, 6, 9, 0, 3, 6, 9, 0, 3, 6, 9) & 7;
}

// The values, negated where a bit of ``signs`` is set, the lowest first.
static inline float16 negated(const int16 values, const int signs)
{
    const int16 bits = (int16)signs >> (int16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15) & 1;
    return convert_float16(values * (1 - 2 * bits));
}

// The signs of 16 values by two times 7 bits: the eighth of each makes their number even.
static inline int even(const int first, const int second)
{
    return first | (popcount(first) & 1) << 7 | second << 8 | (popcount(second) & 1) << 15;
}

#define HALF_OF(byte, second) ((byte) >> (second) * 4 & 15)

#if defined(BLOCKS_iq1_s) || defined(BLOCKS_iq1_m)

// Levels -1, 0, 1 and a shift by 1/8 for each 8 elements, down where its bit is set.
static inline float16 shifted(const int16 q, const int first, const int second)
{
    const float16 shift = (float16)((float8)(first ? -0.125f : 0.125f), (float8)(second ? -0.125f : 0.125f));
    return convert_float16(q - 1) + shift;
}

#ifdef BLOCKS_iq1_s
#define BYTES 50
static inline float16 decode(__global const uchar *b, const int part)
{
    // f16 scale, 32 indices, 8 words: four times 3 bits above indices, a scale, the sign of the shift
    __global const uchar *q = b + 2 + 2 * part;
    const int word = short_at(b + 34 + part / 2 * 2), high = word >> part % 2 * 6;
    const int16 levels = pairs(q[0] | (high & 7) << 8, q[1] | (high >> 3 & 7) << 8);
    return half_at(b) * (2 * (word >> 12 & 7) + 1) * shifted(levels, word >> 15, word >> 15);
}
#else
#define BYTES 56
static inline float16 decode(__global const uchar *b, const int part)
{
    // 32 indices, 16 bytes: two times 3 bits above indices and the sign of the shift; 4 words: four scales each, and a
    // quarter of the f16 scale above
    __global const uchar *q = b + 2 * part, *s = b + 48;
    const int high = b[32 + part], scale = short_at(s + part / 4 * 2) >> part % 4 * 3 & 7;
    const int bits = s[1] >> 4 | (s[3] & 0xf0) | (s[5] & 0xf0) << 4 | (s[7] & 0xf0) << 8;
    const int16 levels = pairs(q[0] | (high & 7) << 8, q[1] | (high >> 4 & 7) << 8);
    return half_above(bits << 16) * (2 * scale + 1) * shifted(levels, high & 8, high & 128);
}
#endif

#elif defined(BLOCKS_iq3_xxs)
#define BYTES 98
static inline float16 decode(__global const uchar *b, const int part)
{
    // f16 scale, 64 indices, 8 words: four times 7 bits of signs, and a scale
    const uint word = word_at(b + 66 + part / 2 * 4), signs = word >> part % 2 * 14;
    const int16 q = triples(convert_int4(vload4(0, b + 2 + 4 * part)));
    const float scale = half_at(b) * (0.5f + (word >> 28)) * 0.5f;
    // 4, 12, 20, ..., 52, 62
    return scale * negated(4 + 8 * q + 2 * (q / 7), even(signs & 127, signs >> 7 & 127));
}

#elif defined(BLOCKS_iq3_s)
#define BYTES 110
static inline float16 decode(__global const uchar *b, const int part)
{
    // f16 scale, 64 indices, a bit above each, 32 bytes of signs, 8 scales
    const int4 high = (int4)(b[66 + part / 2] >> part % 2 * 4) >> (int4)(0, 1, 2, 3) & 1;
    const int16 q = triples(convert_int4(vload4(0, b + 2 + 4 * part)) | high << 8);
    const float scale = half_at(b) * (1 + 2 * HALF_OF(b[106 + part / 4], part / 2 % 2));
    return scale * negated(2 * q + 1, short_at(b + 74 + 2 * part));
}

#else

// Levels 8, 25, 43.
static inline int16 level(const int16 q) { return 8 + 17 * q + (q >> 1); }

#if defined(BLOCKS_iq2_xxs)
#define BYTES 66
static inline float16 decode(__global const uchar *b, const int part)
{
    // f16 scale; for 32 elements 4 indices and a word: four times 7 bits of signs, and a scale
    __global const uchar *q = b + 2 + part / 2 * 8;
    const uint word = word_at(q + 4), signs = word >> part % 2 * 14;
    const int16 levels = level(pairs(q[part % 2 * 2], q[part % 2 * 2 + 1]));
    return half_at(b) * (0.5f + (word >> 28)) * 0.25f * negated(levels, even(signs & 127, signs >> 7 & 127));
}

#elif defined(BLOCKS_iq2_xs)
#define BYTES 74
static inline float16 decode(__global const uchar *b, const int part)
{
    // f16 scale; 32 words of an index of 9 bits and 7 bits of signs; 16 scales
    const int first = short_at(b + 2 + 4 * part), second = short_at(b + 4 + 4 * part);
    const float scale = half_at(b) * (0.5f + HALF_OF(b[66 + part / 2], part % 2)) * 0.25f;
    return scale * negated(level(pairs(first & 511, second & 511)), even(first >> 9, second >> 9));
}

#else
#define BYTES 82
static inline float16 decode(__global const uchar *b, const int part)
{
    // f16 scale, 32 indices, 32 bytes of signs, two bits above each index, 16 scales
    const int high = b[66 + part / 2] >> part % 2 * 4;
    const int16 q = pairs(b[2 + 2 * part] | (high & 3) << 8, b[3 + 2 * part] | (high >> 2 & 3) << 8);
    const float scale = half_at(b) * (0.5f + HALF_OF(b[74 + part / 2], part % 2)) * 0.25f;
    return scale * negated(level(q), short_at(b + 34 + 2 * part));
}
#endif
#endif
