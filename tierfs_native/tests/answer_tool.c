/*
 * Asks the C code what a front would answer; for tests that compare it with the engine.
 *
 *   answer-tool LMDB_DIR TTL_NS NEGATIVE_TTL_NS UID GID FILE_MODE DIR_MODE     (modes in octal)
 *   answer-tool --measure SECONDS LMDB_DIR ...the same
 *
 * stdin: frames of uint32 length, then int64 time (wall clock, ns; 0: now), then one FUSE message. stdout: frames of
 * uint32 length, then int64 result (see answer.h), then the body of the reply. Integers as the machine has them.
 *
 * --measure: how many LOOKUP, GETATTR and READDIRPLUS one thread answers in a second, of the names in the root.
 */
#include "answer.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define MESSAGE_MAX (1024 * 1024)
#define MEASURED_NAMES 10000

static union {
    uint8_t bytes[1024 * 1024];
    struct fuse_open_out open;
} out;

/* 1: all of it; 0: the end came first. */
static int read_all(void *buffer, size_t bytes)
{
    return fread(buffer, 1, bytes, stdin) == bytes;
}

static int serve(const struct tierfs_answers *answers, struct tierfs_reader *reader)
{
    uint32_t length;
    int64_t now_ns;

    while (read_all(&length, sizeof(length))) {
        struct fuse_in_header header;
        uint8_t *message;
        int64_t result;

        if (length < sizeof(now_ns) + sizeof(header) || length > MESSAGE_MAX)
            return 2;
        length -= (uint32_t)sizeof(now_ns);
        message = malloc(length); /* of exactly this size, for sanitizers */
        if (message == NULL || !read_all(&now_ns, sizeof(now_ns)) || !read_all(message, length))
            return 2;
        memcpy(&header, message, sizeof(header));
        if (now_ns != 0)
            result = tierfs_answer_at(answers, reader, now_ns, &header, message + sizeof(header),
                                      length - sizeof(header), &out, sizeof(out));
        else
            result = tierfs_answer(answers, reader, &header, message + sizeof(header),
                                   length - sizeof(header), &out, sizeof(out));
        free(message);
        length = (uint32_t)(sizeof(result) + (result > 0 ? (size_t)result : 0));
        if (fwrite(&length, 1, sizeof(length), stdout) != sizeof(length) ||
            fwrite(&result, 1, sizeof(result), stdout) != sizeof(result) ||
            (result > 0 && fwrite(&out, 1, (size_t)result, stdout) != (size_t)result) || fflush(stdout) != 0)
            return 2;
    }
    return 0;
}

/* -- measuring ------------------------------------------------------------------------------------------------- */

struct names {
    char (*names)[TIERFS_NAME_MAX + 1];
    uint64_t *inos;
    size_t count;
};

static int note_name(void *context, uint64_t seq, const char *name, size_t length, uint64_t ino,
                     uint32_t type)
{
    struct names *names = context;

    (void)seq, (void)type;
    memcpy(names->names[names->count], name, length);
    names->inos[names->count++] = ino;
    return names->count == MEASURED_NAMES;
}

