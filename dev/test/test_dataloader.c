// Tests of llmc/data/dataloader.h: order, positions, ranks, big and many shards, mixtures, and every
// refusal.
#include "llmc/data/dataloader.h"

#include "dev/test/check.h"
#include <sys/resource.h>

static char folder[64];

static const char *in_folder(const char *name) {
    static char path[4][256];
    static int next;
    char *p = path[next++ % 4];
    snprintf(p, sizeof path[0], "%s/%s", folder, name);
    return p;
}

// ---- files to read

// Tokens begin, begin + 1, ...; `file_tokens` of them really stand in the file.
static void write_shard(const char *name, int magic, int version, int tokens, int file_tokens, int begin,
                        int vocab_size) {
    int32_t h[256] = {0};
    h[0] = magic;
    h[1] = version;
    h[2] = tokens;
    h[3] = vocab_size;
    h[4] = vocab_size ? TOKENIZER_GPT2 : 0;
    FILE *f = fopen_or_die(in_folder(name), "wb", "tests need a writable /tmp");
    fwrite(h, 4, 256, f);
    for (int i = 0; i < file_tokens; i++) {
        uint32_t wide = (uint32_t)(begin + i);
        uint16_t narrow = (uint16_t)wide;
        fwrite(magic == SHARD_MAGIC_32 ? (void *)&wide : (void *)&narrow, magic == SHARD_MAGIC_32 ? 4 : 2, 1, f);
    }
    fclose(f);
}
static void write_good(const char *name, int tokens, int begin) {
    write_shard(name, SHARD_MAGIC_16, 1, tokens, tokens, begin, 0);
}

// Three unequal shards with T = 4: rows begin at tokens 0,4 | 1000..1024 (7 rows) | 2000..2008 (3 rows); written out of
// order.
enum { ROWS = 2 + 7 + 3 };
static const int row_begin[ROWS] = {0, 4, 1000, 1004, 1008, 1012, 1016, 1020, 1024, 2000, 2004, 2008};
static void write_three(void) {
    write_good("abc_train_000002.bin", 15, 2000);
    write_good("abc_train_000000.bin", 9, 0);
    write_good("abc_train_000001.bin", 32, 1000);
}
static int row_is(const DataLoader *d, int b, int begin) {
    for (int t = 0; t < d->T; t++)
        if (d->inputs[b * d->T + t] != begin + t || d->targets[b * d->T + t] != begin + t + 1) return 0;
    return 1;
}

static void open_plain(DataLoader *d, const char *pattern, int B, int T, int rank, int world, int shuffle,
                       uint64_t seed, int vocab_size) {
    const RowKind plain = {PACK_NO, 0};
    dataloader_open(d, pattern, B, T, plain, rank, world, shuffle, seed, vocab_size);
}

// ---- what works

// What is there by a name is no pattern, nor are folders in front of one.
static void test_names(void) {
    const struct {
        const char *pattern;
        int shards;
    } cases[] = {{"n[1]/s*.bin", 2}, {"n[1]/s[0].bin", 1}, {"n[1]/s[0]*", 1}, {"n1/s[0].bin", 1}, {"n[12]/s*.bin", 1}};
    mkdir(in_folder("n[1]"), 0700);
    mkdir(in_folder("n1"), 0700);
    write_good("n[1]/s[0].bin", 9, 0);
    write_good("n[1]/s0.bin", 9, 0);
    write_good("n1/s0.bin", 9, 0);
    for (int i = 0; i < COUNT_OF(cases); i++) {
        DataLoader d;
        open_plain(&d, in_folder(cases[i].pattern), 1, 4, 0, 1, 0, 1, 0);
        check(d.num_shards == cases[i].shards, "'%s' is %d shards", cases[i].pattern, d.num_shards);
        dataloader_close(&d);
    }
}

static void test_order(void) {
    DataLoader d;
    int ok = 1;
    open_plain(&d, in_folder("abc_train_*.bin"), 5, 4, 0, 1, 0, 1, 0);
    check(d.num_shards == 3 && d.num_tokens == 56 && d.rows_per_epoch == ROWS, "three unequal shards are counted");
    for (int i = 0; i < 60; i++) {
        if (i % 5 == 0) dataloader_next(&d);
        ok &= row_is(&d, i % 5, row_begin[i % ROWS]);
    }
    check(ok, "unshuffled rows come by file name; steps flow over shards and epochs; targets are one further on");
    int64_t epoch, row;
    dataloader_position(&d, &epoch, &row);
    check(epoch == 5 && row == 0, "position after 60 rows of 12 is epoch 5, row 0");
    dataloader_seek(&d, 0, 0);
    dataloader_next(&d);
    check(row_is(&d, 0, 0), "reset goes back to the first row");
    dataloader_close(&d);
}

// The documented order, computed the slow way: an item's place is the number of items with smaller keys.
static int place_of(uint64_t seed, uint64_t part, int item, int count) {
    int place = 0;
    for (int i = 0; i < count; i++)
        place += rand_u64(seed, rand_stream(RAND_SHUFFLE, part), (uint64_t)i) <
                 rand_u64(seed, rand_stream(RAND_SHUFFLE, part), (uint64_t)item);
    return place;
}
static void reference_epoch(uint64_t seed, uint64_t epoch, int *begins) {
    static const int rows[3] = {2, 7, 3}, first[3] = {0, 2, 9};
    for (int s = 0; s < 3; s++) {
        int before = 0;
        for (int other = 0; other < 3; other++)
            if (place_of(seed, epoch, other, 3) < place_of(seed, epoch, s, 3)) before += rows[other];
        for (int r = 0; r < rows[s]; r++)
            begins[before + place_of(seed, (epoch << 24) + (uint64_t)s + 1, r, rows[s])] = row_begin[first[s] + r];
    }
}
static void test_shuffle(void) {
    DataLoader d;
    int expected[3][ROWS], ok = 1, seen[ROWS] = {0};
    for (int e = 0; e < 3; e++) reference_epoch(7, (uint64_t)e, expected[e]);
    open_plain(&d, in_folder("abc_train_*.bin"), 1, 4, 0, 1, 1, 7, 0);
    for (int i = 0; i < 3 * ROWS; i++) {
        dataloader_next(&d);
        ok &= row_is(&d, 0, expected[i / ROWS][i % ROWS]);
    }
    check(ok, "the shuffled order is the documented one, for three epochs");
    check(memcmp(expected[0], expected[1], sizeof expected[0]) != 0, "two epochs have different orders");
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < ROWS; j++) seen[j] += expected[1][i] == row_begin[j];
    for (int j = 0; j < ROWS; j++) ok &= seen[j] == 1;
    check(ok, "every row comes once in an epoch");
    dataloader_close(&d);
}

