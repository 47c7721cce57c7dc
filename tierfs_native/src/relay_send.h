/*
 * What goes to the engine: requests, in the order in which they came, and interrupts.
 *
 * Whoever brings a request sends it at once, without waiting. What the socket has no room for, and everything that waits
 * for an engine, is sent by tierfs_relay_send_thread, which alone may wait. All but that thread and
 * tierfs_relay_tell_unknown are called with relay->lock held.
 */
#pragma once

#include "relay_state.h"

#include <stdint.h>

/* The lock is given up while the message is sent. flags: of send(2). Returns 0 or -errno: it stays unsent. */
int tierfs_relay_send(struct tierfs_relay *relay, struct tierfs_request *request, int flags);

/* Who waits for that request, which has been sent, has got a signal. Never waits; one that is lost is logged. */
void tierfs_relay_send_interrupt(struct tierfs_relay *relay, const struct tierfs_request *meant);

/*
 * context: the relay. The kernel does not know an inode: then nobody has it open. Tells the engine, which waits for its
 * FORGET. Without the lock; it may take a while, so not from a thread that answers.
 */
void tierfs_relay_tell_unknown(void *context, uint64_t ino);

/* The thread; context: the relay. */
void *tierfs_relay_send_thread(void *context);
