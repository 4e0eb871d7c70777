// Elementary functions of vectors, for floats as processors compute with them: PoCL calls its own as functions, lane by
// lane or through memory. Their errors are a few units in the last place. The polynomials are minimax ones, by reweighted
// least squares (Lawson, 1961) of the relative error; f64 and other devices take the built-in functions.
//
// Macros: VEC.

#ifndef FUNCTIONS
#define FUNCTIONS
#include "access.cl"

// FUNCTION(name, T): the function for vectors of the type of T.
#define FUNCTION(name, T) GLUE(name##_of_, VAL(T))
#define exp_of_double exp
#define expm1_of_double expm1
#define tanh_of_double tanh

// The normal cumulative distribution function. 1 + erf(z) = erfc(-z), which keeps its digits where the sum would cancel.
#define normal_of_double(x) (erfc((x) * -0.70710678118654752) * 0.5)
// log(1 + u) for u from 0 to 1.
#define log1p_unit_of_double log1p

#if VEC == 16
#define MAGNITUDE(x) as_float16(as_int16(x) & 0x7fffffff)

// y · 2^n for n that is whole; in two steps where there is no instruction for it, since 2^n may be too large or too small
// for a float.
#if defined(__AVX512F__) && __has_builtin(__builtin_ia32_scalefps512_mask)
#define TIMES_POWER(y, n) __builtin_ia32_scalefps512_mask(y, n, y, (ushort)0xffff, 4)
#else
static inline float16 times_power(const float16 y, const float16 n)
{
    const int16 power = as_int16(n + 12582912.0f) - 0x4b400000, half_power = power >> 1;
    return y * as_float16((half_power + 127) << 23) * as_float16((power - half_power + 127) << 23);
}
#define TIMES_POWER times_power
#endif

// x = n log 2 + r; log 2 is the sum of two, of which the first has few bits.
static inline float16 exp_of_float(const float16 x)
{
    const float16 low = x < -104.0f ? (float16)(-104.0f) : x, in = low > 89.0f ? (float16)(89.0f) : low;
    const float16 moved = in * 1.44269504f + 12582912.0f, n = moved - 12582912.0f; // which rounds to a whole number
    const float16 r = (in - n * 0.693359375f) + n * 2.12194440e-4f;
    float16 y = r * 0.00138146f + 0.008368716f;
    y = y * r + 0.04166839f;
    y = y * r + 0.16666521f;
    y = y * r + 0.49999994f;
    y = y * r * r + r + 1.0f;
    return TIMES_POWER(y, n);
}

static inline float16 expm1_of_float(const float16 x)
{
    float16 y = x * 0.0001984981f + 0.0013996178f;
    y = y * x + 0.0083335787f;
    y = y * x + 0.04166536f;
    y = y * x + 0.16666664f;
    y = y * x + 0.5f;
    return MAGNITUDE(x) < 0.5f ? x + x * x * y : exp_of_float(x) - 1.0f;
}

static inline float16 tanh_of_float(const float16 x)
{
    const float16 z = x * x, size = MAGNITUDE(x);
    float16 y = z * -0.0057049906f + 0.02063909f;
    y = y * z - 0.053739715f;
    y = y * z + 0.13331442f;
    y = y * z - 0.3333328f;
    const float16 far = 1.0f - 2.0f / (exp_of_float(size + size) + 1.0f);
    return size < 0.625f ? x + x * z * y : x < 0.0f ? -far : far;
}

// log(1 + u) = 2 artanh(u / (2 + u)).
static inline float16 log1p_unit_of_float(const float16 u)
{
    const float16 s = u / (u + 2.0f), z = s * s;
    float16 y = z * 0.1400598f + 0.14000906f;
    y = y * z + 0.20010763f;
    y = y * z + 0.3333321f;
    return 2.0f * (s + s * z * y);
}

// Below zero it is exp(-x²/2) times a polynomial in t - 1/2, where t = 1 / (1 + |x| / √8).
static inline float16 normal_of_float(const float16 x)
{
    const float16 size = MAGNITUDE(x), t = 1.0f / (size * 0.35355338f + 1.0f), u = t - 0.5f;
    float16 y = u * -0.029596783f + 0.024204833f;
    y = y * u + 0.047662865f;
    y = y * u - 0.051506763f;
    y = y * u - 0.0859331f;
    y = y * u + 0.07287072f;
    y = y * u + 0.27946958f;
    y = y * u + 0.34358048f;
    y = y * u + 0.25539568f;
    const float16 tail = exp_of_float(x * x * -0.5f) * (t * y);
    return x < 0.0f ? tail : 1.0f - tail;
}

#else
#define exp_of_float exp
#define expm1_of_float expm1
#define tanh_of_float tanh
#define log1p_unit_of_float log1p
#define normal_of_float(x) (erfc((x) * -0.70710678f) * 0.5f)
#endif
#endif
