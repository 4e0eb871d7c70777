// Arithmetic, elementary functions and conversions of vectors; T is the type of the operands.

#define op_add(T, x, y) TON(T, VEC, W(T, x) + W(T, y))
#define op_sub(T, x, y) TON(T, VEC, W(T, x) - W(T, y))
#define op_mul(T, x, y) TON(T, VEC, W(T, x) * W(T, y))
#define op_div(T, x, y) (x / y)
#define op_neg(T, x) TON(T, VEC, -W(T, x))
#define op_abs(T, x) (x < (V(T))(0) ? op_neg(T, x) : x)
#define op_sign(T, x) (x > (V(T))(0) ? (V(T))(1) : x < (V(T))(0) ? (V(T))(-1) : x)
#define op_square(T, x) op_mul(T, x, x)
#define op_scale(T, x, a, b) (x * a + b)

#define op_exp(T, x) FUNCTION(exp, T)(x)
#define op_expm1(T, x) FUNCTION(expm1, T)(x)
#define op_log(T, x) log(x)
#define op_log1p(T, x) log1p(x)
#define op_sin(T, x) sin(x)
#define op_cos(T, x) cos(x)
#define op_tanh(T, x) FUNCTION(tanh, T)(x)
#define op_sqrt(T, x) sqrt(x)
#define op_rsqrt(T, x) ((V(T))(1) / sqrt(x))
#define op_reciprocal(T, x) ((V(T))(1) / x)

#define op_pow(T, x, y) GLUE(power_, T)(x, y)
#if VEC > 4 && defined(cl_khr_fp64)
// PoCL's pow of more than four doubles at once is wrong.
static inline V(f64) power_f64(const V(f64) x, const V(f64) y)
{
#if VEC == 16
    return (V(f64))(pow(x.s0123, y.s0123), pow(x.s4567, y.s4567), pow(x.s89ab, y.s89ab), pow(x.scdef, y.scdef));
#else
    return (V(f64))(pow(x.lo, y.lo), pow(x.hi, y.hi));
#endif
}
#else
#define power_f64 pow
#endif
#define power_f32 pow
#define power_f16 pow
#define power_bf16 pow

// By squaring. With a negative exponent 1 / x^|y| is rounded towards zero, which is 0 unless x is 1 or -1.
#define WHOLE_POWER(T) \
    static inline V(T) GLUE(power_, T)(const V(T) x, const V(T) y) \
    { \
        const V(T) zero = (V(T))(0), one = (V(T))(1); \
        V(T) result = one, factor = x, left = y; \
        for (int bit = 0; bit < 8 * (int)sizeof(VAL(T)); bit++) { \
            result = (left & one) != zero ? op_mul(T, result, factor) : result; \
            factor = op_mul(T, factor, factor); \
            left >>= one; \
        } \
        const V(T) odd = (y & one) != zero ? x : one; \
        return y < zero ? (x == one || x == op_neg(T, one) ? odd : zero) : result; \
    }

#define op_copy(T, x) (x)
#define op_contiguous(T, x) (x)
#define op_cast(T, to, x) TON(to, VEC, x)
