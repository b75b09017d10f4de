// Small models of every family with random weights as decode.cuh stores them, and what a step of generation must give,
// in plain loops. For the ladder and for the test on a CPU; floatX must be known.
#pragma once

#include <vector>

typedef struct {
    const char *name;
    int L, C, NH, NKV, HD, F, V;
    NormKind norm;
    int rope;
    MlpKind mlp;
    int qkv_bias, linear_bias;
    QkNormKind qk_norm;
    int modern;  // a norm behind the embedding, and a head with bias
} ModelSizes;

static uint64_t model_seed = 1, model_draws;
static inline std::vector<floatX> random_vector(size_t n, float std, float mean) {
    std::vector<floatX> x(n);
    const uint64_t stream = model_draws++;
    #pragma omp parallel for
    for (size_t i = 0; i < n; i++) x[i] = (floatX)(mean + std * rand_normal(model_seed, stream, i));
    return x;
}
struct HostMatrix {
    DecodeShape shape;
    std::vector<uint8_t> bytes, scales;
    std::vector<float> values;  // what bytes and scales stand for
    std::vector<floatX> bias, gain, norm_bias, head_gains;

    void put(int row, int k, const void *value, size_t size) {
        memcpy(&bytes[(size_t)row * decode_row_bytes(shape) + k * size], value, size);
    }
    float one(int row, int k, uint64_t r, float std) {
        switch (shape.dtype) {
        case DECODE_INT8: {
            const int8_t q = (int8_t)(r % 255 - 127);
            put(row, k, &q, 1);
            return q * ((float *)scales.data())[row];
        }
        case DECODE_E4M3: {
            uint8_t q = (uint8_t)r;
            if ((q & 0x7f) > 0x68) q ^= 0x40;
            put(row, k, &q, 1);
            return fp8_to_float(q) * ((float *)scales.data())[row];
        }
        case DECODE_INT4: {
            const size_t at = (size_t)row * decode_row_bytes(shape) + k / 2;
            const unsigned q = r % 16;
            uint16_t scale;
            memcpy(&scale, &scales[(size_t)row * decode_scale_bytes(shape.K) + k / DECODE_INT4_GROUP * 2], 2);
            bytes[at] = (uint8_t)(bytes[at] | q << k % 2 * 4);
            return ((float)q - 8) * bits_float((uint32_t)scale << 16);
        }
        default: {
            const floatX x = (floatX)(std * rand_normal(r, 0, 0));
            put(row, k, &x, sizeof x);
            return (float)x;
        }
        }
    }
    void fill(const DecodeShape &s) {
        const float std = 1 / sqrtf((float)s.K);
        shape = s;
        bytes.assign((size_t)s.columns * decode_row_bytes(s), 0);
        values.resize((size_t)s.columns * s.K);
        const uint64_t stream = model_draws++;
        if (s.dtype == DECODE_INT4) {
            scales.assign((size_t)s.columns * decode_scale_bytes(s.K), 0);
            for (size_t i = 0; i < scales.size(); i += 2) {
                const uint16_t scale = (uint16_t)(float_bits(std / 5 * (1 + i % 7)) >> 16);
                memcpy(&scales[i], &scale, 2);
            }
        } else {
            scales.resize((size_t)s.columns * 4);
            for (int i = 0; i < s.columns; i++)
                ((float *)scales.data())[i] = std / (s.dtype == DECODE_INT8 ? 70 : 10) * (float)(1 + i % 3);
        }
        #pragma omp parallel for
        for (int row = 0; row < s.columns; row++)
            for (int k = 0; k < s.K; k++)
                values[(size_t)row * s.K + k] =
                    one(row, k, rand_u64(model_seed, stream, (uint64_t)row * s.K + k) >> 8, std);
        for (size_t i = 0; i < bytes.size() && s.dtype != DECODE_NATIVE; i += 16)
            if (s.dtype == DECODE_INT4)
                codes_place<4>((uint32_t *)&bytes[i]);
            else
                codes_place<8>((uint32_t *)&bytes[i]);
    }
    // Some of its rows, and of these the elements from first_k on.
    HostMatrix part(const DecodeShape &to, const std::vector<int> &rows, int first_k) const {
        HostMatrix p;
        const bool grouped = shape.dtype == DECODE_INT4;
        const size_t scale = grouped ? (size_t)decode_scale_bytes(to.K) : 4;
        p.shape = to;
        p.bytes.assign((size_t)to.columns * decode_row_bytes(to), 0);
        p.scales.assign((size_t)to.columns * scale, 0);
        p.gain = gain;
        p.norm_bias = norm_bias;
        p.head_gains = head_gains;
        for (size_t i = 0; i < rows.size(); i++) {
            const size_t row = (size_t)rows[i];
            const uint8_t *weights = &bytes[row * decode_row_bytes(shape)] + bytes_of(first_k);
            memcpy(&p.bytes[i * decode_row_bytes(to)], weights, bytes_of(to.K));
            const uint8_t *scales_from = &scales[row * (grouped ? decode_scale_bytes(shape.K) : 4)];
            const int groups = to.K / DECODE_INT4_GROUP, first = first_k / DECODE_INT4_GROUP;
            memcpy(&p.scales[i * scale], scales_from + (grouped ? first * 2 : 0), grouped ? (size_t)groups * 2 : 4);
            if (!bias.empty()) p.bias.push_back(bias[row]);
        }
        return p;
    }
    size_t bytes_of(int K) const {
        return (size_t)K / 2 * (shape.dtype == DECODE_NATIVE ? 2 * sizeof(floatX) : shape.dtype == DECODE_INT4 ? 1 : 2);
    }
};
struct HostModel {
    ModelSizes z;
    int slots, room, each;
    std::vector<int> of_slot;  // (slots,each) pages, not in their order
    std::vector<HostMatrix> matrix;
    std::vector<floatX> wte, wpe, stream_gain, keys, values;
    std::vector<uint8_t> codes[2];  // e4m3: of keys, of values; those have what codes and scales stand for
    std::vector<float> scales;      // (rows,2)
    std::vector<float> cos_sin;

