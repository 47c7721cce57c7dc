/*
 * Who answers a request: the front from its view of the namespace and from the tiers (answer.h, small.h, noopen.h), or,
 * where those cannot or may not, the engine (relay.h).
 *
 * In the threads of device.c and uring.c, each of which is one worker: it has a reader of its own, and takes no lock
 * here. It never waits for the engine. An answer that the kernel does not take is logged.
 */
#pragma once

#include "origin.h"

#include <stddef.h>

/* context: struct tierfs_front. As tierfs_device_links.handle: a request that was read from /dev/fuse. */
void tierfs_front_handle_request(void *context, unsigned worker, void *message, size_t bytes,
                                 const struct tierfs_origin *origin, void *buffer);

/* context: likewise. As tierfs_uring_links.answer; its threads are workers behind those of device.c. */
long tierfs_front_answer_from_ring(void *context, unsigned thread, void *message, size_t bytes,
                                   const struct tierfs_origin *origin, void *out, size_t capacity);
