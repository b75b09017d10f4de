// A step of generation as one kernel (kernels/decode.cuh) among ranks (decode_lines.cuh), for all numbers of rows.
#include "decode_lines.cuh"

template void decode_launch<DecodeLines>(const Decode *, const DecodeLines &, int, cudaStream_t);