    // What the kernel is told of sizes.
    Decode sizes(const int *dtype) const {
        Decode d = {};
        d.layers = z.L;
        d.C = z.C;
        d.NH = z.NH;
        d.NKV = z.NKV;
        d.HD = z.HD;
        d.F = z.F;
        d.head_columns = z.V;
        d.slots = slots;
        d.room = room;
        d.pages = (int)of_slot.size();
        d.each = each;
        d.norm = z.norm;
        d.norm_eps = 1e-5f;
        d.mlp = z.mlp;
        d.qk_norm = z.qk_norm != QK_NORM_NONE;
        d.query_scale = z.qk_norm == QK_NORM_PLAIN ? 1.3f : 1;
        for (int k = 0; k < DECODE_KINDS; k++) d.dtype[k] = dtype[k];
        return d;
    }
    HostModel(const ModelSizes &sizes_, const int *dtype, int slots_, int room_)
        : z(sizes_), slots(slots_), room(room_), each(kv_pages(room_)) {
        for (int i = slots * each; i-- > 0;) of_slot.push_back(i);
        const Decode d = sizes(dtype);
        matrix.resize(4 * (size_t)z.L + 1);
        for (size_t m = 0; m < matrix.size(); m++) {
            const DecodeKind kind = m + 1 == matrix.size() ? DECODE_HEAD : (DecodeKind)(m % 4);
            matrix[m].fill(decode_shape(&d, kind));
            const int biased = kind == DECODE_QKV ? z.qkv_bias : kind == DECODE_HEAD ? z.modern : z.linear_bias;
            if (biased) matrix[m].bias = random_vector((size_t)matrix[m].shape.columns, 0.2f, 0);
            if (kind == DECODE_QKV && z.qk_norm == QK_NORM_GAINS)
                matrix[m].head_gains = random_vector(2 * (size_t)z.HD, 0.2f, 1);
            if (kind == DECODE_PROJ || kind == DECODE_FCPROJ) continue;
            matrix[m].gain = random_vector((size_t)z.C, 0.2f, 1);
            if (z.norm == NORM_LAYER) matrix[m].norm_bias = random_vector((size_t)z.C, 0.2f, 0);
        }
        wte = random_vector((size_t)z.V * z.C, 1, 0.3f);
        if (z.modern) stream_gain = random_vector((size_t)z.C, 0.2f, 1);
        if (!z.rope) wpe = random_vector((size_t)room * z.C, 0.5f, 0);
        const size_t cache = (size_t)z.L * of_slot.size() * z.NKV * KV_PAGE * z.HD;
        keys = random_vector(cache, 1, 0);
        values = random_vector(cache, 1, 0);
        for (int t = 0; t < room && z.rope; t++)
            for (int i = 0; i < z.HD / 2; i++) {
                const double angle = t * pow(10000.0, -2.0 * i / z.HD);
                cos_sin.push_back((float)cos(angle));
                cos_sin.push_back((float)sin(angle));
            }
    }

