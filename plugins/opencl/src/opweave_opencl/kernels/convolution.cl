// Convolutions. Most are products: of the weights, whose rows are outputs, with columns that hold one window each and
// are never written but gathered while they are packed (products.cl). Three axes; where there are fewer, the first are
// of length 1.
//
// Macros: CONVOLUTION, products; or DEPTHWISE, each output from one input; or COLUMNS_OF, the columns themselves, by LINES
// or element by element; or SUMS_OF, columns added up; or FOLD, the same line by line. T; BIAS, the type of the bias.

#include "types.cl"

typedef struct {
    long kernel_size[3], positions[3], length[3];
    long stride[3], dilation[3], before[3]; // element: position · stride + tap · dilation - before,
    long spread[3];                         // divided by this (transposed convolutions), or there is none
    long x_step[4];                         // along channels and the three axes
    long w_channel, w_step[3];              // of the weights, along inputs and the three axes
} Windows;

// The element that tap ``tap`` of the window at ``position`` reads along ``axis``; negative: none.
static inline long along(const Windows *w, const int axis, const long position, const long tap)
{
    const long at = position * w->stride[axis] + tap * w->dilation[axis] - w->before[axis];
    if (at < 0) return -1;
    const long i = w->spread[axis] > 1 ? at / w->spread[axis] : at;
    return i < w->length[axis] && i * w->spread[axis] == at ? i : -1;
}

#ifdef CONVOLUTION
#include "vectors.cl"

typedef VALN(T, 16) Sums;

// The channel and the taps of element k of a window.
static inline long4 parts_of(const Windows *w, long k)
{
    long4 part;
    part.w = k % w->kernel_size[2], k /= w->kernel_size[2];
    part.z = k % w->kernel_size[1], k /= w->kernel_size[1];
    part.y = k % w->kernel_size[0], part.x = k / w->kernel_size[0];
    return part;
}

static inline long weight_at(const Windows *w, const long k)
{
    const long4 part = parts_of(w, k);
    return part.x * w->w_channel + part.y * w->w_step[0] + part.z * w->w_step[1] + part.w * w->w_step[2];
}

static inline VAL(T) element_of_window(__global const MEM(T) *x, const Windows *w, const long k, const long column)
{
    const long4 part = parts_of(w, k);
    const long c = along(w, 2, column % w->positions[2], part.w), line = column / w->positions[2];
    const long b = along(w, 1, line % w->positions[1], part.z), a = along(w, 0, line / w->positions[1], part.y);
    if (a < 0 || b < 0 || c < 0) return 0;
    return LOAD(T, x, part.x * w->x_step[0] + a * w->x_step[1] + b * w->x_step[2] + c * w->x_step[3]);
}

// ``depth`` elements from ``k0`` of 32 windows from ``column``, of which ``columns`` exist, as to[k * 32 + j].
static inline void gather_windows(__global const MEM(T) *x, const Windows *w, __local VAL(T) *to, const long k0,
                                  const int depth, const long column, const int columns)
{
    // The first element of each window; windows that do not exist begin outside of x.
    int first[3][32];
    for (int j = 0; j < 32; j++) {
        const long line = (column + j) / w->positions[2];
        const long position[3] = {line / w->positions[1], line % w->positions[1], (column + j) % w->positions[2]};
        for (int axis = 0; axis < 3; axis++) first[axis][j] = position[axis] * w->stride[axis] - w->before[axis];
        if (j >= columns) first[0][j] = INT_MIN / 2;
    }
    const int length[3] = {w->length[0], w->length[1], w->length[2]};
    // Windows along one line whose elements follow each other are loaded together where all are inside.
    const bool even = columns == 32 && first[2][31] == first[2][0] + 31 && first[1][31] == first[1][0]
                      && first[0][31] == first[0][0] && w->x_step[3] == 1;
    const bool whole = w->spread[0] * w->spread[1] * w->spread[2] == 1;
    for (int k = 0; k < depth; k++, to += 32) {
        const long4 part = parts_of(w, k0 + k);
        __global const MEM(T) *channel = x + part.x * w->x_step[0];
        const int a = part.y * w->dilation[0], b = part.z * w->dilation[1], c = part.w * w->dilation[2];
        if (!whole) {
            for (int j = 0; j < 32; j++) {
                int at[3] = {first[0][j] + a, first[1][j] + b, first[2][j] + c};
                bool inside = true;
                for (int axis = 0; axis < 3; axis++) {
                    const int apart = w->spread[axis], i = at[axis] / apart;
                    inside = inside && at[axis] >= 0 && i < length[axis] && i * apart == at[axis];
                    at[axis] = i;
                }
                const long from = at[0] * w->x_step[1] + at[1] * w->x_step[2] + at[2] * w->x_step[3];
                to[j] = inside ? LOAD(T, channel, from) : 0;
            }
        } else if (even && first[2][0] + c >= 0 && first[2][31] + c < length[2]) {
            const int i = first[0][0] + a, j = first[1][0] + b;
            const bool inside = i >= 0 && i < length[0] && j >= 0 && j < length[1];
            __global const MEM(T) *from = channel + i * w->x_step[1] + j * w->x_step[2] + first[2][0] + c;
            *(__local Sums *)to = inside ? LOAD16(from) : (Sums)0;
            *(__local Sums *)(to + 16) = inside ? LOAD16(from + 16) : (Sums)0;
        } else {
            for (int j = 0; j < 32; j++) {
                const int l = first[0][j] + a, m = first[1][j] + b, n = first[2][j] + c;
                const bool inside = l >= 0 && l < length[0] && m >= 0 && m < length[1] && n >= 0 && n < length[2];
                to[j] = inside ? LOAD(T, channel, l * w->x_step[1] + m * w->x_step[2] + n * w->x_step[3]) : 0;
            }
        }
    }
}

