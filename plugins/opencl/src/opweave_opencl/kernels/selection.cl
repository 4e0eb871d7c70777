// Choosing between vectors; T is the type of the operands.

// A NaN in either operand is the result.
#define op_minimum(T, x, y) (x < y || x != x ? x : y)
#define op_maximum(T, x, y) (x > y || x != x ? x : y)
// Where the lower bound is above the upper one, the upper one is the result.
#define op_clamp(T, x, least, most) ((x < least ? least : x) > most ? most : x < least ? least : x)
#define op_step(T, x) (x > (V(T))(0) ? (V(T))(1) : (V(T))(0))
#define op_where(T, condition, x, y) (CONVERT(MASK(T))(condition) != (MASK(T))(0) ? x : y)
