// Trigonometric and hyperbolic functions, their inverses, and the error function; T is the type of the operand.

#define op_tan(T, x) tan(x)
#define op_asin(T, x) asin(x)
#define op_acos(T, x) acos(x)
#define op_atan(T, x) atan(x)
#define op_sinh(T, x) sinh(x)
#define op_cosh(T, x) cosh(x)
#define op_asinh(T, x) asinh(x)
#define op_acosh(T, x) acosh(x)
#define op_atanh(T, x) atanh(x)
#define op_erf(T, x) erf(x)
