/* The forms of the processors: lanes of a vector, rows at once, and what the compiler may use. A file defines its structs,
 * and SELF, its own name, and includes this header, which includes the file once for each form.
 */
#define FORM plain
#define TARGET
#define LANES 4
#define ROWS 3 /* of a matrix at once, whose sums stay in registers */
#include SELF

#if defined(__x86_64__)
#undef FORM
#undef TARGET
#undef LANES
#define FORM avx2
#define TARGET TARGET_AVX2
#define HAS_AVX2
#define LANES 8
#include SELF

#undef FORM
#undef TARGET
#undef LANES
#undef ROWS
#define FORM avx512
#define TARGET TARGET_AVX512
#define LANES 16
#define ROWS 12
#include SELF

#ifdef HAS_AMX
#undef FORM
#undef TARGET
#define FORM avx512bf16
#define TARGET TARGET_BFLOAT16
#define DOT(sums, weights, pair)                                                                                       \
    (NAME(vector))_mm512_dpbf16_ps((__m512)(sums), (__m512bh)(weights), (__m512bh)(pair))
#include SELF

#undef FORM
#undef TARGET
#undef ROWS
#define FORM amx
#define TARGET TARGET_AMX
#define ROWS 32
#define TILES
#include SELF
#undef DOT

#endif
#endif

/* The forms that this processor runs, the best first. Products in amx and avx512bf16 are of bfloat16 alone. */
static const char *forms(void) {
#if defined(__x86_64__)
    const char *of[] = {"plain", "avx2 plain", "avx512 avx2 plain", "avx512bf16 avx512 avx2 plain",
                        "amx avx512bf16 avx512 avx2 plain"};
    return of[best_form()];
#else
    return "plain";
#endif
}
