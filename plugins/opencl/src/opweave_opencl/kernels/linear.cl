// Parameters of the kernels for ``linear`` of processors: rows of a times the columns of b, which lie along k.

typedef struct {
    long m, n, k;
    long offset[6]; // of out, a, b (in bytes if it is quantized), bias, and two arrays of scratch memory
    long b_n;       // from one column to the next, in bytes if b is quantized
    long biased;    // whether there is a bias
    long share;     // of a work-item, as the kernel says
} Params;
