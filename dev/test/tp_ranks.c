// Tensor parallelism of the CPU trainer: tp_test.h, for mpirun; test_tp.py calls it.
//   tp_ranks TP MODEL...     tensor parallelism of TP ranks, the others data parallel; muon:MODEL with that optimiser
#define LLMC_NO_MAIN
#include "../../train_gpt2.c"
#include "model_test.h"
#include "tp_test.h"

// fp32 sums in another order. Measured on meshes of up to 3 x 2 and 1 x 4: logits 1.0e-6, gradients 3.2e-6, losses and
// norms 9.5e-7; of olmoe on 1 x 4 ranks a third norm 4.2e-6 on one kind of CPU, after two updates that make a gradient
// near 0 as large as any.
static const TpBounds BOUNDS = {{3e-6, 3e-6}, {8e-6, 8e-6}, 8e-6, 1};

static const Config *local_config(const Model *m) { return &m->local; }
static int batch_of(const Model *m) { return m->B; }
static void logits_of(const Model *m, int rows, float *out) {
    memcpy(out, m->logits, (size_t)rows * m->local.padded_vocab_size * sizeof(float));
}

int main(int argc, char **argv) {
    Comm job = comm_open(&argc, &argv, 60);
    require(argc > 2, "usage: tp_ranks TP MODEL...\n-");
    const Mesh mesh = mesh_open(&job, atoi(argv[1]));
    Options o = options_default();
    o.threads = 1;
    omp_set_num_threads(1);
    for (int i = 2; i < argc; i++) {
        const char *model = tp_model(argv[i], &o);
        test_tp(model, &mesh, &BOUNDS, &o);
    }
    char name[64];
    snprintf(name, sizeof name, "rank %d", job.rank);
    const int status = report_tests(name);
    comm_close(&job);
    return status;
}
