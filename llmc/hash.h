// A checksum for files that many write and many read at once. It is a sum: whoever has a stretch of the file adds up his
// own, in any order and of any size, and the sums of all stretches add up to the checksum of the file. No rank has to know
// what another one wrote, and the result does not depend on how many there were.
//
//   checksum = sum of word[i] * key[i], modulo 2^64; word[i]: the four bytes at 4 i as a number; key[i]: odd, 64 bits
//
// Damage inside of one word is always noticed: a difference below 2^32 times an odd key is no multiple of 2^64. Any other
// damage is missed with a probability of at most 2^-32. Zeros add nothing, so sizes must be compared, too. It protects from
// broken disks, cables and memory, not from people. 10 GB/s and more on one core, without special instructions.
#ifndef LLMC_HASH_H
#define LLMC_HASH_H

#include "utils.h"

enum { CHECKSUM_KEYS = 1024 };
static uint64_t checksum_keys[CHECKSUM_KEYS];  // key[i] = checksum_keys[i % CHECKSUM_KEYS] * (a factor of its block of words)

// A well-mixed odd number for every i: the finaliser of splitmix64 (https://prng.di.unimi.it/splitmix64.c).
static inline uint64_t checksum_odd(uint64_t i) {
    i = (i ^ i >> 30) * 0xbf58476d1ce4e5b9ull;
    i = (i ^ i >> 27) * 0x94d049bb133111ebull;
    return (i ^ i >> 31) | 1;
}
__attribute__((constructor)) static void checksum_make_keys(void) {
    for (uint64_t i = 0; i < CHECKSUM_KEYS; i++) checksum_keys[i] = checksum_odd(i + 1);
}

// The share of `bytes` bytes that lie at byte `offset` of a file.
static inline uint64_t checksum(const void *data, size_t bytes, uint64_t offset) {
    const unsigned char *p = (const unsigned char *)data;
    uint64_t sum = 0;
    for (size_t n; bytes > 0; p += n, bytes -= n, offset += n) {
        const size_t first = offset / 4 % CHECKSUM_KEYS, words = bytes / 4 < CHECKSUM_KEYS - first ? bytes / 4 : CHECKSUM_KEYS - first;
        uint64_t block = 0;
        n = 1;
        if (offset % 4 || words == 0) block = ((uint64_t)*p << 8 * (offset % 4)) * checksum_keys[first];  // part of a word
        else {
            n = 4 * words;
            for (size_t i = 0; i < words; i++) {
                uint32_t word;
                memcpy(&word, p + 4 * i, 4);
                block += word * checksum_keys[first + i];
            }
        }
        sum += block * checksum_odd(~(offset / 4 / CHECKSUM_KEYS));
    }
    return sum;
}

#endif
