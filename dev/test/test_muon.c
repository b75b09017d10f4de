// llmc/base/muon.h and Muon on the CPU: Newton-Schulz steps against the same in double precision and against singular
// values that are known, the optimiser's columns, matrices of every layout of ranks, and how they are dealt out.
#define LLMC_ORACLE
#include "../../train_gpt2.c"
#include "llmc/model/backend.h"
#include "check.h"

// steps: 0, or more than the run's, which bring each singular value to 1.
static Muon muon_with(const char *polynomials, int steps) {
    Options o = options_default();
    o.muon_polynomials = polynomials;
    Muon m = muon_of(&o);
    const MuonPolynomial last = {1.875f, -1.25f, 0.375f};
    for (int i = m.steps; i < steps; i++) m.polynomials[i] = strcmp(polynomials, "simple") ? last : m.polynomials[0];
    if (steps) m.steps = steps;
    return m;
}

// ---- Newton-Schulz

// out (M,N) = a (M,K) b (K,N)
static void product(double *out, const double *a, const double *b, int M, int N, int K) {
    memset(out, 0, area(M, N) * sizeof *out);
    for (int i = 0; i < M; i++)
        for (int k = 0; k < K; k++)
            for (int j = 0; j < N; j++) out[area(i, N) + j] += a[area(i, K) + k] * b[area(k, N) + j];
}
// As the formula says, with none of the tricks: x = a x + b (x x^T) x + c (x x^T)^2 x.
static void newton_schulz_double(double *x, int rows, int cols, const Muon *m) {
    const size_t size = area(rows, cols), square = area(rows, rows);
    double *t = (double *)malloc_or_die((3 * size + square) * sizeof *t), *gram = t + 3 * size, norm = 0;
    for (size_t i = 0; i < size; i++) norm += x[i] * x[i];
    for (size_t i = 0; i < size; i++) x[i] /= m->safety * sqrt(norm) + 1e-7;
    for (int step = 0; step < m->steps; step++) {
        const MuonPolynomial q = m->polynomials[step];
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < cols; j++) t[area(j, rows) + i] = x[area(i, cols) + j];
        product(gram, x, t, rows, rows, cols);
        product(t + size, gram, x, rows, cols, rows);
        product(t + 2 * size, gram, t + size, rows, cols, rows);
        for (size_t i = 0; i < size; i++) x[i] = q.a * x[i] + q.b * t[size + i] + q.c * t[2 * size + i];
    }
    free(t);
}
// Orthonormal rows, from random ones by Gram-Schmidt.
static void orthonormal(double *q, int rows, int cols, uint64_t seed) {
    for (int i = 0; i < rows; i++) {
        double *row = q + area(i, cols), norm = 0;
        for (int j = 0; j < cols; j++) row[j] = rand_normal(seed, 0, area(i, cols) + j);
        for (int twice = 0; twice < 2; twice++)
            for (int k = 0; k < i; k++) {
                double dot = 0;
                for (int j = 0; j < cols; j++) dot += row[j] * q[area(k, cols) + j];
                for (int j = 0; j < cols; j++) row[j] -= dot * q[area(k, cols) + j];
            }
        for (int j = 0; j < cols; j++) norm += row[j] * row[j];
        for (int j = 0; j < cols; j++) row[j] /= sqrt(norm);
    }
}
// x (rows,cols) with singular values from 1 down to `least`, and its polar factor: what they all being 1 would give.
static void known_matrix(double *x, double *polar, int rows, int cols, double least, uint64_t seed) {
    const int small = smaller(rows, cols);
    double *u = (double *)malloc_or_die(area(small, rows + cols) * sizeof *u), *v = u + area(small, rows);
    orthonormal(u, small, rows, seed);
    orthonormal(v, small, cols, seed + 1);
    memset(x, 0, area(rows, cols) * sizeof *x);
    memset(polar, 0, area(rows, cols) * sizeof *x);
    for (int k = 0; k < small; k++)
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < cols; j++) {
                const double uv = u[area(k, rows) + i] * v[area(k, cols) + j];
                x[area(i, cols) + j] += pow(least, k / fmax(1, small - 1)) * uv;
                polar[area(i, cols) + j] += uv;
            }
    free(u);
}
static double difference(const double *a, const double *b, size_t n) {
    double top = 0, bottom = 0;
    for (size_t i = 0; i < n; i++) {
        top += (a[i] - b[i]) * (a[i] - b[i]);
        bottom += b[i] * b[i];
    }
    return sqrt(top / bottom);
}
static void in_floats(double *x, int rows, int cols, const Muon *m, int rounds) {
    const size_t size = area(rows, cols);
    float *y = (float *)malloc_or_die((size + newton_schulz_scratch(rows, cols)) * sizeof *y);
    for (size_t i = 0; i < size; i++) y[i] = (float)x[i];
    newton_schulz_cpu(y, y + size, rows, cols, m, rounds);
    for (size_t i = 0; i < size; i++) x[i] = y[i];
    free(y);
}
static void test_matrix(int rows, int cols) {
    const size_t size = area(rows, cols), bytes = size * sizeof(double);
    double *x = (double *)malloc_or_die(5 * bytes), *polar = x + size, *exact = polar + size, *y = exact + size,
           *spoilt = y + size;
    known_matrix(x, polar, rows, cols, 1e-2, 5);
    const struct {
        const char *name;
        int steps;
        double to_polar;  // rounding apart
    } kinds[] = {{"polar-express", 0, 0.15}, {"simple", 0, 0.05}, {"polar-express", 9, 1e-5}, {"simple", 20, 1e-5}};
    for (int k = 0; k < 4; k++) {
        Muon m = muon_with(kinds[k].name, kinds[k].steps);
        memcpy(exact, x, bytes);
        memcpy(y, x, bytes);
        memcpy(spoilt, x, bytes);
        newton_schulz_double(exact, rows, cols, &m);
        in_floats(y, rows, cols, &m, 0);
        const double apart = difference(y, exact, size), error = difference(exact, polar, size);
        m.polynomials[m.steps - 1].b *= 1.0001f;
        in_floats(spoilt, rows, cols, &m, 0);
        const double seen = difference(spoilt, exact, size);
        check(
            apart < 1e-5 && seen > 3e-5 && error < kinds[k].to_polar,
            "%d x %d, %d steps of %s: %.1e from double precision (bound 1e-5; with a coefficient 1e-4 off %.1e), %.1e "
            "from the polar factor",
            rows, cols, m.steps, kinds[k].name, apart, seen, error);
    }
    Muon m = muon_with("polar-express", 0);
    memcpy(exact, x, bytes);
    memcpy(y, x, bytes);
    newton_schulz_double(exact, rows, cols, &m);
    in_floats(y, rows, cols, &m, 1);
    const double apart = difference(y, exact, size);
    check(apart > 1e-4 && apart < 5e-2, "%d x %d, rounded to bf16 as on a GPU: %.1e apart", rows, cols, apart);
    for (size_t i = 0; i < size; i++) y[i] = 0;
    in_floats(y, rows, cols, &m, 0);
    int zeros = 1;
    for (size_t i = 0; i < size; i++) zeros &= y[i] == 0;
    check(zeros, "%d x %d of zeros stays so", rows, cols);
    free(x);
}

