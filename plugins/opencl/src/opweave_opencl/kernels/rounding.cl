// Floats to whole numbers; T is the type of the operand.

#define op_floor(T, x) floor(x)
#define op_ceil(T, x) ceil(x)
#define op_round(T, x) rint(x)
#define op_trunc(T, x) trunc(x)