// Global batch of 6 rows, 9 steps: one rank with B = 6, three ranks with B = 2, two with B = 1 and three micro-steps.
static void collect(int B, int world, int micro_steps, int *out /*[9][6]*/) {
    for (int rank = 0; rank < world; rank++) {
        DataLoader d;
        open_plain(&d, in_folder("abc_train_*.bin"), B, 4, rank, world, 1, 99, 0);
        for (int step = 0; step < 9; step++)
            for (int m = 0; m < micro_steps; m++) {
                dataloader_next(&d);
                for (int b = 0; b < B; b++)
                    out[step * 6 + (m * world + rank) * B + b] = row_is(&d, b, d.inputs[b * 4]) ? d.inputs[b * 4] : -1;
            }
        dataloader_close(&d);
    }
}
static void test_world_sizes(void) {
    int a[54], b[54], c[54];
    collect(6, 1, 1, a);
    collect(2, 3, 1, b);
    collect(1, 2, 3, c);
    check(memcmp(a, b, sizeof a) == 0 && memcmp(a, c, sizeof a) == 0,
          "the order depends on the global batch alone, not on ranks and micro-steps");
}

static void test_resume(void) {
    DataLoader d, e;
    int ok = 1;
    open_plain(&d, in_folder("abc_train_*.bin"), 5, 4, 0, 1, 1, 3, 0);
    open_plain(&e, in_folder("abc_train_*.bin"), 5, 4, 0, 1, 1, 3, 0);
    for (int i = 0; i < 40; i++) {
        int64_t epoch, row;
        dataloader_position(&d, &epoch, &row);
        dataloader_next(&d);
        dataloader_seek(&e, 9, 1);  // somewhere else
        dataloader_next(&e);
        dataloader_seek(&e, epoch, row);
        dataloader_next(&e);
        ok &= memcmp(d.inputs, e.inputs, 20 * sizeof(int)) == 0 && memcmp(d.targets, e.targets, 20 * sizeof(int)) == 0;
    }
    check(ok, "seek to a saved position gives the same batches, also back and forth");
    dataloader_seek(&e, 1, 3 * ROWS + 2);
    int64_t epoch, row;
    dataloader_position(&e, &epoch, &row);
    check(epoch == 4 && row == 2, "a row beyond the epoch counts on into later ones");
    dataloader_close(&d);
    dataloader_close(&e);
}

static void test_read_ahead(void) {
    DataLoader d, e;
    int ok = 1, taken = 0;
    open_plain(&d, in_folder("abc_train_*.bin"), 5, 4, 1, 2, 1, 3, 0);
    open_plain(&e, in_folder("abc_train_*.bin"), 5, 4, 1, 2, 1, 3, 0);
    for (int i = 0; i < 60; i++) {
        // what was read ahead is of another place
        if (i == 20) {
            dataloader_seek(&d, 2, 7);
            dataloader_seek(&e, 2, 7);
        }
        if (i == 40) {
            dataloader_seek(&d, 0, 0);
            dataloader_seek(&e, 0, 0);
        }
        dataloader_next(&d);
        dataloader_next(&e);
        if (i % 7 != 3) dataloader_read_ahead(&e);
        if (i % 5 == 1) dataloader_read_ahead(&e);  // asking twice changes nothing
        taken += e.ahead_next >= 0;
        ok &= memcmp(d.inputs, e.inputs, 20 * sizeof(int)) == 0 &&
              memcmp(d.targets, e.targets, 20 * sizeof(int)) == 0 && d.next == e.next;
    }
    check(ok && taken > 40, "batches that are read ahead are the same, also after a seek");
    dataloader_read_ahead(&e);
    dataloader_close(&e);  // while the thread reads
    dataloader_close(&d);
}

static void test_wide_tokens(void) {
    DataLoader d;
    write_shard("wide.bin", SHARD_MAGIC_32, 7, 9, 9, 128000, 0);
    open_plain(&d, in_folder("wide.bin"), 1, 4, 0, 1, 0, 1, 128256);
    dataloader_next(&d);
    dataloader_next(&d);
    check(row_is(&d, 0, 128004), "uint32 shards are read");
    dataloader_close(&d);
}

static void many_shards_child(void *unused) {
    (void)unused;
    struct rlimit few = {32, 32};
    require(setrlimit(RLIMIT_NOFILE, &few) == 0, "setrlimit");
    DataLoader d;
    open_plain(&d, in_folder("many_*.bin"), 7, 4, 0, 1, 1, 1, 0);
    int64_t sum = 0;
    for (int i = 0; i < 1500; i++) {
        dataloader_next(&d);
        for (int b = 0; b < 7; b++) sum += d.inputs[b * 4];
    }
    int64_t expected = 0;
    for (int i = 0; i < 1500; i++) expected += 7 * 10 * i + (0 + 4 + 8 + 12 + 16 + 20 + 24);
    require(d.rows_per_epoch == 7 * 1500 && sum == expected, "sum %lld, not %lld\n.", (long long)sum,
            (long long)expected);
    dataloader_close(&d);
}
static void test_many_shards(void) {
    for (int i = 0; i < 1500; i++) {
        char name[32];
        snprintf(name, sizeof name, "many_%06d.bin", i);
        write_good(name, 29, 10 * i);
    }
    char text[4096];
    check(run_child(many_shards_child, NULL, text, sizeof text) == 0, "1500 shards are read with 32 file descriptors");
}

