// Activation functions of vectors; T is the type of the operand.

#define op_relu(T, x) (x < (V(T))(0) ? (V(T))(0) : x)
#define op_leaky_relu(T, x, slope) (x > (V(T))(0) ? x : x * slope)
#define op_elu(T, x, alpha) (x > (V(T))(0) ? x : op_expm1(T, x) * alpha)
#define op_xielu(T, x, alpha_p, alpha_n, beta, eps) \
    (x > (V(T))(0) ? x * (x * alpha_p + beta) : op_expm1(T, (x < eps ? x : eps)) * alpha_n + x * (beta - alpha_n))
#define op_softplus(T, x) (op_relu(T, x) + FUNCTION(log1p_unit, T)(op_exp(T, x < (V(T))(0) ? x : -x)))

#define op_sigmoid(T, x) ((V(T))(1) / ((V(T))(1) + op_exp(T, -x)))
#define op_hardsigmoid(T, x) \
    (op_clamp(T, (x + (V(T))(3)), (V(T))(0), (V(T))(6)) * (V(T))(0.16666666666666667))

#define op_silu(T, x) (x / ((V(T))(1) + op_exp(T, -x)))
#define op_hardswish(T, x) (x * op_hardsigmoid(T, x))
#define op_gelu(T, x) (x * FUNCTION(normal, T)(x))
// (1 + tanh u) / 2 is the sigmoid of 2u, which keeps its digits far below zero; this is 2 √(2/π) u.
#define op_gelu_tanh(T, x) \
    (x / ((V(T))(1) + op_exp(T, x * (x * x * (V(T))(-0.071354816272800224) + (V(T))(-1.5957691216057308)))))
#define op_gelu_quick(T, x) (x / ((V(T))(1) + op_exp(T, x * (V(T))(-1.702))))

#define op_relu_backward(T, grad, y) (y <= (V(T))(0) ? (V(T))(0) : grad)
#define op_silu_backward(T, grad, x) \
    (grad * op_sigmoid(T, x) * ((V(T))(1) + x * ((V(T))(1) - op_sigmoid(T, x))))
// With u as above and its derivative: s = sigmoid u.
#define U_AT(T, x) (x * (x * x * (V(T))(0.071354816272800224) + (V(T))(1.5957691216057308)))
#define SLOPE_OF_U(T, x) (x * x * (V(T))(0.21406444881840067) + (V(T))(1.5957691216057308))
#define op_gelu_tanh_backward(T, grad, x) \
    (grad * op_sigmoid(T, U_AT(T, x)) * ((V(T))(1) + x * SLOPE_OF_U(T, x) * ((V(T))(1) - op_sigmoid(T, U_AT(T, x)))))
