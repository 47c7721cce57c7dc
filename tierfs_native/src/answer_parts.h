/* What the files of answer.h share. Nobody else includes this. */
#pragma once

#include "answer.h"

#include <errno.h>

#define TIERFS_SECOND_NS 1000000000

struct tierfs_answers {
    struct tierfs_answer_settings settings;
};

/* One request, and what answering it needs. The extensions of the message are not in body_bytes. */
struct tierfs_request {
    const struct tierfs_answer_settings *settings;
    struct tierfs_reader *reader;
    int64_t now_ns;
    const struct fuse_in_header *header;
    const uint8_t *body;
    size_t body_bytes;
    uint8_t *out;
    size_t out_capacity;
};

/* -- what is believed ---------------------------------------------------------------------------------------- */

/* Nanoseconds until then; 0: it is over. */
static inline uint64_t tierfs_time_left_ns(const struct tierfs_request *request, int64_t until_ns)
{
    return until_ns > request->now_ns ? (uint64_t)until_ns - (uint64_t)request->now_ns : 0;
}

/* Whether size and times of an open file may be newer in the engine's memory than in this record. */
static inline bool tierfs_is_in_flux(const struct tierfs_inode *inode)
{
    return S_ISREG(inode->mode) && (inode->flags & TIERFS_DATA_LOCAL);
}

/* The directory of a request that needs one: 0, or what the request fails with. */
int tierfs_find_directory(const struct tierfs_request *request, struct tierfs_inode *directory);

/* What a status means for the reply: about damage, and about LMDB's own failures, the engine decides. */
long tierfs_reply_of(int status);

/* -- answer_attr.c -------------------------------------------------------------------------------------------- */

void tierfs_put_entry(const struct tierfs_request *request, const struct tierfs_inode *inode,
                      struct fuse_entry_out *entry);
long tierfs_answer_getattr(const struct tierfs_request *request);
long tierfs_answer_getxattr(const struct tierfs_request *request);
long tierfs_answer_listxattr(const struct tierfs_request *request);

/* -- answer_dir.c --------------------------------------------------------------------------------------------- */

long tierfs_answer_opendir(const struct tierfs_request *request);
long tierfs_answer_readdir(const struct tierfs_request *request);
