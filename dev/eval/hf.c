// What the trainers say of a Hugging Face folder: dev/eval/hf.py builds this program and asks it, so that there is one
// reader.
//   hf config FOLDER DTYPE   its config.json as the trainers understand and write it, or why they refuse it
//   hf table FOLDER          name and shape of each tensor that its weight files must hold
//   hf check FOLDER
//     that they hold these, and nothing else; of our checkpoints every byte is read, of others the headers
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
static void print_logits(const Config *c, const char *folder) {
    int *tokens = (int *)malloc_or_die((size_t)c->max_seq_len * sizeof(int));
    const int T = (int)fread(tokens, sizeof(int), (size_t)c->max_seq_len, stdin);
    require(T > 0, "no token ids on standard input\ncall this through dev/eval/hf.py");
    const Mesh one_rank = MESH_ALONE;
    Options o = options_default();
    o.batch_size = 1;
    o.seq_len = T;
    Model m;
    model_open(&m, c, &o, &one_rank);
    model_load_weights(&m, folder);
    const Pass pass = pass_of(&m, 1, T);
    model_forward(&m, &pass, tokens);
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
    require(argc >= 3, "usage: hf config|table|check|logits FOLDER\ncall this through dev/eval/hf.py");
    const char *what = argv[1], *folder = argv[2];
    Model m;
    memset(&m, 0, sizeof m);
    if (!strcmp(what, "check")) {
        const Comm alone = COMM_ALONE;
        checkpoint_require_intact(&alone, folder, file_bytes(folder, "optimizer.safetensors") < 0 ? 2 : 3);
    }
    m.config = config_from_json(folder);
    m.table = params_table(&m.config);
    if (!strcmp(what, "config")) {
        config_write(&m.config, argc > 3 ? argv[3] : "fp32", stdout, "\n  ");
        printf("\n");
    } else if (!strcmp(what, "table")) {
        print_table(&m.table);
    } else if (!strcmp(what, "check")) {
        StReader r;
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
