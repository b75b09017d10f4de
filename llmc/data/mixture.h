// Data sets by name, and which of them each row of a run comes from.
//
//   mixture_open(&m, "a/*.bin:0.7,b/*.bin:0.3");     sets with their shares; or "a/*.bin": a set alone
//   mixture_seek(&m, row);
//   set = mixture_next(&m, &of_set);                 row `row` of the run is row `of_set` of this set
//
// A name that matches files is that one set, whatever characters it has, but for FILE.mix: it has a set with its share
// in a line, and lines of comments begin with #. Blanks around a line are no part of it. A pattern may hold commas, but
// no part before one may hold a colon. Shares are divided by their sum.
//
// The order of sets is a function of the shares and the row's number alone: that of R. Tijdeman, "The chairman
// assignment problem" (1980). Any first n rows have share * n rows of a set, to less than one: to 1 - 1 / (2k - 2)
// with k sets. No order does better for all shares. It repeats after `total` rows, each set then has its share exactly.
// So any 1,000 rows have shares that are thousandths exactly, and those of two sets to one row.
#pragma once

#include <glob.h>

#include "../base/utils.h"

enum { MOST_SETS = 64 };
static const double SHARE_UNITS = 1e5;
#define MIXTURE_HINT \
    "name shards by 'a/*.bin', several sets by 'a/*.bin:0.7,b/*.bin:0.3' or lines of a FILE.mix in UTF-8"

typedef struct {
    int count, line;  // line: of a file, where something is wrong
    char *text;       // of the patterns, private
    char *patterns[MOST_SETS];
    int lines[MOST_SETS];              // of a file, where the patterns stand
    int64_t shares[MOST_SETS], total;  // in units of 1 / SHARE_UNITS, and their sum
    // the place
    int64_t row, taken[MOST_SETS];  // rows before, and of them those of each set
    int64_t lag[MOST_SETS];         // share * row - taken, times total
} Mixture;

// glob(), sorted. The name of an existing file means that file, whatever characters it has, and so do the names of
// folders in front of a pattern.
static int find_files(const char *pattern, glob_t *found) {
    char *escaped = new_array(char, 2 * strlen(pattern) + 1), *to = escaped, *slash = strcpy(escaped, pattern);
    while (slash && !file_exists(escaped))
        if ((slash = strrchr(escaped, '/'))) *slash = 0;
    const char *literal = pattern + (slash ? strlen(escaped) : 0);
    for (const char *from = pattern; *from; *to++ = *from++)
        if (from < literal && strchr("\\*?[{~", *from)) *to++ = '\\';
    *to = 0;
    int status = glob(escaped, GLOB_TILDE | GLOB_BRACE, NULL, found);
    free(escaped);
    return status;
}
static int matches_files(const char *pattern) {
    glob_t found;
    if (find_files(pattern, &found)) return 0;
    globfree(&found);
    return 1;
}

// ---- names

// Returns whether a part of a text is a set with its share.
static int mixture_add(Mixture *m, char *part) {
    char *colon = strrchr(part, ':'), *end = part;
    const double units = colon ? strtod(colon + 1, &end) * SHARE_UNITS : 0, whole = rint(units);
    if (end[strspn(end, " \t\r")] || !(whole >= 1 && whole <= 100 * SHARE_UNITS && fabs(units - whole) < 1e-3))
        return 0;
    require(m->count < MOST_SETS, "a mixture of more than %d sets\nput sets into one by a pattern that has both",
            MOST_SETS);
    *colon = 0;
    m->patterns[m->count] = part;
    m->lines[m->count] = m->line;
    m->shares[m->count++] = (int64_t)whole;
    m->total += (int64_t)whole;
    return 1;
}
static char *mixture_lines(const char *path, ssize_t *bytes) {
    char *lines = NULL;
    size_t size = 0;
    FILE *f = fopen(path, "r");
    require(f && (*bytes = getdelim(&lines, &size, 0, f)) > 0, "cannot read '%s', or it is empty\n" MIXTURE_HINT, path);
    fclose(f);
    return lines;
}
// Returns what is no set with its share; NULL: nothing. The first pattern is there in any case.
static const char *mixture_parse(Mixture *m, const char *text) {
    CLEAR(m);
    ssize_t n = strlen(text);
    const int is_file = n > 4 && !strcmp(text + n - 4, ".mix") && file_exists(text);
    m->patterns[0] = m->text = is_file ? mixture_lines(text, &n) : strcpy(new_array(char, n + 1), text);
    m->line = is_file;
    if (!is_file && (!strchr(text, ':') || matches_files(text))) {
        m->count = 1;
        m->total = m->shares[0] = SHARE_UNITS;
        return NULL;
    }
    const char *ends = is_file ? "\n" : ",";
    char *part = m->text + (strncmp(m->text, "\xef\xbb\xbf", 3) ? 0 : 3), *end = part;  // a byte order mark
    for (int last = 0; !last; m->line += is_file) {
        part += strspn(part, " \t\r");
        end += strcspn(end, ends);
        last = !*end;
        if (last && end != m->text + n) return part;  // a NUL
        *end++ = 0;
        if ((is_file && (!*part || *part == '#')) || mixture_add(m, part))
            part = end;
        else if (is_file || last || !*part || strchr(part, ':'))
            return part;
        else
            end[-1] = *ends;
    }
    m->line = 0;
    return m->count ? NULL : text;
}
// How messages begin. line: 0 where there is no file.
static Path mixture_place(const char *text, int line) {
    return line ? path_of("'%s' line %d: ", text, line) : (Path){};
}
static void mixture_open(Mixture *m, const char *text) {
    const char *bad = mixture_parse(m, text);
    require(!bad,
            "%s'%s' names no shards, and no set with its share: above 0, up to 100, at most 5 decimals\n" MIXTURE_HINT,
            mixture_place(text, m->line).text, bad);
}
static void mixture_close(Mixture *m) { free(m->text); }
// Of a text that may be wrong.
static Path first_pattern(const char *text) {
    Mixture m;
    mixture_parse(&m, text);
    const Path path = path_of("%s", m.patterns[0]);
    mixture_close(&m);
    return path;
}

// ---- order

// The set that row m->row comes from, whose row is *of_set. Of the sets that have had too few rows, the one that can
// wait the shortest time.
static int mixture_next(Mixture *m, int64_t *of_set) {
    const int64_t parts = m->count > 1 ? 2 * m->count - 2 : 1;
    int chosen = -1;
    int64_t least = 0;  // lag that the chosen set may still have; the time that it takes is this by its share
    for (int i = 0; i < m->count; i++) {
        m->lag[i] += m->shares[i];
        const int64_t left = (parts - 1) * m->total - parts * m->lag[i];
        const int waits = chosen >= 0 && left * m->shares[chosen] >= least * m->shares[i];
        if (waits || parts * m->lag[i] < m->total) continue;
        chosen = i;
        least = left;
    }
    assert(chosen >= 0);
    m->lag[chosen] -= m->total;
    m->row++;
    *of_set = m->taken[chosen]++;
    return chosen;
}
// The next row is `row`.
static void mixture_seek(Mixture *m, int64_t row) {
    int64_t unused;
    if (row < m->row || row / m->total > m->row / m->total) {
        m->row = row - row % m->total;
        for (int i = 0; i < m->count; i++) {
            m->taken[i] = m->row / m->total * m->shares[i];
            m->lag[i] = 0;
        }
    }
    while (m->row < row) mixture_next(m, &unused);
}
