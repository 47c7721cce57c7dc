/*
 * Opens on their way through the relay: what is open (handles.h), and whether it is passed through (backing.h), which
 * backing.c decides in two steps, before the engine is asked and when it has answered.
 *
 * Any thread; of one open, one after the other. Not with relay->lock held: tierfs_relay_open_undo takes it (it is a
 * request of its own), tierfs_relay_open_answered may make the front read the channel. tierfs_relay_open_mark alone,
 * which changes a request that is kept, wants it held.
 */
#pragma once

#include "relay_state.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/*
 * An OPEN, before the engine is asked. 1: the inode is passed through, and so will this open be; 0: it is not; -errno:
 * it cannot be opened, and nothing more is to be told about it.
 */
int tierfs_relay_open_begins(struct tierfs_relay *relay, const struct fuse_in_header *header);

/* Says so in its flags, for the engine. */
void tierfs_relay_open_mark(struct tierfs_request *request, bool is_passed);

/* It began, and the engine will never be asked. */
void tierfs_relay_open_failed(struct tierfs_relay *relay, const struct fuse_in_header *header);

/*
 * The answer to OPEN, OPENDIR, CREATE or TMPFILE, of bytes: remembers the handle, and lets it pass through if that can
 * be, for which the answer is changed. Returns whether something is open; *handle is filled in then.
 */
bool tierfs_relay_open_answered(struct tierfs_relay *relay, const struct tierfs_request *request,
                                struct fuse_out_header *header, size_t bytes, struct tierfs_handle *handle);

/* Nobody took that answer: the request was given up. What was opened has to be closed again. unique: of the request. */
void tierfs_relay_open_undo(struct tierfs_relay *relay, const struct tierfs_handle *handle, uint64_t unique);

/* A RELEASE or RELEASEDIR, before the engine is told. */
void tierfs_relay_open_released(struct tierfs_relay *relay, const struct fuse_in_header *header);
