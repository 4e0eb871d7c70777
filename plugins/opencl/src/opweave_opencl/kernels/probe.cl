// What a driver is tried with: what most kernels are made of, on vectors of 16. Not one of opweave's operations.

#define ARGUMENTS(T) __global const float *x, __global const int *n, __global T *out

__kernel void conversions(ARGUMENTS(char))
{
    const size_t i = get_global_id(0);
    vstore16(convert_char16(vload16(i, n)) + convert_char16(vload16(i, x)), i, out);
}

__kernel void comparisons(ARGUMENTS(uchar))
{
    const size_t i = get_global_id(0);
    vstore16(convert_uchar16((vload16(i, x) > (float16)(0)) & (int16)(1)), i, out);
}

__kernel void choices(ARGUMENTS(int))
{
    const size_t i = get_global_id(0);
    const float16 a = vload16(i, x);
    const int16 b = vload16(i, n);
    vstore16(a < convert_float16(b) ? b : select(convert_int16(a), -b, b < (int16)(-100)), i, out);
}

__kernel void functions(ARGUMENTS(half))
{
    const size_t i = get_global_id(0);
    const float16 a = vload16(i, x);
    vstore_half16_rte(exp(a * 0.125f) / (1 + fmax(a, (float16)(0))), i, out);
}

// A group adds up 16 vectors.
__kernel void sums(ARGUMENTS(float))
{
    __local float part[16];
    const size_t me = get_local_id(0), size = get_local_size(0);
    float16 found = 0;
    for (size_t i = me; i < 16; i += size)
        found += vload16(get_group_id(0) * 16 + i, x);
    const float8 pair = found.lo + found.hi;
    const float4 quarter = pair.lo + pair.hi;
    part[me] = quarter.x + quarter.y + quarter.z + quarter.w;
    for (size_t left = size / 2; left > 0; left /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (me < left)
            part[me] += part[me + left];
    }
    if (me == 0)
        out[get_group_id(0)] = part[0];
}