// Rows, or the columns of a wide matrix, get one norm; the matrix keeps its own, and each row its direction.
static void test_even_lines(int rows, int cols, const char *polynomials) {
    const int lines = rows >= cols ? rows : cols, length = rows >= cols ? cols : rows;
    const int step = rows >= cols ? 1 : cols, next = rows >= cols ? cols : 1;
    const size_t size = area(rows, cols);
    double *x = (double *)malloc_or_die(2 * size * sizeof *x), *even = x + size, whole[2] = {0}, off = 0, turned = 0;
    Muon m = muon_with(polynomials, 0);
    for (size_t i = 0; i < size; i++) x[i] = even[i] = rand_normal(3, 0, i) * (1 + 3 * (double)(i % 7));
    in_floats(x, rows, cols, &m, 0);
    m.is_even = 1;
    in_floats(even, rows, cols, &m, 0);
    for (size_t i = 0; i < size; i++) {
        whole[0] += x[i] * x[i];
        whole[1] += even[i] * even[i];
    }
    double uneven = 0;
    for (int k = 0; k < lines; k++) {
        double of_x = 0, of_even = 0, dot = 0;
        for (int i = 0; i < length; i++) {
            const size_t at = area(k, next) + area(i, step);
            of_x += x[at] * x[at];
            of_even += even[at] * even[at];
            dot += x[at] * even[at];
        }
        off = fmax(off, fabs(of_even * lines / whole[0] - 1));
        uneven = fmax(uneven, fabs(of_x * lines / whole[0] - 1));
        turned = fmax(turned, 1 - dot / sqrt(of_x * of_even));
    }
    check(off < 1e-5 && uneven > 1e-2 && turned < 1e-6 && fabs(whole[1] / whole[0] - 1) < 1e-5,
          "%d x %d, even: squared norms of lines off by %.1e (%.1e without), directions by %.1e", rows, cols, off,
          uneven, turned);
    for (size_t i = 0; i < size; i++) even[i] = i == 0;  // all lines but one are zeros
    in_floats(even, rows, cols, &m, 0);
    double most = 0;
    for (size_t i = 1; i < size; i++) most = fmax(most, fabs(even[i]));
    check(most == 0 && fabs(even[0] - 1) < 2e-1, "%d x %d, even: lines of zeros stay so", rows, cols);
    free(x);
}
// Two rows of mean squares 1 and s: the second one is divided by the root of s, or of MUON_LEAST_SQUARE if s is less.
static void test_least_line(void) {
    enum { COLS = 2 };
    const float squares[] = {1e-2f, 4 * MUON_LEAST_SQUARE, MUON_LEAST_SQUARE / 4};
    for (int i = 0; i < 3; i++) {
        const float s = sqrtf(squares[i]), raised = i < 2 ? 1 : 0.5f;
        float x[2 * COLS] = {1, -1, s, s};
        muon_even_cpu(x, 2, COLS);
        check(fabsf(x[2] / x[0] - raised) < 1e-4f && fabsf(x[0] + x[1]) < 1e-6f &&
                  fabsf(x[0] * x[0] + x[2] * x[2] - 1 - squares[i]) < 1e-5f,
              "a row of mean square %.1e beside 1 becomes %.2f of it", squares[i], x[2] / x[0]);
    }
}

