// What a run shows: on the console a line for each step, overwritten on a terminal; in the output folder main.jsonl
// for llmc plot (evaluate.jsonl of runs that only evaluate).
// Each JSON line is an event, written at once: start (options, config, git, device, ...), step, eval, eval_set,
// eval_choice, epoch, set, sample, checkpoint, checkpoint_failed, end. A log that the folder already has is continued.
// Lines that a full disk does not take are kept in memory and written when there is room again. A file that was removed
// is made again as soon as its folder is there.
#pragma once

#include "../files/hf_config.h"
#include "../base/options.h"

#include <fcntl.h>
#include <sys/ioctl.h>

typedef struct {
    Text lines;      // in memory, not yet in the file. lines.file NULL: no output folder, or not rank 0
    size_t written;  // bytes of `lines` that the file already has
    Path path;
    int file;
    int failed;     // the last write did, and a warning said so
    double opened;  // now_seconds() at the start
} Logger;

// folder "": no file.
static void logger_open(Logger *g, const char *folder, const char *name) {
    memset(g, 0, sizeof *g);
    g->opened = now_seconds();
    if (!*folder) return;
    make_directory(folder);
    g->path = path_in(folder, name);
    g->file = open_or_die(g->path.text, O_WRONLY | O_APPEND | O_CREAT,
                          "name another --output folder, or make this one writable");
    text_open(&g->lines);
}

// Begins an event's line; returns NULL when nothing is logged. End it with logger_end.
static FILE *logger_begin(Logger *g, const char *event, int64_t step) {
    FILE *f = g->lines.file;
    if (f) fprintf(f, "{\"event\":\"%s\",\"step\":%ld,\"elapsed\":%.3f", event, step, now_seconds() - g->opened);
    return f;
}
static void logger_write(Logger *g) {
    struct stat s;
    text_flush(&g->lines);
    if (fstat(g->file, &s) || !s.st_nlink) {  // it was removed
        close(g->file);
        g->file = open(g->path.text, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    }
    while (g->written < g->lines.length) {
        ssize_t n = g->file < 0 ? -1 : write(g->file, g->lines.bytes + g->written, g->lines.length - g->written);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) {  // a full disk must not end the training
            if (!g->failed)
                fprintf(stderr, "warning: cannot write the log: %s; it is kept in memory until that works again\n",
                        strerror(errno));
            g->failed = 1;
            return;
        }
        g->written += n;
    }
    rewind(g->lines.file);  // the next line begins where this one did
    g->written = 0;
    g->failed = 0;
}
static void logger_end(Logger *g) {
    fputs("}\n", g->lines.file);
    logger_write(g);
}
// Returns the bytes that could not be written to the end.
static size_t logger_close(Logger *g) {
    if (!g->lines.file) return 0;
    if (g->failed) logger_write(g);
    const size_t lost = g->failed ? g->lines.length - g->written : 0;
    free(text_close(&g->lines));
    close(g->file);
    memset(g, 0, sizeof *g);
    return lost;
}
// Whether an older log of the folder has a training step.
static int logger_has_steps(const char *folder) {
    char *line = NULL;
    size_t size = 0;
    int found = 0;
    FILE *f = fopen(path_in(folder, "main.jsonl").text, "r");
    while (f && !found && getline(&line, &size, f) > 0) found = strstr(line, "\"event\":\"step\"") != NULL;
    free(line);
    if (f) fclose(f);
    return found;
}
// Logs one event with such fields.
#define logger_event(logger, event, step, ...) \
    do { \
        FILE *event_line = logger_begin(logger, event, step); \
        if (!event_line) break; \
        json_write_fields(event_line, __VA_ARGS__); \
        logger_end(logger); \
    } while (0)
static void logger_options(FILE *f, const Options *o) {
    fputs(",\"options\":{", f);
    const char *comma = "";
    OPTION_EACH(info) {
        char number[OPTION_NUMBER];
        const char *value = option_text(o, info, number);
        fprintf(f, "%s\"%s\":", comma, info->name);
        if (info->kind == OPTION_STR)
            json_write_string(f, value);
        else
            fputs(value, f);
        comma = ",";
    }
    fputs("}", f);
}

// Columns of the terminal that stdout is. 0: a file or a pipe, or mpirun's terminal when it prints to one of these.
static int console_columns(void) {
    struct winsize w;
    return ioctl(STDOUT_FILENO, TIOCGWINSZ, &w) == 0 ? w.ws_col : 0;
}
// On a terminal: prints over the current line, cut to its width. "" clears the line.
static void console_overwrite(const char *text) {
    int width = console_columns() - 1;
    if (width < 1) return;
    printf("\r%-*.*s%s", width, width, text, *text ? "" : "\r");
    if (*text) fflush(stdout);
}

// 75 -> "1m15s", 4000 -> "1h06m"
static void duration_text(double seconds, char *out, size_t size) {
    long s = seconds > 0 ? (long)(seconds + 0.5) : 0;
    if (s < 60)
        snprintf(out, size, "%lds", s);
    else if (s < 3600)
        snprintf(out, size, "%ldm%02lds", s / 60, s % 60);
    else if (s < 86400)
        snprintf(out, size, "%ldh%02ldm", s / 3600, s / 60 % 60);
    else
        snprintf(out, size, "%ldd%02ldh", s / 86400, s / 3600 % 24);
}
