// JSON from a text that the caller keeps: what tests parse. Returns what json_parse_owned does.
#pragma once

#include "../../llmc/files/json.h"

static inline int json_parse(Json *j, const char *text, size_t length) {
    return json_parse_owned(j, (char *)memcpy(malloc_or_die(length + 1), text, length), length);
}
