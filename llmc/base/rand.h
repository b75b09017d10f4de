// Counter-based random numbers: a value depends on (seed, stream, counter) alone, not on the order in which or the rank
// by which it is drawn. Any sharding, any number of threads and Python (train_gpt2.py has the same lines) agree.
// The mixer is splitmix64's finaliser (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
#pragma once

#include "utils.h"

// Purposes of numbers. No two share a stream.
enum { RAND_INIT = 1, RAND_SHUFFLE = 2, RAND_SAMPLE = 3, RAND_ROUND = 4 };

HOST_DEVICE uint64_t rand_mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}
// 64 random bits. `stream` names the purpose and its parts, e.g. rand_stream(RAND_INIT, tensor).
HOST_DEVICE uint64_t rand_u64(uint64_t seed, uint64_t stream, uint64_t counter) {
    return rand_mix(rand_mix(rand_mix(seed + 0x9e3779b97f4a7c15ull) + stream) + counter * 0x9e3779b97f4a7c15ull);
}
HOST_DEVICE uint64_t rand_stream(uint64_t purpose, uint64_t part) { return purpose << 56 ^ part; }
// Three numbers of 16 random bits each. For places that draw billions at a time, where 64-bit multiplications would
// take longer than the memory traffic. `key` is a rand_u64; each serves 2^32 counters. The hash is lowbias32 (Wellons,
// "Prospecting for hash functions", nullprogram.com/blog/2018/07/31; constants of github.com/skeeto/hash-prospector,
// issue 19) with half of the key before each multiplication: for each key a permutation of the 32-bit numbers.
// lowbias32 alone leaves correlations between counters that differ by a power of two. The upper halves of its products
// with a, a^2 and a^3 (mod 2^32) have none. a is the multiplier of a good congruential generator: pairs of neighbouring
// powers lie on a lattice 98% as wide as any can be, pairs of a and a^3 on one of 89%. dev/test/test_adamw.c tests all
// of this.
typedef struct { uint32_t a, b, c; } Rand3;
HOST_DEVICE Rand3 rand_three(uint64_t key, uint32_t counter) {
    uint32_t x = counter ^ (uint32_t)key;
    x = (x ^ x >> 16) * 0x21f0aaadu;
    x = (x ^ x >> 15 ^ (uint32_t)(key >> 32)) * 0xd35a2d97u;
    x ^= x >> 15;
    return (Rand3){x * 0xadb4a92du >> 16, x * 0x291471e9u >> 16, x * 0x449ed6f5u >> 16};
}
// Standard normal (Box-Muller on the two halves of one draw: 32 bits each, never log(0)).
static inline float rand_normal(uint64_t seed, uint64_t stream, uint64_t counter) {
    uint64_t r = rand_u64(seed, stream, counter);
    double u = ((double)(uint32_t)(r >> 32) + 0.5) * 0x1p-32, v = (double)(uint32_t)r * 0x1p-32;
    return (float)(sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v));
}
