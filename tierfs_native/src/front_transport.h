/*
 * The mount, and the ways in which the kernel's requests come: /dev/fuse (device.h), and queues of io_uring (uring.h)
 * where they are wanted and offered. What comes is dispatched (front_dispatch.h). Takes no lock of the front.
 */
#pragma once

#include "front.h"

#include <stdbool.h>
#include <stddef.h>

/* What TIERFS_MOUNT asks for; once for a process. Main thread. 0, or -errno: there is no mount. */
int tierfs_front_mount(struct tierfs_front *front, const struct tierfs_packet *packet);

/*
 * context: struct tierfs_front. As in struct tierfs_relay_links: in the thread that gets the answer to INIT. Why there is
 * no ring is logged, and kept for TIERFS_COUNTS.
 */
bool tierfs_front_prepare_ring(void *context, bool is_offered, size_t payload_bytes);
void tierfs_front_begin_ring(void *context);
