// Ladder of llmc/tp.cuh: sums of parts to the bit, with a bias or positions; gradients of copies on meshes whose ranks run one after another
// here, as batches of all sizes; speed. What carries the parts from GPU to GPU is not tested here: test_gpt2.cu --tp does that.
// Build and run: make bench, or see dev/cuda/common.cuh.
#include "common.cuh"
#include "../../llmc/tp.cuh"

// Exact: fp32 sums in the order of the ranks, one rounding. In another order many of the sums are other numbers.
static void check_sum(int ranks, int rows, int C, int period, int own_in_place) {
    ladder_case("%d ranks, rows=%d C=%d, %d added row%s%s", ranks, rows, C, period, period == 1 ? "" : "s", own_in_place ? "" : ", all in slots");
    cudaStream_t stream = ladder.gpu.compute;
    const size_t piece = (size_t)rows * C;
    float *parts = host_normal((size_t)ranks * piece, 1.0f), *add = host_normal((size_t)(period ? period : 1) * C, 1.0f);
    floatX *d_slots = upload<floatX>(parts, (size_t)ranks * piece), *d_add = period ? upload<floatX>(add, (size_t)period * C) : NULL, *d_out = device_new<floatX>(piece);
    for (int rank = 0; rank < ranks; rank++) {
        const int own = own_in_place ? rank : -1, first = own_in_place ? rank * rows : 0;
        auto run = [&] {
            if (own >= 0) cudaCheck(cudaMemcpyAsync(d_out, d_slots + (size_t)rank * piece, piece * sizeof(floatX), cudaMemcpyDeviceToDevice, stream));
            tp_sum(d_out, d_slots, d_add, ranks, own, rows, C, first, period ? period : 1, stream);
        };
        run();
        const float *out = download(d_out, piece);
        size_t wrong = 0, other_order = 0;
        for (size_t i = 0; i < piece; i++) {
            float sum = 0, backwards = 0;
            for (int r = 0; r < ranks; r++) sum += parts[(size_t)r * piece + i];
            for (int r = ranks; r-- > 0;) backwards += parts[(size_t)r * piece + i];
            const float more = period ? add[(i / C + first) % period * C + i % C] : 0;
            wrong += as_floatX(sum + more) != out[i];
            other_order += as_floatX(backwards + more) != out[i];
        }
        check_true(wrong == 0 && (ranks == 2 || piece < 1000 || sizeof(floatX) == 2 || other_order > 0), "rank %d: %zu of %zu sums wrong (in another order: %zu)", rank, wrong, piece, other_order);
        if (rank == 0) check_same_bits("sum", {{d_out, piece * sizeof(floatX)}}, run);
        if (!own_in_place) break;  // the same on all ranks
    }
}
// A rank's own slot is not read.
static void check_own_slot(void) {
    ladder_case("own slot");
    enum { RANKS = 3, ROWS = 5, C = 64, PIECE = ROWS * C };
    float *parts = host_normal(RANKS * PIECE, 1.0f);
    for (int rank = 0; rank < RANKS; rank++) {
        floatX *d_slots = upload<floatX>(parts, RANKS * PIECE), *d_out = upload<floatX>(parts + rank * PIECE, PIECE);
        poison(d_slots + rank * PIECE, PIECE);
        tp_sum(d_out, d_slots, NULL, RANKS, rank, ROWS, C, 0, 1, ladder.gpu.compute);
        const float *out = download(d_out, PIECE);
        size_t wrong = 0;
        for (int i = 0; i < PIECE; i++) wrong += as_floatX(parts[i] + parts[PIECE + i] + parts[2 * PIECE + i]) != out[i];
        check_true(wrong == 0, "rank %d: %zu sums wrong", rank, wrong);
    }
}

