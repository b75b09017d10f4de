// Token shards -> batches, for both trainers.
//
//   dataloader_open(&d, "data/x_train_*.bin", B, T, row_kind, rank, world, shuffle, seed, vocab_size);
//   dataloader_next(&d);                       d.inputs, d.targets: this rank's next (B,T)
//   dataloader_read_ahead(&d);                 a thread reads the next batch while this one is used
//   dataloader_position, dataloader_seek       (epoch, row) where the next call begins, the same on every rank
//
// A shard has llm.c's format: 256 int32 {magic, version, tokens, vocab_size, tokenizer, hash_lo, hash_hi, eot, 0...},
// then the tokens: uint16 (magic 20240520, version 1) or uint32 (20240801, 7). vocab_size and all after it may be 0:
// unknown. A document is an end-of-text token and all until the next one.
//
// A shard of conversations has marked tokens, uint32 (20240801, 8): bits 0 to 29 are the id, bit 31 says that a
// document begins here, bit 30 that this token is not learned. End-of-text has no meaning in it.
//
// Row r of a shard is its tokens [r*T, r*T + T]: T inputs, and T targets one position later. Or (RowKind) documents are
// packed into rows: each token but a document's first is a target once, and so is the end-of-text that follows it. What
// is left of a row is padding, end-of-text with targets of -2, which are not learned. In a shard of conversations
// targets are -1 where a token is not learned, and where a document ends. One epoch visits every row
// of every shard once: shards of a set in order of rand_u64(seed, rand_stream(RAND_SHUFFLE, epoch), shard), the rows of
// one shard in order of rand_u64(seed, rand_stream(RAND_SHUFFLE, (epoch << 24) + shard + 1), row). A call of
// dataloader_next takes the next world * B rows. Rank k takes those from k * B on, so a step's tokens depend on the
// global batch alone. An epoch may end inside a step. Of each set one shard is open at a time, and at most one batch is
// read ahead.
//
// `pattern` may name a mixture of sets (mixture.h), whose shards must be of one kind. Each set comes in the order that
// it has alone, and begins its next epoch when it has run out. (epoch, row) counts epochs of as many rows as all sets
// have.
//
// A shard is identified by a hash of up to 64 KiB of it (shard_hash), which the handshake and a resumed run compare.
// The hash is checked again when the shard is opened, and when the file was written to while open: no batch of a
// changed shard is used.
#pragma once

#include <pthread.h>

#include "mixture.h"
#include "packing.h"
#include "../base/rand.h"
#include "tokenizer.h"

enum { SHARD_MAGIC_16 = 20240520, SHARD_VERSION_16 = 1, SHARD_MAGIC_32 = 20240801, SHARD_VERSION_32 = 7 };
enum { SHARD_VERSION_MARKED = 8, TOKEN_ID = (1 << 30) - 1, TOKEN_NOT_LEARNED = 1 << 30 };
enum { SHARD_SAMPLES = 16, SHARD_SAMPLE_BYTES = 4096 };

typedef enum {
    PACK_NO,     // rows are cut from the stream of documents
    PACK_WHOLE,  // rows are documents, packed; one that is longer than a row is refused
    PACK_CUT,    // such a one is cut into rows, and what is left of it is packed
    PACK_AUTO    // conversations are packed whole, other shards not
} Pack;
typedef struct {
    Pack pack;
    int marks;  // an input where a document begins, and padding, is ~id: so a model sees where documents end; -1: auto
} RowKind;
typedef struct {
    char *path;
    int64_t bytes, tokens, rows;
    uint64_t hash;
} Shard;
typedef struct {
    uint64_t key;
    int64_t index;
} ShuffleKey;

