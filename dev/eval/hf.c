// What the trainers say of a Hugging Face folder: dev/eval/hf.py builds this program and asks it, so that there is one
// reader.
//   hf config FOLDER DTYPE   its config.json as the trainers understand and write it, or why they refuse it
//   hf newest FOLDER         the folder that --model opens for it: of a run its newest checkpoint
//   hf adapter FOLDER        that its adapter_config.json is JSON; of our checkpoints every byte is read
//   hf table FOLDER          name and shape of each tensor that its weight files must hold
//   hf tensors FILE|FOLDER   what is in safetensors files; after the first two lines, all of them JSON, of each tensor
//                            [name, dtype, number of its file, first byte, [shape]]
//                              {"base": "..."}     of adapters: the mark of the base that they are for; or ""
//                              [name of a file, ...]
//   hf finite FILE|FOLDER    that its tensors are finite numbers; of a folder those of the model alone
//   hf check FOLDER
//     that they hold these, and nothing else; of our checkpoints every byte is read, of others the headers
//   hf merge -
//     of every line "ROWS COLUMNS RANK SCALE" on stdin, with W (rows, columns), A (rank, columns)
//                            and B (rows, rank) as fp32 behind it: W + scale B A to stdout
//   hf logits FOLDER         token ids (int32) from stdin -> logits (T, V) as fp32 to stdout, by the CPU trainer
#define LLMC_NO_MAIN
#include "../../train_gpt2.c"
#include "../../llmc/files/checkpoint.h"

static void print_table(const ParamTable *t) {
    for (int i = 0; i < t->count; i++) {
        uint64_t shape[2];
        const int dims = param_shape(&t->params[i], shape);
        printf("%s", t->params[i].name);
        for (int d = 0; d < dims; d++) printf(" %llu", (unsigned long long)shape[d]);
        printf("\n");
    }
}
static void print_tensors(const char *path) {
    StReader r;
    st_open(&r, path);
    printf("{\"base\": \"");
    if (base_of_adapters(&r)) printf("%016lx", base_of_adapters(&r));
    printf("\"}\n[");
    for (int i = 0; i < r.num_files; i++) {
        if (i) printf(", ");
        json_write_string(stdout, file_name(r.files[i].path.text));
    }
    printf("]\n");
    for (const StTensor *t = r.tensors; t < r.tensors + r.count; t++) {
        printf("[");
        json_write_string(stdout, t->name);
        printf(", \"%s\", %d, %lu, [", st_types[t->type].name, t->file, t->begin);
        for (int i = 0; i < t->dims; i++) printf("%s%lu", i ? ", " : "", t->shape[i]);
        printf("]]\n");
    }
    st_close(&r);
}
static int is_finite(const StReader *r, const StTensor *t) {
    enum { PIECE = 1 << 16 };
    int finite = 1;
    #pragma omp parallel for reduction(&& : finite) schedule(static)
    for (uint64_t at = 0; at < t->count; at += PIECE) {
        float values[PIECE];
        const uint64_t n = t->count - at < PIECE ? t->count - at : PIECE;
        st_read_floats(r, t, at, n, values);
        for (uint64_t i = 0; i < n; i++) finite = finite && isfinite(values[i]);
    }
    return finite;
}
// table: of the model; NULL: all tensors are meant. warns: a warning is enough.
static void require_finite(const char *path, const ParamTable *table, int warns) {
    StReader r;
    st_open(&r, path);
    for (int i = 0; i < (table ? table->count : r.count); i++) {
        const StTensor *t = table ? find_param(&r, "", &table->params[i]) : &r.tensors[i];
        if (!t || !st_is_float(t) || is_finite(&r, t)) continue;
        require(warns,
                "'%s': tensor '%.100s' holds NaN or infinity\n"
                "the run has diverged, or the file is damaged: take an earlier checkpoint, or download it again",
                path, t->name);
        fprintf(stderr, "warning: tensor '%.100s' holds NaN or infinity\n", t->name);
        break;
    }
    st_close(&r);
}
static float *read_matrix(size_t rows, size_t columns) {
    float *values = (float *)malloc_or_die(rows * columns * sizeof(float));
    require(fread(values, sizeof(float), rows * columns, stdin) == rows * columns,
            "too few numbers on standard input\ncall this through dev/eval/hf.py");
    return values;
}
static void merge_next(size_t rows, size_t columns, int rank, float scale) {
    float *w = read_matrix(rows, columns), *a = read_matrix((size_t)rank, columns),
          *b = read_matrix(rows, (size_t)rank);
    PARALLEL_FOR
    for (int64_t i = 0; i < (int64_t)rows; i++)
        lora_merge_row(w + (size_t)i * columns, columns, a, columns, b + i * rank, rank, scale);
    fwrite(w, sizeof(float), rows * columns, stdout);
    fflush(stdout);
    free(w);
    free(a);
    free(b);
}
static void merge(void) {
    char line[128];
    while (fgets(line, sizeof line, stdin)) {
        size_t rows, columns;
        int rank;
        float scale;
        require(sscanf(line, "%zu %zu %d %f", &rows, &columns, &rank, &scale) == 4,
                "no sizes on standard input\ncall this through dev/eval/hf.py");
        merge_next(rows, columns, rank, scale);
    }
}
static void print_logits(const Config *c, const char *folder) {
    int *tokens = (int *)malloc_or_die((size_t)c->max_seq_len * sizeof(int));
    const int T = (int)fread(tokens, sizeof(int), (size_t)c->max_seq_len, stdin);
    require(T > 0, "no token ids on standard input\ncall this through dev/eval/hf.py");
    const Mesh one_rank = MESH_ALONE;
    Options o = options_default();
    o.batch_size = 1;
    o.seq_len = T;
    o.window = config_window(c, o.window, T);
    Model m;
    model_open(&m, c, &o, &one_rank);
    model_load_weights(&m, folder);
    Pass pass = pass_of(&m, 1, T);
    model_forward(&m, &pass, read_marks(&m, &pass, tokens));
    float *logits = (float *)malloc_or_die((size_t)T * (size_t)c->vocab_size * sizeof(float));
    const Weights head = head_of(&m, UNIT_FORWARD).w;
    matmul_forward_cpu(logits, NULL, m.h_final, head.weight, head.bias, T, c->channels, c->vocab_size);
    for (int t = 0; t < T; t++) softcap_row(logits + area(t, c->vocab_size), c->logit_softcap, c->vocab_size);
    fwrite(logits, sizeof(float), (size_t)T * (size_t)c->vocab_size, stdout);
    free(logits);
    free(tokens);
    model_close(&m);
}

