// What the trainers say of a Hugging Face folder: dev/eval/hf.py builds this program and asks it, so that there is one
// reader.
//   hf config FOLDER DTYPE   its config.json as the trainers understand and write it, or why they refuse it
//   hf adapter FOLDER        that its adapter_model.safetensors is whole; of our checkpoints every byte is read
//   hf table FOLDER          name and shape of each tensor that its weight files must hold
//   hf check FOLDER
//     that they hold these, and nothing else; of our checkpoints every byte is read, of others the headers
//   hf merge ROWS COLUMNS RANK SCALE
//     W (rows, columns), A (rank, columns) and B (rows, rank) as fp32 from stdin -> W + scale B A to stdout
//   hf logits FOLDER         token ids (int32) from stdin -> logits (T, V) as fp32 to stdout, by the CPU trainer
#define LLMC_NO_MAIN
#include "../../train_gpt2.c"
#include "../../llmc/checkpoint.h"

static void print_table(const ParamTable *t) {
    for (int i = 0; i < t->count; i++) {
        uint64_t shape[2];
        const int dims = param_shape(&t->params[i], shape);
        printf("%s", t->params[i].name);
        for (int d = 0; d < dims; d++) printf(" %llu", (unsigned long long)shape[d]);
        printf("\n");
    }
}
static float *read_matrix(size_t rows, size_t columns) {
    float *values = (float *)malloc_or_die(rows * columns * sizeof(float));
    require(fread(values, sizeof(float), rows * columns, stdin) == rows * columns,
            "too few numbers on standard input\ncall this through dev/eval/hf.py");
    return values;
}
static void merge(size_t rows, size_t columns, int rank, float scale) {
    float *w = read_matrix(rows, columns), *a = read_matrix((size_t)rank, columns),
          *b = read_matrix(rows, (size_t)rank);
    PARALLEL_FOR
    for (int64_t i = 0; i < (int64_t)rows; i++)
        lora_merge_row(w + (size_t)i * columns, columns, a, columns, b + i * rank, rank, scale);
    fwrite(w, sizeof(float), rows * columns, stdout);
    free(w);
    free(a);
    free(b);
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
    require(argc >= 3, "usage: hf adapter|config|table|check|merge|logits FOLDER\ncall this through dev/eval/hf.py");
    const char *what = argv[1], *folder = argv[2];
    if (!strcmp(what, "merge") && argc == 6) {
        merge((size_t)atoll(argv[2]), (size_t)atoll(argv[3]), atoi(argv[4]), strtof(argv[5], NULL));
        return ferror(stdout) || fflush(stdout) ? EXIT_FAILURE : 0;
    }
    Model m;
    StReader r;
    memset(&m, 0, sizeof m);
    if (!strcmp(what, "check") || !strcmp(what, "adapter")) {
        const Comm alone = COMM_ALONE;
        checkpoint_require_intact(&alone, folder, file_bytes(folder, "optimizer.safetensors") < 0 ? 2 : 3);
    }
    if (!strcmp(what, "adapter")) {
        st_open(&r, path_of("%s/adapter_model.safetensors", folder).text);
        st_close(&r);
        return 0;
    }
    m.config = config_from_json(folder);
    m.table = params_table(&m.config);
    if (!strcmp(what, "config")) {
        config_write(&m.config, argc > 3 ? argv[3] : "fp32", stdout, "\n  ");
        printf("\n");
    } else if (!strcmp(what, "table")) {
        print_table(&m.table);
    } else if (!strcmp(what, "check")) {
        st_open(&r, folder);
        require_same_tensors(&m, weight_slot, 1, &r, folder);
        st_close(&r);
    } else if (!strcmp(what, "logits")) {
        print_logits(&m.config, folder);
    } else
        die("unknown question '%s'\ncall this through dev/eval/hf.py", what);
    params_free(&m.table);
    return ferror(stdout) || fflush(stdout) ? EXIT_FAILURE : 0;
}