// Some shards, whose rows come epoch after epoch.
typedef struct {
    int num_shards;
    Shard *shards;
    int64_t rows;  // of an epoch
    // the place
    int64_t order_epoch;      // the epoch of shard_order, -1: none yet
    ShuffleKey *shard_order;  // [num_shards]
    int64_t *slot_begin;      // [num_shards + 1] first row of the epoch in the i-th shard of the order
    int slot;
    int open_shard, fd;        // -1: none
    struct timespec modified;  // when the open shard was last written to
    Packing packing;           // of the open shard
    ShuffleKey *row_order;     // rows of the open shard, if shuffled
} DataSet;

typedef struct DataLoader {
    int B, T;
    int *inputs, *targets;  // (B,T) each, in one buffer
    Mixture mixture;
    DataSet *sets;  // [mixture.count]
    // what the shards of all sets say
    int num_shards;
    int64_t num_tokens, rows_per_epoch;
    int vocab_size;  // 0: not said
    TokenizerKind tokenizer;
    uint64_t hash;  // of the tokenizer's tokens, as in tokenizer.h; 0: not said
    int eot;
    int64_t cut_documents;  // longer than a row
    // private
    RowKind kind;   // never auto once the first shard is open
    int marked;     // shards of conversations
    DataSet *only;  // rows come from this set alone; NULL: from all
    Shard *shards;
    int32_t header[HEADER_WORDS];  // of the first shard
    int token_bytes, rank, world, shuffle, check_vocab;
    uint64_t seed;
    int64_t next;  // rows of all epochs and ranks before the next call's
    void *raw;     // tokens as they are in the file: T + 1, or those of a block
    // read ahead: while `reading` all of the above but `next` belongs to the thread
    pthread_t thread;
    int reading;
    int *ahead;          // (2,B,T): inputs and targets of the call that
    int64_t ahead_next;  // begins here; -1: none
} DataLoader;

// ---- shards

#define DATA_HINT "make shards with: llmc prepare tinyshakespeare, or of your own text: llmc prepare"

static int compare_keys(const void *a, const void *b) {
    const ShuffleKey *x = (const ShuffleKey *)a, *y = (const ShuffleKey *)b;
    return x->key != y->key ? (x->key < y->key ? -1 : 1) : (x->index > y->index) - (x->index < y->index);
}
// 0..n-1 in the order of their random keys; in their own order if not shuffled.
static void fill_order(ShuffleKey *order, int64_t n, int shuffle, uint64_t seed, uint64_t part) {
    for (int64_t i = 0; i < n; i++) {
        order[i].key = shuffle ? rand_u64(seed, rand_stream(RAND_SHUFFLE, part), i) : 0;
        order[i].index = i;
    }
    if (shuffle) qsort(order, n, sizeof *order, compare_keys);
}
// Tells a shard from another one of the same name and size: FNV-1a of 16 blocks of 4 KiB at equal distances. The first
// begins with the header, the last ends with the file. A file of up to 64 KiB is read whole.
static uint64_t shard_hash(int fd, int64_t bytes, const char *path) {
    unsigned char samples[SHARD_SAMPLES * SHARD_SAMPLE_BYTES];
    int64_t at[SHARD_SAMPLES];
    int64_t block = smaller(bytes, SHARD_SAMPLE_BYTES);
    posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);  // else the system reads up to megabytes around each block
    for (int i = 0; i < SHARD_SAMPLES; i++) {
        at[i] = i * (bytes - block) / (SHARD_SAMPLES - 1);
        posix_fadvise(fd, at[i], block, POSIX_FADV_WILLNEED);  // a network disk then fetches all blocks at once
    }
    for (int i = 0; i < SHARD_SAMPLES; i++) pread_or_die(fd, samples + i * block, block, at[i], path);
    posix_fadvise(fd, 0, 0, POSIX_FADV_NORMAL);
    return fnv1a(FNV1A, samples, SHARD_SAMPLES * block);
}
// The open shard must be the file that was there at the start.
static void shard_require_same(DataSet *set) {
    const Shard *s = &set->shards[set->open_shard];
    struct stat now;
    require(fstat(set->fd, &now) == 0 && now.st_size == s->bytes && shard_hash(set->fd, s->bytes, s->path) == s->hash,
            "'%s' holds other tokens than at the start of this run\n"
            "leave shards alone while a run reads them; bring this one back and resume, or start anew",
            s->path);
    set->modified = now.st_mtim;
}
// After reading: nothing may be used that was written since the last check.
static void shard_require_unchanged(DataSet *set) {
    struct stat now;
    if (set->open_shard < 0) return;
    if (fstat(set->fd, &now) != 0 || memcmp(&now.st_mtim, &set->modified, sizeof now.st_mtim) != 0)
        shard_require_same(set);
}
static void shard_leave(DataSet *set) {
    if (set->open_shard < 0) return;
    shard_require_unchanged(set);
    close(set->fd);
    set->open_shard = set->fd = -1;
}

