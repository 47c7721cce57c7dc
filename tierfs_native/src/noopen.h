/*
 * No-open mode: a mount through which nothing is written need not be asked for each file that is opened.
 *
 * The kernel takes ENOSYS for an answer to OPEN: the file is open then, and for as long as the connection lives no
 * OPEN and no RELEASE is sent any more. That round trip is most of what a small file costs whose bytes are in the
 * page cache. What it takes away is passthrough, for files of any size, and with it the one place where a mode of
 * reading could be chosen; so the mode is for mounts that are read-only, and `auto` waits until it has seen many
 * small files opened and no large one in between.
 *
 * Requests about such files carry handle 0, which no engine gives out. They get the handle of a file that the front
 * has opened (TIERFS_FH_FRONT and the inode), and go the way of those: see small.h. What others put into the bucket
 * in the place of an object has another inode, so nothing that the kernel keeps is wrong for being kept.
 */
#pragma once

#include "abi.h"
#include "backing.h"
#include "view.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* In struct tierfs_view_settings. */
enum tierfs_open_mode {
    TIERFS_OPEN_ASK = 0,  /* every open is answered */
    TIERFS_OPEN_AUTO = 1, /* until TIERFS_NOOPEN_AFTER small files in a row have been opened */
    TIERFS_OPEN_NONE = 2, /* none is */
};

#define TIERFS_NOOPEN_AFTER 1024u

struct tierfs_noopen;

/* Only for mounts that are read-only. backing: is told when opens end. 0 or -errno. */
int tierfs_noopen_create(enum tierfs_open_mode mode, struct tierfs_backing *backing,
                         struct tierfs_noopen **noopen);
void tierfs_noopen_destroy(struct tierfs_noopen *noopen);

/* Called once, by the thread that answers the first open so, before it does. */
void tierfs_noopen_on_begin(struct tierfs_noopen *noopen, void (*on_begin)(void *context), void *context);

/* Not for this function, or no longer: body may have been changed. */
#define TIERFS_NOT_NOOPEN (-100004L)

/* As tierfs_answer; body is written to. Any thread. */
long tierfs_noopen_answer(struct tierfs_noopen *noopen, struct tierfs_reader *reader,
                          const struct fuse_in_header *header, void *body, size_t body_bytes);

/* Whether files are open that nobody has been told of. */
bool tierfs_noopen_has_begun(const struct tierfs_noopen *noopen);