    // Of keys and values.
    size_t cache_row(int layer, int slot, int kv, int t) const {
        const size_t page = layer * of_slot.size() + of_slot[(size_t)(slot * each + t / KV_PAGE)];
        return (page * z.NKV + kv) * KV_PAGE + t % KV_PAGE;
    }
    void round_row(int value, size_t row) {
        floatX *x = &(value ? values : keys)[row * z.HD];
        float most = 0;
        for (int i = 0; i < z.HD; i++) most = fmaxf(most, fabsf((float)x[i]));
        const float up = fp8_scale(most);
        for (int i = 0; i < z.HD; i++) {
            const uint8_t code = fp8_from_float((float)x[i] * up);
            codes[value][row * z.HD + i] = code;
            x[i] = (floatX)(fp8_to_float(code) / up);
        }
        scales[2 * row + value] = 1 / up;
    }
    // From now on the cache is in e4m3.
    void round_cache(void) {
        scales.resize(2 * keys.size() / z.HD);
        for (int value = 0; value < 2; value++) {
            codes[value].resize(keys.size());
            for (size_t row = 0; row < keys.size() / z.HD; row++) round_row(value, row);
        }
    }

    // keys and values become what codes and scales stand for.
    void widen_cache(void) {
        for (size_t i = 0; i < keys.size(); i++)
            for (int value = 0; value < 2; value++)
                (value ? values : keys)[i] = (floatX)(fp8_to_float(codes[value][i]) * scales[i / z.HD * 2 + value]);
    }
    // Whether the last layer has the codes and scales of `fresh` (rows,2 NKV,HD), bit for bit.
    bool has_rounded(const floatX *fresh, const std::vector<DecodeInput> &in) const {
        HostModel expected = *this;
        const size_t heads = (size_t)z.NKV, HD = (size_t)z.HD;
        for (size_t i = 0; i < in.size() * 2 * heads; i++) {
            const size_t head = i % heads, value = i / heads % 2, r = i / heads / 2,
                         row = cache_row(z.L - 1, in[r].slot, (int)head, in[r].position);
            std::copy(fresh + i * HD, fresh + (i + 1) * HD, &(value ? expected.values : expected.keys)[row * HD]);
            expected.round_row((int)value, row);
        }
        return expected.codes[0] == codes[0] && expected.codes[1] == codes[1] && expected.scales == scales;
    }
    // What rank `rank` of `ranks` has of it: heads, columns of the MLP and rows of the vocabulary.
    HostModel part(int rank, int ranks) const {
        HostModel p = *this;
        const auto range = [&](std::vector<int> &rows, int first, int count) {
            for (int i = 0; i < count / ranks; i++) rows.push_back(first + rank * (count / ranks) + i);
        };
        p.z.NH /= ranks;
        p.z.NKV /= ranks;
        p.z.F /= ranks;
        p.z.V /= ranks;
        int dtype[DECODE_KINDS];
        for (size_t m = 0; m < matrix.size(); m++)
            dtype[m + 1 == matrix.size() ? DECODE_HEAD : m % 4] = matrix[m].shape.dtype;
        const Decode d = p.sizes(dtype);
        for (size_t m = 0; m < matrix.size(); m++) {
            const DecodeKind kind = m + 1 == matrix.size() ? DECODE_HEAD : (DecodeKind)(m % 4);
            const DecodeShape to = decode_shape(&d, kind);
            const bool by_k = kind == DECODE_PROJ || kind == DECODE_FCPROJ;
            std::vector<int> rows;
            if (kind == DECODE_QKV) {
                range(rows, 0, z.NH * z.HD);
                range(rows, z.NH * z.HD, z.NKV * z.HD);
                range(rows, (z.NH + z.NKV) * z.HD, z.NKV * z.HD);
            } else if (by_k)
                for (int i = 0; i < z.C; i++) rows.push_back(i);
            else if (kind == DECODE_HEAD)
                range(rows, 0, z.V);
            else
                for (int first = 0; first < matrix[m].shape.columns; first += z.F) range(rows, first, z.F);
            p.matrix[m] = matrix[m].part(to, rows, by_k ? rank * to.K : 0);
        }
        const size_t vocabulary = (size_t)p.z.V * z.C, head = (size_t)p.z.NKV * KV_PAGE * z.HD;
        p.wte.assign(wte.begin() + rank * vocabulary, wte.begin() + (rank + 1) * vocabulary);
        p.keys.clear();
        p.values.clear();
        for (size_t i = 0; i < z.L * of_slot.size(); i++) {
            const size_t at = (i * ranks + rank) * head;
            p.keys.insert(p.keys.end(), keys.begin() + at, keys.begin() + at + head);
            p.values.insert(p.values.end(), values.begin() + at, values.begin() + at + head);
        }
        if (!scales.empty()) p.round_cache();  // what was rounded stays
        return p;
    }