// ---- documents

// raw: tokens as they are in the file.
static uint32_t raw_token(const DataLoader *d, const void *raw, int64_t i) {
    return d->token_bytes == 2 ? ((const uint16_t *)raw)[i] : ((const uint32_t *)raw)[i];
}
static int begins_document(const DataLoader *d, uint32_t token) {
    return d->marked ? token >> 31 : token == (uint32_t)d->eot;
}
static const int64_t SCAN_TOKENS = 1 << 18;  // that are read at a time
static void packing_add_document(DataLoader *d, const Shard *s, Packing *p, int64_t begin, int64_t end) {
    const int64_t T = d->T, length = end - begin;
    require(d->kind.pack == PACK_CUT || length <= T,
            "'%s': the document at token %ld has %ld tokens, a row %ld\n"
            "use a longer --seq-len, or --pack cut, which cuts such a document into rows",
            s->path, begin, length, T);
    for (; begin + T < end; begin += T) packing_add(p, (int)begin, (int)T);
    if (begin < end) packing_add(p, (int)begin, (int)(end - begin));
}
// The rows of a shard, whose documents are found by reading all of it. Returns how many are longer than a row.
static int64_t shard_pack(DataLoader *d, const Shard *s, int fd, Packing *p) {
    int64_t begin = 0, cut = 0;
    packing_free(p);
    for (int64_t at = 0, n; at < s->tokens; at += n) {
        n = smaller(s->tokens - at, SCAN_TOKENS);
        pread_or_die(fd, d->raw, n * d->token_bytes, HEADER_BYTES + at * d->token_bytes, s->path);
        for (int64_t i = 0; i < n; i++) {
            if (!begins_document(d, raw_token(d, d->raw, i))) continue;
            cut += at + i - begin > d->T;
            packing_add_document(d, s, p, begin, at + i);
            begin = at + i;
        }
    }
    packing_add_document(d, s, p, begin, s->tokens);
    packing_fill(p, d->T);
    return cut + (s->tokens - begin > d->T);
}