// Sets one token. in_place: the file is written to; otherwise another file, good but for this token, gets its name.
static void write_changed(const char *name, int tokens, int at, int token, int in_place) {
    const char *other = in_place ? name : "other.bin";
    if (!in_place) write_good(other, tokens, 0);
    const int fd = open(in_folder(other), O_WRONLY);
    const uint16_t word = (uint16_t)token;
    require(pwrite(fd, &word, 2, HEADER_BYTES + 2 * (off_t)at) == 2 && close(fd) == 0, "cannot write\n.");
    if (!in_place) require(rename(in_folder(other), in_folder(name)) == 0, "cannot rename\n.");
}
enum { LARGE = 200000 };
static uint64_t hash_with(int at, int token) {
    DataLoader d;
    write_good("large.bin", LARGE, 0);
    write_changed("large.bin", LARGE, at, token, 1);
    open_plain(&d, in_folder("large.bin"), 1, 4, 0, 1, 0, 1, 0);
    const uint64_t hash = d.shards[0].hash;
    dataloader_close(&d);
    return hash;
}
// The hash is that of 16 blocks of 4 KiB, computed the slow way; a token that is not in a block does not change it.
static void test_hash(void) {
    static unsigned char file[HEADER_BYTES + 2 * LARGE];
    unsigned char samples[SHARD_SAMPLES * SHARD_SAMPLE_BYTES];
    const uint64_t whole = hash_with(0, 0);
    FILE *f = fopen_or_die(in_folder("large.bin"), "rb", ".");
    require(fread(file, 1, sizeof file, f) == sizeof file, "cannot read\n.");
    fclose(f);
    for (size_t i = 0; i < SHARD_SAMPLES; i++) {
        const size_t at = i * (sizeof file - SHARD_SAMPLE_BYTES) / (SHARD_SAMPLES - 1);
        memcpy(samples + i * SHARD_SAMPLE_BYTES, file + at, SHARD_SAMPLE_BYTES);
    }
    check(whole == fnv1a(FNV1A, samples, sizeof samples), "a shard's hash is that of 64 KiB of it");
    check(hash_with(0, 1) != whole, "the first token changes it");
    check(hash_with(LARGE - 1, 1) != whole, "the last token changes it");
    check(hash_with(LARGE / 3, 1) != whole, "a token of a block in the middle changes it");
    check(hash_with(4000, 1) == whole, "a token between two blocks does not");
}
static int swap_in_place, swap_to;
// Four epochs of a shard of 7 rows; in the second, the token `swap_to` of it becomes 1.
static void swapped(void *unused) {
    (void)unused;
    DataLoader d;
    write_good("swap.bin", 29, 0);
    open_plain(&d, in_folder("swap.bin"), 1, 4, 0, 1, 1, 1, 0);
    for (int i = 0; i < 28; i++) {
        dataloader_next(&d);
        require(row_is(&d, 0, d.inputs[0]), "a batch of the other tokens was returned\n.");
        if (i % 2) dataloader_read_ahead(&d);
        if (i == 9) usleep(20000);  // times of files move in ticks of up to 10 ms
        if (i == 9) write_changed("swap.bin", 29, swap_to, 1, swap_in_place);
    }
    dataloader_close(&d);
}
static void test_swapped(void) {
    char text[4096];
    for (swap_in_place = 0; swap_in_place < 2; swap_in_place++) {
        const char *how = swap_in_place ? "written over" : "replaced";
        for (swap_to = 0; swap_to < 29; swap_to += 14) {
            char name[100];
            snprintf(name, sizeof name, "a shard that is %s while it is used, with another token %d", how, swap_to);
            check_refused(name, swapped, NULL, "swap.bin' holds other tokens than at the start of this run");
        }
        swap_to = 1;  // token 1 is 1
        check(run_child(swapped, NULL, text, sizeof text) == 0, "a shard that is %s by the same tokens goes on", how);
    }
}

// Files with holes: they take no room on the disk.
static void test_big_shards(void) {
    static const int tokens[2] = {1200000000, INT32_MAX};
    for (int i = 0; i < 2; i++) {
        const int wide = i == 0, bytes = wide ? 4 : 2, T = 1024;
        write_shard("big.bin", wide ? SHARD_MAGIC_32 : SHARD_MAGIC_16, wide ? 7 : 1, tokens[i], 0, 0, 0);
        const char *path = in_folder("big.bin");
        const int64_t size = 1024 + (int64_t)tokens[i] * bytes, rows = (tokens[i] - 1) / T;
        int fd = open(path, O_WRONLY);
        uint32_t mark = 777;
        int possible = ftruncate(fd, size) == 0 &&
                       pwrite(fd, &mark, (size_t)bytes, (off_t)(1024 + (rows - 1) * T * bytes)) == bytes;
        close(fd);
        if (!possible) {
            printf("      no sparse files of %lld bytes in /tmp: skipped\n", (long long)size);
            continue;
        }
        DataLoader d;
        open_plain(&d, path, 1, T, 0, 1, 0, 1, 0);
        dataloader_seek(&d, 0, rows - 1);
        dataloader_next(&d);
        check(d.rows_per_epoch == rows && d.inputs[0] == 777 && d.inputs[1] == 0,
              wide ? "the last row of a 4.8 GB shard" : "the last row of a shard of 2^31 - 1 tokens");
        dataloader_close(&d);
        unlink(path);
    }
}

// ---- documents in rows

// Documents of these lengths, with their end-of-text (0) before them; all other tokens differ. A shard begins inside of
// a document, without end-of-text, if its first length is negative.
enum { DOCUMENTS_END = 1 << 20, MOST_TOKENS = 4096 };
static int follows[MOST_TOKENS];  // of a token that is not end-of-text: the next one
static int write_documents(const char *name, const int *lengths, int first) {
    uint16_t tokens[MOST_TOKENS];
    int n = 0;
    for (int i = 0; lengths[i] != DOCUMENTS_END; i++)
        for (int t = 0; t < abs(lengths[i]); t++, n++) tokens[n] = (uint16_t)(t == 0 && lengths[i] > 0 ? 0 : first + n);
    for (int i = 0; i < n; i++) follows[tokens[i]] = i + 1 < n ? tokens[i + 1] : 0;
    int32_t h[256] = {SHARD_MAGIC_16, 1, n, MOST_TOKENS, TOKENIZER_GPT2};
    FILE *f = fopen_or_die(in_folder(name), "wb", "tests need a writable /tmp");
    fwrite(h, 4, 256, f);
    fwrite(tokens, 2, (size_t)n, f);
    fclose(f);
    return n;
}
enum { ROW = 16 };
static const int short_ones[] = {5, 11, 3, 1, 16, 7, 9, 2, 2, 2, 10, DOCUMENTS_END},
                 long_ones[] = {-4, 40, 16, 17, 33, 1, 6, DOCUMENTS_END};
