/* What the kernels share. A file that has forms includes itself once for each of them, and this header at its beginning:
 * first without a form, then with FORM (its name), LANES (of a vector) and TARGET (what the compiler may use of the
 * processor), and HAS_AVX2 if that is AVX2 or more. NAME(f) is f's name in the form, VECTOR its vector of
 * float32.
 */
#ifndef FORM

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#define TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#define TARGET_AVX512 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")))
#define TARGET_BFLOAT16 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))
#define TARGET_AMX                                                                                                     \
    __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16")))
#if defined(__linux__) && (__GNUC__ >= 11 || __clang_major__ >= 12)
#define HAS_AMX /* the compiler has, and AVX512_BF16 */
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline, unused)) TARGET
#define JOINED(name, form) name##_##form
#define JOIN(name, form) JOINED(name, form)
#define NAME(name) JOIN(name, FORM)
#define VECTOR NAME(vector)
#define BITS NAME(bits)
#define AT(where) (*(NAME(loose) *)(where)) /* VECTOR anywhere in memory */
#define READ(where) (*(const NAME(loose) *)(where))
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

enum dtype { FLOAT32, BFLOAT16, FLOAT16 }; /* of numbers in memory; native.py has the same order */

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

#if defined(__x86_64__)
/* What this processor and this process may use: 0 none of the forms, 1 AVX2, 2 AVX-512, 3 and its bfloat16, 4 AMX. */
__attribute__((unused)) static int best_form(void) {
    unsigned a, b, c, d;
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__get_cpuid(1, &a, &b, &c, &d) ||
        !(c & bit_F16C))
        return 0;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
        return 1;
#ifdef HAS_AMX
    /* AMX-BF16, AMX-TILE; ARCH_REQ_XCOMP_PERM: Linux has to allow a process the tiles, whose state is large */
    enum { PRODUCTS = 1 << 22, TILE = 1 << 24, REQUEST = 0x1023, TILE_DATA = 18 };
    if (!__builtin_cpu_supports("avx512bf16"))
        return 2;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & PRODUCTS) && (d & TILE) &&
        syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0)
        return 4;
    return 3;
#else
    return 2;
#endif
}
#endif

#ifdef HAS_AMX
struct tile_shapes { /* as the processor reads them: bytes of a row and rows of each tile */
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};
#endif

#else /* one form */

typedef float NAME(vector) __attribute__((vector_size(LANES * 4)));
typedef uint32_t NAME(bits) __attribute__((vector_size(LANES * 4)));
typedef float NAME(loose) __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t NAME(loose_bits) __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t NAME(halves) __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

INLINE BITS NAME(pick)(BITS which, BITS a, BITS b) { return (which & a) | (~which & b); } /* a where all bits are set */

/* Where either is NaN: b. */
INLINE VECTOR NAME(larger)(VECTOR a, VECTOR b) {
#if defined(HAS_AVX2) && LANES == 16
    return (VECTOR)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(HAS_AVX2)
    return (VECTOR)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return (VECTOR)NAME(pick)((BITS)(a > b), (BITS)a, (BITS)b);
#endif
}

/* LANES numbers of float16 as float32: by instructions, or else by their bits. Either way a NaN becomes a quiet one. */
INLINE VECTOR NAME(read_float16)(const void *from) {
#if defined(HAS_AVX2) && LANES == 16
    return (VECTOR)_mm512_cvtph_ps(_mm256_loadu_si256(from));
#elif defined(HAS_AVX2)
    return (VECTOR)_mm256_cvtph_ps(_mm_loadu_si128(from));
#elif defined(__aarch64__) && LANES == 4
    return (VECTOR)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
#else
    BITS half = __builtin_convertvector(*(const NAME(halves) *)from, BITS), absolute = half & 0x7fff;
    BITS bits = (absolute << 13) + (112u << 23); /* the bias of the exponent: 127 in place of 15 */
    BITS small = (BITS)((VECTOR)(absolute + (126u << 23)) - 0.5f); /* subnormal: so many 2^-24, the last place of 0.5 */
    bits = NAME(pick)((BITS)(absolute < 0x400), small, bits);
    bits += (BITS)(absolute >= 0x7c00) & (112u << 23); /* infinity and NaN */
    bits |= (BITS)(absolute > 0x7c00) & 0x400000; /* NaN: quiet */
    return (VECTOR)(bits | (half & 0x8000) << 16);
#endif
}

