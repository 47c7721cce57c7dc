/*
 * What the engine asks the front for, on the channel: to mount and unmount, to be attached, counts, and so on; and what
 * it says of itself. Each is answered on the channel, if at all, an error as an errno; what is not understood is logged.
 */
#pragma once

#include "front.h"

/* All that is queued (front_channel.h), in order. Main thread; without channel_lock. */
void tierfs_front_handle_packets(struct tierfs_front *front);