static void open_documents(DataLoader *d, const char *name, int B, RowKind kind, int rank, int world) {
    dataloader_open(d, in_folder(name), B, ROW, kind, rank, world, 1, 5, 0);
}
// An epoch in rows: every token once, followed by what follows it in the text; the rest is padding at the rows' ends.
static void check_epoch(const char *what, const char *name, RowKind kind, int tokens, int rows) {
    DataLoader d;
    int ok = 1, used = 0, seen[MOST_TOKENS] = {0};
    open_documents(&d, name, 1, kind, 0, 1);
    for (int r = 0; r < d.rows_per_epoch; r++) {
        dataloader_next(&d);
        int length = 0;
        while (length < ROW && d.targets[length] >= 0) length++;
        used += length;
        for (int t = 0; t < length; t++) {
            const int id = d.inputs[t] < 0 ? ~d.inputs[t] : d.inputs[t];
            const int begins = t == 0 || id == 0 || (d.targets[t - 1] != id);
            ok &= kind.marks ? (d.inputs[t] < 0) == begins : d.inputs[t] >= 0;
            ok &= id == 0 || (seen[id]++ == 0 && d.targets[t] == follows[id]);
            if (id == 0) ok &= d.targets[t] == 0 || seen[d.targets[t]] == 0;  // the document's first word follows
        }
        for (int t = length; t < ROW; t++) ok &= d.inputs[t] == (kind.marks ? ~0 : 0) && d.targets[t] == -2;
    }
    for (int id = 1; id < MOST_TOKENS; id++) ok &= seen[id] == (follows[id] >= 0);
    check(ok && used == tokens && d.rows_per_epoch == rows &&
              fabs(dataloader_padding(&d) - (1 - tokens / (double)(rows * ROW))) < 1e-12,
          "%s: %d tokens in %d rows of %d, each once, %.1f%% padding", what, used, (int)d.rows_per_epoch, ROW,
          100 * dataloader_padding(&d));
    dataloader_close(&d);
}
static void test_packing(void) {
    const RowKind whole = {PACK_WHOLE, 1}, cut = {PACK_CUT, 1}, unmarked = {PACK_CUT, 0};
    memset(follows, -1, sizeof follows);
    const int few = write_documents("short.bin", short_ones, 1);
    check_epoch("documents, packed", "short.bin", whole, few, 5);
    check_epoch("documents that need no cut", "short.bin", cut, few, 5);
    const int many = write_documents("long.bin", long_ones, 1000);
    check_epoch("documents, cut and packed", "[sl]*o*.bin", cut, few + many, 5 + 8);
    check_epoch("the same without marks", "[sl]*o*.bin", unmarked, few + many, 5 + 8);
    DataLoader d;
    open_documents(&d, "[sl]*o*.bin", 1, cut, 0, 1);
    check(d.cut_documents == 3, "three documents are longer than a row");
    dataloader_close(&d);
}
// The same rows for any number of ranks, and from any place on.
static void test_packed_ranks(void) {
    const RowKind cut = {PACK_CUT, 1};
    DataLoader one, three[3], again;
    int ok = 1;
    open_documents(&one, "[sl]*o*.bin", 6, cut, 0, 1);
    open_documents(&again, "[sl]*o*.bin", 6, cut, 0, 1);
    for (int r = 0; r < 3; r++) open_documents(&three[r], "[sl]*o*.bin", 2, cut, r, 3);
    for (int step = 0; step < 12; step++) {
        int64_t epoch, row;
        dataloader_position(&one, &epoch, &row);
        dataloader_next(&one);
        if (step % 3) dataloader_read_ahead(&one);
        for (int r = 0; r < 3; r++) {
            dataloader_next(&three[r]);
            ok &= !memcmp(three[r].inputs, one.inputs + 2 * r * ROW, 2 * ROW * sizeof(int));
            ok &= !memcmp(three[r].targets, one.targets + 2 * r * ROW, 2 * ROW * sizeof(int));
        }
        dataloader_seek(&again, epoch, row);
        dataloader_next(&again);
        ok &= !memcmp(again.inputs, one.inputs, 6 * ROW * sizeof(int));
        ok &= !memcmp(again.targets, one.targets, 6 * ROW * sizeof(int));
        dataloader_seek(&again, 2, 7);
        dataloader_next(&again);
    }
    check(ok, "packed rows do not depend on the number of ranks, nor on where one begins to read");
    dataloader_close(&one);
    dataloader_close(&again);
    for (int r = 0; r < 3; r++) dataloader_close(&three[r]);
}
// Conversations: a token's number says what it is. From 100 on it is learned. A conversation begins with a number that
// ends in 0, and end-of-text (0) is a word as any other.
static const int talk[] = {10, 101, 102, 3, 104, 20, 105, 0, 106, 30, 107, 40, 8, 109, 5, 110, 50};
enum { TALK = sizeof talk / sizeof *talk };
static void write_conversations(const char *name, int extra) {
    uint32_t tokens[TALK + 1] = {0};
    for (int i = 0; i < TALK; i++)
        tokens[i] = (uint32_t)talk[i] | (talk[i] < 100 ? TOKEN_NOT_LEARNED : 0) |
                    (talk[i] && talk[i] < 100 && talk[i] % 10 == 0 ? 1u << 31 : 0);
    const int32_t h[256] = {SHARD_MAGIC_32, SHARD_VERSION_MARKED, TALK + extra, 200, TOKENIZER_GPT2};
    FILE *f = fopen_or_die(in_folder(name), "wb", "tests need a writable /tmp");
    fwrite(h, 4, 256, f);
    fwrite(tokens, 4, (size_t)(TALK + extra), f);
    fclose(f);
}
// Each row by hand: the longest conversation first, in a row of 6.
static void check_conversations(const char *what, RowKind kind, int rows, const int (*inputs)[6],
                                const int (*targets)[6]) {
    DataLoader d;
    int ok = 1;
    dataloader_open(&d, in_folder("talk.bin"), 1, 6, kind, 0, 1, 0, 5, 200);
    check(d.rows_per_epoch == rows, "%s: %d rows", what, rows);
    for (int r = 0; r < rows; r++) {
        dataloader_next(&d);
        ok &= !memcmp(d.inputs, inputs[r], sizeof *inputs) && !memcmp(d.targets, targets[r], sizeof *targets);
    }
    check(ok, "%s: what is learned is what the marks say, and nothing across a border", what);
    dataloader_close(&d);
}
static void test_conversations(void) {
    const RowKind automatic = {PACK_AUTO, -1}, unmarked = {PACK_CUT, 0};
    static const int inputs[][6] = {{~10, 101, 102, 3, 104, ~0},
                                    {~40, 8, 109, 5, 110, ~50},
                                    {~20, 105, 0, 106, ~30, 107}};
    static const int bare[][6] = {{10, 101, 102, 3, 104, 0}, {40, 8, 109, 5, 110, 50}, {20, 105, 0, 106, 30, 107}};
    static const int targets[][6] = {{101, 102, -1, 104, -1, -2},
                                     {-1, 109, -1, 110, -1, -1},
                                     {105, -1, 106, -1, 107, -1}};
    write_conversations("talk.bin", 0);
    check_conversations("conversations", automatic, 3, inputs, targets);
    check_conversations("conversations without marks", unmarked, 3, bare, targets);
    check(shards_vocabulary(in_folder("talk.bin")) == 200 && !shards_vocabulary(in_folder("none.bin")),
          "a vocabulary's size from the header alone");
}
// The share of padding of 20,000 documents of which kind: lengths that fall off exponentially, that are all alike, two
// kinds, and a few as long as a row.
static int length_of(int kind, int T, uint64_t i) {
    const double u = rand_u64(3, 0, i) / 18446744073709551616.0, v = rand_u64(4, 0, i) / 18446744073709551616.0;
    const double lengths[] = {-log(1 - u) * T / 8,
                              1 + u * T / 2,
                              u < 0.5 ? T / 40.0 : T / 3.0,
                              exp(u * log(T)),
                              u < 0.1 ? T - v * T / 3 : 1 + v * T / 5,
                              T / 2 + 1 + u * T / 2};
    return lengths[kind] < 1 ? 1 : lengths[kind] > T ? T : (int)lengths[kind];
}
static double padding_of(int kind, int longest, int T) {
    Packing p = {0};
    int64_t total = 0;
    for (int i = 0; i < 20000; i++) {
        packing_add(&p, i, length_of(kind, longest, (uint64_t)i));
        total += p.pieces[i].length;
    }
    packing_fill(&p, T);
    const double padding = 1 - total / ((double)p.num_rows * T);
    packing_free(&p);
    return padding;
}
static void test_padding(void) {
    static const char *const names[] = {"exponential, T/8 on average", "even up to T/2", "T/40 and T/3",
                                        "logarithmically even", "a tenth of 2/3 T and more"};
    for (int kind = 0; kind < 5; kind++)
        for (int T = 1024; T <= 4096; T *= 4) {
            const double padding = padding_of(kind, T, T);
            check(padding < 0.02, "lengths %s, T = %d: %.3f%% padding", names[kind], T, 100 * padding);
        }
    const double much = padding_of(5, 1024, 1024), little = padding_of(5, 1024, 16 * 1024);
    check(much > 0.2 && little < 0.02,
          "more than half a row each, so that no two fit together: %.1f%% padding, and %.1f%% in rows of 16 times the "
          "length",
          100 * much, 100 * little);
}
// Many documents of random lengths: little is left over.
static void test_packing_is_tight(void) {
    enum { COUNT = 20000, T = 1000 };
    Packing p = {0};
    int64_t total = 0;
    int ok = 1;
    for (int i = 0; i < COUNT; i++) {
        const double u = rand_u64(3, 0, (uint64_t)i) / 18446744073709551616.0;
        const int length = 1 + (int)(300 * -log(1 - u));
        total += length > T ? T : length;
        packing_add(&p, i, length > T ? T : length);
    }
    packing_fill(&p, T);
    for (int64_t r = 0; r < p.num_rows; r++) {
        int used = 0;
        for (int64_t i = p.row_begin[r]; i < p.row_begin[r + 1]; i++) used += p.pieces[i].length;
        ok &= used > 0 && used <= T;
    }
    const double padding = 1 - (double)total / (double)(p.num_rows * T);
    check(ok && p.row_begin[p.num_rows] == COUNT && padding < 0.001, "20,000 documents of 300 tokens: %.3f%% padding",
          100 * padding);
    packing_free(&p);
}

