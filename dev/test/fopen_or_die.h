// Opens a file of a test, or ends the test.
#pragma once

#include "../../llmc/base/utils.h"

__attribute__((unused)) static FILE *fopen_or_die(const char *path, const char *mode, const char *hint) {
    FILE *f = fopen(path, mode);
    require(f, "cannot open '%s': %s\n%s", path, strerror(errno), hint);
    return f;
}
