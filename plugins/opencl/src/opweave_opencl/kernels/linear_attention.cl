// Linear attention. Macros: the types of the operands, T for q and the result, K V W U A B STATE; SIZE, the rows of a state;
// WITH_DECAY WITH_BONUS WITH_REMOVAL, 0 or 1.

#include "types.cl"

typedef struct {
    long heads, tokens, width, continued, last;
    long y_step[4], last_offset, last_step;
    long q_step[4], k_step[4], v_step[4], w_step[4], u_step[2], a_step[4], b_step[4], state_step[4];
    long offset[9];
} Params;

#define ROW(name) (head_of_##name + t * p.name##_step[2])
#define HEAD(name, i) (p.offset[i] + image * p.name##_step[0] + head * p.name##_step[1])

// One work-item for each column of each head's state, which stays in registers while the item walks along the tokens.
__kernel void recur(__global MEM(T) *out, __global const MEM(T) *q, __global const MEM(K) *k, __global const MEM(V) *v,
                    __global const MEM(W) *w, __global const MEM(U) *u, __global const MEM(A) *a,
                    __global const MEM(B) *b, __global const MEM(STATE) *state, const Params p)
{
    const long column = get_global_id(0), head = get_global_id(1), image = get_global_id(2);
    if (column >= p.width || head >= p.heads) return; // work-items that fill up groups
    const long head_of_q = HEAD(q, 1), head_of_k = HEAD(k, 2), head_of_v = HEAD(v, 3);
    VAL(T) s[SIZE];
    for (int i = 0; i < SIZE; i++)
        s[i] = p.continued ? LOAD(STATE, state, HEAD(state, 8) + i * p.state_step[2] + column * p.state_step[3]) : 0;
    for (long t = 0; t < p.tokens; t++) {
        const VAL(T) value = LOAD(V, v, ROW(v) + column * p.v_step[3]);
        VAL(T) sum = 0;
#if WITH_REMOVAL
        const long head_of_a = HEAD(a, 6), head_of_b = HEAD(b, 7);
        VAL(T) removed = 0;
        for (int i = 0; i < SIZE; i++) removed += LOAD(A, a, ROW(a) + i * p.a_step[3]) * s[i];
#endif
#if WITH_DECAY
        const long head_of_w = HEAD(w, 4);
#endif
        for (int i = 0; i < SIZE; i++) {
            const VAL(T) query = LOAD(T, q, ROW(q) + i * p.q_step[3]);
            const VAL(T) added = LOAD(K, k, ROW(k) + i * p.k_step[3]) * value;
#if WITH_BONUS
            sum += query * (s[i] + LOAD(U, u, p.offset[5] + head * p.u_step[0] + i * p.u_step[1]) * added);
#endif
#if WITH_DECAY
            s[i] *= LOAD(W, w, ROW(w) + i * p.w_step[3]);
#endif
#if WITH_REMOVAL
            s[i] += LOAD(B, b, ROW(b) + i * p.b_step[3]) * removed;
#endif
            s[i] += added;
#if !WITH_BONUS
            sum += query * s[i];
#endif
        }
        STORE(T, sum, out, p.offset[0] + image * p.y_step[0] + head * p.y_step[1] + t * p.y_step[2]
                           + column * p.y_step[3]);
    }
    if (!p.last) return;
    const long first = (image * p.heads + head) * SIZE;
    for (int i = 0; i < SIZE; i++)
        STORE(T, s[i], out, p.offset[0] + p.last_offset + ((first + i) * p.width + column) * p.last_step);
}