// ---- mixtures

// Any first n rows have n times its share of each set, to less than one row; any 1,000 rows thousandths exactly, and
// those of two sets to one row. Counted with whole numbers.
static void check_shares(const char *text, double most_in_window) {
    enum { ROWS_SEEN = 12000, WINDOW = 1000 };
    static int64_t count[ROWS_SEEN + 1][MOST_SETS];
    Mixture m;
    int64_t of_set, most_off = 0, most_in = 0;
    int ok = 1;
    mixture_open(&m, text);
    memset(count, 0, sizeof count);
    for (int n = 0; n < ROWS_SEEN; n++) {
        const int set = mixture_next(&m, &of_set);
        ok &= of_set == count[n][set];
        for (int i = 0; i < m.count; i++) count[n + 1][i] = count[n][i] + (i == set);
    }
    for (int n = 0; n <= ROWS_SEEN; n++)
        for (int i = 0; i < m.count; i++) {
            const int64_t off = llabs(count[n][i] * m.total - n * m.shares[i]);
            const int64_t before = n < WINDOW ? 0 : count[n - WINDOW][i];
            const int64_t in = n < WINDOW ? 0 : llabs((count[n][i] - before) * m.total - WINDOW * m.shares[i]);
            if (off > most_off) most_off = off;
            if (in > most_in) most_in = in;
        }
    const double bound = m.count > 1 ? 1 - 1.0 / (2 * m.count - 2) : 0;
    check(ok && most_off <= bound * m.total + 1e-6 && most_in <= most_in_window * m.total,
          "%.40s: shares after any rows to %.3f of a row, in any %d rows to %.3f", text, most_off / (double)m.total,
          WINDOW, most_in / (double)m.total);
    mixture_close(&m);
}
static void test_shares(void) {
    char many[MOST_SETS * 16] = "";
    check_shares("alone", 0);
    check_shares("a:0.7,b:0.3", 0);
    check_shares("a:0.5,b:0.3,c:0.2", 0);
    check_shares("a:0.985,b:0.001,c:0.007,d:0.007", 0);
    check_shares("a:1,b:1,c:1", 1);
    check_shares("a:0.12345,b:0.7", 1);
    check_shares("a:0.99999,b:0.00001", 1);
    check_shares("a:61,b:59,c:7,d:5,e:2", 2);
    for (int i = 0; i < MOST_SETS; i++) APPEND(many, "%ss%d:%d", i ? "," : "", i, 1 + i * i % 97);
    check_shares(many, 2);
}
// A row's set does not depend on where one begins to read.
static void test_places_in_a_mixture(void) {
    enum { ROWS_SEEN = 3000 };
    int sets[ROWS_SEEN], ok = 1;
    int64_t of_set[ROWS_SEEN], row;
    Mixture m;
    mixture_open(&m, "a:0.31,b:0.44,c:0.2,d:0.04");
    for (int n = 0; n < ROWS_SEEN; n++) sets[n] = mixture_next(&m, &of_set[n]);
    for (uint64_t i = 0; i < 2000; i++) {
        const int n = (int)(rand_u64(8, 0, i) % ROWS_SEEN);
        mixture_seek(&m, n);
        ok &= mixture_next(&m, &row) == sets[n] && row == of_set[n];
    }
    mixture_seek(&m, 99000ll * 100000000 + 1234);
    ok &= mixture_next(&m, &row) == sets[1234] && m.taken[2] >= 20000ll * 100000000;
    check(ok && m.total == 99000, "the set of a row is that of its number, far away, too");
    mixture_close(&m);
}
// What a text names: "pattern=share ..." with shares of their sum.
static void check_sets(const char *text, const char *expected) {
    Mixture m;
    char found[512] = "";
    mixture_open(&m, text);
    for (int i = 0; i < m.count; i++)
        APPEND(found, "%s%s=%g", i ? " " : "", m.patterns[i], m.shares[i] / (double)m.total);
    check(!strcmp(found, expected), "'%s' names %s", text, found);
    mixture_close(&m);
}
static void test_names_of_sets(void) {
    char text[300], expected[300];
    check_sets("a/*.bin", "a/*.bin=1");
    check_sets("a/*.bin,b/*.bin", "a/*.bin,b/*.bin=1");
    check_sets("a/*.bin:0.7,b/*.bin:0.3", "a/*.bin=0.7 b/*.bin=0.3");
    check_sets("a:b:25,c:75", "a:b=0.25 c=0.75");
    write_good("odd:0.7,even:0.3", 9, 0);
    snprintf(expected, sizeof expected, "%s=1", in_folder("odd:0.7,even:0.3"));
    check_sets(in_folder("odd:0.7,even:0.3"), expected);
    snprintf(text, sizeof text, "%s", in_folder("sets.mix"));
    check_sets(text, strcat(strcpy(expected, text), "=1"));
    FILE *f = fopen_or_die(text, "w", ".");
    fputs("# a comment: 0.5\n\na/*.bin:0.75\r\n#b:3\nfolder with blanks/a,b.bin:0.25", f);
    fclose(f);
    check_sets(text, "a/*.bin=0.75 folder with blanks/a,b.bin=0.25");
    f = fopen_or_die(text, "w", ".");
    fputs("\xef\xbb\xbf a/*.bin:3 \r\n\t#b:3\n \n\tb/\xff.bin: 1\t\r\n", f);
    fclose(f);
    check_sets(text, "a/*.bin=0.75 b/\xff.bin=0.25");
    check_sets("{a,b}/*.bin:3, c,d/*.bin:1", "{a,b}/*.bin=0.75 c,d/*.bin=0.25");
    mkdir(in_folder("shards.mix"), 0700);
    write_good("shards.mix/x.bin", 9, 0);
    snprintf(text, sizeof text, "%s", in_folder("shards.mix/*.bin"));
    check_sets(text, strcat(strcpy(expected, text), "=1"));
}
// Two sets of three shards and of one. Tokens say which set a row is from: 3000 and more are of the second.
static const char *two_sets(void) {
    static char text[512];
    snprintf(text, sizeof text, "%s:0.7,%s:0.3", in_folder("abc_train_*.bin"), in_folder("second.bin"));
    return text;
}
enum { MIXED_STEPS = 50, MIXED_ROWS = 8 };
// Steps of 8 rows on some ranks. From step `from` on; the loader comes there by a saved place if it is not 0.
static void collect_mixed(int B, int world, int micro_steps, int from, int *out /*[MIXED_STEPS][MIXED_ROWS][4]*/) {
    for (int rank = 0; rank < world; rank++) {
        DataLoader d;
        int64_t epoch, row;
        open_plain(&d, two_sets(), B, 4, rank, world, 1, 99, 0);
        dataloader_seek(&d, 0, from * MIXED_ROWS);
        dataloader_position(&d, &epoch, &row);
        dataloader_seek(&d, epoch, row);
        for (int step = from; step < MIXED_STEPS; step++)
            for (int m = 0; m < micro_steps; m++) {
                dataloader_next(&d);
                if (step % 3) dataloader_read_ahead(&d);
                memcpy(out + (step * MIXED_ROWS + (m * world + rank) * B) * 4, d.inputs, B * 4 * sizeof(int));
            }
        dataloader_close(&d);
    }
}
static void test_mixed_rows(void) {
    enum { ALL = MIXED_STEPS * MIXED_ROWS };
    static const int ways[][3] = {{8, 1, 1}, {4, 2, 1}, {2, 4, 1}, {1, 4, 2}, {2, 1, 4}};
    static int a[ALL * 4], b[ALL * 4];
    int ok = 1, same = 1, second = 0;
    write_good("second.bin", 22, 3000);
    collect_mixed(8, 1, 1, 0, a);
    DataLoader sets[2];
    open_plain(&sets[0], in_folder("abc_train_*.bin"), 1, 4, 0, 1, 1, 99, 0);
    open_plain(&sets[1], in_folder("second.bin"), 1, 4, 0, 1, 1, 99, 0);
    for (int i = 0; i < ALL; i++) {
        const int of_second = a[4 * i] >= 3000;
        dataloader_next(&sets[of_second]);
        same &= !memcmp(sets[of_second].inputs, a + 4 * i, 4 * sizeof(int));
        second += of_second;
        ok &= abs(10 * second - 3 * (i + 1)) <= 5;
    }
    check(ok && second == 3 * ALL / 10, "three of ten rows are of the second set, to half a row at any place");
    check(same && sets[0].next > 20 * ROWS && sets[1].next > 20 * 5,
          "each set has the order that it has alone, epoch after epoch");
    for (int i = 0; i < 2; i++) dataloader_close(&sets[i]);
    for (int i = 0; i < COUNT_OF(ways); i++)
        for (int from = 0; from < 40; from += 13) {
            memset(b, -1, sizeof b);
            collect_mixed(ways[i][0], ways[i][1], ways[i][2], from, b);
            const size_t at = from * MIXED_ROWS * 4;
            check(!memcmp(a + at, b + at, sizeof a - at * sizeof *a),
                  "the same rows from step %d on, %d ranks with %d micro-steps of %d", from, ways[i][1], ways[i][2],
                  ways[i][0]);
        }
}
// Packed documents of two sets, and one set alone after the other, as validation reads them.
static void test_mixed_documents(void) {
    const RowKind cut = {PACK_CUT, 1};
    DataLoader d, alone[2];
    char text[512];
    int ok = 1;
    snprintf(text, sizeof text, "%s:0.6,%s:0.4", in_folder("short.bin"), in_folder("long.bin"));
    dataloader_open(&d, text, 1, ROW, cut, 0, 1, 1, 5, 0);
    open_documents(&alone[0], "short.bin", 1, cut, 0, 1);
    open_documents(&alone[1], "long.bin", 1, cut, 0, 1);
    check(d.rows_per_epoch == 5 + 8 && d.num_shards == 2 && d.cut_documents == 3 && d.sets[1].rows == 8,
          "a mixture counts what its sets have together");
    for (int i = 0; i < 100; i++) {
        dataloader_next(&d);
        DataLoader *of = &alone[i % 5 % 2 == 1];  // 0 1 0 1 0
        dataloader_next(of);
        ok &= !memcmp(d.inputs, of->inputs, ROW * sizeof(int)) && !memcmp(d.targets, of->targets, ROW * sizeof(int));
    }
    for (int i = 0; i < 60; i++) {
        const int set = i / 20 % 2;
        if (i % 20 == 0) dataloader_begin_set(&d, set);
        if (i % 20 == 0) dataloader_seek(&alone[set], 0, 0);
        dataloader_next(&d);
        if (i % 3) dataloader_read_ahead(&d);
        dataloader_next(&alone[set]);
        ok &= !memcmp(d.inputs, alone[set].inputs, ROW * sizeof(int));
    }
    check(ok, "packed rows of a mixture, and those of one of its sets, are those of the sets alone");
    dataloader_close(&d);
    for (int i = 0; i < 2; i++) dataloader_close(&alone[i]);
}