// ---- momentum

static void test_momentum(void) {
    enum { N = 1001 };
    float m[N], u[N], grad[N], wide[N];
    uint16_t narrow[N], again[N];
    int good = 1, neighbours = 1, up = 0;
    for (int i = 0; i < N; i++) {
        narrow[i] = again[i] = bf16_nearest(rand_normal(1, 0, (uint64_t)i));
        m[i] = wide[i] = bf16_widen(narrow[i]);
        grad[i] = rand_normal(1, 1, (uint64_t)i);
    }
    muon_momentum_cpu(u, wide, grad, N, 0.9f, 0.5f);
    for (int i = 0; i < N; i++) {
        const double g = 0.5 * grad[i], expected = 0.9 * m[i] + 0.1 * g;
        good &= fabs(wide[i] - expected) < 1e-6 && fabs(u[i] - (0.9 * expected + 0.1 * g)) < 1e-6;
    }
    check(good, "momentum and Nesterov's form of it");
    float v[N];
    muon_momentum_bf16_cpu(v, narrow, grad, N, 0.9f, 0.5f, 7, 3, 99);
    for (size_t begin = 0; begin < N; begin += 100)  // in pieces
        muon_momentum_bf16_cpu(m, again + begin, grad + begin, begin + 100 < N ? 100 : N - begin, 0.9f, 0.5f, 7, 3,
                               99 + begin);
    for (int i = 0; i < N; i++) {
        const float low = bf16_widen((uint16_t)(float_bits(wide[i]) >> 16)), stored = bf16_widen(narrow[i]);
        neighbours &= u[i] == v[i] && (stored == low || narrow[i] == (float_bits(wide[i]) >> 16) + 1);
        up += stored != low;
    }
    check(neighbours && abs(up - N / 2) < 5 * 16 && !memcmp(narrow, again, sizeof narrow),
          "in bf16: rounded to a neighbour, up %d times of %d, by bits of the element; the update uses it unrounded",
          up, (int)N);
}

// ---- columns

