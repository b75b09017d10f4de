// Two hashes.
//
// fnv1a (FNV-1a, 64 bits): of names, options, vocabularies and small files. Shards and tokenizer files store it.
//
// checksum: of files that many ranks write and read at once. It is a sum over the 4-byte words of the file, so each
// rank adds up its own part and the sums of all parts add up to the checksum, however the file was divided.
//   checksum = sum of word[i] * key[i], modulo 2^64; word[i]: the four bytes at 4 i as a number; key[i]: odd, 64 bits
// Damage inside one word is always detected: a difference below 2^32 times an odd key is no multiple of 2^64. Other
// damage is missed with a probability of at most 2^-32. Zeros add nothing, so compare sizes too. It detects faults of
// disks, cables and memory, not forgery. 10 GB/s and more on one core.
#pragma once

#include "rand.h"
#include "utils.h"

#define FNV1A 0xcbf29ce484222325ull  // the hash of nothing
// The hash of what `hash` covers, followed by these bytes.
static uint64_t fnv1a(uint64_t hash, const void *data, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ ((const unsigned char *)data)[i]) * 0x100000001b3ull;
    return hash;
}

enum { CHECKSUM_KEYS = 1024 };
// key[i] = checksum_keys[i % CHECKSUM_KEYS] * (a factor of its block of words), all odd
static uint64_t checksum_keys[CHECKSUM_KEYS];

__attribute__((constructor)) static void checksum_make_keys(void) {
    for (uint64_t i = 0; i < CHECKSUM_KEYS; i++) checksum_keys[i] = rand_mix(i + 1) | 1;
}

// What the `bytes` bytes at `offset` of a file add to its checksum.
static uint64_t checksum(const void *data, size_t bytes, uint64_t offset) {
    const unsigned char *p = (const unsigned char *)data;
    uint64_t sum = 0;
    for (size_t n; bytes > 0; p += n, bytes -= n, offset += n) {
        size_t first = offset / 4 % CHECKSUM_KEYS, room = CHECKSUM_KEYS - first;
        size_t words = smaller(bytes / 4, room);
        uint64_t block = 0;
        n = offset % 4 || words == 0 ? 1 : 4 * words;
        if (n == 1) block = ((uint64_t)*p << 8 * (offset % 4)) * checksum_keys[first];  // part of a word
        for (size_t i = 0; i < n / 4; i++) {
            uint32_t word;
            memcpy(&word, p + 4 * i, 4);
            block += word * checksum_keys[first + i];
        }
        sum += block * (rand_mix(~(offset / 4 / CHECKSUM_KEYS)) | 1);
    }
    return sum;
}