// ---- what is refused

static void open_pattern(const char *name, int B, int T, int vocab_size) {
    DataLoader d;
    open_plain(&d, in_folder(name), B, T, 0, 1, 0, 1, vocab_size);
    for (int i = 0; i < 8; i++) dataloader_next(&d);
}
static void no_match(void *unused) {
    (void)unused;
    open_pattern("nothing_*.bin", 1, 4, 0);
}
static void huge_batch(void *unused) {
    (void)unused;
    open_pattern("good.bin", 1 << 20, 1 << 12, 0);
}
static void long_rows(void *unused) {
    (void)unused;
    open_pattern("good.bin", 1, 32, 0);
}
static void is_folder(void *unused) {
    (void)unused;
    open_pattern(".", 1, 4, 0);
}
static void empty_file(void *unused) {
    (void)unused;
    fclose(fopen_or_die(in_folder("bad.bin"), "wb", "."));
    open_pattern("bad.bin", 1, 4, 0);
}
static void wrong_magic(void *unused) {
    (void)unused;
    write_shard("bad.bin", 20240519, 1, 32, 32, 0, 0);
    open_pattern("bad.bin", 1, 4, 0);
}
static void wrong_version(void *unused) {
    (void)unused;
    write_shard("bad.bin", SHARD_MAGIC_16, 2, 32, 32, 0, 0);
    open_pattern("bad.bin", 1, 4, 0);
}
static void wrong_version_32(void *unused) {
    (void)unused;
    write_shard("bad.bin", SHARD_MAGIC_32, 1, 32, 32, 0, 0);
    open_pattern("bad.bin", 1, 4, 0);
}
static void negative_count(void *unused) {
    (void)unused;
    write_shard("bad.bin", SHARD_MAGIC_16, 1, -5, 32, 0, 0);
    open_pattern("bad.bin", 1, 4, 0);
}
static void truncated(void *unused) {
    (void)unused;
    write_shard("bad.bin", SHARD_MAGIC_16, 1, 32, 31, 0, 0);
    open_pattern("bad.bin", 1, 4, 0);
}
static void too_long(void *unused) {
    (void)unused;
    write_shard("bad.bin", SHARD_MAGIC_16, 1, 32, 33, 0, 0);
    open_pattern("bad.bin", 1, 4, 0);
}
static void one_short(void *unused) {
    (void)unused;
    write_shard("mixed_0.bin", SHARD_MAGIC_16, 1, 4, 4, 0, 0);
    write_good("mixed_1.bin", 32, 0);
    open_pattern("mixed_*.bin", 1, 4, 0);
}
static void no_tokens(void *unused) {
    (void)unused;
    write_shard("bad.bin", SHARD_MAGIC_16, 1, 0, 0, 0, 0);
    open_pattern("bad.bin", 1, 4, 0);
}
static void two_tokenizers(void *unused) {
    (void)unused;
    write_shard("mixed_0.bin", SHARD_MAGIC_16, 1, 32, 32, 0, 50257);
    open_pattern("mixed_*.bin", 1, 4, 0);
}
static void two_widths(void *unused) {
    (void)unused;
    write_shard("mixed_0.bin", SHARD_MAGIC_32, 7, 32, 32, 0, 0);
    open_pattern("mixed_*.bin", 1, 4, 0);
}
static void outside_vocab(void *unused) {
    (void)unused;
    write_shard("bad.bin", SHARD_MAGIC_16, 1, 32, 32, 240, 0);
    open_pattern("bad.bin", 1, 4, 256);
}
static void just_outside_vocab(void *unused) {
    (void)unused;
    write_shard("bad.bin", SHARD_MAGIC_16, 1, 29, 29, 228, 0);
    open_pattern("bad.bin", 1, 4, 256);
}
static void outside_own_vocab(void *unused) {
    (void)unused;
    write_shard("bad.bin", SHARD_MAGIC_16, 1, 32, 32, 240, 256);
    open_pattern("bad.bin", 1, 4, 0);
}
static void negative_id(void *unused) {
    (void)unused;
    write_shard("bad.bin", SHARD_MAGIC_32, 7, 32, 32, -1, 0);
    open_pattern("bad.bin", 1, 4, 0);
}
static void other_vocab(void *unused) {
    (void)unused;
    write_shard("bad.bin", SHARD_MAGIC_16, 1, 32, 32, 0, 50257);
    open_pattern("bad.bin", 1, 4, 256);
}
static void bad_header(void *unused) {
    (void)unused;
    write_shard("bad.bin", SHARD_MAGIC_16, 1, 32, 32, 0, -1);
    open_pattern("bad.bin", 1, 4, 256);
}
static void bad_seek(void *unused) {
    (void)unused;
    DataLoader d;
    open_plain(&d, in_folder("good.bin"), 1, 4, 0, 1, 0, 1, 0);
    dataloader_seek(&d, -1, 0);
}
static void far_seek(void *unused) {
    (void)unused;
    DataLoader d;
    open_plain(&d, in_folder("good.bin"), 1, 4, 0, 1, 0, 1, 0);
    dataloader_seek(&d, INT64_MAX / 2, 0);
}
static void no_end_of_text(void *unused) {
    (void)unused;
    const RowKind marks = {PACK_NO, 1};
    DataLoader d;
    open_documents(&d, "good.bin", 1, marks, 0, 1);
}
static void long_document(void *unused) {
    (void)unused;
    const RowKind whole = {PACK_WHOLE, 1};
    DataLoader d;
    open_documents(&d, "long.bin", 1, whole, 0, 1);
}
static void cut_conversations(void *unused) {
    (void)unused;
    const RowKind no = {PACK_NO, 1};
    DataLoader d;
    open_documents(&d, "talk.bin", 1, no, 0, 1);
}
static void two_kinds(void *unused) {
    (void)unused;
    const RowKind automatic = {PACK_AUTO, -1};
    DataLoader d;
    write_shard("talk_wide.bin", SHARD_MAGIC_32, 7, 32, 32, 0, 200);
    open_documents(&d, "talk*.bin", 1, automatic, 0, 1);
}
static void shrunk(void *unused) {
    (void)unused;
    DataLoader d;
    write_good("bad.bin", 32, 0);
    open_plain(&d, in_folder("bad.bin"), 1, 4, 0, 1, 0, 1, 0);
    dataloader_next(&d);
    require(truncate(in_folder("bad.bin"), 1024 + 20) == 0, "truncate");
    for (int i = 0; i < 6; i++) dataloader_next(&d);
}