static ParamTable table_of(const char *model, const Options *o, int tp, int rank) {
    Config c;
    config_parse(model, &c);
    ParamTable t = params_of_rank(&c, tp, rank);
    params_set_optimiser(&t, o);
    return t;
}
static void test_columns(void) {
    Options o = options_default();
    o.learning_rate = 1e-3;
    o.weight_decay = 0.1;
    ParamTable t = table_of("llama3:8B,layers=2,channels=64,heads=4,kv_heads=2,ffn=88,vocab=97", &o, 1, 0);
    int good = 1;
    for (int i = 0; i < t.count; i++)
        good &= t.params[i].optimiser == OPTIMISER_ADAMW && t.params[i].rate == 1 &&
                t.params[i].decay == !t.params[i].is_vector;
    check(good && t.muon == 0 && base_lr(&o) == 1e-3 && base_decay(&o) == 0.1,
          "without options: AdamW, one rate for all and decay of matrices");
    params_free(&t);
    o.optimizer = "muon";
    o.lr_embedding = 0.7;
    o.lr_head = 0.004;
    o.decay_matrix = 0.05;
    o.decay_vector = 0.01;
    for (int zero = 0; zero < 2; zero++) {  // rates and decays of their own where the common ones are 0
        if (zero) o.learning_rate = o.weight_decay = 0;
        const double lr = base_lr(&o), decay = base_decay(&o), common = zero ? 0 : 0.1;
        t = table_of("llama3:8B,layers=2,channels=64,heads=4,kv_heads=2,ffn=88,vocab=97", &o, 1, 0);
        size_t muon = 0;
        good = 1;
        for (int i = 0; i < t.count; i++) {
            const Param *p = &t.params[i];
            const int matrix = !p->is_vector && unit_is_block(&t, p->unit);
            const double rates[] = {p->is_vector            ? o.learning_rate
                                    : matrix                ? 0.02
                                    : p->role == ROLE_HEADW ? 0.004
                                                            : 0.7,
                                    p->is_vector ? 0.01
                                    : matrix     ? 0.05
                                                 : common};
            good &= fabs(p->rate * lr - rates[0]) < 1e-7 && fabs(p->decay * decay - rates[1]) < 1e-7 &&
                    (p->optimiser == OPTIMISER_MUON) == matrix && slot_holds(SLOT_V, p) == !matrix &&
                    slot_holds(SLOT_M, p);
            muon += matrix && p->unit == 2 ? p->size : 0;
        }
        check(good && t.muon == muon, "Muon for matrices of blocks, rates and decays of each group; common ones %s",
              zero ? "0" : "set");
        params_free(&t);
    }
}

// ---- what is kept of the second moment

static void test_second_moment(const char *model, int world) {
    Options o = options_default();
    o.optimizer = "muon";
    ParamTable t = table_of(model, &o, 1, 0);
    size_t held = 0, vectors = 0;
    int good = 1;
    for (int i = 0; i < t.count; i++) vectors += slot_holds(SLOT_V, &t.params[i]) ? t.params[i].size : 0;
    for (int keep = KEEP_WHOLE; keep <= KEEP_SHARDS; keep++)
        for (int r = 0; r < world; r++) {
            Comm dp = COMM_ALONE;
            dp.rank = r;
            dp.world = world;
            size_t at = 0;
            for (int u = 0; u < t.num_units; u++) {
                const Span s = slot_span(&dp, &t, (Keep)keep, SLOT_V, u), m = slot_span(&dp, &t, (Keep)keep, SLOT_M, u);
                const size_t place = slot_index(&dp, &t, (Keep)keep, SLOT_V, u, s.begin);
                good &= s.count == 0 || (place == at && s.begin % 8 == 0 && s.begin + s.count <= m.begin + m.count);
                good &= s.count % 8 == 0;
                at += s.count;
                for (int i = 0; i < t.count && keep == KEEP_SHARDS; i++)
                    if (t.params[i].unit == u) {
                        const Span here = span_overlap(s, t.params[i].offset, t.params[i].size);
                        held += here.count;
                        good &= here.count == 0 || slot_holds(SLOT_V, &t.params[i]);
                    }
            }
        }
    check(good && held == vectors, "%s on %d ranks: v of what AdamW updates, once, one place after the other", model,
          world);
    params_free(&t);
}

// ---- matrices

