// Adapters in files, as peft has them: adapter_config.json says which matrices of which base have adapters, and
// adapter_model.safetensors holds them. transformers with peft opens what we write. What peft writes opens here, unless
// it has what this program has not (DoRA, trained biases, other modules); that is refused by name.
#pragma once

#include "json.h"
#include "../base/lora.h"
#include "safetensors.h"

static Path adapter_file(const char *folder) { return path_in(folder, "adapter_model.safetensors"); }
static int is_adapter_folder(const char *folder) {
    return is_directory(folder) && file_exists(path_in(folder, "adapter_config.json").text);
}

static void adapter_config_open(Json *j, const char *folder, Path *path) {
    *path = path_in(folder, "adapter_config.json");
    require(json_load(j, path->text), "cannot read '%s': %s\nname a folder of adapters as peft writes it", path->text,
            j->error);
}
// The folder that holds the model which the adapters are for.
static Path adapter_base(const char *folder) {
    Json j;
    Path path;
    adapter_config_open(&j, folder, &path);
    const char *base = json_text(&j, 0, "base_model_name_or_path");
    require(base && is_directory(base),
            "'%s': its base '%s' is no folder here\n"
            "write its folder to base_model_name_or_path; of a checkpoint, in a copy without train_state.json",
            path.text, base ? base : "");
    const Path found = path_of("%s", base);
    json_free(&j);
    return found;
}
// Keys that may say something: they are read below, or W + scale B A does not depend on them.
static const char adapter_keys[] =
    " auto_mapping base_model_name_or_path eva_config fan_in_fan_out inference_mode lora_alpha lora_dropout "
    "megatron_core peft_type peft_version qalora_group_size r revision target_modules task_type use_rslora ";
// The other keys, of which peft invents new ones, must be null, false, "none" or empty. init_lora_weights must not have
// changed the base, as pissa, olora, corda, loftq and lora_ga do.
static void adapter_require_plain(const Json *j, const char *path, int key) {
    const char *name = json_string(j, key), *text = json_string(j, key + 1);
    const int is_init = !strcmp(name, "init_lora_weights");
    int used = json_is(j, key + 1, JSON_NUMBER) || json_items(j, key + 1);
    if (json_bool(j, key + 1, &used)) used &= !is_init;
    if (text) used = *text && !has_word(is_init ? " gaussian eva orthogonal " : " none ", text);
    require(!used || has_word(adapter_keys, name),
            "'%s' uses %s, which these adapters have not\n"
            "merge it: llmc merge, or peft's merge_and_unload",
            path, name);
}
static Lora adapter_config_read(const char *folder, const Config *c) {
    Json j;
    Path path;
    adapter_config_open(&j, folder, &path);
    const char *type = json_text(&j, 0, "peft_type");
    require(type && !strcmp(type, "LORA"), "'%s': peft_type is '%.40s', not LORA\nname a folder of LoRA adapters",
            path.text, type ? type : "missing");
    JSON_EACH(&j, key, 0) adapter_require_plain(&j, path.text, key);
    Lora l = {0, 0, 8, 0, 0};
    int64_t rank = 8;
    double alpha = 8;
    const int r = json_get(&j, 0, "r"), a = json_get(&j, 0, "lora_alpha"), rs = json_get(&j, 0, "use_rslora");
    require((r == JSON_NONE || json_int(&j, r, &rank)) && rank >= 1 && rank <= LORA_MOST_RANK,
            "'%s': r is no rank from 1 to %d\ncorrect it", path.text, LORA_MOST_RANK);
    require(a == JSON_NONE || (json_double(&j, a, &alpha) && isfinite((float)alpha) && (float)alpha > 0),
            "'%s': lora_alpha is no number above 0 of fp32\ncorrect it", path.text);
    require(rs == JSON_NONE || json_bool(&j, rs, &l.rank_stabilised),
            "'%s': use_rslora is neither true nor false\ncorrect it", path.text);
    l.rank = (int)rank;
    l.alpha = (float)alpha;
    const int targets = json_get(&j, 0, "target_modules");
    const char *all = targets == JSON_NONE ? NULL : json_string(&j, targets);
    require((all && !strcmp(all, "all-linear")) || (json_is(&j, targets, JSON_ARRAY) && json_items(&j, targets)),
            "'%s': target_modules is no list of names\ncorrect it", path.text);
    if (all) l.targets = lora_targets(c, "all", path.text);
    JSON_EACH(&j, name, targets) {
        const char *text = json_string(&j, name);
        l.targets |= lora_targets(c, text ? text : "", path.text);
    }
    json_free(&j);
    return l;
}
static void adapter_config_write(const Config *c, const Lora *l, const char *base, FILE *f) {
    char *absolute = realpath(base, NULL);
    const char *separator = "";
    fputs("{\n  \"peft_type\": \"LORA\",\n  \"task_type\": \"CAUSAL_LM\",\n  \"base_model_name_or_path\": ", f);
    json_write_string(f, absolute ? absolute : base);
    free(absolute);
    fprintf(f, ",\n  \"r\": %d,\n  \"lora_alpha\": ", l->rank);
    json_write_float(f, l->alpha);
    fprintf(f, ",\n  \"use_rslora\": %s,\n  \"lora_dropout\": 0.0,\n  \"bias\": \"none\",\n",
            l->rank_stabilised ? "true" : "false");
    fprintf(f, "  \"fan_in_fan_out\": %s,\n  \"inference_mode\": true,\n  \"target_modules\": [",
            config_is(c, "gpt2") ? "true" : "false");
    for (int kind = 0; kind < NUM_BLOCK_KINDS; kind++) {
        const char *name = lora_name(c, kind);
        if (!(l->targets >> kind & 1) || !name) continue;
        fputs(separator, f);
        json_write_string(f, name);
        separator = ", ";
    }
    fputs("]\n}\n", f);
}

// ---- merging while weights are loaded

typedef struct {
    Lora lora;
    ParamTable table;  // of a single rank
    float *values;
} Adapters;
// w: `count` elements of a rank's tensor `index` from `at` on, all of one part.
static void adapters_merge(const Adapters *adapters, int index, const Param *p, size_t at, size_t count, float *w) {
    const ParamPart *part = param_part_at(p, at);
    const Param *a = lora_next(&adapters->table, p->unit, index, NULL);
    if (!a || p->is_vector || !part) return;
    const Param *b = lora_next(&adapters->table, p->unit, index, a);
    const size_t width = param_width(p, part);
    for (size_t k = 0, n; k < count; k += n) {
        const size_t in_part = at + k - part->begin, col = in_part % width, row = part->row + in_part / width;
        n = smaller(width - col, count - k);
        lora_merge_row(w + k, n, adapters->values + a->offset + part->col + col, a->cols,
                       adapters->values + b->offset + row * b->cols, adapters->lora.rank, lora_scale(&adapters->lora));
    }
}