static void open_mixture(const char *format, const char *a, const char *b) {
    char text[1024];
    DataLoader d;
    snprintf(text, sizeof text, format, a, b);
    open_plain(&d, text, 1, 4, 0, 1, 0, 1, 0);
}
#define BAD_MIXTURE(name, format) \
    static void name(void *unused) { \
        (void)unused; \
        open_mixture(format, in_folder("good.bin"), in_folder("other_good.bin")); \
    }
BAD_MIXTURE(share_of_0, "%s:0,%s:1")
BAD_MIXTURE(negative_share, "%s:1,%s:-0.5")
BAD_MIXTURE(share_is_a_word, "%s:half,%s:0.5")
BAD_MIXTURE(share_is_nan, "%s:nan,%s:0.5")
BAD_MIXTURE(share_is_infinite, "%s:inf,%s:0.5")
BAD_MIXTURE(share_too_small, "%s:0.000001,%s:0.5")
BAD_MIXTURE(share_too_fine, "%s:0.123456,%s:0.5")
BAD_MIXTURE(no_share, "%s:0.5,%s")
BAD_MIXTURE(two_commas, "%s:0.5,,%s:0.5")
BAD_MIXTURE(share_too_large, "%s:101,%s:0.5")
BAD_MIXTURE(set_without_files, "%s:0.5,%s/*.bin:0.5")
static void other_tokenizer(void *unused) {
    (void)unused;
    write_shard("words.bin", SHARD_MAGIC_16, 1, 32, 32, 0, 50257);
    open_mixture("%s:0.5,%s:0.5", in_folder("good.bin"), in_folder("words.bin"));
}
static void other_width(void *unused) {
    (void)unused;
    open_mixture("%s:0.5,%s:0.5", in_folder("good.bin"), in_folder("wide.bin"));
}
static void text_and_conversations(void *unused) {
    (void)unused;
    const RowKind cut = {PACK_CUT, 1};
    DataLoader d;
    char text[512];
    snprintf(text, sizeof text, "%s:0.5,%s:0.5", in_folder("talk.bin"), in_folder("talk_wide.bin"));
    dataloader_open(&d, text, 1, ROW, cut, 0, 1, 1, 5, 0);
}
static void too_many_sets(void *unused) {
    (void)unused;
    char text[8000] = "";
    Mixture m;
    for (int i = 0; i < 1000; i++) APPEND(text, "%ss%d:1", i ? "," : "", i);
    mixture_open(&m, text);
}
static void empty_mix(void *unused) {
    (void)unused;
    Mixture m;
    FILE *f = fopen_or_die(in_folder("empty.mix"), "w", ".");
    fputs("# nothing\n", f);
    fclose(f);
    mixture_open(&m, in_folder("empty.mix"));
}