// Whether all is known to be one document. Data too large to be read for that are not.
static int dataloader_is_one_document(const DataLoader *d) {
    enum { MOST_TOKENS = 1 << 24 };
    const Shard *s = d->shards;
    if (d->num_shards != 1 || s->tokens > MOST_TOKENS || !d->vocab_size) return 0;
    const int fd = open_or_die(s->path, O_RDONLY, DATA_HINT);
    char *tokens = new_array(char, s->tokens * d->token_bytes);
    int64_t i = 1;
    pread_or_die(fd, tokens, s->tokens * d->token_bytes, HEADER_BYTES, s->path);
    close(fd);
    while (i < s->tokens && !begins_document(d, raw_token(d, tokens, i))) i++;
    free(tokens);
    return i >= s->tokens;
}
// What the first shard says of all.
static void shard_first(DataLoader *d, const Shard *s, const int32_t *h) {
    memcpy(d->header, h, sizeof d->header);
    d->marked = h[1] == SHARD_VERSION_MARKED;
    d->eot = h[7];
    if (d->kind.pack == PACK_AUTO) d->kind.pack = d->marked ? PACK_WHOLE : PACK_NO;
    if (d->kind.marks < 0) d->kind.marks = d->marked;
    require(!d->marked || d->kind.pack,
            "'%s' holds conversations: rows cannot be cut from it as from a text\n"
            "use --pack whole or --pack cut",
            s->path);
}
// Checks one shard. All must have the tokenizer of the first.
static void shard_open(DataLoader *d, Shard *s, Packing *packing) {
    #define SHARD_REQUIRE(ok, what, ...) require(ok, "'%s' " what, s->path, __VA_ARGS__)
    int64_t bytes;
    int32_t h[HEADER_WORDS];
    int fd = open_with_header(s->path, "a token shard", DATA_HINT, h, &bytes);
    SHARD_REQUIRE(h[0] == SHARD_MAGIC_16 || h[0] == SHARD_MAGIC_32,
                  "is not a token shard (magic %d, not %d or %d)\n" DATA_HINT, h[0], SHARD_MAGIC_16, SHARD_MAGIC_32);
    int narrow = h[0] == SHARD_MAGIC_16, version = narrow ? SHARD_VERSION_16 : SHARD_VERSION_32;
    d->token_bytes = narrow ? 2 : 4;
    SHARD_REQUIRE(h[1] == version || (!narrow && h[1] == SHARD_VERSION_MARKED),
                  "is a token shard of version %d, this program reads %d\n" DATA_HINT, h[1], version);
    SHARD_REQUIRE(h[2] >= 0,
                  "is no shard: its header counts %d tokens\n"
                  "at most 2^31 - 1 fit: make smaller shards with --shard-tokens 100000000",
                  h[2]);
    int64_t expected = HEADER_BYTES + (int64_t)h[2] * d->token_bytes;
    SHARD_REQUIRE(bytes == expected, "is %s: %ld bytes, its header promises %ld\nmake or download it again",
                  bytes < expected ? "truncated" : "too long", bytes, expected);
    if (s == d->shards) shard_first(d, s, h);
    SHARD_REQUIRE(
        h[2] > (d->kind.pack ? 0 : d->T),
        "has %d tokens: too few for one row of T = %d (T + 1 are needed)\n"
        "use a shorter --seq-len, or more text; prepare.py --val-fraction says how much of it is for validation",
        h[2], d->T);
    SHARD_REQUIRE(h[3] >= 0 && h[4] >= 0 && h[4] < NUM_TOKENIZERS && h[7] >= 0 && (h[3] == 0 || h[7] < h[3]),
                  "has vocabulary size %d, tokenizer %d and end-of-text %d in its header: one of them is out of "
                  "range\n" DATA_HINT,
                  h[3], h[4], h[7]);
    require(h[3] > 0 || (!d->kind.pack && !d->kind.marks),
            "'%s' does not say which token ends a text: nobody knows where its documents begin\n"
            "make shards with llmc prepare, or leave --documents and --pack out",
            s->path);
    SHARD_REQUIRE(h[0] == d->header[0] && h[1] == d->header[1] &&
                      !memcmp(h + 3, d->header + 3, sizeof h - 3 * sizeof *h),
                  "and '%s' were made with different tokenizers, or one of them of conversations\n"
                  "name shards of one kind only",
                  d->shards[0].path);
    s->bytes = bytes;
    s->tokens = h[2];
    s->hash = shard_hash(fd, bytes, s->path);
    if (d->kind.pack) d->cut_documents += shard_pack(d, s, fd, packing);
    s->rows = d->kind.pack ? packing->num_rows : (s->tokens - 1) / d->T;
    close(fd);
}

