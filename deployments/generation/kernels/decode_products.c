/* Products of a step's rows with a model's weights, [rows, width] x [outputs, width] -> [rows, outputs], and what
 * follows them: bias, residual, or silu(gate) * up. Made for few rows, where reading the weights once is what takes time.
 *
 * The weights are packed once, so that a thread reads them from its first byte to its last: in blocks of COLUMNS outputs,
 *
 *     float32:  [blocks, width, COLUMNS]
 *     bfloat16: [blocks, width / 2, COLUMNS, 2]    two numbers of each output side by side, as the processor's bfloat16
 *                                                  instructions multiply and add them; width is padded to PAD
 *
 * with zeros behind the last output. Where a product is gated, the first half of each block's columns is of the gate and
 * the second of the same outputs of `up`.
 */
#include "vectors.h"
#ifndef FORM

struct product {
    const void *x;         /* [rows, width], a row `x_stride` numbers after the one before */
    const void *weights;   /* packed */
    const float *bias;     /* [blocks * COLUMNS], or NULL */
    const void *residual;  /* [rows, outputs], or NULL; it may be `y` */
    void *y;               /* out: [rows, outputs] */
    int64_t rows, width, outputs, x_stride;
    int64_t is_gated;
    int64_t dtype;         /* of x and weights: FLOAT32 or BFLOAT16. Sums are float32 */
    int64_t y_dtype;       /* the same of residual and y */
    int64_t blocks, share; /* all; those that a thread takes at once */
    int64_t next;          /* the next that is taken; 0 at first */
};

#define SELF "decode_products.c"
#include "multiply.h"

const char *decode_products_forms(void) { return forms(); }

#else /* one form */

#include "multiply.h"

INLINE VECTOR NAME(silu)(VECTOR x) {
    VECTOR y = -x;
    y = (VECTOR)NAME(pick)((BITS)(y < -87), (BITS)((VECTOR){0} - 87), (BITS)y);
    y = (VECTOR)NAME(pick)((BITS)(y > 87), (BITS)((VECTOR){0} + 87), (BITS)y);
    return x / (1 + NAME(power)(y));
}

/* What follows the sums [rows, COLUMNS] of a block, and its place in y. */
INLINE void NAME(finish)(const struct product *at, float *sums, int64_t row, int64_t rows, int64_t block) {
    int64_t columns = at->is_gated ? COLUMNS / 2 : COLUMNS, start = block * columns;
    int64_t wanted = least(columns, at->outputs - start);
    for (int64_t r = 0; r < rows; r++) {
        NAME(loose) *of = (NAME(loose) *)(sums + r * COLUMNS);
        if (at->bias != NULL)
            UNROLL for (int v = 0; v < VECTORS; v++) of[v] += ((const NAME(loose) *)(at->bias + block * COLUMNS))[v];
        if (at->is_gated)
            UNROLL for (int v = 0; v < VECTORS / 2; v++) of[v] = NAME(silu)(of[v]) * of[VECTORS / 2 + v];
        int64_t out = (row + r) * at->outputs + start, done = 0;
        for (; done + LANES <= wanted; done += LANES) {
            VECTOR numbers = of[done / LANES];
            if (at->residual != NULL)
                numbers += NAME(read)(at->residual, out + done, at->y_dtype);
            NAME(write)(at->y, out + done, numbers, at->y_dtype);
        }
        if (done < wanted) { /* the last block's last columns */
            int64_t width = at->y_dtype == FLOAT32 ? 4 : 2, bytes = (wanted - done) * width;
            char rest[LANES * 4] = {0}, y[LANES * 4];
            if (at->residual != NULL)
                memcpy(rest, (const char *)at->residual + (out + done) * width, bytes);
            NAME(write)(y, 0, of[done / LANES] + NAME(read)(rest, 0, at->y_dtype), at->y_dtype);
            memcpy((char *)at->y + (out + done) * width, y, bytes);
        }
    }
}

/* Compute blocks until none is left. Any number of threads may do so at once, on the same struct. */
TARGET void NAME(decode_products)(struct product *at) {
    float sums[ROWS * COLUMNS] __attribute__((aligned(64)));
    int64_t width = at->dtype == FLOAT32 ? 4 : 2, pair = at->dtype == FLOAT32 ? 1 : 2;
    struct factors of = {.width = at->width, .dtype = at->dtype, .x_stride = at->x_stride, .x_step = pair};
    for (;;) {
        int64_t first = __atomic_fetch_add(&at->next, at->share, __ATOMIC_RELAXED);
        if (first >= at->blocks)
            break;
        for (int64_t row = 0; row < at->rows; row += ROWS) {
            int64_t rows = least(ROWS, at->rows - row);
#ifdef TILES
            NAME(configure)(least(rows, TILE), rows > TILE ? rows - TILE : 0);
#endif
            for (int64_t block = first; block < least(first + at->share, at->blocks); block++) {
                of.x = (const char *)at->x + row * at->x_stride * width;
                of.weights = (const char *)at->weights + block * at->width * COLUMNS * width;
                NAME(multiply)(&of, rows, sums);
                NAME(finish)(at, sums, row, rows, block);
            }
        }
    }
#ifdef TILES
    _tile_release();
#endif
}

#undef VECTORS
#endif
