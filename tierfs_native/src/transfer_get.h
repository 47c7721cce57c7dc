/*
 * Ranged GETs over plain HTTP by threads of their own: each has a connection, sends one request after another, and
 * takes the body of the reply into a file of a tier, with the checksums of its blocks. No Python in any of it.
 *
 * Only what goes as it should is done here. Whatever else happens (a reply of another kind, a connection that breaks, a
 * file that cannot be written) ends the get with an error; nothing is known of the bytes in the file then.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct tierfs_getter;

/* Everything belongs to who submits it, and stays until the get is taken, or the getter closed. */
struct tierfs_get {
    struct tierfs_get *next;
    const char *request; /* head and all */
    size_t request_bytes;
    uint64_t offset, length; /* of the range in the object; a length of 0 is refused */
    const char *etag;        /* without quotes: what the reply has to carry */
    size_t etag_bytes;
    const char *path; /* of the file */
    bool create;      /* it is made if it is not there; its directory is not */
    uint64_t target_offset;
    uint64_t *sums; /* one for each block of TIERFS_BLOCK_BYTES that length has begun */
    char *body;     /* length bytes, or NULL */
    int result;     /* set at the end: 0 or an errno */
};

struct tierfs_getter_settings {
    const char *host;
    const char *port;
    unsigned threads; /* at most so many, at least 1 */
    int connect_timeout_ms;
    int timeout_ms; /* how long nothing may come */
};

int tierfs_getter_open(const struct tierfs_getter_settings *settings,
                       struct tierfs_getter **getter); /* 0 or -errno */

/* Can be read when there is something to take. */
int tierfs_getter_descriptor(const struct tierfs_getter *getter);

/* Returns 0, or -errno if no thread could be started: the get is not taken over then. */
int tierfs_getter_submit(struct tierfs_getter *getter, struct tierfs_get *get);

/* All that have ended since the last call, as a list; NULL: none. */
struct tierfs_get *tierfs_getter_take(struct tierfs_getter *getter);

/* Breaks off what is under way, waits for the threads, and returns what was not taken, ended or not, as a list. */
struct tierfs_get *tierfs_getter_close(struct tierfs_getter *getter);
