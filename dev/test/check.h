// Checks of the host tests: one printed line each, and refusals seen from outside, as a user sees them.
#pragma once

#include "fopen_or_die.h"
#include "../../llmc/base/rand.h"

#include <sys/wait.h>

static int checks_passed, checks_failed;

__attribute__((unused, format(printf, 2, 3))) static int check(int condition, const char *format, ...) {
    va_list args;
    va_start(args, format);
    printf(condition ? "ok    " : "FAIL  ");
    vprintf(format, args);
    printf("\n");
    va_end(args);
    condition ? checks_passed++ : checks_failed++;
    return condition;
}

// Uniform in [0, 1) with 53 bits.
__attribute__((unused)) static double rand_uniform(uint64_t seed, uint64_t stream, uint64_t counter) {
    return (double)(rand_u64(seed, stream, counter) >> 11) * 0x1p-53;
}
// Texts behind each other. free() it.
__attribute__((unused)) static char *joined(const char *a, const char *b, const char *c) {
    char *text = new_array(char, strlen(a) + strlen(b) + strlen(c) + 1);
    return strcat(strcat(strcpy(text, a), b), c);
}

// die's status, without the leak report that a stopped process would give
static void check_end_child(void) { _exit(EXIT_FAILURE); }
// Runs f(argument) in a child; returns its wait status and what it wrote to stderr.
__attribute__((unused)) static int run_child(void (*f)(void *), void *argument, char *text, size_t size) {
    int pipe_ends[2];
    fflush(stdout);
    require(pipe(pipe_ends) == 0, "cannot make a pipe\nclose other programs");
    pid_t child = fork();
    require(child >= 0, "cannot fork\nclose other programs");
    if (child == 0) {
        dup2(pipe_ends[1], STDERR_FILENO);
        close(pipe_ends[0]);
        close(pipe_ends[1]);
        die_hook = check_end_child;
        f(argument);
        _exit(0);
    }
    close(pipe_ends[1]);
    size_t used = 0;
    for (ssize_t n; (n = read(pipe_ends[0], text + used, size - 1 - used)) > 0;) used += (size_t)n;
    text[used] = 0;
    close(pipe_ends[0]);
    int status;
    waitpid(child, &status, 0);
    return status;
}
// f(argument) must end the process with status 1 and an error that contains `expected` and a hint.
__attribute__((unused)) static int check_refused(const char *name, void (*f)(void *), void *argument,
                                                 const char *expected) {
    static char text[1 << 16];
    int status = run_child(f, argument, text, sizeof text);
    int good = WIFEXITED(status) && WEXITSTATUS(status) == EXIT_FAILURE && strstr(text, "error: ") &&
               strstr(text, "hint: ") && strstr(text, expected) && !strstr(text, "Sanitizer");
    check(good, "refused: %s", name);
    if (!good) printf("      expected '%s', status %x, stderr:%s\n", expected, (unsigned)status, text);
    return good;
}
__attribute__((unused)) static int checks_report(const char *name) {
    printf("%s: %d passed, %d failed\n", name, checks_passed, checks_failed);
    return checks_failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
