// Writes the gradient of GPT-2 124M, random weights, over micro-steps of 4 x 256 tokens: what --grad-dtype makes of it
// (gradient_sums.py compares).
//   gradient_sums NUM_MICRO fp32|bf16 OUT.bin SHARDS
#define TESTING
#include "../../train_gpt2.cu"
#include "../../llmc/run/loop.h"

int main(int argc, char **argv) {
    require(argc == 5, "usage: gradient_sums NUM_MICRO fp32|bf16 OUT.bin SHARDS\n-");
    const Mesh mesh = MESH_ALONE;
    const int num_micro = atoi(argv[1]);
    Model *m = (Model *)calloc_or_die(sizeof *m);
    Config c;
    DataLoader data;
    Options o = options_default();
    config_parse("gpt2:124M", &c);
    o.batch_size = 4;
    o.seq_len = 256;
    o.total_batch = 1024ll * num_micro;
    o.grad_dtype = argv[2];
    o.tf32 = 0;
    const RowKind plain = {PACK_NO, 0};
    dataloader_open(&data, argv[4], 4, 256, plain, 0, 1, 1, 1337, c.vocab_size);
    model_open(m, &c, &o, &mesh);
    init_weights(m, 1337);
    for (int micro = 0; micro < num_micro; micro++) {
        dataloader_next(&data);
        model_micro_step(m, data.inputs, data.targets, micro, num_micro);
    }
    float *grads = (float *)malloc_or_die(m->table.total * sizeof(float));
    model_read(m, SLOT_GRAD, 0, m->table.total, grads);
    FILE *f = fopen(argv[3], "wb");
    require(f && fwrite(grads, sizeof(float), m->table.total, f) == m->table.total && fclose(f) == 0,
            "cannot write '%s'\n-", argv[3]);
    printf("%s build, %d micro-steps, --grad-dtype %s\n", FLOATX_NAME, num_micro, argv[2]);
    return 0;
}
