// Tensors made without sources. RAMP(T) defines the function for a type.

// start + i * step for VEC elements from i on.
#define RAMP(T, wide) \
    static inline V(T) GLUE(ramp_, T)(const long i, const wide start, const wide step) \
    { \
        VAL(T) each[VEC]; \
        for (int k = 0; k < VEC; k++) each[k] = TO(T, (wide)(i + k) * step + start); \
        return LOAD_AS_IS(VEC, each, 0); \
    }
