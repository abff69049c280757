/* Products of matrices by panels of COLUMNS outputs, in the forms of forms.h: a file includes this header in its place, and
 * again in each form. The form amx has 16 rows of a matrix in each of the processor's tiles.
 */
#ifndef FORM

enum { COLUMNS = 32, PAD = 32, TILE = 16, AHEAD = 4096 }; /* AHEAD: bytes of weights that are asked for before use */

struct factors {
    const void *x;              /* [rows, width] */
    const void *weights;        /* float32: [width, COLUMNS]; bfloat16: [width / 2, COLUMNS, 2], width a multiple of PAD */
    int64_t width, dtype;       /* dtype of both: FLOAT32 or BFLOAT16 */
    int64_t x_stride, x_step;   /* numbers of x from a row to the next; from a float32, or pair of bfloat16, to the next */
};

static inline int64_t padded(int64_t count) { return (count + PAD - 1) / PAD * PAD; }

#include "forms.h"

#else /* one form */

#define VECTORS (COLUMNS / LANES)

#ifdef TILES

INLINE void NAME(configure)(int64_t upper, int64_t lower) {
    struct tile_shapes of = {.palette = 1};
    const int64_t rows[8] = {upper, upper, lower, lower, upper, lower, TILE, TILE};
    for (int i = 0; i < 8; i++)
        of.bytes[i] = rows[i] ? 64 : 0, of.rows[i] = (uint8_t)rows[i];
    _tile_loadconfig(&of);
}

/* sums [rows, COLUMNS] = x times weights. Tiles 0 to 3 are of the upper and lower 16 rows and the left and right 16
 * columns, as configured.
 */
INLINE void NAME(multiply)(const struct factors *of, int64_t rows, float *sums) {
    const uint16_t *x = of->x, *below = x + TILE * of->x_stride, *weights = of->weights;
    int64_t stride = of->x_stride * 2;
    enum { LINE = COLUMNS * 4, HALF = TILE * 2 };
    _tile_zero(0);
    _tile_zero(1);
    if (rows <= TILE) {
        for (int64_t k = 0; k < of->width; k += PAD, weights += PAD * COLUMNS) {
            UNROLL for (int line = 0; line < PAD * COLUMNS * 2; line += 64)
                __builtin_prefetch((const char *)weights + AHEAD + line);
            _tile_loadd(4, x + k, stride);
            _tile_loadd(6, weights, LINE);
            _tile_loadd(7, weights + HALF, LINE);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        }
    } else {
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t k = 0; k < of->width; k += PAD, weights += PAD * COLUMNS) {
            UNROLL for (int line = 0; line < PAD * COLUMNS * 2; line += 64)
                __builtin_prefetch((const char *)weights + AHEAD + line);
            _tile_loadd(4, x + k, stride);
            _tile_loadd(5, below + k, stride);
            _tile_loadd(6, weights, LINE);
            _tile_loadd(7, weights + HALF, LINE);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(2, sums + TILE * COLUMNS, LINE);
        _tile_stored(3, sums + TILE * COLUMNS + TILE, LINE);
    }
    _tile_stored(0, sums, LINE);
    _tile_stored(1, sums + TILE, LINE);
}

#else

/* sums [rows, COLUMNS] = x times weights. */
INLINE void NAME(multiply_some)(const struct factors *of, float *sums, const int rows) {
    VECTOR found[ROWS][VECTORS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < VECTORS; v++) found[r][v] = (VECTOR){0};
    int64_t stride = of->x_stride, step = of->x_step;
    if (of->dtype == BFLOAT16) { /* two numbers of a row, and of each output, at a time */
        const uint16_t *x = of->x, *weights = of->weights;
        for (int64_t k = 0; k < of->width; k += 2, x += step, weights += 2 * COLUMNS) {
            UNROLL for (int line = 0; line < COLUMNS * 4; line += 64)
                __builtin_prefetch((const char *)weights + AHEAD + line);
            BITS w[VECTORS];
            UNROLL for (int v = 0; v < VECTORS; v++) w[v] = (BITS)((const NAME(loose_bits) *)weights)[v];
            UNROLL for (int r = 0; r < rows; r++) {
                uint32_t pair;
                memcpy(&pair, x + r * stride, sizeof pair);
                BITS both = (BITS){0} + pair;
#ifdef DOT
                UNROLL for (int v = 0; v < VECTORS; v++) found[r][v] = DOT(found[r][v], w[v], both);
#else
                VECTOR first = (VECTOR)(both << 16), second = (VECTOR)(both & 0xffff0000);
                UNROLL for (int v = 0; v < VECTORS; v++)
                    found[r][v] += first * (VECTOR)(w[v] << 16) + second * (VECTOR)(w[v] & 0xffff0000);
#endif
            }
        }
    } else {
        const float *x = of->x, *weights = of->weights;
        for (int64_t k = 0; k < of->width; k++, x += step, weights += COLUMNS) {
            UNROLL for (int line = 0; line < COLUMNS * 4; line += 64)
                __builtin_prefetch((const char *)weights + AHEAD + line);
            UNROLL for (int r = 0; r < rows; r++)
                UNROLL for (int v = 0; v < VECTORS; v++)
                    found[r][v] += ((const NAME(loose) *)weights)[v] * x[r * stride];
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < VECTORS; v++) ((NAME(loose) *)sums)[r * VECTORS + v] = found[r][v];
}

static TARGET void NAME(multiply)(const struct factors *of, int64_t rows, float *sums) {
#define MULTIPLY(count)                                                                                                \
    case count:                                                                                                        \
        NAME(multiply_some)(of, sums, count);                                                                          \
        break;
    switch (rows) {
        MULTIPLY(1) MULTIPLY(2) MULTIPLY(3)
#if ROWS == 12
        MULTIPLY(4) MULTIPLY(5) MULTIPLY(6) MULTIPLY(7) MULTIPLY(8) MULTIPLY(9) MULTIPLY(10) MULTIPLY(11) MULTIPLY(12)
#endif
    }
#undef MULTIPLY
}

#endif
#endif
