// safetensors.h: any bytes as a file of tensors or, if they begin with '{', as the index of a folder of one file.
#include "fuzz.h"

#include "../../llmc/files/safetensors.h"

static const char *folder;
static void make_folder(const char *index) {
    char path[128];
    const uint64_t shape[2] = {2, 3};
    const float values[6] = {1, 2, 3, 4, 5, 6};
    StWriter w;
    folder = fuzz_folder();
    snprintf(path, sizeof path, "%s/a.safetensors", folder);
    st_create(&w, path);
    st_declare(&w, "x", ST_F32, 2, shape);
    st_declare(&w, "y", ST_BF16, 1, shape);
    st_begin(&w, 1);
    st_write_floats(&w, 0, 0, 6, values);
    st_write_floats(&w, 1, 0, 2, values);
    st_finish(&w);
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", folder);
    assert(symlink(index, path) == 0);
}

static void read_tensor(const StReader *r, const StTensor *t) {
    float values[8];
    const uint64_t count = t->count < 8 ? t->count : 8;
    assert(st_find(r, t->name) == t && t->dims >= 0 && t->dims <= ST_MAX_DIMS);
    assert(st_same(r, t, t));
    if (!st_is_float(t)) return;
    st_read_floats(r, t, 0, count, values);
    st_read_floats(r, t, t->count - count, count, values);
}
static void fuzz_one(const uint8_t *data, size_t size) {
    const char *path = fuzz_file(data, size);
    StReader r;
    if (!folder) {
        fuzz.running = 0;
        make_folder(path);
        fuzz.running = 1;
    }
    st_open(&r, size > 0 && *data == '{' ? folder : path);
    for (int i = 0; i < r.count; i++) read_tensor(&r, &r.tensors[i]);
    st_close(&r);
}

static void seed_file(const char *header, size_t bytes) {
    uint8_t file[1000] = {0};
    const uint64_t length = strlen(header);
    memcpy(file, &length, 8);
    memcpy(file + 8, header, length);
    fuzz_seed(file, 8 + length + bytes);
}
static void fuzz_seeds(void) {
    seed_file("{\"__metadata__\":{\"format\":\"pt\"},"
              "\"a.weight\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]},"
              "\"b\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[24,32]}}    ",
              32);
    seed_file("{\"c\":{\"dtype\":\"F16\",\"shape\":[],\"data_offsets\":[0,2]},\"d\":{\"dtype\":\"I64\",\"shape\":[0,7],"
              "\"data_offsets\":[2,2]},"
              "\"e\":{\"dtype\":\"BOOL\",\"shape\":[1,1,1,1,1,1,1,3],\"data_offsets\":[2,5]}}",
              5);
    fuzz_seed_text("{\"metadata\":{\"total_size\":28},"
                   "\"weight_map\":{\"x\":\"a.safetensors\",\"y\":\"a.safetensors\"}}");
}
