// Softmax and norms: one group of work-items a row.
//
// Macros: those of rows.cl (VEC is 1 unless the rows of all operands have no gaps); SOFTMAX with MASK, or NORM with
// CENTER, WEIGHT and BIAS: 1 where it is so or that operand is given.

#include "rows.cl"

typedef struct {
    long n, rank, shape[8]; // length of a row; axes of rows, innermost first
    long offset[4];         // of out, x, then mask or weight, then bias
    long step[4];           // of the same along a row
    long stride[3][8];      // along the axes of rows, of out, x, mask
    float parameter;        // scale or epsilon
} Params;

// Element i of a row.
#if VEC > 1
#define AT(row, i, operand) (row)[i]
#else
#define AT(row, i, operand) (row)[(i) * p.step[operand]]
#undef FOR_VECTORS
#define FOR_VECTORS(i, n) for (long i = 0; i < 0;)
#undef FOR_TAIL
#define FOR_TAIL(i, n) for (long i = get_local_id(0); i < (n); i += GROUP)
#endif

#if MASK
#define NEXT_MASK mask += i_ * p.stride[2][axis];
#else
#define NEXT_MASK
#endif

#define ENTER_ROW(index) \
    do { \
        long rest_ = (index); \
        out += p.offset[0], x += p.offset[1]; \
        for (int axis = 0; axis < p.rank; axis++) { \
            const long i_ = rest_ % p.shape[axis]; \
            rest_ /= p.shape[axis]; \
            out += i_ * p.stride[0][axis], x += i_ * p.stride[1][axis]; \
            NEXT_MASK \
        } \
    } while (0)

#ifdef SOFTMAX
#if MASK
#define LOGITS(i) (LOAD(x + (i)) * scale + LOAD(mask + (i)))
#define LOGIT(i) (AT(x, i, 1) * scale + AT(mask, i, 2))
#else
#define LOGITS(i) (LOAD(x + (i)) * scale)
#define LOGIT(i) (AT(x, i, 1) * scale)
#endif

// exp(x * scale + mask), divided by its sum along the row; the largest logit is taken off before.
__kernel void softmax(__global float *out, __global const float *x,
#if MASK
                      __global const float *mask,
#endif
                      const Params p)
{
    __local float scratch[GROUP];
#if MASK
    mask += p.offset[2];
#endif
    ENTER_ROW(get_group_id(0));
    const long n = p.n;
    const float scale = p.parameter;

    Vec each = -INFINITY;
    float single = -INFINITY;
    FOR_VECTORS(i, n) each = larger_each(each, LOGITS(i));
    FOR_TAIL(i, n) single = larger(single, LOGIT(i));
    const float most = group_largest(larger(single, lanes_largest(each)), scratch);

    Vec sums = 0.0f;
    float sum = 0.0f;
    FOR_VECTORS(i, n) {
        const Vec e = exp(LOGITS(i) - most);
        STORE(e, out + i);
        sums += e;
    }
    FOR_TAIL(i, n) {
        const float e = exp(LOGIT(i) - most);
        AT(out, i, 0) = e;
        sum += e;
    }
    const float factor = 1.0f / group_sum(sum + lanes_sum(sums), scratch);
    FOR_VECTORS(i, n) STORE(LOAD(out + i) * factor, out + i);
    FOR_TAIL(i, n) AT(out, i, 0) *= factor;
}
#endif

#ifdef NORM
#if WEIGHT
#define WEIGHTS(i) * LOAD(weight + (i))
#define WEIGHT_AT(i) * AT(weight, i, 2)
#else
#define WEIGHTS(i)
#define WEIGHT_AT(i)
#endif
#if BIAS
#define BIASES(i) + LOAD(bias + (i))
#define BIAS_AT(i) + AT(bias, i, 3)
#else
#define BIASES(i)
#define BIAS_AT(i)
#endif

// CENTER: (x - mean) / sqrt(variance + epsilon), else x / sqrt(mean of squares + epsilon); then * weight + bias.
__kernel void norm(__global float *out, __global const float *x,
#if WEIGHT
                   __global const float *weight,
#endif
#if BIAS
                   __global const float *bias,
#endif
                   const Params p)
{
    __local float scratch[GROUP];
#if WEIGHT
    weight += p.offset[2];
#endif
#if BIAS
    bias += p.offset[3];
#endif
    ENTER_ROW(get_group_id(0));
    const long n = p.n;
    float mean = 0.0f;
#if CENTER
    {
        Vec sums = 0.0f;
        float sum = 0.0f;
        FOR_VECTORS(i, n) sums += LOAD(x + i);
        FOR_TAIL(i, n) sum += AT(x, i, 1);
        mean = group_sum(sum + lanes_sum(sums), scratch) / n;
    }
#endif
    Vec squares = 0.0f;
    float square = 0.0f;
    FOR_VECTORS(i, n) {
        const Vec d = LOAD(x + i) - mean;
        squares += d * d;
    }
    FOR_TAIL(i, n) {
        const float d = AT(x, i, 1) - mean;
        square += d * d;
    }
    const float factor = 1.0f / sqrt(group_sum(square + lanes_sum(squares), scratch) / n + p.parameter);
    FOR_VECTORS(i, n) STORE((LOAD(x + i) - mean) * factor WEIGHTS(i) BIASES(i), out + i);
    FOR_TAIL(i, n) AT(out, i, 0) = (AT(x, i, 1) - mean) * factor WEIGHT_AT(i) BIAS_AT(i);
}
#endif
