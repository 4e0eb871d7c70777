// The softmax of attention and the gradient of its scores, in place of the products q kᵀ and dy vᵀ. One group of
// work-items takes a row, a query of a head.
//
// Macros: those of groups.cl; ADDED, the type of the mask, and SINK, of the sinks; MASKED, SINKING, CAUSAL, CAPPED: whether
// these are there; OTHER: whether ADDED is not f32.

#include "groups.cl"
#include "slopes.cl"

ACCESS(f32)
#if OTHER
ACCESS(ADDED)
#endif
COMBINED(f32, sum, SUM)
COMBINED(f32, largest, LARGER)

typedef struct {
    long rows, groups, first_group, repeats, tokens, heads, keys;
    long offset[5]; // of probs, dscores, slopes, mask, sinks
    long mask_step[4], sink_step;
    float scale, max_bias, soft_cap;
} Params;

SLOPES(float)

#define FIRST_ROW(group) (p.rows * (long)(group) / (long)get_num_groups(0))

__kernel UNVECTORIZED void weigh(
    __global float *all_probs, __global float *all_dscores, __global float *all_slopes,
    __global const MEM(ADDED) *all_masks, __global const MEM(SINK) *sinks, const Params p)
{
    __local float scratch[GROUP];
    for (long row = FIRST_ROW(get_group_id(0)); row < FIRST_ROW(get_group_id(0) + 1); row++) {
        const long token = row % p.tokens, group = row / p.tokens / p.repeats;
        const long head = (p.first_group + group % p.groups) * p.repeats + row / p.tokens % p.repeats;
        __global float *probs = all_probs + p.offset[0] + row * p.keys, *slopes = all_slopes + p.offset[2] + row * p.keys;
        __global float *dscores = all_dscores + p.offset[1] + row * p.keys;
        const long seen = CAUSAL ? clamp(p.keys - p.tokens + token + 1, 0L, p.keys) : p.keys;
#if MASKED
        const float bias = p.max_bias != 0.0f ? slope_of(head, p.heads, p.max_bias) : 1.0f;
        __global const MEM(ADDED) *mask = all_masks + p.offset[3] + group / p.groups * p.mask_step[0]
                                         + head * p.mask_step[1] + token * p.mask_step[2];
#endif
        V(f32) each = (V(f32))(-INFINITY);
        FOR_SHARE(i, p.keys) {
            const int here = COUNT(i, p.keys), visible = (int)clamp(seen - i, 0L, (long)VEC);
            V(f32) score = TAKE(f32)(probs, i, 1, here) * p.scale;
#if CAPPED
            const V(f32) part = tanh(score / p.soft_cap);
            PUT(f32)(1.0f - part * part, slopes, i, 1, here);
            score = part * p.soft_cap;
#endif
#if MASKED
            score += bias * TAKE(ADDED)(mask, i, p.mask_step[3], here);
#endif
            if (visible < VEC) score = AMONG_FIRST(f32, visible) ? score : (V(f32))(-INFINITY);
            PUT(f32)(score, probs, i, 1, here);
            each = score > each ? score : each;
        }
        float most = largest_group(largest_lanes(each), scratch);
#if SINKING
        const float sink = LOAD(SINK, sinks, p.offset[4] + head * p.sink_step);
        most = fmax(most, sink);
#endif
        V(f32) sums = (V(f32))(0.0f), dots = (V(f32))(0.0f);
        FOR_SHARE(i, p.keys) {
            const int here = COUNT(i, p.keys);
            V(f32) power = exp(TAKE(f32)(probs, i, 1, here) - most);
            if (here < VEC) power = AMONG_FIRST(f32, here) ? power : (V(f32))(0.0f);
            PUT(f32)(power, probs, i, 1, here);
            sums += power;
            dots += power * TAKE(f32)(dscores, i, 1, here);
        }
        float total = sum_group(sum_lanes(sums), scratch);
#if SINKING
        total += exp(sink - most);
#endif
        const float dot = sum_group(sum_lanes(dots), scratch) / total;
        FOR_SHARE(i, p.keys) {
            const int here = COUNT(i, p.keys);
            const V(f32) prob = TAKE(f32)(probs, i, 1, here) / total;
            V(f32) dscore = (TAKE(f32)(dscores, i, 1, here) - dot) * prob * p.scale;
#if CAPPED
            dscore *= TAKE(f32)(slopes, i, 1, here);
#endif
            PUT(f32)(prob, probs, i, 1, here);
            PUT(f32)(dscore, dscores, i, 1, here);
        }
    }
}