static double now_s(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* One request. Returns the entries that the reply told. */
static size_t ask(const struct tierfs_answers *answers, struct tierfs_reader *reader,
                  const struct names *names, uint32_t opcode, size_t number, uint64_t *cookie,
                  size_t *relayed)
{
    struct fuse_in_header header = {.opcode = opcode, .nodeid = TIERFS_ROOT_INO};
    struct fuse_getattr_in getattr = {0};
    struct fuse_read_in read = {.fh = TIERFS_FH_FRONT | TIERFS_ROOT_INO, .offset = *cookie, .size = 32768};
    size_t entries = 0;
    long result;

    if (opcode == FUSE_LOOKUP) {
        const char *name = names->names[number];

        result = tierfs_answer(answers, reader, &header, name, strlen(name) + 1, &out, sizeof(out));
    } else if (opcode == FUSE_GETATTR) {
        header.nodeid = names->inos[number];
        result = tierfs_answer(answers, reader, &header, &getattr, sizeof(getattr), &out, sizeof(out));
    } else {
        result = tierfs_answer(answers, reader, &header, &read, sizeof(read), &out, sizeof(out));
        *cookie = 0;
        for (long at = 0; at < result; entries++) {
            struct fuse_direntplus entry;

            memcpy(&entry, out.bytes + at, sizeof(entry));
            *cookie = entry.dirent.off;
            at += (long)fuse_align(sizeof(entry) + entry.dirent.namelen);
        }
        return entries;
    }
    *relayed += result < 0;
    return 1;
}

static int measure(const struct tierfs_answers *answers, struct tierfs_reader *reader, double seconds)
{
    static const struct {
        const char *what;
        uint32_t opcode;
    } kinds[] = {
        {"LOOKUP", FUSE_LOOKUP}, {"GETATTR", FUSE_GETATTR}, {"READDIRPLUS entries", FUSE_READDIRPLUS}};
    struct names names = {calloc(MEASURED_NAMES, TIERFS_NAME_MAX + 1),
                          calloc(MEASURED_NAMES, sizeof(uint64_t)), 0};

    if (names.names == NULL || names.inos == NULL || tierfs_reader_begin(reader) != 0)
        return 2;
    tierfs_scan(reader, TIERFS_ROOT_INO, 0, note_name, &names);
    tierfs_reader_end(reader);
    for (size_t kind = 0; names.count > 0 && kind < sizeof(kinds) / sizeof(kinds[0]); kind++) {
        const double began_s = now_s();
        double took_s = 0;
        size_t done = 0, relayed = 0;
        uint64_t cookie = 0;
        uint64_t random = 1;

        while ((took_s = now_s() - began_s) < seconds)
            for (int i = 0; i < 100; i++) {
                random = random * UINT64_C(6364136223846793005) + 1442695040888963407;
                done += ask(answers, reader, &names, kinds[kind].opcode, (random >> 33) % names.count,
                            &cookie, &relayed);
            }
        printf("%s: %.0f/s (%zu relayed or refused)\n", kinds[kind].what, (double)done / took_s, relayed);
    }
    free(names.names);
    free(names.inos);
    return 0;
}

int main(int argc, char **argv)
{
    struct tierfs_answer_settings settings = {0};
    struct tierfs_answers *answers = NULL;
    struct tierfs_reader *reader = NULL;
    struct tierfs_view *view = NULL;
    double seconds = 0;
    int status;

    if (argc == 10 && strcmp(argv[1], "--measure") == 0) {
        seconds = atof(argv[2]);
        argv += 2;
        argc -= 2;
    }
    if (argc != 8) {
        fprintf(stderr, "answer-tool: wrong number of arguments, see its source\n");
        return 2;
    }
    settings.ttl_ns = strtoull(argv[2], NULL, 10);
    settings.negative_ttl_ns = strtoull(argv[3], NULL, 10);
    settings.uid = (uint32_t)strtoul(argv[4], NULL, 10);
    settings.gid = (uint32_t)strtoul(argv[5], NULL, 10);
    settings.file_mode = (uint32_t)strtoul(argv[6], NULL, 8);
    settings.dir_mode = (uint32_t)strtoul(argv[7], NULL, 8);
    status = tierfs_view_open(argv[1], &view);
    if (status == 0)
        status = tierfs_reader_open(view, &reader);
    if (status == 0)
        status = tierfs_answers_open(&settings, &answers);
    if (status != 0) {
        fprintf(stderr, "answer-tool: %s: %s\n", argv[1], strerror(-status));
        tierfs_reader_close(reader);
        tierfs_view_close(view);
        return 1;
    }
    status = seconds > 0 ? measure(answers, reader, seconds) : serve(answers, reader);
    tierfs_answers_close(answers);
    tierfs_reader_close(reader);
    tierfs_view_close(view);
    return status;
}
