/*
 * What is answered without the engine, by its settings (TIERFS_VIEW): names from a view of the namespace, small files
 * from the tiers, with a thread that reads from devices, and opens of a read-only mount. What cannot be had is logged and
 * left to the engine.
 */
#pragma once

#include "front.h"

#include <stddef.h>

/* Once, before there is a mount; again, or with settings that are not understood: nothing happens. Main thread. */
void tierfs_front_begin_serving(struct tierfs_front *front, const struct tierfs_packet *packet);

/* context: struct tierfs_front. As in struct tierfs_relay_links. Any thread, no lock. */
long tierfs_front_read_placed(void *context, const void *body, size_t body_bytes, char *out,
                              size_t out_capacity);