    // ---- the oracle

    static std::vector<float> rounded(std::vector<float> x) {
        for (float &v : x) v = (float)(floatX)v;
        return x;
    }
    std::vector<float> product(const HostMatrix &m, const std::vector<float> &x) const {
        std::vector<float> y((size_t)m.shape.columns);
        #pragma omp parallel for
        for (size_t i = 0; i < y.size(); i++) {
            double sum = m.bias.empty() ? 0 : (float)m.bias[i];
            for (int k = 0; k < m.shape.K; k++) sum += (double)m.values[i * m.shape.K + k] * x[(size_t)k];
            y[i] = (float)sum;
        }
        return y;
    }
    std::vector<float> norm(const std::vector<floatX> &gain, const std::vector<floatX> &bias,
                            std::vector<float> x) const {
        double mean = 0, squares = 0;
        if (z.norm == NORM_LAYER)
            for (float v : x) mean += v / (double)z.C;
        for (float v : x) squares += (v - mean) * (v - mean) / z.C;
        const double rstd = 1 / sqrt(squares + 1e-5);
        for (size_t i = 0; i < x.size(); i++)
            x[i] = (float)((x[i] - mean) * rstd * (float)gain[i] + (bias.empty() ? 0 : (float)bias[i]));
        return rounded(x);
    }
    std::vector<float> norm(const HostMatrix &m, const std::vector<float> &x) const {
        return norm(m.gain, m.norm_bias, x);
    }
    void attend(std::vector<float> &y, const std::vector<float> &qkv, int layer, int slot, int position) {
        for (int h = 0; h < z.NH; h++) {
            const auto at = [&](int t) { return cache_row(layer, slot, h / (z.NH / z.NKV), t) * z.HD; };
            std::vector<double> p((size_t)position + 1);
            double top = -1e30, sum = 0;
            for (int t = 0; t <= position; t++) {
                for (int i = 0; i < z.HD; i++)
                    p[(size_t)t] += qkv[(size_t)h * z.HD + i] * (double)(float)keys[at(t) + i];
                p[(size_t)t] /= sqrt((double)z.HD);
                top = fmax(top, p[(size_t)t]);
            }
            for (double &v : p) sum += v = exp(v - top);
            for (int i = 0; i < z.HD; i++) {
                double x = 0;
                for (int t = 0; t <= position; t++) x += p[(size_t)t] * (float)values[at(t) + i];
                y[(size_t)h * z.HD + i] = (float)(x / sum);
            }
        }
    }
    void normalise_heads(std::vector<float> &qkv, const HostMatrix &m) {
        if (z.qk_norm == QK_NORM_NONE) return;
        qkv = rounded(qkv);
        for (int h = 0; h < z.NH + z.NKV; h++) {
            float *x = &qkv[(size_t)h * z.HD];
            const size_t gains = h < z.NH ? 0 : (size_t)z.HD;
            double squares = 0;
            for (int i = 0; i < z.HD; i++) squares += x[i] * (double)x[i] / z.HD;
            const double scale = h < z.NH && z.qk_norm == QK_NORM_PLAIN ? 1.3f : 1;
            for (size_t i = 0; i < (size_t)z.HD; i++)
                x[i] = (float)(x[i] * scale / sqrt(squares + 1e-5) *
                               (m.head_gains.empty() ? 1 : (float)m.head_gains[gains + i]));
        }
    }
    void rotate_and_append(std::vector<float> &qkv, int layer, int slot, int position) {
        const int half = z.HD / 2;
        for (int h = 0; h < z.NH + z.NKV && z.rope; h++)
            for (int i = 0; i < half; i++) {
                float &a = qkv[(size_t)h * z.HD + i], &b = qkv[(size_t)h * z.HD + i + half];
                const float *f = &cos_sin[2 * ((size_t)position * half + i)], x = a * f[0] - b * f[1];
                b = b * f[0] + a * f[1];
                a = x;
            }
        qkv = rounded(qkv);
        for (int h = 0; h < 2 * z.NKV; h++) {
            std::vector<floatX> &to = h < z.NKV ? keys : values;
            const size_t row = cache_row(layer, slot, h % z.NKV, position);
            for (int i = 0; i < z.HD; i++) to[row * z.HD + i] = (floatX)qkv[(size_t)(z.NH + h) * z.HD + i];
            if (!scales.empty()) round_row(h / z.NKV, row);
        }
    }
    std::vector<float> activate(const std::vector<float> &f) const {
        std::vector<float> h((size_t)z.F);
        for (int i = 0; i < z.F; i++) {
            const double x = f[(size_t)i];
            h[(size_t)i] = z.mlp == MLP_SWIGLU ? (float)(x / (1 + exp(-x)) * f[(size_t)(z.F + i)])
                           : z.mlp == MLP_RELU2
                               ? (float)(x > 0 ? x * x : 0)
                               : (float)(x / (1 + exp(-2 * 0.7978845608028654 * (x + 0.044715 * x * x * x))));
        }
        return rounded(h);
    }
    // Appends to the cache; logits (V).
    std::vector<float> step(int slot, int position, int token) {
        std::vector<float> x((size_t)z.C), y((size_t)z.NH * z.HD);
        for (int i = 0; i < z.C; i++) {
            x[(size_t)i] = (float)wte[(size_t)token * z.C + i];
            if (!z.rope) x[(size_t)i] += (float)wpe[(size_t)position * z.C + i];
        }
        if (z.modern) x = norm(stream_gain, {}, x);
        const auto add = [&](const std::vector<float> &more) {
            for (size_t i = 0; i < x.size(); i++) x[i] += more[i];
        };
        for (int l = 0; l < z.L; l++) {
            const HostMatrix *m = &matrix[4 * (size_t)l];
            std::vector<float> qkv = product(m[0], norm(m[0], x));
            normalise_heads(qkv, m[0]);
            rotate_and_append(qkv, l, slot, position);
            attend(y, qkv, l, slot, position);
            add(product(m[1], rounded(y)));
            add(product(m[3], activate(product(m[2], norm(m[2], x)))));
        }
        return product(matrix.back(), norm(matrix.back(), x));
    }
};

// Rows of a step: most of a slot of their own at a position of their own; every third continues the row before.
static inline std::vector<DecodeInput> model_rows(int rows, int room, int V, const std::vector<int> &positions) {
    std::vector<DecodeInput> in((size_t)rows);
    for (int r = 0; r < rows; r++) {
        const int token = (int)(rand_u64(model_seed, 99, (uint64_t)r) % (uint64_t)V);
        const int position = positions[(size_t)r % positions.size()];
        in[(size_t)r] = {r, position < room - 2 ? position : room - 2, token};
        if (r % 3 == 2) in[(size_t)r] = {in[(size_t)r - 1].slot, in[(size_t)r - 1].position + 1, token};
    }
    return in;
}
