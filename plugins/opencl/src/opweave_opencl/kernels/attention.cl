// softmax(cap(scale · q kᵀ) + slope · mask) v, with the scores of one block of keys at a time. Rows are the queries of
// all heads that share keys. For each row there are the largest score so far, the sum of the powers of e of all scores
// relative to it, and the sum of values so weighted; a larger score scales what was added up before.
//
// Macros: T; MASK and SINK, types of these; DIRECT, whether elements of T are what is computed with; ROWS of a work-item or
// group and KEYS of a block, at most 32; SIZE of a key and WIDTH of a value; and
//   ATTEND        one work-item does it all: for processors. SIZE and WIDTH are multiples of 16, filled up with zeros.
//   ATTEND_GROUP  GROUP work-items share the work; macros of combining.cl.

#include "slopes.cl"
#include "types.cl"
#include "vectors.cl"

typedef struct {
    long batch, heads, groups, tokens, keys, size, width, causal, masked, sinking;
    long out_step[4], q_step[4], k_step[4], v_step[4], mask_step[4], sink_step;
    long offset[6]; // of out, q, k, v, mask, sinks
    float scale, max_bias, soft_cap;
} Params;

SLOPES(float)

#define PARAMETERS \
    __global MEM(T) *out, __global const MEM(T) *q, __global const MEM(T) *k, __global const MEM(T) *v, \
        __global const MEM(MASK) *mask, __global const MEM(SINK) *sinks, const Params p

#define ENTER \
    const long group = get_global_id(1), image = get_global_id(2), repeats = p.heads / p.groups; \
    const long first = (long)get_group_id(0) * ROWS; \
    const int count = min((long)ROWS, repeats * p.tokens - first); \
    out += p.offset[0] + image * p.out_step[0], q += p.offset[1] + image * p.q_step[0]; \
    k += p.offset[2] + image * p.k_step[0] + group * p.k_step[1]; \
    v += p.offset[3] + image * p.v_step[0] + group * p.v_step[1]; \
    mask += p.offset[4] + image * p.mask_step[0]

#define HEAD(row) (group * repeats + (first + (row)) / p.tokens)
#define TOKEN(row) ((first + (row)) % p.tokens)
// The first key that a row does not see, and where the last row of all ends.
#define SEES(row) (p.causal ? max(p.keys - p.tokens + TOKEN(row) + 1, 0L) : p.keys)

#ifdef ATTEND
#define PIECES(n) ((n) / 16)

// ``n`` elements, ``step`` apart, into local memory.
static inline void fetch(__global const MEM(T) *from, const long step, __local float *to, const int n)
{
    if (step == 1) UNPACK(T, from, to, n);
    else
        for (int i = 0; i < n; i++) to[i] = LOAD(T, from, i * step);
}

