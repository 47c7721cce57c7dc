/*
 * Answers FUSE requests from the records alone, as the engine would answer them; what it cannot know is relayed.
 *
 * Nothing is believed beyond its time: a record that has expired, a name that only a listing of the bucket could
 * rule out, a file whose size may be newer in the engine's memory than in its record are the engine's business.
 * So is everything damaged: it knows what to log. One value serves all threads; it is never changed.
 */
#pragma once

#include "abi.h"
#include "view.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What the mount options say. negative_ttl_ns counts no further than ttl_ns. Modes: permission bits. */
struct tierfs_answer_settings {
    uint64_t ttl_ns, negative_ttl_ns;
    uint32_t uid, gid, file_mode, dir_mode; /* of what has neither mode nor owner of its own */
    bool read_only;
    bool close_waits;
};

struct tierfs_answers;

int tierfs_answers_open(const struct tierfs_answer_settings *settings, struct tierfs_answers **answers);
void tierfs_answers_close(struct tierfs_answers *answers);

#define TIERFS_RELAY (-100001L)    /* the engine has to answer */
#define TIERFS_NO_REPLY (-100002L) /* the request is done with, and has no answer */

/* In the handle of a directory that was opened here. The rest is its inode number: no state, nothing to hand over. */
#define TIERFS_FH_FRONT (UINT64_C(1) << 63)

/* A body that holds every reply made here but those of READDIR and READDIRPLUS, which fill what there is. */
#define TIERFS_REPLY_BYTES 4096

/*
 * body: what follows header in the message, body_bytes of it; both may be anything. out: where the body of the
 * reply goes, 8-byte aligned, of at least TIERFS_REPLY_BYTES. Returns the bytes of it (>= 0), -errno for a reply
 * without a body, TIERFS_RELAY or TIERFS_NO_REPLY. Begins and ends a snapshot of the reader.
 */
long tierfs_answer(const struct tierfs_answers *answers, struct tierfs_reader *reader,
                   const struct fuse_in_header *header, const void *body, size_t body_bytes, void *out,
                   size_t out_capacity);

/* The same at a given wall clock time. */
long tierfs_answer_at(const struct tierfs_answers *answers, struct tierfs_reader *reader, int64_t now_ns,
                      const struct fuse_in_header *header, const void *body, size_t body_bytes, void *out,
                      size_t out_capacity);
