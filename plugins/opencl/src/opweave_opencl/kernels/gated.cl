// Gated linear units of vectors; T is the type of the operands.

#define op_reglu(T, x, gate) (x * op_relu(T, gate))
#define op_geglu_none(T, x, gate) (x * op_gelu(T, gate))
#define op_geglu_tanh(T, x, gate) (x * op_gelu_tanh(T, gate))
#define op_geglu_quick(T, x, gate) (x * op_gelu_quick(T, gate))
#define op_swiglu(T, x, gate) (x * op_silu(T, gate))
#define op_swiglu_oai(T, x, gate, alpha, limit) \
    (op_swish(T, (gate > limit ? limit : gate), alpha) * (op_clamp(T, x, -limit, limit) + (V(T))(1)))
#define op_swish(T, x, slope) (x / ((V(T))(1) + op_exp(T, -slope * x)))
