#define _GNU_SOURCE
#include "log.h"

#include <stdarg.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

void tierfs_log(const char *level, const char *format, ...)
{
    char line[1024];
    struct timespec now;
    struct tm parts;
    va_list arguments;
    int used;
    int more;

    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &parts);
    used = snprintf(line, sizeof line, "%04d-%02d-%02dT%02d:%02d:%02d.%03ldZ %-8s ", parts.tm_year + 1900,
                    parts.tm_mon + 1, parts.tm_mday, parts.tm_hour, parts.tm_min, parts.tm_sec,
                    now.tv_nsec / 1000000, level);
    if (used < 0 || (size_t)used >= sizeof line)
        return;
    va_start(arguments, format);
    more = vsnprintf(line + used, sizeof line - (size_t)used, format, arguments);
    va_end(arguments);
    if (more < 0)
        return;
    used += more;
    if ((size_t)used > sizeof line - 32)
        used = (int)sizeof line - 32;
    used += snprintf(line + used, sizeof line - (size_t)used, "  [tierfs.front]\n");
    /* One write, so that lines of several processes do not mix. Nothing can be done about a full disk. */
    if (write(STDERR_FILENO, line, (size_t)used) < 0)
        return;
}
