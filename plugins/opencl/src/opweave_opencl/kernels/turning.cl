// Sines and cosines of position · frequency, where the product is large and f32 is too coarse for it.
//
// A frequency is high + low, in turns. Whole numbers of turns do not matter, so they are subtracted from the exact
// product: fma gives what rounding the product lost.

static inline float part_of_turn(const float position, const float high, const float low)
{
    const float product = position * high;
    return (product - rint(product)) + (fma(position, high, -product) + position * low);
}

#define TURN 6.283185307179586f
