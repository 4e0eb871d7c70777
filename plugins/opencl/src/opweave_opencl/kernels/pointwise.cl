// out[...] = F(a[...], b[...]) over up to eight axes, innermost first.
//
// Macros: OUT and IN, the element types; VEC, elements that a work-item handles along the first axis; SOURCES, 1 or 2;
// F(T, TO, a, b), the expression, for scalars and vectors alike: T is the type of a and b, TO converts to the output's; A_LOAD and B_LOAD, how a source lies along the first axis:
// EACH (one after another), SAME (one element for all), STEP (some stride; VEC is 1 then).

#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)

typedef struct {
    long rank;
    long shape[8];
    long offset[SOURCES + 1];
    long stride[SOURCES + 1][8];
    float alpha, beta;
} Params;

#define EACH_ONE(p, i, step) (p)[i]
#define SAME_ONE(p, i, step) (p)[0]
#define STEP_ONE(p, i, step) (p)[(i) * (step)]

#if VEC > 1
typedef PASTE(IN, VEC) InV;
#define STORE PASTE(vstore, VEC)
#define EACH_VEC(p, i) PASTE(vload, VEC)(0, (p) + (i))
#define SAME_VEC(p, i) ((InV)((p)[0]))
#endif

__kernel void pointwise(
    __global OUT *out,
    __global const IN *a,
#if SOURCES > 1
    __global const IN *b,
#endif
    const Params p)
{
    const long n = p.shape[0];
    const long i = (long)get_global_id(0) * VEC;
    const long j = get_global_id(1);
    if (i >= n || j >= p.shape[1]) return;

    long rest = get_global_id(2);
    out += p.offset[0] + j * p.stride[0][1];
    a += p.offset[1] + j * p.stride[1][1];
#if SOURCES > 1
    b += p.offset[2] + j * p.stride[2][1];
#endif
    for (int axis = 2; axis < p.rank; axis++) {
        const long k = rest % p.shape[axis];
        rest /= p.shape[axis];
        out += k * p.stride[0][axis];
        a += k * p.stride[1][axis];
#if SOURCES > 1
        b += k * p.stride[2][axis];
#endif
    }
    const float alpha = p.alpha, beta = p.beta;
    (void)alpha, (void)beta;

#if VEC > 1
    if (i + VEC <= n) {
        const InV x = PASTE(A_LOAD, _VEC)(a, i);
#if SOURCES > 1
        const InV y = PASTE(B_LOAD, _VEC)(b, i);
#else
        const InV y = 0;
#endif
        STORE(F(InV, PASTE(convert_, PASTE(OUT, VEC)), x, y), 0, out + i);
        return;
    }
#endif
    const long out_step = p.stride[0][0], a_step = p.stride[1][0];
#if SOURCES > 1
    const long b_step = p.stride[2][0];
#endif
    (void)a_step;
    const long end = min(i + VEC, n);
    for (long k = i; k < end; k++) {
        const IN x = PASTE(A_LOAD, _ONE)(a, k, a_step);
#if SOURCES > 1
        const IN y = PASTE(B_LOAD, _ONE)(b, k, b_step);
#else
        const IN y = 0;
#endif
        out[k * out_step] = F(IN, PASTE(convert_, OUT), x, y);
    }
}