// Every rank of a dp x tp mesh with gradients of its own; those of data-parallel rank `dp_rank` are added up here. room: of a batch.
static void check_copies(const char *model, int dp, int dp_rank, int tp, int sharded, size_t room) {
    Config c;
    config_parse(model, &c);
    ladder_case("%d x %d, %s%s, batches of %zu", dp, tp, model, sharded ? ", ZeRO 1" : "", room);
    cudaStream_t stream = ladder.gpu.compute;
    ParamTable tables[8];
    TpCopy *lists[8], *d_lists[8];
    float *grads[8];
    floatX *d_grads[8], *batch[8];
    Mesh meshes[8];
    size_t total = 0, first_total = 0;
    int count = 0;
    for (int r = 0; r < tp; r++) {
        const Mesh alone = MESH_ALONE;
        meshes[r] = alone;
        meshes[r].tp.rank = r; meshes[r].tp.world = tp; meshes[r].dp.rank = dp_rank; meshes[r].dp.world = dp;
        tables[r] = params_of_rank(&c, tp, r);
        Span *owned = host_new<Span>(tables[r].num_units);
        for (int u = 0; u < tables[r].num_units; u++) owned[u] = sharded ? param_shard(&tables[r], u, dp_rank, dp) : param_unit(&tables[r], u);
        count = tp_list_copies(&meshes[r], &tables[r], owned, room, NULL, &total);
        lists[r] = host_new<TpCopy>(count);
        check_true(tp_list_copies(&meshes[r], &tables[r], owned, room, lists[r], &total) == count && (r == 0 || total == first_total), "%d copies, %zu elements", count, total);
        first_total = total;
        d_lists[r] = device_new<TpCopy>(count);
        cudaCheck(cudaMemcpy(d_lists[r], lists[r], count * sizeof(TpCopy), cudaMemcpyHostToDevice));
        grads[r] = host_normal(tables[r].total, 1.0f);
        d_grads[r] = upload<floatX>(grads[r], tables[r].total);
        batch[r] = device_new<floatX>(tp * (total < room ? total : room));
    }
    int begin = 0, end = 0;  // as tp_sum_copies
    for (size_t at = 0; at < total; at += room, begin = end) {
        const size_t size = total - at < room ? total - at : room;
        for (size_t n = 0; n < size; end++) n += (size_t)lists[0][end].count;
        for (int r = 0; r < tp; r++) tp_pack(batch[r] + r * size, d_grads[r], d_lists[r] + begin, end - begin, stream);
        for (int r = 0; r < tp; r++)
            for (int from = 0; from < tp; from++)
                if (from != r) cudaCheck(cudaMemcpyAsync(batch[r] + from * size, batch[from] + from * size, size * sizeof(floatX), cudaMemcpyDeviceToDevice, stream));
        for (int r = 0; r < tp; r++) tp_unpack(d_grads[r], batch[r], d_lists[r] + begin, end - begin, size, stream);
    }
    check_true(end == count, "%d of %d copies were in batches", end, count);
    for (int r = 0; r < tp; r++) {
        const ParamTable *t = &tables[r];
        float *expected = host_copy(grads[r], t->total);
        size_t wrong = 0, changed = 0, summed = 0;
        for (int i = 0; i < t->count; i++)
            for (int k = 0; k < t->params[i].num_parts; k++) {
                const Param *p = &t->params[i];
                const ParamPart *q = &p->parts[k];
                const Span unit = sharded ? param_shard(t, p->unit, dp_rank, dp) : param_unit(t, p->unit), mine = span_overlap(unit, p->offset + q->begin, q->copies > 1 ? q->count : 0);
                for (size_t e = mine.begin; e < mine.begin + mine.count; e++) {
                    float sum = 0;
                    for (int j = 0; j < q->copies && p->role != ROLE_WPE; j++) sum += grads[r - q->copy + j][e];
                    if (p->role == ROLE_WPE) sum = dp > 1 ? grads[0][e] : grads[r][e];
                    expected[e] = as_floatX(sum);
                    summed += p->role != ROLE_WPE || dp > 1;
                }
            }
        const float *got = download(d_grads[r], t->total);
        for (size_t e = 0; e < t->total; e++) { wrong += got[e] != expected[e]; changed += got[e] != grads[r][e]; }
        check_true(wrong == 0 && summed == total && (changed > 0 || total == 0), "rank %d: %zu wrong, %zu of %zu copies changed", r, wrong, changed, total);
    }
    for (int r = 0; r < tp; r++) params_free(&tables[r]);
}

static void bench_sum(const char *name, int ranks, int rows, int C) {
    ladder_case("%s, ranks=%d rows=%d C=%d", name, ranks, rows, C);
    const size_t piece = (size_t)rows * C;
    floatX *slots = device_normal<floatX>((size_t)ranks * piece, 1), *out = device_normal<floatX>(piece, 1), *bias = device_normal<floatX>(C, 1);
    bench("sum of parts", (ranks + 1.0) * (double)piece * sizeof(floatX), 0, [&] { tp_sum(out, slots, bias, ranks, 0, rows, C, 0, 1, ladder.gpu.compute); });
}

int main(int argc, char **argv) {
    ladder_open("tp", argc, argv);
    if (ladder.check) {
        for (int ranks : {2, 3, 4, 5, 8}) {
            check_sum(ranks, 1, 8, 0, 1);
            check_sum(ranks, 37, 264, 0, 1);
            check_sum(ranks, 100, 768, 1, 1);
            check_sum(ranks, 50, 512, 33, 1);  // positions: rank k's rows begin at k * 50 % 33
            check_sum(ranks, 9, 1600, 1, 0);
            check_sum(ranks, 4, 64, 3, 0);
        }
        check_own_slot();
        const char *const models[] = {"d2,channels=128,heads=8,vocab=300,seq=24", "llama3:8B,layers=2,channels=128,heads=8,kv_heads=2,vocab=500,ffn=256,seq=24",
                                      "qwen2.5:1.5B,layers=2,channels=128,heads=8,kv_heads=1,vocab=300,ffn=128,seq=24"};
        for (const char *model : models)
            for (int tp : {2, 4, 8}) {
                check_copies(model, 1, 0, tp, 0, TP_BATCH_MOST);
                check_copies(model, 1, 0, tp, 0, 1000);
                check_copies(model, 3, 2, tp, 1, 5000);
                check_copies(model, 4, 0, tp, 0, 123);
            }
    }
    if (ladder.bench) {
        bench_sum("Llama-3-8B", 8, 2048, 4096);
        bench_sum("Llama-3-8B", 2, 8192, 4096);
        bench_sum("GPT-2 124M", 2, 32768, 768);
    }
    return ladder_close();
}
