// Sparse attention. Macros: T, the type of q and the result; K and W, those of keys and weights.

#include "types.cl"

typedef struct {
    long heads, tokens, keys, size;
    long out_step[3], q_step[4], k_step[3], w_step[3];
    long offset[4];
} Params;

// One work-item for each key and token.
__kernel void scores(__global MEM(T) *out, __global const MEM(T) *q, __global const MEM(K) *k,
                     __global const MEM(W) *w, const Params p)
{
    const long key = get_global_id(0), token = get_global_id(1), image = get_global_id(2);
    if (key >= p.keys || token >= p.tokens) return; // work-items that fill up groups
    k += p.offset[2] + image * p.k_step[0] + key * p.k_step[1];
    q += p.offset[1] + image * p.q_step[0] + token * p.q_step[2];
    w += p.offset[3] + image * p.w_step[0] + token * p.w_step[2];
    VAL(T) total = 0;
    for (long head = 0; head < p.heads; head++) {
        VAL(T) sum = 0;
        for (long i = 0; i < p.size; i++)
            sum += LOAD(T, q, head * p.q_step[1] + i * p.q_step[3]) * LOAD(K, k, i * p.k_step[2]);
        total += LOAD(W, w, head * p.w_step[1]) * (sum < 0 ? 0 : sum);
    }
    STORE(T, total, out, p.offset[0] + image * p.out_step[0] + token * p.out_step[1] + key * p.out_step[2]);
}
