// Comparing vectors; T is the type of the operands, the result is bool.

#define TRUTH(T, comparison) TON(bool, VEC, (comparison) & (MASK(T))(1))

#define op_less(T, x, y) TRUTH(T, x < y)
#define op_less_equal(T, x, y) TRUTH(T, x <= y)
#define op_equal(T, x, y) TRUTH(T, x == y)
#define op_not_equal(T, x, y) TRUTH(T, x != y)
#define op_truth(T, x) TRUTH(T, x != (V(T))(0))
