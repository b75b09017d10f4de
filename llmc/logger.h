// Seeing a run: a console line a step for people, overwritten on a terminal, and main.jsonl in the output folder for
// dev/plot.py (evaluate.jsonl: of runs that only evaluate).
// JSONL events: start (options, config, git, device, ...), step, eval, eval_choice, sample, checkpoint, end; each a line, flushed.
#ifndef LLMC_LOGGER_H
#define LLMC_LOGGER_H

#include <math.h>
#include <sys/ioctl.h>

#include "hf_config.h"
#include "options.h"

typedef struct {
    FILE *jsonl;      // NULL: no output folder, or not rank 0
    double opened;    // now_seconds() at the start
} Logger;

// `append` goes on with an older log, otherwise an older log of the folder is replaced. folder "": no file.
static inline Logger logger_open(const char *folder, const char *name, int append) {
    Logger g;
    g.jsonl = NULL;
    g.opened = now_seconds();
    if (!*folder) return g;
    char path[4200];
    make_directory(folder);
    snprintf(path, sizeof path, "%s/%s", folder, name);
    g.jsonl = fopen_or_die(path, append ? "a" : "w", "name another --output folder, or make this one writable");
    return g;
}
static inline void logger_close(Logger *g) {
    if (g->jsonl) fclose(g->jsonl);
    g->jsonl = NULL;
}

// Begins an event's line; returns NULL when nothing is logged. End it with logger_end.
static inline FILE *logger_begin(Logger *g, const char *event, int64_t step) {
    if (!g->jsonl) return NULL;
    fprintf(g->jsonl, "{\"event\":\"%s\",\"step\":%lld,\"elapsed\":%.3f", event, (long long)step, now_seconds() - g->opened);
    return g->jsonl;
}
static inline void logger_end(Logger *g) {
    fputs("}\n", g->jsonl);
    if (fflush(g->jsonl) != 0) {  // a full disk must not end the training: say it, go on without the log
        fprintf(stderr, "warning: cannot write the log: %s; the run goes on without it\n", strerror(errno));
        logger_close(g);
    }
}
static inline void logger_number(FILE *f, const char *key, double value) {
    fprintf(f, ",\"%s\":", key);
    json_write_double(f, value);
}
static inline void logger_text(FILE *f, const char *key, const char *value) {
    fprintf(f, ",\"%s\":", key);
    json_write_string(f, value);
}
static inline void logger_options(FILE *f, const Options *o) {
    fputs(",\"options\":{", f);
    const char *comma = "";
    OPTION_EACH(info) {
        char value[512];
        option_value(o, info, value, sizeof value);
        fprintf(f, "%s\"%s\":", comma, info->name);
        if (info->kind == OPTION_STR) json_write_string(f, value);
        else fputs(value, f);
        comma = ",";
    }
    fputs("}", f);
}

// Columns of the terminal that we print to. 0: a file or a pipe; mpirun's terminal has none where it prints to one.
static inline int console_columns(void) {
    struct winsize w;
    return ioctl(STDOUT_FILENO, TIOCGWINSZ, &w) == 0 ? w.ws_col : 0;
}
// On a terminal: over what its line holds, cut to one line; "" clears it, for what is printed next.
static inline void console_overwrite(const char *text) {
    const int width = console_columns() - 1;
    if (width < 1) return;
    printf("\r%-*.*s%s", width, width, text, *text ? "" : "\r");
    if (*text) fflush(stdout);
}

// 75 -> "1m15s", 4000 -> "1h06m"
static inline const char *duration_text(double seconds, char *out, size_t size) {
    long s = seconds > 0 ? (long)(seconds + 0.5) : 0;
    if (s < 60) snprintf(out, size, "%lds", s);
    else if (s < 3600) snprintf(out, size, "%ldm%02lds", s / 60, s % 60);
    else if (s < 86400) snprintf(out, size, "%ldh%02ldm", s / 3600, s / 60 % 60);
    else snprintf(out, size, "%ldd%02ldh", s / 86400, s / 3600 % 24);
    return out;
}

#endif
