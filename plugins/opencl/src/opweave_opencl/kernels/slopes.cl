// SLOPES(R) defines `slope_of`, the factor of a head's mask in R: that of ALiBi (Press, Smith and Lewis, "Train Short, Test
// Long", 2022), as `alibi_slopes` of the core's ops defines it.

#define SLOPES(R) \
    static inline R slope_of(const long head, const long heads, const R max_bias) \
    { \
        long n = 1; \
        while (n * 2 <= heads) n *= 2; \
        return head < n ? exp2(-max_bias / n * (head + 1)) : exp2(-max_bias / (2 * n) * (2 * (head - n) + 1)); \
    }
