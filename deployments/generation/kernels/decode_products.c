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
 *
 * The file includes itself once for each form: lanes of a vector, rows at once, and what the compiler may use of the
 * processor. The form amx, at its end, has 16 rows of a matrix in each of the processor's tiles.
 */
#include "vectors.h"
#ifndef FORM

enum { COLUMNS = 32, PAD = 32, TILE = 16, AHEAD = 4096 }; /* AHEAD: bytes of weights that are asked for before use */

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

#if defined(__x86_64__)
#define FORM avx2
#define TARGET TARGET_AVX2
#define HAS_FLOAT16
#define LANES 8
#define ROWS 3 /* at once, whose sums stay in registers */
#include "decode_products.c"

#undef FORM
#undef TARGET
#undef LANES
#undef ROWS
#define FORM avx512
#define TARGET TARGET_AVX512
#define LANES 16
#define ROWS 12
#include "decode_products.c"

#ifdef HAS_AMX
#undef FORM
#undef TARGET
#define FORM avx512bf16
#define TARGET TARGET_BFLOAT16
#define DOT(sums, weights, pair)                                                                                       \
    (NAME(vector))_mm512_dpbf16_ps((__m512)(sums), (__m512bh)(weights), (__m512bh)(pair))
#include "decode_products.c"
#undef DOT

#undef FORM
#undef TARGET
#undef LANES
#undef ROWS
#define FORM amx
#define TARGET TARGET_AMX
#define LANES 16
#define ROWS 32
#define TILES
#include "decode_products.c"

#endif
#endif

/* The forms that this processor runs, the best first. Amx and avx512bf16 are for bfloat16 alone. */
const char *decode_products_forms(void) {
#if defined(__x86_64__)
    const char *of[] = {"", "avx2", "avx512 avx2", "avx512bf16 avx512 avx2", "amx avx512bf16 avx512 avx2"};
    return of[best_form()];
#else
    return "";
#endif
}

#else /* one form */

#define VECTORS (COLUMNS / LANES)

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

#ifdef TILES

INLINE void NAME(configure)(int64_t upper, int64_t lower) {
    struct tile_shapes of = {.palette = 1};
    const int64_t rows[8] = {upper, upper, lower, lower, upper, lower, TILE, TILE};
    for (int i = 0; i < 8; i++)
        of.bytes[i] = rows[i] ? 64 : 0, of.rows[i] = (uint8_t)rows[i];
    _tile_loadconfig(&of);
}

/* Sums of one block: tiles 0 to 3 are of the upper and lower 16 rows and the left and right 16 columns. */
INLINE void NAME(multiply)(const struct product *at, int64_t row, int64_t rows, int64_t block, float *sums) {
    const uint16_t *x = (const uint16_t *)at->x + row * at->x_stride, *below = x + TILE * at->x_stride;
    const uint16_t *weights = (const uint16_t *)at->weights + block * at->width * COLUMNS;
    int64_t stride = at->x_stride * 2;
    enum { LINE = COLUMNS * 4, HALF = TILE * 2 };
    _tile_zero(0);
    _tile_zero(1);
    if (rows <= TILE) {
        for (int64_t k = 0; k < at->width; k += PAD, weights += PAD * COLUMNS) {
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
        for (int64_t k = 0; k < at->width; k += PAD, weights += PAD * COLUMNS) {
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

/* Sums of `rows` rows and one block. */
INLINE void NAME(multiply_some)(const struct product *at, int64_t row, int64_t block, float *sums, const int rows) {
    VECTOR found[ROWS][VECTORS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < VECTORS; v++) found[r][v] = (VECTOR){0};
    int64_t stride = at->x_stride;
    if (at->dtype == BFLOAT16) { /* two numbers of a row, and of each output, at a time */
        const uint16_t *x = (const uint16_t *)at->x + row * stride;
        const uint16_t *weights = (const uint16_t *)at->weights + block * at->width * COLUMNS;
        for (int64_t k = 0; k < at->width; k += 2, weights += 2 * COLUMNS) {
            UNROLL for (int line = 0; line < COLUMNS * 4; line += 64)
                __builtin_prefetch((const char *)weights + AHEAD + line);
            BITS w[VECTORS];
            UNROLL for (int v = 0; v < VECTORS; v++) w[v] = (BITS)((const NAME(loose_bits) *)weights)[v];
            UNROLL for (int r = 0; r < rows; r++) {
                uint32_t pair;
                memcpy(&pair, x + r * stride + k, sizeof pair);
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
        const float *x = (const float *)at->x + row * stride;
        const float *weights = (const float *)at->weights + block * at->width * COLUMNS;
        for (int64_t k = 0; k < at->width; k++, weights += COLUMNS) {
            UNROLL for (int line = 0; line < COLUMNS * 4; line += 64)
                __builtin_prefetch((const char *)weights + AHEAD + line);
            UNROLL for (int r = 0; r < rows; r++)
                UNROLL for (int v = 0; v < VECTORS; v++)
                    found[r][v] += ((const NAME(loose) *)weights)[v] * x[r * stride + k];
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < VECTORS; v++) ((NAME(loose) *)sums)[r * VECTORS + v] = found[r][v];
}

static TARGET void NAME(multiply)(const struct product *at, int64_t row, int64_t rows, int64_t block, float *sums) {
#define MULTIPLY(count)                                                                                                \
    case count:                                                                                                        \
        NAME(multiply_some)(at, row, block, sums, count);                                                              \
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

/* Compute blocks until none is left. Any number of threads may do so at once, on the same struct. */
TARGET void NAME(decode_products)(struct product *at) {
    float sums[ROWS * COLUMNS] __attribute__((aligned(64)));
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
                NAME(multiply)(at, row, rows, block, sums);
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
