// Generation: the model's forward over new tokens, with the keys and values of all earlier ones kept (backend.h). A tensor-parallel group
// does it together, each rank with its heads; the few rows are not spread but summed on every rank.
#ifndef LLMC_DECODE_CUH
#define LLMC_DECODE_CUH

#include "model.cuh"

static void decode_memory_hint(char *text, size_t size, size_t, const Memory *, void *context) {
    const int generates = (int)((const Model *)context)->options.generate;
    snprintf(text, size, "this is beside the model, for samples alone: use fewer --samples or --sample-tokens, or %s", generates ? "a shorter --seq-len" : "a smaller --batch-size");
}
void model_decode_open(Model *m, int sequences, int room) {
    const Config *c = &m->local;
    KvCache *cache = &m->cache;
    const size_t S = (size_t)sequences, ranks = (size_t)m->mesh->tp.world, most = rows_here(m, (size_t)m->B * m->T), size = (size_t)c->num_layers * S * c->num_kv_heads * room * c->head_dim;
    assert(!cache->keys && sequences <= m->B && room <= c->max_seq_len);
    require(S <= most, "%zu samples at a time are more than the %zu rows of a micro-step that a rank has with --tp\nsample fewer, or use a longer --seq-len", S, most);
    cache->sequences = sequences;
    cache->room = room;
    memory_request(&cache->memory, &cache->keys, "samples", "keys (L,S,NKV,room,HD)", size);
    memory_request(&cache->memory, &cache->values, "samples", "values (L,S,NKV,room,HD)", size);
    memory_request(&cache->memory, &cache->last, "samples", "last tokens (S,C)", S * c->channels);
    if (c->position == POSITION_ROPE) memory_request(&cache->memory, &cache->cos_sin, "samples", "rope table (room,HD/2,2)", (size_t)room * c->head_dim);
    if (is_split(m)) memory_request(&cache->memory, &cache->logits, "samples", "logits (ranks,S,Vp)", ranks * S * c->padded_vocab_size);
    memory_request_pinned(&cache->memory, &cache->host_logits, "samples", is_split(m) ? "logits (ranks,S,Vp)" : "logits (S,Vp)", ranks * S * c->padded_vocab_size);
    memory_allocate(&cache->memory, 1, decode_memory_hint, m);
    if (c->position == POSITION_ROPE) upload_rope_table(m, cache->cos_sin, room);
}
void model_decode_reset(Model *m) { m->cache.count = 0; }
void model_decode(Model *m, const int *tokens, int n, float *logits) {
    const Config *c = &m->local;
    KvCache *cache = &m->cache;
    const int S = cache->sequences, ranks = m->mesh->tp.world, most = (int)rows_here(m, (size_t)m->B * m->T) / S, C = c->channels, V = m->config.vocab_size, Vp = c->padded_vocab_size;
    const int autotune = m->matmul.autotune;
    const size_t row = (size_t)C * sizeof(floatX);
    int *piece = (int *)malloc_or_die((size_t)S * (size_t)(n < most ? n : most) * sizeof(int));
    cudaStream_t s = m->gpu.compute;
    assert(n >= 1 && cache->count + n <= cache->room);
    m->matmul.autotune = 0;  // shapes that come once
    m->spread = 1;
    for (int t0 = 0, k; t0 < n; t0 += k) {
        k = n - t0 < most ? n - t0 : most;
        for (int i = 0; i < S; i++) memcpy(piece + i * k, tokens + (size_t)i * n + t0, (size_t)k * sizeof(int));
        upload_tokens(m, piece, NULL, (size_t)S * k);
        model_forward(m, S, k, cache);
        cache->count += k;
        if (t0 + k == n) cudaCheck(cudaMemcpy2DAsync(cache->last, row, m->h_final + (size_t)(k - 1) * C, k * row, row, (size_t)S, cudaMemcpyDeviceToDevice, s));
    }
    m->spread = ranks;
    const size_t share = (size_t)S * Vp;
    floatX *all = is_split(m) ? cache->logits : m->logits;  // (ranks,S,Vp)
    matmul_forward(&m->matmul, all + (size_t)m->mesh->tp.rank * share, cache->last, head_weight(m, m->weights), NULL, NULL, S, C, Vp, s);
    if (is_split(m)) tp_gather(&m->tp, all, share);
    cudaCheck(cudaMemcpyAsync(cache->host_logits, all, (size_t)ranks * share * sizeof(floatX), cudaMemcpyDeviceToHost, s));
    cudaCheck(cudaStreamSynchronize(s));
    m->matmul.autotune = autotune;
    for (int i = 0; i < S; i++)
        for (int v = 0; v < V; v++) logits[(size_t)i * V + v] = (float)cache->host_logits[(size_t)(v / Vp) * share + (size_t)i * Vp + v % Vp];
    free(piece);
}

#endif
