// --ask QUESTION: what a trainer says of itself and of folders. There is no second table, and no second reader.
//   options ARGUMENTS   all that the table has of each option, and its value, as these leave it: JSON, a line each
//   config MODEL DTYPE  config.json of a preset, or of a folder as it is understood here
//   newest FOLDER       the folder that --model opens for it
//   shapes FOLDER       name and shape of each tensor that it must hold
//   check FOLDER        that it holds these and no others; of our checkpoints every byte is read
//   adapter FOLDER      that its config is JSON; of our checkpoints every byte is read
//   tensors PATH        of safetensors files the mark of the base that adapters are for, then where each tensor lies:
//                       JSON, a line each
#pragma once

#include "calls.h"

static void ask_options(int argc, char **argv) {
    const Options o = options_parse(argc, argv);
    const char *section = "";
    for (const OptionInfo *p = option_table; p < option_table + NUM_OPTIONS; p++) {
        char number[OPTION_NUMBER];
        const char effect[] = {p->effect, 0};
        if (p->kind == OPTION_SECTION) {
            section = p->help;
            continue;
        }
        const char *text = option_text(&o, p, number);
        fputs("{\"value\": ", stdout);
        if (p->kind == OPTION_STR)
            json_write_string(stdout, text);
        else if (p->kind == OPTION_FLT)
            json_write_double(stdout, strtod(text, NULL));
        else
            fputs(text, stdout);
        json_write_fields(stdout, "name %s section %s letters %s effect %s low %g high %g choices %s help %s", p->name,
                          section, p->letters, effect, p->low, p->high, p->choices, p->help);
        puts("}");
    }
}
static void ask_tensors(const char *path) {
    StReader r;
    st_open(&r, path);
    const uint64_t base = base_of_adapters(&r);
    printf("{\"base\": \"%.*lx\"}\n", base ? 16 : 0, base);
    for (const StTensor *t = r.tensors; t < r.tensors + r.count; t++) {
        printf("{\"shape\": \"%s\"", shape_text(t->dims, t->shape).text);
        json_write_fields(stdout, "name %s dtype %s file %s begin %lld", t->name, st_types[t->type].name,
                          r.files[t->file].path.text, (long long)t->begin);
        puts("}");
    }
}
// These questions need the config of a folder, or of a preset.
static void ask_model(const char *question, const char *of, const char *dtype) {
    const int is_config = !strcmp(question, "config");
    const ParamTable none = {};
    Config c;
    if (is_config && !is_directory(of) && !strchr(of, '/'))
        config_parse(of, &c);
    else
        c = config_from_json(of);
    if (is_config) return config_write(&c, dtype, stdout, "\n  ");
    ParamTable table = params_of_rank(&c, 1, 0);
    if (!strcmp(question, "check")) {
        const ModelFacts facts = {&c, &table, &none, NULL, NULL};
        StReader r;
        st_open(&r, of);
        require_same_tensors(&facts, weight_slot, 1, &r, of);
        return;
    }
    PARAM_EACH(p, &table) {
        uint64_t shape[2];
        const int dims = param_shape(p, shape);
        printf("%s %s\n", p->name, shape_text(dims, shape).text);
    }
}
// argv: of the program. Returns the exit status.
static int ask(int argc, char **argv) {
    const char *question = argc > 2 ? argv[2] : "", *of = argc > 3 ? argv[3] : "";
    const int is_check = !strcmp(question, "check"), is_adapter = !strcmp(question, "adapter");
    const Comm alone = COMM_ALONE;
    Path path;
    Json j;
    if (is_check || is_adapter)
        checkpoint_require_intact(&alone, of, file_bytes(of, "optimizer.safetensors") < 0 ? 2 : 3);
    if (!strcmp(question, "options")) {
        argv[2] = argv[0];
        ask_options(argc - 2, argv + 2);
    } else if (!strcmp(question, "newest"))
        fputs(newest_of_run(&alone, of, &path), stdout);
    else if (!strcmp(question, "tensors"))
        ask_tensors(of);
    else if (is_adapter)
        adapter_config_open(&j, of, &path);
    else if (is_check || !strcmp(question, "config") || !strcmp(question, "shapes"))
        ask_model(question, of, argc > 4 ? argv[4] : "fp32");
    else
        die("--ask knows no '%s'\nask options, config, newest, shapes, tensors, check or adapter", question);
    return fflush(stdout) || ferror(stdout) ? EXIT_FAILURE : EXIT_SUCCESS;
}
