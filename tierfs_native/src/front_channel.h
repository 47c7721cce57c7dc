/*
 * The front's end of the channel (channel.h): what the engine says, queued for the main thread, and what it is told.
 *
 * The channel is read by whoever needs what is on it: the main thread, and the one that gets the engine's answers, for
 * which a file may have been lent. So it has a lock, front->channel_lock, which these functions take.
 */
#pragma once

#include "front.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/*
 * Reads all that has come. Lent files and answers are dealt with at once; the rest is queued, in order, for the main
 * thread, which is woken. Any thread; never waits for the engine. False: it is gone, or not understood (logged).
 */
bool tierfs_front_take_packets(struct tierfs_front *front);

/* The next one of the queue, to be freed, with its descriptor to be closed; NULL: there is none. Main thread. */
struct tierfs_queued_packet *tierfs_front_next_packet(struct tierfs_front *front);

/* Main thread. Without an engine nothing happens; an error other than that it is gone is logged. */
void tierfs_front_tell(struct tierfs_front *front, uint16_t kind, uint64_t value, const void *body,
                       size_t bytes);

/*
 * context: struct tierfs_front, with small files. What was read without the engine counts as used: else it would be
 * evicted first. Any thread; never waits for the engine: what the channel has no room for is lost.
 */
void tierfs_front_tell_touched(void *context);
