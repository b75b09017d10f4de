// options.h, config.h: any bytes as a command line, one word a line. What is accepted prints and reads back alike.
#include "fuzz.h"

#include "../../llmc/run/loop.h"

static void fuzz_one(const uint8_t *data, size_t size) {
    static char text[1 << 16], values[NUM_OPTIONS][OPTION_NUMBER];
    char *argv[200] = {(char *)"train_gpt2"}, *again[2 * NUM_OPTIONS + 1] = {(char *)"train_gpt2"}, *rest = text;
    int argc = 1, count = 1;
    if (size >= sizeof text) return;
    memcpy(text, data, size);
    text[size] = 0;
    for (char *word; argc < 200 && (word = strsep(&rest, "\n"));) argv[argc++] = word;
    const Options o = options_parse(argc, argv);
    for (int i = 0; i < NUM_OPTIONS; i++) {
        static char given[NUM_OPTIONS][128];
        const OptionInfo *info = &option_table[i];
        if (info->kind == OPTION_SECTION) continue;
        const int debug = info->group == OPTIONS_DEBUG;
        const char *value = option_text(&o, info, values[i]);
        snprintf(given[i], sizeof given[i], debug ? "%s=%s" : "--%s", info->name, value);
        again[count++] = debug ? (char *)"--debug" : given[i];
        again[count++] = debug ? given[i] : (char *)value;
    }
    const Options same = options_parse(count, again);
    for (int i = 0; i < NUM_OPTIONS; i++) {
        char number[OPTION_NUMBER];
        assert(option_table[i].kind == OPTION_SECTION || !option_change(&o, &same, &option_table[i], number));
    }
    char *echo = NULL;
    size_t length;
    FILE *f = open_memstream(&echo, &length);
    options_echo(&o, f);
    fclose(f);
    free(echo);
    check_options(&o);
    Config c;
    if (!config_parse(o.model, &c)) config_finish(&c, NULL);
    ParamTable table = params_of_rank(&c, 1, 0);
    params_free(&table);
}
static void fuzz_seeds(void) {
    fuzz_seed_text("-e\nd6,channels=128,vocab=300,seq=64\n-b\n4\n--seq-len=64\n-d\n1024\n-l\n3e-4\n-k\ncosine\n-u\n10");
    fuzz_seed_text("--model\nllama3.2:1B,layers=2,channels=64,heads=4,kv_heads=2,ffn=96,tied=0\n"
                   "--resume\n-o\nlog\n-n\n5");
    fuzz_seed_text("-e\ngpt3:c384\n-i\nx*.bin\n-j\ny.bin\n-x\n10\n-z\n1\n-pi\nmpi\n-r\n2\n--temperature\n0.5\n-sl\n6");
}