// Appends the files of a pattern to the shards, in the order of their names. Returns their number.
static int find_shards(DataLoader *d, const char *pattern, Path place) {
    glob_t found;
    int status = find_files(pattern, &found);
    require(status == 0 || status == GLOB_NOMATCH, "cannot list '%s': %s\ncheck the folder", pattern, strerror(errno));
    require(*pattern, "no data are named\ngive --train-data PATTERN");
    require(status == 0 && found.gl_pathc > 0, "%sno file matches '%s'\n" DATA_HINT, place.text, pattern);
    require(found.gl_pathc < (1 << 24) - 1, "%zu files match '%s': too many\nmake larger shards", found.gl_pathc,
            pattern);
    const int n = (int)found.gl_pathc;
    grow_array(d->shards, d->num_shards + (size_t)n);
    Shard *added = d->shards + d->num_shards;
    for (int i = 0; i < n; i++) require((added[i].path = strdup(found.gl_pathv[i])), "out of memory\nuse fewer shards");
    globfree(&found);
    qsort(added, n, sizeof(Shard), by_name);
    d->num_shards += n;
    return n;
}
static void set_open(DataLoader *d, DataSet *set) {
    for (int i = 0; i < set->num_shards; i++) {
        shard_open(d, &set->shards[i], &set->packing);
        d->num_tokens += set->shards[i].tokens;
        set->rows += set->shards[i].rows;
    }
    set->shard_order = new_array(ShuffleKey, set->num_shards);
    set->slot_begin = new_array(int64_t, set->num_shards + 1);
    set->order_epoch = set->open_shard = set->fd = -1;
    d->rows_per_epoch += set->rows;
}
// Stops with a message if anything is wrong with any shard. vocab_size > 0: every token id must be below it.
static void dataloader_open(DataLoader *d, const char *pattern, int B, int T, RowKind kind, int rank, int world,
                            int shuffle, uint64_t seed, int vocab_size) {
    size_t tokens = (size_t)B * T;
    CLEAR(d);
    require(tokens <= INT32_MAX / 4, "batch size %d times sequence length %d is too large\nuse a smaller --batch-size",
            B, T);
    assert(B > 0 && T > 0 && 0 <= rank && rank < world);
    d->B = B;
    d->T = T;
    d->kind = kind;
    d->rank = rank;
    d->world = world;
    d->shuffle = shuffle;
    d->seed = seed;
    d->check_vocab = vocab_size;
    const Mixture *m = &d->mixture;
    mixture_open(&d->mixture, pattern);
    const int count = m->count;
    d->sets = new_zeros(DataSet, count);
    for (int i = 0; i < count; i++)
        d->sets[i].num_shards = find_shards(d, m->patterns[i], mixture_place(pattern, m->lines[i]));
    d->raw = malloc_or_die((kind.pack && T < SCAN_TOKENS ? SCAN_TOKENS : T + 1) * sizeof(uint32_t));
    Shard *first = d->shards;
    for (int i = 0; i < count; first += d->sets[i++].num_shards) {
        d->sets[i].shards = first;
        set_open(d, &d->sets[i]);
    }
    d->vocab_size = d->header[3];
    d->tokenizer = (TokenizerKind)d->header[4];
    d->hash = header_hash(d->header + 5);
    require(!vocab_size || d->vocab_size <= vocab_size,
            "'%s' was made with a vocabulary of %d tokens, the model has %d\n"
            "use a model with that vocabulary, or other shards",
            d->shards[0].path, d->vocab_size, vocab_size);
    d->inputs = new_array(int, 2 * tokens);
    d->targets = d->inputs + tokens;
    d->ahead = new_array(int, 2 * tokens);
    d->ahead_next = -1;
}
// The vocabulary that the first shard names; 0: none. dataloader_open says what is wrong with it.
static int shards_vocabulary(const char *pattern) {
    glob_t found;
    int32_t h[HEADER_WORDS] = {0};
    int64_t bytes;
    if (find_files(first_pattern(pattern).text, &found)) return 0;
    close(open_with_header(found.gl_pathv[0], "a token shard", DATA_HINT, h, &bytes));
    globfree(&found);
    return h[0] == SHARD_MAGIC_16 || h[0] == SHARD_MAGIC_32 ? h[3] : 0;
}
// The share of all places in rows that is padding.
static double dataloader_padding(const DataLoader *d) {
    return d->kind.pack ? 1 - d->num_tokens / ((double)d->rows_per_epoch * d->T) : 0;
}

