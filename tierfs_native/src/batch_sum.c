/*
 * XXH3 is specified at https://github.com/Cyan4973/xxHash (doc/xxhash_spec.md): what follows implements the 64 bit
 * variant without a seed. Lengths are those of blocks, so the loop over long input is all that has to be fast; it
 * is written so that compilers turn it into vector instructions.
 */
#include "batch_sum.h"

#include <string.h>

#define PRIME32_1 UINT64_C(0x9E3779B1)
#define PRIME32_2 UINT64_C(0x85EBCA77)
#define PRIME32_3 UINT64_C(0xC2B2AE3D)
#define PRIME64_1 UINT64_C(0x9E3779B185EBCA87)
#define PRIME64_2 UINT64_C(0xC2B2AE3D27D4EB4F)
#define PRIME64_3 UINT64_C(0x165667B19E3779F9)
#define PRIME64_4 UINT64_C(0x85EBCA77C2B2AE63)
#define PRIME64_5 UINT64_C(0x27D4EB2F165667C5)
#define PRIME_MX1 UINT64_C(0x165667919E3779F9)
#define PRIME_MX2 UINT64_C(0x9FB21C651E98DF25)

#define STRIPE_BYTES 64
#define STRIPES_PER_BLOCK 16
#define BLOCK_BYTES (STRIPE_BYTES * STRIPES_PER_BLOCK)
#define LANES 8
#define SECRET_BYTES 192

/* The default secret of the specification. */
static const uint8_t secret[SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static inline uint64_t read64(const uint8_t *from)
{
    uint64_t value;

    memcpy(&value, from, sizeof(value));
    return value;
}

static inline uint64_t read32(const uint8_t *from)
{
    uint32_t value;

    memcpy(&value, from, sizeof(value));
    return value;
}

static inline uint64_t rotate(uint64_t value, unsigned bits)
{
    return value << bits | value >> (64 - bits);
}

static inline uint64_t multiply_fold(uint64_t left, uint64_t right)
{
    const unsigned __int128 product = (unsigned __int128)left * right;

    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t avalanche(uint64_t value)
{
    value ^= value >> 37;
    value *= PRIME_MX1;
    return value ^ value >> 32;
}

static uint64_t avalanche_short(uint64_t value)
{
    value ^= value >> 33;
    value *= PRIME64_2;
    value ^= value >> 29;
    value *= PRIME64_3;
    return value ^ value >> 32;
}

static inline uint64_t mix16(const uint8_t *data, const uint8_t *key)
{
    return multiply_fold(read64(data) ^ read64(key), read64(data + 8) ^ read64(key + 8));
}

static uint64_t sum_to_16(const uint8_t *data, size_t length)
{
    if (length > 8) {
        const uint64_t low = read64(data) ^ read64(secret + 24) ^ read64(secret + 32);
        const uint64_t high = read64(data + length - 8) ^ read64(secret + 40) ^ read64(secret + 48);

        return avalanche(length + __builtin_bswap64(low) + high + multiply_fold(low, high));
    }
    if (length >= 4) {
        uint64_t value = read32(data + length - 4) + (read32(data) << 32);

        value ^= read64(secret + 8) ^ read64(secret + 16);
        value ^= rotate(value, 49) ^ rotate(value, 24);
        value *= PRIME_MX2;
        value ^= (value >> 35) + length;
        value *= PRIME_MX2;
        return value ^ value >> 28;
    }
    if (length > 0) {
        const uint64_t value = (uint64_t)data[0] << 16 | (uint64_t)data[length >> 1] << 24 |
                               data[length - 1] | (uint64_t)length << 8;

        return avalanche_short(value ^ read32(secret) ^ read32(secret + 4));
    }
    return avalanche_short(read64(secret + 56) ^ read64(secret + 64));
}

static uint64_t sum_to_240(const uint8_t *data, size_t length)
{
    uint64_t total = length * PRIME64_1;

    if (length <= 128) {
        for (size_t i = (length - 1) / 32 + 1; i-- > 0;)
            total += mix16(data + 16 * i, secret + 32 * i) +
                     mix16(data + length - 16 * (i + 1), secret + 32 * i + 16);
        return avalanche(total);
    }
    for (size_t i = 0; i < 8; i++)
        total += mix16(data + 16 * i, secret + 16 * i);
    total = avalanche(total);
    for (size_t i = 8; i < length / 16; i++)
        total += mix16(data + 16 * i, secret + 16 * (i - 8) + 3);
    return avalanche(total + mix16(data + length - 16, secret + 136 - 17));
}

static inline void add_stripe(uint64_t lanes[LANES], const uint8_t *data, const uint8_t *key)
{
    uint64_t values[LANES], keyed[LANES];

    memcpy(values, data, sizeof(values));
    memcpy(keyed, key, sizeof(keyed));
    for (size_t i = 0; i < LANES; i++) {
        keyed[i] ^= values[i];
        lanes[i] += values[i ^ 1] + (keyed[i] & UINT32_MAX) * (keyed[i] >> 32);
    }
}

static inline __attribute__((always_inline)) uint64_t sum_stripes(const uint8_t *data, size_t length)
{
    uint64_t lanes[LANES] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                             PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    const size_t blocks = (length - 1) / BLOCK_BYTES;
    uint64_t total = length * PRIME64_1;

    for (size_t block = 0; block < blocks; block++) {
        const uint8_t *start = data + block * BLOCK_BYTES;

        for (size_t i = 0; i < STRIPES_PER_BLOCK; i++)
            add_stripe(lanes, start + i * STRIPE_BYTES, secret + i * 8);
        for (size_t i = 0; i < LANES; i++) {
            lanes[i] ^= lanes[i] >> 47 ^ read64(secret + SECRET_BYTES - STRIPE_BYTES + i * 8);
            lanes[i] *= PRIME32_1;
        }
    }
    for (size_t i = 0; i < (length - 1 - blocks * BLOCK_BYTES) / STRIPE_BYTES; i++)
        add_stripe(lanes, data + blocks * BLOCK_BYTES + i * STRIPE_BYTES, secret + i * 8);
    add_stripe(lanes, data + length - STRIPE_BYTES, secret + SECRET_BYTES - STRIPE_BYTES - 7);
    for (size_t i = 0; i < LANES / 2; i++)
        total += multiply_fold(lanes[2 * i] ^ read64(secret + 11 + 16 * i),
                               lanes[2 * i + 1] ^ read64(secret + 11 + 16 * i + 8));
    return avalanche(total);
}

static uint64_t sum_portable(const uint8_t *data, size_t length)
{
    return sum_stripes(data, length);
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
/* The eight lanes are one register of 512 bits: several times faster where the processor has them. */
__attribute__((target("avx512f,avx512dq,prefer-vector-width=512"))) static uint64_t
sum_wide(const uint8_t *data, size_t length)
{
    return sum_stripes(data, length);
}

static uint64_t sum_long(const uint8_t *data, size_t length)
{
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq"))
        return sum_wide(data, length);
    return sum_portable(data, length);
}
#else
static uint64_t sum_long(const uint8_t *data, size_t length)
{
    return sum_portable(data, length);
}
#endif

uint64_t tierfs_block_sum(const void *data, size_t length)
{
    if (length <= 16)
        return sum_to_16(data, length);
    if (length <= 240)
        return sum_to_240(data, length);
    return sum_long(data, length);
}
