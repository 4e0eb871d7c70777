// Sums that keep small addends however many there are: some consecutive additions make a sum of their own, and these sums
// are added up with what rounding loses carried along (Kahan, "Further Remarks on Reducing Truncation Errors", 1965).
//
//   ADD_EXACTLY(type, total, lost, v)  adds v, a number or a vector; ``lost`` is 0 at first. Where a sum is infinite
//                                      nothing is carried.

#define ADD_EXACTLY(type, total, lost, v) \
    do { \
        const type more_ = (v) - lost, next_ = total + more_, less_ = next_ - total - more_; \
        lost = less_ == less_ ? less_ : (type)(0); \
        total = next_; \
    } while (0)
