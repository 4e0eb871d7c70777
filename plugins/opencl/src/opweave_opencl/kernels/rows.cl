// Walking a row with the work-items of one group. Each loads VEC elements at a time; GROUP work-items share a row.
//
// Macros: VEC, 1 or a vector width; GROUP, a power of two.

#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)

#if VEC > 1
typedef PASTE(float, VEC) Vec;
#define LOAD(p) PASTE(vload, VEC)(0, p)
#define STORE(v, p) PASTE(vstore, VEC)(v, 0, p)
#else
typedef float Vec;
#define LOAD(p) (*(p))
#define STORE(v, p) (*(p) = (v))
#endif

// Vectors lie at i = 0, VEC, ...; what does not fill one comes element by element. ``n`` is the length of the row.
#define WHOLE(n) ((n) / VEC * VEC)
#define FOR_VECTORS(i, n) for (long i = (long)get_local_id(0) * VEC; i + VEC <= (n); i += GROUP * VEC)
#define FOR_TAIL(i, n) for (long i = WHOLE(n) + get_local_id(0); i < (n); i += GROUP)

// A NaN is the largest number, as in NumPy.
inline float larger(float a, float b) { return b > a || isnan(b) ? b : a; }
#if VEC > 1
inline Vec larger_each(Vec a, Vec b) { return b > a || isnan(b) ? b : a; }
#else
#define larger_each larger
#endif

inline float lanes_sum(Vec v)
{
#if VEC > 1
    float lane[VEC], sum = 0.0f;
    STORE(v, lane);
    for (int i = 0; i < VEC; i++) sum += lane[i];
    return sum;
#else
    return v;
#endif
}

inline float lanes_largest(Vec v)
{
#if VEC > 1
    float lane[VEC], best = -INFINITY;
    STORE(v, lane);
    for (int i = 0; i < VEC; i++) best = larger(best, lane[i]);
    return best;
#else
    return v;
#endif
}

// Every work-item of the group gets the result; ``scratch`` holds GROUP numbers.
inline float group_sum(float value, __local float *scratch)
{
#if GROUP > 1
    const int me = get_local_id(0);
    scratch[me] = value;
    for (int half_ = GROUP / 2; half_ > 0; half_ /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (me < half_) scratch[me] += scratch[me + half_];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    value = scratch[0];
    barrier(CLK_LOCAL_MEM_FENCE);
#endif
    return value;
}

inline float group_largest(float value, __local float *scratch)
{
#if GROUP > 1
    const int me = get_local_id(0);
    scratch[me] = value;
    for (int half_ = GROUP / 2; half_ > 0; half_ /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (me < half_) scratch[me] = larger(scratch[me], scratch[me + half_]);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    value = scratch[0];
    barrier(CLK_LOCAL_MEM_FENCE);
#endif
    return value;
}
