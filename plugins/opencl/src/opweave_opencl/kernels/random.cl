// Random numbers, one block of four words for each work-item: Philox4x32-10 (Salmon et al., 2011), as
// `opweave.ops.random.philox` defines it. Macros: T; WIDE, whether it is f64; NORMAL, whether numbers are normal, else uniform;
// DIGITS of uniform ones.

#include "types.cl"

typedef struct {
    long blocks, size, offset[3]; // blocks of out, elements of out; of out, key, counter
} Params;

#define EACH (WIDE ? 2 : 4)

static inline uint4 philox(const ulong key, const ulong counter, const ulong block)
{
    uint4 w = (uint4)((uint)block, (uint)(block >> 32), (uint)counter, (uint)(counter >> 32));
    uint2 k = (uint2)((uint)key, (uint)(key >> 32));
    for (int round = 0; round < 10; round++) {
        w = (uint4)(mul_hi(0xCD9E8D57u, w.z) ^ w.y ^ k.x, 0xCD9E8D57u * w.z,
                    mul_hi(0xD2511F53u, w.x) ^ w.w ^ k.y, 0xD2511F53u * w.x);
        k += (uint2)(0x9E3779B9u, 0xBB67AE85u);
    }
    return w;
}

#if WIDE
#define PI_4 0.78539816339744831
#else
#define PI_4 0.785398163f
#endif

// Box and Muller, 1958: a radius, and an angle at `part` of an eighth of a turn, which three bits of `top` choose.
static inline void pair(VAL(T) *z, const VAL(T) u, const VAL(T) part, const uint top)
{
    const VAL(T) radius = sqrt((VAL(T))-2 * log(u)), angle = part * PI_4, c = cos(angle), s = sin(angle);
    z[0] = radius * (top >> 31 ? s : c) * (top >> 30 & 1 ? -1 : 1);
    z[1] = radius * (top >> 31 ? c : s) * (top >> 29 & 1 ? -1 : 1);
}

__kernel void random(__global MEM(T) *out, __global const long *key, __global const long *counter, const Params p)
{
    const long block = get_global_id(0) + get_global_id(1) * get_global_size(0);
    if (block >= p.blocks) return;
    const uint4 w = philox(key[p.offset[1]], counter[p.offset[2]], block);
    VAL(T) values[4];
#if WIDE
    const ulong first = (ulong)w.x << 21 | w.y >> 11, second = (ulong)w.z << 21 | w.w >> 11;
#if NORMAL
    pair(values, (first + 1) * 0x1p-53, ((ulong)(w.z & 0x1fffffffu) << 32 | w.w) * 0x1p-61, w.z);
#else
    values[0] = first * 0x1p-53, values[1] = second * 0x1p-53;
#endif
#elif NORMAL
    pair(values, convert_float((ulong)w.x + 1) * 0x1p-32f, convert_float(w.y & 0x1fffffffu) * 0x1p-29f, w.y);
    pair(values + 2, convert_float((ulong)w.z + 1) * 0x1p-32f, convert_float(w.w & 0x1fffffffu) * 0x1p-29f, w.w);
#else
    const float unit = 1.0f / (1 << DIGITS);
    values[0] = convert_float(w.x >> (32 - DIGITS)) * unit, values[1] = convert_float(w.y >> (32 - DIGITS)) * unit;
    values[2] = convert_float(w.z >> (32 - DIGITS)) * unit, values[3] = convert_float(w.w >> (32 - DIGITS)) * unit;
#endif
    for (int k = 0; k < EACH; k++) {
        const long i = EACH * block + k;
        if (i < p.size) STORE(T, values[k], out, p.offset[0] + i);
    }
}
