// Vectors of GCC and Clang: + and * work on all lanes, on any CPU.
#ifndef LLMC_VECTORS_H
#define LLMC_VECTORS_H

#if defined __AVX512F__
enum { LANES = 16 };
#elif defined __AVX__
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));

#endif