// The parts of all ranks cover each matrix of a block, and rows and columns are those of the whole tensor.
static void test_parts(const char *model, int tp, int expected) {
    Options o = options_default();
    o.optimizer = "muon";
    ParamTable whole = table_of(model, &o, 1, 0), *tables = (ParamTable *)malloc_or_die(tp * sizeof *tables);
    MuonMatrix one[MUON_MOST_MATRICES], matrices[MUON_MOST_MATRICES];
    for (int r = 0; r < tp; r++) tables[r] = table_of(model, &o, tp, r);
    const int count = muon_matrices(&tables[tp - 1], tp, 2, 2, matrices);
    int good = muon_matrices(&whole, 1, 2, 2, one) == count && count == expected;
    for (int i = 0; i < count && good; i++) {
        const MuonMatrix *m = &matrices[i];
        const MuonPart all = muon_part(&whole, 0, &one[i]);
        good &= m->rows == one[i].rows && m->cols == one[i].cols && all.rows == m->rows && all.width == m->cols;
        int *place = (int *)calloc_or_die(area(m->rows, m->cols) * sizeof(int));  // of the whole tensor, + 1
        for (int r = 0; r < tp; r++) {
            const Param *p = &tables[r].params[m->param];
            const MuonPart q = muon_part(tables, r, m);
            for (int k = 0; k < q.rows; k++)
                for (int j = 0; j < q.width; j++) {
                    const size_t element = q.at + area(k, q.width) + j - (p->offset - tables[r].unit_begin[p->unit]);
                    const int at = (int)param_whole(p, param_part_at(p, element), element) + 1;
                    int *to = &place[area(q.row + k, m->cols) + q.col + j];
                    good &= *to == 0 || *to == at;
                    *to = at;
                }
        }
        for (size_t k = 0; k < area(m->rows, m->cols); k++) good &= place[k] == place[0] + (int)k && place[0] > 0;
        free(place);
    }
    check(good, "%s on %d tensor-parallel ranks: %d whole matrices in a block", model, tp, count);
    for (int r = 0; r < tp; r++) params_free(&tables[r]);
    params_free(&whole);
    free(tables);
}
static void test_deal(const char *model, int layers, int ranks) {
    Options o = options_default();
    o.optimizer = "muon";
    ParamTable t = table_of(model, &o, 1, 0);
    MuonMatrix *m = (MuonMatrix *)malloc_or_die(layers * MUON_MOST_MATRICES * sizeof *m);
    const int count = muon_matrices(&t, 1, 1, layers, m);
    double *work = (double *)calloc_or_die(ranks * sizeof *work), sum = 0, most = 0, largest = 0;
    muon_deal(m, count, ranks);
    for (int i = 0; i < count; i++) {
        work[m[i].owner] += muon_cost(&m[i]);
        sum += muon_cost(&m[i]);
        largest = fmax(largest, muon_cost(&m[i]));
    }
    for (int r = 0; r < ranks; r++) most = fmax(most, work[r]);
    const double ideal = fmax(sum / ranks, largest);
    check(most <= 1.34 * ideal, "%s: %d matrices over %d ranks, the busiest has %.2f of an even share", model, count,
          ranks, most / ideal);
    free(m);
    free(work);
    params_free(&t);
}

int main(void) {
    const int sizes[][2] = {{48, 48}, {40, 120}, {120, 40}, {97, 64}, {1, 30}, {30, 1}};
    for (int i = 0; i < 6; i++) test_matrix(sizes[i][0], sizes[i][1]);
    for (int i = 0; i < 6; i++) test_even_lines(sizes[i][0], sizes[i][1], i ? "simple" : "polar-express");
    test_least_line();
    test_momentum();
    test_columns();
    const char *gpt2 = "d2,channels=96,heads=12,vocab=300,seq=24";
    const char *llama = "llama3:8B,layers=2,channels=96,heads=12,kv_heads=3,vocab=500,ffn=192,seq=24";
    for (int world = 1; world <= 4; world++) {
        test_second_moment(gpt2, world);
        test_second_moment(llama, world);
        test_parts(gpt2, world, 6);
        if (world != 2 && world != 4) test_parts(llama, world, 7);
    }
    test_parts(llama, 12, 7);
    test_parts("qwen2.5:1.5B,layers=2,channels=96,heads=12,kv_heads=1,vocab=256,ffn=96,seq=24", 4, 7);
    for (int ranks = 1; ranks <= 64; ranks *= 2) test_deal("gpt2:124M", 12, ranks);
    test_deal("llama3:8B", 32, 8);
    return checks_report("test_muon");
}