int main(int argc, char **argv) {
    require(argc >= 3, "usage: hf QUESTION FOLDER\ncall this through dev/eval/hf.py");
    const char *what = argv[1], *folder = argv[2];
    if (!strcmp(what, "merge")) {
        merge();
        return ferror(stdout) || fflush(stdout) ? EXIT_FAILURE : 0;
    }
    Model m;
    StReader r;
    Json j;
    Path path;
    const Comm alone = COMM_ALONE;
    memset(&m, 0, sizeof m);
    if (!strcmp(what, "newest")) {
        Path newest;
        printf("%s", newest_of_run(&alone, folder, &newest));
        return 0;
    }
    if (!strcmp(what, "check") || !strcmp(what, "adapter")) {
        checkpoint_require_intact(&alone, folder, file_bytes(folder, "optimizer.safetensors") < 0 ? 2 : 3);
    }
    if (!strcmp(what, "adapter")) {
        adapter_config_open(&j, folder, &path);
        json_free(&j);
        return 0;
    }
    if (!strcmp(what, "tensors")) {
        print_tensors(folder);
        return ferror(stdout) || fflush(stdout) ? EXIT_FAILURE : 0;
    }
    if (!strcmp(what, "finite") && !is_directory(folder)) {
        require_finite(folder, NULL, 0);
        return 0;
    }
    m.config = config_from_json(folder);
    m.table = params_of_rank(&m.config, 1, 0);
    if (!strcmp(what, "config")) {
        config_write(&m.config, argc > 3 ? argv[3] : "fp32", stdout, "\n  ");
        printf("\n");
    } else if (!strcmp(what, "table")) {
        print_table(&m.table);
    } else if (!strcmp(what, "check")) {
        st_open(&r, folder);
        require_same_tensors(&m, weight_slot, 1, &r, folder);
        st_close(&r);
    } else if (!strcmp(what, "finite")) {
        require_finite(folder, &m.table, argc > 3);
    } else if (!strcmp(what, "logits")) {
        print_logits(&m.config, folder);
    } else
        die("unknown question '%s'\ncall this through dev/eval/hf.py", what);
    params_free(&m.table);
    return ferror(stdout) || fflush(stdout) ? EXIT_FAILURE : 0;
}