#include "products.cl"
#endif

#if defined(DEPTHWISE) || defined(SUMS_OF)
typedef struct {
    long channels, out_step[5], out_offset;
#ifdef DEPTHWISE
    long each;                                // channels of out from one of x
    long x_image, w_row, bias_step, biased, offset[3];
    Windows windows;
#else
    long image_step, row_step, column_step, offset;
    Windows windows;                          // positions: elements of out, length: windows
#endif
} Params;

#ifdef DEPTHWISE
#define OPERANDS __global const MEM(T) *x, __global const MEM(T) *weight, __global const MEM(BIAS) *bias,
#define START (p.biased ? LOAD(BIAS, bias, p.offset[2] + channel * p.bias_step) : 0.0f)
#define ENTER_LINE \
    __global const MEM(T) *line = x + a * w->x_step[1] + b * w->x_step[2]; \
    __global const MEM(T) *row = weight + i * w->w_step[0] + j * w->w_step[1];
#define TERM LOAD(T, line, c * w->x_step[3]) * LOAD(T, row, k * w->w_step[2])
#else
#define OPERANDS __global const MEM(T) *x,
#define START 0.0f
#define ENTER_LINE \
    __global const MEM(T) *line = x + (i * taps[1] + j) * taps[2] * p.row_step; \
    line += (a * w->length[1] + b) * w->length[2] * p.column_step;
#define TERM LOAD(T, line, k * p.row_step + c * p.column_step)
#endif

// Each output is a sum over the taps that meet an element.
__kernel void sums(__global MEM(T) *out, OPERANDS const Params p)
{
    const Windows *w = &p.windows;
    const long position[3] = {get_global_id(1) / w->positions[1], get_global_id(1) % w->positions[1], get_global_id(0)};
    const long image = get_global_id(2) / p.channels, channel = get_global_id(2) % p.channels, *taps = w->kernel_size;
    if (position[2] >= w->positions[2] || position[0] >= w->positions[0]) return;
    float sum = START;
#ifdef DEPTHWISE
    x += p.offset[0] + image * p.x_image + channel / p.each * w->x_step[0];
    weight += p.offset[1] + channel * p.w_row;
#else
    x += p.offset + image * p.image_step + channel * taps[0] * taps[1] * taps[2] * p.row_step;
#endif
    for (long i = 0; i < taps[0]; i++) {
        const long a = along(w, 0, position[0], i);
        for (long j = 0; j < taps[1] && a >= 0; j++) {
            const long b = along(w, 1, position[1], j);
            if (b < 0) continue;
            ENTER_LINE
            for (long k = 0; k < taps[2]; k++) {
                const long c = along(w, 2, position[2], k);
                if (c >= 0) sum += TERM;
            }
        }
    }
    long to = p.out_offset + image * p.out_step[0] + channel * p.out_step[1];
    for (int axis = 0; axis < 3; axis++) to += position[axis] * p.out_step[2 + axis];
    STORE(T, sum, out, to);
}
#endif

#ifdef COLUMNS_OF
typedef struct {
    long rows, row_step, column_step, images, image_step, x_image, offset[2];
    Windows windows;
} Params;