/* The way back: to nearest, ties to even. */
INLINE void NAME(write_float16)(void *to, VECTOR numbers) {
#if defined(HAS_AVX2) && LANES == 16
    _mm256_storeu_si256(to, _mm512_cvtps_ph((__m512)numbers, _MM_FROUND_TO_NEAREST_INT));
#elif defined(HAS_AVX2)
    _mm_storeu_si128(to, _mm256_cvtps_ph((__m256)numbers, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__) && LANES == 4
    vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)numbers)));
#else
    BITS bits = (BITS)numbers, absolute = bits & 0x7fffffff;
    BITS half = (absolute - (112u << 23) + 0xfff + ((absolute >> 13) & 1)) >> 13; /* rounded at bit 13 */
    BITS small = (BITS)((VECTOR)absolute + 0.5f) - (126u << 23); /* subnormal: the addition rounds to so many 2^-24 */
    half = NAME(pick)((BITS)(absolute < 113u << 23), small, half);
    half = NAME(pick)((BITS)(absolute >= 143u << 23), (BITS){0} + 0x7c00, half); /* 2^16 and more: infinity */
    half = NAME(pick)((BITS)(absolute > 0x7f800000), ((absolute >> 13) & 0x3ff) | 0x7e00, half); /* NaN: quiet */
    *(NAME(halves) *)to = __builtin_convertvector(half | (bits >> 16 & 0x8000), NAME(halves));
#endif
}

/* LANES numbers from number `start` on as float32, and back: to nearest, ties to even. */
INLINE VECTOR NAME(read)(const void *from, int64_t start, enum dtype dtype) {
    if (dtype == FLOAT32)
        return READ((const float *)from + start);
    if (dtype == FLOAT16)
        return NAME(read_float16)((const uint16_t *)from + start);
    return (VECTOR)(__builtin_convertvector(*(const NAME(halves) *)((const uint16_t *)from + start), BITS) << 16);
}

INLINE void NAME(write)(void *to, int64_t start, VECTOR numbers, enum dtype dtype) {
    if (dtype == FLOAT32) {
        AT((float *)to + start) = numbers;
        return;
    }
    if (dtype == FLOAT16) {
        NAME(write_float16)((uint16_t *)to + start, numbers);
        return;
    }
    BITS bits = (BITS)numbers, nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    bits = NAME(pick)((BITS)(numbers == numbers), nearest, (BITS){0} + 0x7fc0);
    *(NAME(halves) *)((uint16_t *)to + start) = __builtin_convertvector(bits, NAME(halves));
}

/* e^x of numbers from -87 to 87: 2^n times a polynomial of the rest, as in Cephes' expf. */
INLINE VECTOR NAME(power)(VECTOR x) {
    const float round = 12582912; /* 1.5 * 2^23: the last bits of a number that it is added to are an integer's */
    VECTOR shifted = x * 1.44269504f + round, n = shifted - round;
    VECTOR r = x - n * 0.693359375f + n * 2.12194440e-4f;
    VECTOR y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1;
    return y * (VECTOR)(((BITS)shifted << 23) + (127u << 23));
}

/* The same to 1 / 8000, for weights that become bfloat16, which are rounded by up to 1 / 512. */
INLINE VECTOR NAME(rough_power)(VECTOR x) {
    VECTOR shifted = x * 1.44269504f + 12582912, r = x - (shifted - 12582912) * 0.693147182f;
    VECTOR y = (r * 0.16662810f + 0.50394164f) * r * r + r + 1;
    return y * (VECTOR)(((BITS)shifted << 23) + (127u << 23));
}

#endif
