// An index out of bounds is recorded for the host (indices.py), the first one only. Kernels go on without what
// it would read or write.
//
// Macros: CHECKED, whether they are recorded. A kernel takes WRONG_INDEX after its operands, and the last member of its
// parameters p is ``site``. INSIDE(index, length): whether an index is 0 .. length - 1; one that is not is recorded.

#ifndef WRONG_INDEX
static inline bool is_inside(const long index, const long length) { return index >= 0 && index < length; }

#if CHECKED
typedef struct {
    int site, unused;
    long index;
} WrongIndex;

static inline bool inside_or_noted(const long index, const long length, __global WrongIndex *note, const int site)
{
    const bool there = is_inside(index, length);
    if (!there && atomic_cmpxchg((volatile __global int *)&note->site, 0, site) == 0) note->index = index;
    return there;
}

#define WRONG_INDEX __global WrongIndex *wrong_index,
#define INSIDE(index, length) inside_or_noted(index, length, wrong_index, (int)p.site)
#else
#define WRONG_INDEX
#define INSIDE(index, length) is_inside(index, length)
#endif
#endif