__kernel UNVECTORIZED void attend(PARAMETERS)
{
    __local float16 queries[ROWS][PIECES(SIZE)], results[ROWS][PIECES(WIDTH)], values[KEYS][PIECES(WIDTH)];
    __local float16 scores[ROWS][2];
    __local float top[ROWS], total[ROWS];
#if ROWS > 4
    __local float16 keys[SIZE][2]; // transposed: vectors of neighbouring keys
    __local float one[SIZE] __attribute__((aligned(64)));
#else
    __local float16 key[PIECES(SIZE)];
#endif
    ENTER;
    long seen = 0;
    for (int r = 0; r < ROWS; r++) {
        for (int i = 0; i < PIECES(SIZE); i++) queries[r][i] = 0.0f;
        for (int i = 0; i < PIECES(WIDTH); i++) results[r][i] = 0.0f;
        scores[r][0] = scores[r][1] = 0.0f;
        if (r >= count) continue;
        fetch(q + HEAD(r) * p.q_step[1] + TOKEN(r) * p.q_step[2], p.q_step[3], (__local float *)queries[r], p.size);
        for (int i = 0; i < PIECES(SIZE); i++) queries[r][i] *= p.scale;
        // A sink is a score without a value.
        top[r] = p.sinking ? LOAD(SINK, sinks, p.offset[5] + HEAD(r) * p.sink_step) : -INFINITY;
        total[r] = p.sinking ? 1.0f : 0.0f;
        seen = max(seen, SEES(r));
    }
#if ROWS > 4
    for (int i = 0; i < SIZE; i++) keys[i][0] = keys[i][1] = 0.0f;
#else
    for (int i = 0; i < PIECES(SIZE); i++) key[i] = 0.0f;
#endif
    for (int j = 0; j < KEYS; j++)
        for (int i = 0; i < PIECES(WIDTH); i++) values[j][i] = 0.0f;

    for (long k0 = 0; k0 < seen; k0 += KEYS) {
        const int block = min((long)KEYS, p.keys - k0);
        for (int j = 0; j < block; j++) {
            __global const MEM(T) *from = k + (k0 + j) * p.k_step[2];
#if ROWS > 4
            fetch(from, p.k_step[3], one, p.size);
            for (int i = 0; i < p.size; i++) ((__local float *)keys[i])[j] = one[i];
#else
            fetch(from, p.k_step[3], (__local float *)key, p.size);
            for (int r = 0; r < count; r++) {
                float16 sum = 0.0f;
                for (int i = 0; i < PIECES(SIZE); i++) sum += queries[r][i] * key[i];
                ((__local float *)scores[r])[j] = lanes_sum(sum);
            }
#endif
            fetch(v + (k0 + j) * p.v_step[2], p.v_step[3], (__local float *)values[j], p.width);
        }
#if ROWS > 4
        for (int r = 0; r < count; r += 8) {
#define EACH(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7)
#define START(n) \
    __local const float *q##n = (__local const float *)queries[r + n]; \
    float16 a##n = 0.0f, b##n = 0.0f;
            EACH(START)
            for (int i = 0; i < SIZE; i++) {
                const float16 x = keys[i][0], y = keys[i][1];
#define ADD(n) a##n += q##n[i] * x, b##n += q##n[i] * y;
                EACH(ADD)
            }
#define FINISH(n) scores[r + n][0] = a##n, scores[r + n][1] = b##n;
            EACH(FINISH)
#undef START
#undef ADD
#undef FINISH
        }
#endif
        for (int r = 0; r < count; r++) {
            __local float *score = (__local float *)scores[r];
            if (p.soft_cap != 0.0f)
                for (int h = 0; h < 2; h++) scores[r][h] = p.soft_cap * tanh(scores[r][h] / p.soft_cap);
            if (p.masked) {
                const float slope = p.max_bias != 0.0f ? slope_of(HEAD(r), p.heads, p.max_bias) : 1.0f;
                __global const MEM(MASK) *row = mask + HEAD(r) * p.mask_step[1] + TOKEN(r) * p.mask_step[2] + k0 * p.mask_step[3];
                for (int j = 0; j < block; j++) score[j] += slope * LOAD(MASK, row, j * p.mask_step[3]);
            }
            for (int j = max(min(SEES(r) - k0, (long)block), 0L); j < 32; j++) score[j] = -INFINITY;
            const float16 most = fmax(scores[r][0], scores[r][1]);
            const float8 eight = fmax(most.lo, most.hi);
            const float4 four = fmax(eight.lo, eight.hi);
            const float best = fmax(top[r], fmax(fmax(four.x, four.y), fmax(four.z, four.w)));
            // A row that has seen no key yet has no largest score to subtract.
            const float base = best == -INFINITY ? 0.0f : best;
            const float16 low = exp(scores[r][0] - base), high = exp(scores[r][1] - base);
            const float factor = exp(top[r] - base);
            scores[r][0] = low, scores[r][1] = high;
            total[r] = total[r] * factor + lanes_sum(low + high);
            top[r] = best;
            if (factor != 1.0f)
                for (int i = 0; i < PIECES(WIDTH); i++) results[r][i] *= factor;
        }
#if ROWS > 4
        for (int r = 0; r < count; r += 8)
            for (int i = 0; i < PIECES(WIDTH); i++) {
#define START(n) \
    __local const float *s##n = (__local const float *)scores[r + n]; \
    float16 a##n = results[r + n][i];
                EACH(START)
                for (int j = 0; j < KEYS; j++) {
                    const float16 x = values[j][i];
#define ADD(n) a##n += s##n[j] * x;
                    EACH(ADD)
                }
#define FINISH(n) results[r + n][i] = a##n;
                EACH(FINISH)
            }
#else
        for (int r = 0; r < count; r++)
            for (int i = 0; i < PIECES(WIDTH); i++) {
                float16 sum = results[r][i];
                for (int j = 0; j < KEYS; j++) sum += ((__local const float *)scores[r])[j] * values[j][i];
                results[r][i] = sum;
            }
#endif
    }
    for (int r = 0; r < count; r++) {
        __global MEM(T) *to = out + HEAD(r) * p.out_step[1] + TOKEN(r) * p.out_step[2];
        __local const float *sum = (__local const float *)results[r];
        for (int i = 0; i < p.width; i++) STORE(T, sum[i] / total[r], to, i * p.out_step[3]);
    }
}
#endif

#ifdef ATTEND_GROUP
#include "combining.cl"
#define SHARED(i, n) for (int i = me; i < (n); i += GROUP)