static void test_refusals(void) {
    write_good("good.bin", 32, 0);
    write_good("other_good.bin", 32, 0);
    #define REFUSES(f, words) check_refused(#f ": " words, f, NULL, words)
    REFUSES(no_match, "no file matches '");
    REFUSES(no_match, "nothing_*.bin'");
    REFUSES(no_match, "llmc prepare tinyshakespeare");
    REFUSES(no_match, "of your own text: llmc prepare");
    REFUSES(huge_batch, "is too large");
    REFUSES(long_rows, "has 32 tokens: too few for one row of T = 32");
    REFUSES(is_folder, "is not a regular file");
    REFUSES(empty_file, "has 0 bytes: too short for a token shard");
    REFUSES(wrong_magic, "is not a token shard (magic 20240519");
    REFUSES(wrong_version, "version 2, this program reads 1");
    REFUSES(wrong_version_32, "version 1, this program reads 7");
    REFUSES(negative_count, "its header counts -5 tokens");
    REFUSES(truncated, "is truncated: 1086 bytes, its header promises 1088");
    REFUSES(too_long, "is too long: 1090 bytes, its header promises 1088");
    REFUSES(one_short, "has 4 tokens: too few for one row");
    REFUSES(no_tokens, "has 0 tokens: too few");
    REFUSES(two_tokenizers, "were made with different tokenizers");
    REFUSES(two_widths, "were made with different tokenizers");
    REFUSES(outside_vocab, "token 16 is 256, outside the vocabulary of 256");
    REFUSES(just_outside_vocab, "token 28 is 256, outside the vocabulary of 256");
    REFUSES(outside_own_vocab, "token 16 is 256, outside the vocabulary of 256");
    REFUSES(negative_id, "token 0 is 4294967295, outside");
    REFUSES(other_vocab, "a vocabulary of 50257 tokens, the model has 256");
    REFUSES(bad_header, "is out of range");
    REFUSES(bad_seek, "is no place in the data");
    REFUSES(far_seek, "is no place in the data");
    REFUSES(no_end_of_text, "does not say which token ends a text");
    REFUSES(long_document, "the document at token 4 has 40 tokens, a row 16");
    REFUSES(long_document, "--pack cut");
    REFUSES(cut_conversations, "talk.bin' holds conversations: rows cannot be cut from it");
    REFUSES(two_kinds, "were made with different tokenizers, or one of them of conversations");
    REFUSES(share_of_0, "good.bin:0' names no shards, and no set with its share");
    REFUSES(share_of_0, "a/*.bin:0.7,b/*.bin:0.3");
    REFUSES(negative_share, "other_good.bin:-0.5' names no shards, and no set");
    REFUSES(share_is_a_word, "good.bin:half' names no shards");
    REFUSES(share_is_nan, "and no set with its share");
    REFUSES(share_is_infinite, "and no set with its share");
    REFUSES(share_too_small, "at most 5 decimals");
    REFUSES(share_too_fine, "at most 5 decimals");
    REFUSES(no_share, "other_good.bin' names no shards, and no set with its share");
    REFUSES(two_commas, "'' names no shards");
    REFUSES(share_too_large, "up to 100");
    REFUSES(set_without_files, "no file matches '");
    REFUSES(other_tokenizer, "words.bin' and '");
    REFUSES(other_tokenizer, "were made with different tokenizers");
    REFUSES(other_width, "were made with different tokenizers");
    REFUSES(text_and_conversations, "or one of them of conversations");
    REFUSES(too_many_sets, "a mixture of more than 64 sets");
    REFUSES(empty_mix, "empty.mix' names no shards, and no set with its share");
    REFUSES(shrunk, "holds other tokens than at the start of this run");
}

int main(void) {
    strcpy(folder, "/tmp/test_dataloader_XXXXXX");
    require(mkdtemp(folder), "cannot make a folder in /tmp\ntests need one");
    write_three();
    test_names();
    test_order();
    test_shuffle();
    test_world_sizes();
    test_resume();
    test_read_ahead();
    test_wide_tokens();
    test_many_shards();
    test_hash();
    test_swapped();
    test_big_shards();
    test_packing();
    test_packed_ranks();
    test_conversations();
    test_padding();
    test_packing_is_tight();
    test_shares();
    test_places_in_a_mixture();
    test_names_of_sets();
    test_mixed_rows();
    test_mixed_documents();
    test_refusals();
    char command[96];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    if (system(command) != 0) printf("      could not remove %s\n", folder);
    return checks_report("test_dataloader");
}
