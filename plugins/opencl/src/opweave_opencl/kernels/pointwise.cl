// What generated pointwise kernels are made of: the walk, access to operands, and the operations.
//
// Macros: VEC, elements that are computed at once. A kernel's block of parameters is called p and begins with WALK.

#include "walk.cl"
#include "functions.cl"
#include "elementwise.cl"
#include "activation.cl"
#include "gated.cl"
#include "rounding.cl"
#include "selection.cl"
#include "trigonometry.cl"
#include "comparison.cl"
#include "creation.cl"

// Scalars lie in the block of parameters as words.
#define SCALAR(T, word) GLUE(scalar_, VAL(T))(word)
#define scalar_double(word) as_double(word)
#define scalar_float(word) as_float((uint)(word))
#define scalar_long(word) (word)
#define scalar_int(word) ((int)(word))
#define scalar_short(word) ((short)(word))
#define scalar_char(word) ((char)(word))
#define scalar_uchar(word) ((uchar)(word))