// The softmax of a row is computed by a sub-group, or by one work-item.
#ifdef SUBGROUPS
#define EACH_ROW(r) for (int r = get_sub_group_id(); r < count; r += get_num_sub_groups())
#define EACH_KEY(j) for (int j = get_sub_group_local_id(); j < KEYS; j += get_sub_group_size())
#define LARGEST(v) sub_group_reduce_max(v)
#define TOTAL(v) sub_group_reduce_add(v)
#define IS_FIRST (get_sub_group_local_id() == 0)
#else
#define EACH_ROW(r) SHARED(r, count)
#define EACH_KEY(j) for (int j = 0; j < KEYS; j++)
#define LARGEST(v) (v)
#define TOTAL(v) (v)
#define IS_FIRST 1
#endif

__kernel __attribute__((reqd_work_group_size(GROUP, 1, 1))) void attend_group(PARAMETERS)
{
    __local float queries[ROWS][SIZE], keys[KEYS][SIZE + 1], values[KEYS][WIDTH]; // + 1: rows begin in other banks
    __local float scores[ROWS][KEYS], results[ROWS][WIDTH], top[ROWS], total[ROWS], factor[ROWS];
    ENTER;
    const int me = get_local_id(0);
    long seen = 0;
    for (int r = 0; r < count; r++) seen = max(seen, SEES(r));
    SHARED(i, ROWS * SIZE)
    {
        const int r = i / SIZE, at = i % SIZE;
        const long from = HEAD(r) * p.q_step[1] + TOKEN(r) * p.q_step[2] + at * p.q_step[3];
        queries[r][at] = r < count ? LOAD(T, q, from) * p.scale : 0.0f;
    }
    SHARED(i, ROWS * WIDTH) results[i / WIDTH][i % WIDTH] = 0.0f;
    SHARED(r, count)
    {
        top[r] = p.sinking ? LOAD(SINK, sinks, p.offset[5] + HEAD(r) * p.sink_step) : -INFINITY;
        total[r] = p.sinking ? 1.0f : 0.0f;
    }
    for (long k0 = 0; k0 < seen; k0 += KEYS) {
        const int block = min((long)KEYS, p.keys - k0);
        barrier(CLK_LOCAL_MEM_FENCE);
        SHARED(i, KEYS * SIZE)
        {
            const int j = i / SIZE, at = i % SIZE;
            keys[j][at] = j < block ? LOAD(T, k, (k0 + j) * p.k_step[2] + at * p.k_step[3]) : 0.0f;
        }
        SHARED(i, KEYS * WIDTH)
        {
            const int j = i / WIDTH, at = i % WIDTH;
            values[j][at] = j < block ? LOAD(T, v, (k0 + j) * p.v_step[2] + at * p.v_step[3]) : 0.0f;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        SHARED(i, ROWS * KEYS)
        {
            const int r = i / KEYS, j = i % KEYS;
            float score = -INFINITY;
            if (r < count && j < block && k0 + j < SEES(r)) {
                score = 0.0f;
                for (int at = 0; at < SIZE; at++) score += queries[r][at] * keys[j][at];
                if (p.soft_cap != 0.0f) score = p.soft_cap * tanh(score / p.soft_cap);
                if (p.masked) {
                    const float slope = p.max_bias != 0.0f ? slope_of(HEAD(r), p.heads, p.max_bias) : 1.0f;
                    score += slope * LOAD(MASK, mask, HEAD(r) * p.mask_step[1] + TOKEN(r) * p.mask_step[2]
                                                          + (k0 + j) * p.mask_step[3]);
                }
            }
            scores[r][j] = score;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        EACH_ROW(r)
        {
            float best = top[r], sum = 0.0f;
            EACH_KEY(j) best = fmax(best, scores[r][j]);
            best = LARGEST(best);
            // A row that has seen no key yet has no largest score to subtract.
            const float base = best == -INFINITY ? 0.0f : best;
            EACH_KEY(j) sum += scores[r][j] = exp(scores[r][j] - base);
            sum = TOTAL(sum);
            if (IS_FIRST) {
                factor[r] = exp(top[r] - base);
                total[r] = total[r] * factor[r] + sum;
                top[r] = best;
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        SHARED(i, count * WIDTH)
        {
            const int r = i / WIDTH, at = i % WIDTH;
            float sum = results[r][at] * factor[r];
            for (int j = 0; j < block; j++) sum += scores[r][j] * values[j][at];
            results[r][at] = sum;
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    SHARED(i, count * WIDTH)
    {
        const int r = i / WIDTH, at = i % WIDTH;
        const long to = HEAD(r) * p.out_step[1] + TOKEN(r) * p.out_step[2] + at * p.out_step[3];
        STORE(T, results[r][at] / total[r], out, to);
    }
}
#endif
