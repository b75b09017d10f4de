// NCCL's calls (llmc/ranks/nccl_calls.cuh) as tests need them. Include it before everything else of llmc/ranks.
//   ranks_share_gpu    ranks exchange through MPI and host memory, so that all of them may have one GPU: slow
//   otherwise
//     a communicator that is closed waits for the process's next model of the same ranks: tests open hundreds,
//                      and NCCL takes half a second for each
#pragma once

#include "../../llmc/ranks/nccl_calls.cuh"

typedef struct {
    NcclHandle handle;
    int first, stride, world, max_ctas, open;
} KeptNccl;
static struct {
    KeptNccl all[64];
    int count;
} kept_nccl;

// Ranks of a group make and close their communicators in the same order, so they find the same ones here.
static inline NcclHandle test_connect(const Comm *comm, int max_ctas) {
    if (ranks_share_gpu) return (NcclHandle)comm;
    for (int i = 0; i < kept_nccl.count; i++) {
        KeptNccl *k = &kept_nccl.all[i];
        const int same_ranks = k->first == comm->first && k->stride == comm->stride && k->world == comm->world;
        if (k->open || !same_ranks || k->max_ctas != max_ctas) continue;
        k->open = 1;
        return k->handle;
    }
    require(kept_nccl.count < 64, "more than 64 groups of ranks\nmake room in kept_nccl");
    KeptNccl *k = &kept_nccl.all[kept_nccl.count++];
    *k = {nccl_connect(comm, max_ctas), comm->first, comm->stride, comm->world, max_ctas, 1};
    return k->handle;
}
static inline void test_disconnect(NcclHandle handle) {
    for (int i = 0; i < kept_nccl.count; i++)
        if (kept_nccl.all[i].handle == handle) kept_nccl.all[i].open = 0;
}
static inline const char *test_error(NcclHandle handle) { return ranks_share_gpu ? NULL : nccl_error(handle); }
static inline void test_calls_begin(void) {
    if (!ranks_share_gpu) nccl_calls_begin();
}
static inline void test_calls_end(void) {
    if (!ranks_share_gpu) nccl_calls_end();
}

// The first of `ranks` rows of `count` elements becomes their sum in fp32, rounded once. stride: bytes from row to row
template <typename T> inline void sum_of_rows(char *rows, int ranks, size_t stride, size_t count) {
    for (size_t i = 0; i < count; i++) {
        float sum = 0;
        for (int r = 0; r < ranks; r++) sum += (float)((const T *)(rows + (size_t)r * stride))[i];
        ((T *)rows)[i] = (T)sum;
    }
}
// The first of `ranks` rows of `count` numbers becomes the largest of each column.
static inline void largest_of_rows(uint32_t *rows, size_t ranks, size_t count) {
    for (size_t i = count; i < ranks * count; i++)
        if (rows[i] > rows[i % count]) rows[i % count] = rows[i];
}
static inline void test_carry(NcclHandle handle, NcclKind kind, const Comm *comm, void *to, const void *from,
                              size_t count, size_t size, cudaStream_t stream) {
    if (!ranks_share_gpu) {
        nccl_carry(handle, kind, comm, to, from, count, size, stream);
        return;
    }
    const size_t world = (size_t)comm->world, rank = (size_t)comm->rank, piece = count * size;
    const size_t sent = kind == NCCL_ALL_GATHER || kind == NCCL_MAX ? piece : world * piece;
    char *all = (char *)malloc_or_die(world * sent), *mine = all + (sent == piece ? 0 : rank * piece);
    auto upload = [&](size_t at, const char *data, size_t bytes) {
        cudaCheck(cudaMemcpyAsync((char *)to + at, data, bytes, cudaMemcpyHostToDevice, stream));
    };
    cudaCheck(cudaMemcpyAsync(all + rank * sent, from, sent, cudaMemcpyDeviceToHost, stream));
    cudaCheck(cudaStreamSynchronize(stream));
    comm_all_gather(comm, all, sent);
    if (kind == NCCL_REDUCE_SCATTER) {
        if (size == sizeof(float))
            sum_of_rows<float>(mine, comm->world, sent, count);
        else
            sum_of_rows<__nv_bfloat16>(mine, comm->world, sent, count);
        upload(0, mine, piece);
    }
    if (kind == NCCL_MAX) {
        largest_of_rows((uint32_t *)all, world, count);
        upload(0, all, piece);
    }
    if (kind == NCCL_ALL_GATHER) upload(0, all, world * piece);
    for (size_t r = 0; r < world && kind == NCCL_EXCHANGE; r++)
        if (r != rank) upload(r * piece, mine + r * sent, piece);
    cudaCheck(cudaStreamSynchronize(stream));
    free(all);
}

#define nccl_connect test_connect
#define nccl_disconnect test_disconnect
#define nccl_error test_error
#define nccl_calls_begin test_calls_begin
#define nccl_calls_end test_calls_end
#define nccl_carry test_carry