// Turns (epoch, row of the epoch) into (open shard, row of the shard). Rows come in rising order but for a seek.
static int64_t set_locate(DataLoader *d, DataSet *set, int64_t epoch, int64_t row) {
    if (epoch != set->order_epoch) {
        fill_order(set->shard_order, set->num_shards, d->shuffle, d->seed, epoch);
        set->slot_begin[0] = 0;
        for (int i = 0; i < set->num_shards; i++)
            set->slot_begin[i + 1] = set->slot_begin[i] + set->shards[set->shard_order[i].index].rows;
        set->order_epoch = epoch;
        set->slot = 0;
        shard_leave(set);
    }
    if (row < set->slot_begin[set->slot]) set->slot = 0;
    while (row >= set->slot_begin[set->slot + 1]) set->slot++;
    int index = (int)set->shard_order[set->slot].index;
    const Shard *s = &set->shards[index];
    if (index != set->open_shard) {
        int64_t bytes;
        shard_leave(set);
        set->fd = open_data_file(s->path, DATA_HINT, &bytes);
        set->open_shard = index;
        shard_require_same(set);
        if (d->kind.pack) shard_pack(d, s, set->fd, &set->packing);
        if (d->shuffle) {
            free(set->row_order);
            set->row_order = new_array(ShuffleKey, s->rows);
            fill_order(set->row_order, s->rows, 1, d->seed, ((uint64_t)epoch << 24) + index + 1);
        }
    }
    int64_t at = row - set->slot_begin[set->slot];
    return d->shuffle ? set->row_order[at].index : at;
}

// A piece of the open shard as inputs and targets.
static void set_read_piece(DataLoader *d, const DataSet *set, Piece piece, int *inputs, int *targets) {
    const Shard *s = &set->shards[set->open_shard];
    const int check = d->check_vocab ? d->check_vocab : d->vocab_size, n = piece.length;
    const int follows = piece.begin + (int64_t)n < s->tokens;  // else the text ends with the shard
    const uint32_t limit = check ? check : INT32_MAX;
    const size_t token_bytes = d->token_bytes;
    pread_or_die(set->fd, d->raw, (n + follows) * token_bytes, HEADER_BYTES + piece.begin * token_bytes, s->path);
    for (int t = 0; t < n + follows; t++) {
        const uint32_t token = raw_token(d, d->raw, t), id = d->marked ? token & TOKEN_ID : token;
        const int begins = begins_document(d, token), marked = d->kind.marks && ((d->kind.pack && t == 0) || begins);
        const int learned = !d->marked || !(begins || token & TOKEN_NOT_LEARNED);
        require(id < limit,
                "'%s': token %d is %u, outside the vocabulary of %u\n"
                "use a model with the vocabulary that the shards were made for (--model ...,vocab=N)",
                s->path, piece.begin + t, id, limit);
        if (t < n) inputs[t] = marked ? ~(int)id : (int)id;
        if (t > 0) targets[t - 1] = learned ? (int)id : -1;
    }
    if (!follows) targets[n - 1] = d->marked ? -1 : d->eot;
}
// Row `r` of the open shard as T inputs and T targets.
static void set_read_row(DataLoader *d, const DataSet *set, int64_t r, int *inputs, int *targets) {
    const Piece cut = {(int)(r * d->T), d->T};
    const Packing *p = &set->packing;
    const int pack = d->kind.pack != PACK_NO, padding = d->kind.marks ? ~d->eot : d->eot;
    const Piece *pieces = pack ? p->pieces + p->row_begin[r] : &cut;
    const int64_t count = pack ? p->row_begin[r + 1] - p->row_begin[r] : 1;
    int used = 0;
    for (int64_t i = 0; i < count; used += pieces[i++].length)
        set_read_piece(d, set, pieces[i], inputs + used, targets + used);
    for (; used < d->T; used++) {
        inputs[used] = padding;
        targets[used] = -2;
    }
}

