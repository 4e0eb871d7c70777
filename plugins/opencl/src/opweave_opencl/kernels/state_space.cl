// Recurrences over tokens. Macros: T and the types of the other operands. CONVOLUTION: W BIAS BEFORE. SCAN: DELTA A B C D
// STATE; also the LANES of a vector of states and the number VECTORS of these.

#include "types.cl"

#ifdef CONVOLUTION
typedef struct {
    long channels, tokens, taps, biased, continued;
    long out_step[3], x_step[3], w_step[2], bias_step, before_step[3];
    long offset[5];
} Params;

__kernel void causal(__global MEM(T) *out, __global const MEM(T) *x, __global const MEM(W) *w,
                     __global const MEM(BIAS) *bias, __global const MEM(BEFORE) *before, const Params p)
{
    const long token = get_global_id(0), channel = get_global_id(1), image = get_global_id(2);
    if (token >= p.tokens || channel >= p.channels) return;
    out += p.offset[0] + image * p.out_step[0] + channel * p.out_step[1];
    x += p.offset[1] + image * p.x_step[0] + channel * p.x_step[1];
    w += p.offset[2] + channel * p.w_step[0];
    before += p.offset[4] + image * p.before_step[0] + channel * p.before_step[1];
    float sum = p.biased ? LOAD(BIAS, bias, p.offset[3] + channel * p.bias_step) : 0.0f;
    for (long j = 0; j < p.taps; j++) {
        const long at = token + j - (p.taps - 1);
        float value = 0.0f;
        if (at >= 0) value = LOAD(T, x, at * p.x_step[2]);
        else if (p.continued) value = LOAD(BEFORE, before, (at + p.taps - 1) * p.before_step[2]);
        sum += LOAD(W, w, j * p.w_step[1]) * value;
    }
    STORE(T, sum, out, token * p.out_step[2]);
}
#endif

#ifdef SCAN
typedef VALN(f32, LANES) Lanes;
typedef VALN(i32, LANES) Numbers;
#if LANES == 16
#define NUMBERS (Numbers)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
#else
#define NUMBERS (Numbers)(0, 1, 2, 3)
#endif

typedef struct {
    long channels, tokens, states, repeats, softplus, skip, continued, last;
    long y_step[3], last_offset;
    long u_step[3], delta_step[3], a_step[2], b_step[4], c_step[4], d_step, state_step[3];
    long offset[8];
} Params;

static inline float sum_of(const Lanes v)
{
#if LANES == 16
    const float8 eight = v.lo + v.hi;
    const float4 four = eight.lo + eight.hi;
#else
    const float4 four = v;
#endif
    return (four.x + four.y) + (four.z + four.w);
}

// ``lanes``: LANES elements of ``type`` from ``from`` on, ``step`` apart, zeros past ``n``.
#define GATHER(lanes, type, from, step, n) \
    do { \
        union { float each[LANES]; Lanes all; } v_; \
        for (int i_ = 0; i_ < LANES; i_++) v_.each[i_] = i_ < (n) ? LOAD(type, from, i_ * (step)) : 0.0f; \
        lanes = v_.all; \
    } while (0)

// One work-item for each channel of each batch: its state stays in registers while it walks along the tokens.
__kernel UNVECTORIZED void scan(__global MEM(T) *out, __global const MEM(T) *u, __global const MEM(DELTA) *delta,
                                __global const MEM(A) *a, __global const MEM(B) *b, __global const MEM(C) *c,
                                __global const MEM(D) *d, __global const MEM(STATE) *state, const Params p)
{
    const long channel = get_global_id(0), image = get_global_id(1), set = channel / p.repeats;
    u += p.offset[1] + image * p.u_step[0] + channel * p.u_step[1];
    delta += p.offset[2] + image * p.delta_step[0] + channel * p.delta_step[1];
    a += p.offset[3] + channel * p.a_step[0];
    b += p.offset[4] + image * p.b_step[0] + set * p.b_step[1];
    c += p.offset[5] + image * p.c_step[0] + set * p.c_step[1];
    state += p.offset[7] + image * p.state_step[0] + channel * p.state_step[1];
    __global MEM(T) *y = out + p.offset[0] + image * p.y_step[0] + channel * p.y_step[1];
    const float through = p.skip ? LOAD(D, d, p.offset[6] + channel * p.d_step) : 0.0f;

    Lanes h[VECTORS], rate[VECTORS];
    for (int v = 0; v < VECTORS; v++) {
        const int n = p.states - v * LANES;
        GATHER(rate[v], A, a + v * LANES * p.a_step[1], p.a_step[1], n);
        h[v] = 0.0f;
        if (p.continued) GATHER(h[v], STATE, state + v * LANES * p.state_step[2], p.state_step[2], n);
    }
    for (long t = 0; t < p.tokens; t++) {
        const float input = LOAD(T, u, t * p.u_step[2]), x = LOAD(DELTA, delta, t * p.delta_step[2]);
        const float step = p.softplus ? fmax(x, 0.0f) + log1p(exp(-fabs(x))) : x;
        Lanes sum = 0.0f;
        for (int v = 0; v < VECTORS; v++) {
            const int n = p.states - v * LANES;
            Lanes from, to;
            GATHER(from, B, b + v * LANES * p.b_step[2] + t * p.b_step[3], p.b_step[2], n);
            GATHER(to, C, c + v * LANES * p.c_step[2] + t * p.c_step[3], p.c_step[2], n);
            h[v] = exp(step * rate[v]) * h[v] + step * input * from;
            const Lanes term = h[v] * to;
            // Zeros that fill up a vector become NaN where the input is infinite.
            sum += n < LANES ? select((Lanes)0.0f, term, NUMBERS < n) : term;
        }
        STORE(T, p.skip ? sum_of(sum) + through * input : sum_of(sum), y, t * p.y_step[2]);
    }
    if (p.last) {
        // The states of all channels, one after another, in steps of the output's only axis.
        __global MEM(T) *to = out + p.offset[0] + p.last_offset;
        const long first = (image * p.channels + channel) * p.states;
        for (int i = 0; i < p.states; i++) {
            union { float each[LANES]; Lanes all; } v;
            v.all = h[i / LANES];
            STORE(T, v.each[i % LANES], to, (first + i) * p.y_step[2]);
        }
    }
}
#endif