#if LINES
// Of a processor: a work-item writes some rows of the columns, each of which reads along the lines of one channel.
__kernel UNVECTORIZED void columns(__global MEM(T) *out, __global const MEM(T) *x, const Params p)
{
    const Windows *w = &p.windows;
    const long items = get_global_size(0), rows = p.rows * p.images, apart = w->stride[2], to_step = p.column_step;
    const long all = w->positions[0] * w->positions[1], n = w->positions[2];
    for (long at = rows * get_global_id(0) / items; at < rows * (get_global_id(0) + 1) / items; at++) {
        long k = at % p.rows;
        __global MEM(T) *to = out + p.offset[0] + at / p.rows * p.image_step + k * p.row_step;
        const long tap = k % w->kernel_size[2], shift = tap * w->dilation[2] - w->before[2];
        k /= w->kernel_size[2];
        const long line_tap = k % w->kernel_size[1], plane_tap = k / w->kernel_size[1] % w->kernel_size[0];
        const long channel = k / w->kernel_size[1] / w->kernel_size[0];
        __global const MEM(T) *from = x + p.offset[1] + at / p.rows * p.x_image + channel * w->x_step[0];
        // The positions whose elements lie inside of a line.
        const long first = min(shift < 0 ? (apart - 1 - shift) / apart : 0, n);
        const long last = max(min(w->length[2] > shift ? (w->length[2] - shift + apart - 1) / apart : 0, n), first);
        for (long line = 0; line < all; line++, to += n * to_step) {
            const long a = along(w, 0, line / w->positions[1], plane_tap);
            const long b = along(w, 1, line % w->positions[1], line_tap);
            const bool inside = a >= 0 && b >= 0;
            const long begin = inside ? first : n, end = inside ? last : n;
            for (long i = 0; i < begin; i++) STORE(T, 0, to, i * to_step);
            if (inside) {
                __global const MEM(T) *own = from + a * w->x_step[1] + b * w->x_step[2] + shift * w->x_step[3];
                if (to_step == 1 && apart * w->x_step[3] == 1)
                    for (long i = begin; i < end; i++) STORE(T, LOAD(T, own, i), to, i);
                else
                    for (long i = begin; i < end; i++) STORE(T, LOAD(T, own, i * apart * w->x_step[3]), to, i * to_step);
            }
            for (long i = end; i < n; i++) STORE(T, 0, to, i * to_step);
        }
    }
}
#else
__kernel void columns(__global MEM(T) *out, __global const MEM(T) *x, const Params p)
{
    const Windows *w = &p.windows;
    const long column = get_global_id(0), image = get_global_id(2);
    if (column >= w->positions[0] * w->positions[1] * w->positions[2] || get_global_id(1) >= p.rows) return;
    long k = get_global_id(1);
    const long c = along(w, 2, column % w->positions[2], k % w->kernel_size[2]), line = column / w->positions[2];
    k /= w->kernel_size[2];
    const long b = along(w, 1, line % w->positions[1], k % w->kernel_size[1]);
    k /= w->kernel_size[1];
    const long a = along(w, 0, line / w->positions[1], k % w->kernel_size[0]);
    k /= w->kernel_size[0];
    x += p.offset[1] + image * p.x_image + k * w->x_step[0];
    VAL(T) value = 0;
    if (a >= 0 && b >= 0 && c >= 0) value = LOAD(T, x, a * w->x_step[1] + b * w->x_step[2] + c * w->x_step[3]);
    STORE(T, value, out, p.offset[0] + image * p.image_step + get_global_id(1) * p.row_step + column * p.column_step);
}
#endif
#endif

#ifdef FOLD
typedef struct {
    long channels, images, biased, offset[3]; // of out, the columns and the bias; all are dense
    Windows windows;
} Params;

// The columns hold, for each channel of the output and each tap, a number for each element of x, which belongs to the
// position where the tap meets that element. A work-item adds up some lines of the output.
__kernel UNVECTORIZED void fold(
    __global float *out, __global const float *columns, __global const float *bias, const Params p)
{
    const Windows *w = &p.windows;
    const long lines = w->positions[0] * w->positions[1], n = w->positions[2], apart = w->spread[2];
    const long elements = w->length[0] * w->length[1] * w->length[2], *taps = w->kernel_size;
    const long all = p.images * p.channels * lines, items = get_global_size(0);
    for (long at = all * get_global_id(0) / items; at < all * (get_global_id(0) + 1) / items; at++) {
        const long line = at % lines, channel = at / lines;
        __global float *to = out + p.offset[0] + at * n;
        const float start = p.biased ? bias[p.offset[2] + channel % p.channels] : 0.0f;
        for (long i = 0; i < n; i++) to[i] = start;
        for (long i = 0; i < taps[0]; i++) {
            const long a = along(w, 0, line / w->positions[1], i);
            for (long j = 0; j < taps[1] && a >= 0; j++) {
                const long b = along(w, 1, line % w->positions[1], j);
                if (b < 0) continue;
                const long tap = ((channel * taps[0] + i) * taps[1] + j) * taps[2];
                __global const float *from = columns + p.offset[1] + tap * elements + (a * w->length[1] + b) * w->length[2];
                for (long k = 0; k < taps[2]; k++, from += elements) {
                    // Element e of a line meets this tap at position e * apart + shift.
                    const long shift = w->before[2] - k * w->dilation[2];
                    const long first = shift < 0 ? (apart - 1 - shift) / apart : 0;
                    const long last = min(w->length[2], n > shift ? (n - shift + apart - 1) / apart : 0);
                    if (apart == 1)
                        for (long e = first; e < last; e++) to[e + shift] += from[e];
                    else
                        for (long e = first; e < last; e++) to[e * apart + shift] += from[e];
                }
            }
        }
    }
}
#endif