// Reads this rank's B rows of the call that begins at row `next`. The only function that touches the disk after open.
static void dataloader_read_batch(DataLoader *d, int64_t next, int *inputs) {
    int *targets = inputs + d->B * d->T;
    next += (int64_t)d->rank * d->B;
    if (!d->only) mixture_seek(&d->mixture, next);
    for (int b = 0; b < d->B; b++) {
        int64_t row = next + b;
        DataSet *set = d->only ? d->only : &d->sets[mixture_next(&d->mixture, &row)];
        int64_t r = set_locate(d, set, row / set->rows, row % set->rows);
        set_read_row(d, set, r, inputs + b * d->T, targets + b * d->T);
    }
    for (int i = 0; i < d->mixture.count; i++) shard_require_unchanged(&d->sets[i]);
}

static void *dataloader_thread(void *loader) {
    DataLoader *d = (DataLoader *)loader;
    dataloader_read_batch(d, d->ahead_next, d->ahead);
    return NULL;
}
// Waits for the thread. Returns whether the next batch has been read.
static int dataloader_wait(DataLoader *d) {
    if (d->reading) pthread_join(d->thread, NULL);
    d->reading = 0;
    return d->ahead_next == d->next;
}
static void dataloader_read_ahead(DataLoader *d) {
    if (dataloader_wait(d)) return;
    d->ahead_next = d->next;
    d->reading = pthread_create(&d->thread, NULL, dataloader_thread, d) == 0;
    if (!d->reading) d->ahead_next = -1;  // there is no thread: the next call reads by itself
}
static void dataloader_position(const DataLoader *d, int64_t *epoch, int64_t *row) {
    *epoch = d->next / d->rows_per_epoch;
    *row = d->next % d->rows_per_epoch;
}
static void dataloader_seek(DataLoader *d, int64_t epoch, int64_t row) {
    require(epoch >= 0 && row >= 0 && epoch <= (INT64_MAX - row) / d->rows_per_epoch,
            "epoch %ld, row %ld is no place in the data\n"
            "the saved training state is damaged: use an older one",
            epoch, row);
    d->next = epoch * d->rows_per_epoch + row;
}
static void dataloader_next(DataLoader *d) {
    if (dataloader_wait(d)) {
        int *used = d->inputs;
        d->inputs = d->ahead;
        d->targets = d->inputs + d->B * d->T;
        d->ahead = used;
        d->ahead_next = -1;
    } else {
        dataloader_read_batch(d, d->next, d->inputs);
    }
    d->next += (int64_t)d->world * d->B;
}
// From now on rows come from one set alone, from its first row.
static void dataloader_begin_set(DataLoader *d, int set) {
    dataloader_wait(d);
    d->ahead_next = -1;
    d->only = &d->sets[set];
    d->next = 0;
}
static void dataloader_close(DataLoader *d) {
    dataloader_wait(d);
    for (int i = 0; i < d->num_shards; i++) free(d->shards[i].path);
    for (int i = 0; i < d->mixture.count; i++) {
        DataSet *set = &d->sets[i];
        if (set->fd >= 0) close(set->fd);
        packing_free(&set->packing);
        free(set->shard_order);
        free(set->slot_begin);
        free(set->row_order);
    }
    mixture_close(&d->mixture);
    void *const owned[] = {d->inputs, d->ahead, d->shards, d->sets, d->raw};
    for (int i = 0; i < COUNT_OF(owned); i++) free(owned[i]);
    CLEAR(d);
}
