// dataloader.h: any bytes as a token shard, behind 16 bytes that say where in the data a run goes on, and its rows.
#include "fuzz.h"

#include "../../llmc/data/dataloader.h"

enum { B = 2, T = 4, VOCAB = 300 };

static void next_batch(DataLoader *d) {
    dataloader_next(d);
    for (int i = 0; i < B * T; i++) {
        const int id = d->inputs[i] < 0 && d->kind.marks ? ~d->inputs[i] : d->inputs[i];
        assert(id >= 0 && id < VOCAB);
        assert(d->targets[i] >= (d->kind.pack ? -2 : 0) && d->targets[i] < VOCAB);
    }
}
static void fuzz_one(const uint8_t *data, size_t size) {
    int64_t place[2] = {0, 0};
    DataLoader d;
    if (size < sizeof place) return;
    memcpy(place, data, sizeof place);
    const RowKind kind = {(Pack)((uint64_t)place[1] % 4), (int)((uint64_t)place[0] % 3) - 1};
    dataloader_open(&d, fuzz_file(data + sizeof place, size - sizeof place), B, T, kind, 0, 1, 1, 1, VOCAB);
    for (int i = 0; i < 4; i++) next_batch(&d);
    dataloader_seek(&d, place[0], place[1]);
    next_batch(&d);
    dataloader_close(&d);
}

static void seed_shard(int64_t epoch, int64_t row, int version, int tokens) {
    uint8_t input[16 + HEADER_BYTES + 400] = {0};
    const int64_t place[2] = {epoch, row};
    const int wide = version != SHARD_VERSION_16, magic = wide ? SHARD_MAGIC_32 : SHARD_MAGIC_16;
    const int32_t header[8] = {magic, version, tokens, 256, 1, 5, 6, 0};
    memcpy(input, place, 16);
    memcpy(input + 16, header, sizeof header);
    for (int i = 0; i < tokens; i++) {
        const uint32_t marks = version != SHARD_VERSION_MARKED ? 0 : i % 3 ? TOKEN_NOT_LEARNED : 1u << 31;
        const uint32_t token = (uint32_t)(i * 7 % 256) | marks;
        memcpy(input + 16 + HEADER_BYTES + i * (wide ? 4 : 2), &token, wide ? 4 : 2);
    }
    fuzz_seed(input, 16 + HEADER_BYTES + (size_t)tokens * (wide ? 4 : 2));
}
static void fuzz_seeds(void) {
    seed_shard(0, 4, SHARD_VERSION_16, 60);
    seed_shard(2, 1000002, SHARD_VERSION_32, 33);
    seed_shard(2, 6, SHARD_VERSION_16, 60);
    seed_shard(0, 7, SHARD_VERSION_MARKED, 60);
}
