/* What one core can do at most: loops that do nothing else, compiled for this processor by peak.py. */

#if defined(__AVX512F__)
enum { bytes = 64 };
#elif defined(__AVX__)
enum { bytes = 32 };
#else
enum { bytes = 16 };
#endif
/* Twelve sums that do not wait for one another keep every unit busy. */
enum { lanes = bytes / 4, sums = 12 };
typedef float vector __attribute__((vector_size(bytes)));

/* Floating-point operations of one round of each loop; 0 where the processor has no such unit. */
double fma_flops(void) { return 2.0 * lanes * sums; }

float fma_run(long rounds, float factor, float term) {
    vector sum[sums], by = factor - (vector){0}, add = term - (vector){0};
    for (int i = 0; i < sums; ++i) sum[i] = add * (float)i;
    for (long n = 0; n < rounds; ++n) {
#pragma GCC unroll 12
        for (int i = 0; i < sums; ++i) sum[i] = sum[i] * by + add;
    }
    for (int i = 1; i < sums; ++i) sum[0] += sum[i];
    return sum[0][0];
}

/* Pairs of bfloat16 multiplied and added to float32, in registers: every product of a pair is undone by the other. */
#if defined(__AVX512BF16__)
#include <immintrin.h>

double dot_flops(void) { return 4.0 * 16 * sums; }

float dot_run(long rounds, float factor, float term) {
    __m512 sum[sums];
    __m512bh left = (__m512bh)_mm512_set1_epi32(0x3f80bf80), right = (__m512bh)_mm512_set1_epi16(0x3f9d);
    for (int i = 0; i < sums; ++i) sum[i] = _mm512_set1_ps(factor + term * (float)i);
    for (long n = 0; n < rounds; ++n) {
#pragma GCC unroll 12
        for (int i = 0; i < sums; ++i) sum[i] = _mm512_dpbf16_ps(sum[i], left, right);
    }
    for (int i = 1; i < sums; ++i) sum[0] = _mm512_add_ps(sum[0], sum[i]);
    return _mm512_reduce_add_ps(sum[0]);
}
#else
double dot_flops(void) { return 0; }

float dot_run(long rounds, float factor, float term) { return (float)rounds * factor * term; }
#endif

/* The same by tiles of 16 rows of 64 bytes: two by two sums, as an attention kernel has them. */
#if defined(__AMX_BF16__) && defined(__linux__)
#include <immintrin.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { ask_permission = 0x1023, tile_data = 18, tiles = 8 };

double tile_flops(void) {
    return syscall(SYS_arch_prctl, ask_permission, tile_data) == 0 ? 4 * 2.0 * 16 * 16 * 32 : 0;
}

float tile_run(long rounds, float factor, float term) {
    struct {
        unsigned char palette, start, reserved[14];
        unsigned short row_bytes[16];
        unsigned char rows[16];
    } config;
    unsigned short pairs[16 * 32];
    float result[16 * 16];
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int i = 0; i < tiles; ++i) config.row_bytes[i] = 64, config.rows[i] = 16;
    for (int i = 0; i < 16 * 32; ++i) pairs[i] = (unsigned short)(i % 2 ? 0xbf80 : 0x3f9d);
    for (int i = 0; i < 16 * 16; ++i) result[i] = factor + term * (float)i;
    /* The instructions read more than the compiler is told. */
    __asm__ volatile("" : : "r"(&config), "r"(pairs), "r"(result) : "memory");
    _tile_loadconfig(&config);
    _tile_loadd(0, result, 64);
    _tile_loadd(1, result, 64);
    _tile_loadd(2, result, 64);
    _tile_loadd(3, result, 64);
    _tile_loadd(4, pairs, 64);
    _tile_loadd(5, pairs, 64);
    _tile_loadd(6, pairs, 64);
    _tile_loadd(7, pairs, 64);
    for (long n = 0; n < rounds; ++n) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, result, 64);
    _tile_release();
    __asm__ volatile("" : : "r"(result) : "memory");
    return result[0];
}
#else
double tile_flops(void) { return 0; }

float tile_run(long rounds, float factor, float term) { return (float)rounds * factor * term; }
#endif

/* Reads every byte of so many pieces of memory, one after another. */
long long read_run(const unsigned char *const *starts, const long *sizes, long count) {
    enum { wide = 8 };
    typedef long long words __attribute__((vector_size(bytes), aligned(1)));
    words sum[wide] = {{0}};
    long long rest = 0;
    for (long piece = 0; piece < count; ++piece) {
        const unsigned char *at = starts[piece], *end = at + sizes[piece];
        for (; end - at >= (long)(wide * bytes); at += wide * bytes) {
#pragma GCC unroll 8
            for (int i = 0; i < wide; ++i) sum[i] ^= *(const words *)(at + i * bytes);
        }
        while (at < end) rest ^= *at++;
    }
    for (int i = 1; i < wide; ++i) sum[0] ^= sum[i];
    for (int i = 0; i < (int)(bytes / 8); ++i) rest ^= sum[0][i];
    return rest;
}

/* Reads every byte of so many pieces of memory and writes it back with some bits flipped: twice leaves them as they were. */
void update_run(unsigned char *const *starts, const long *sizes, long count, long long flip) {
    enum { wide = 8 };
    typedef long long words __attribute__((vector_size(bytes), aligned(1)));
    words by = {0};
    for (int i = 0; i < (int)(bytes / 8); ++i) by[i] = flip;
    for (long piece = 0; piece < count; ++piece) {
        unsigned char *at = starts[piece], *end = at + sizes[piece];
        for (; end - at >= (long)(wide * bytes); at += wide * bytes) {
#pragma GCC unroll 8
            for (int i = 0; i < wide; ++i) *(words *)(at + i * bytes) ^= by;
        }
        while (at < end) *at++ ^= (unsigned char)flip;
    }
}
