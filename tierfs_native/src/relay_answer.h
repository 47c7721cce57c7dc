/*
 * What comes from the engine: answers, each of which goes to the origin of its request and takes it out of those that
 * are kept, and notifications.
 *
 * Requests are taken out by one thread each, so that a message stays where it is until then: those that went to pyfuse3
 * by tierfs_relay_answers_thread, those about names by tierfs_relay_names_thread, those that went on the channel by
 * whoever calls tierfs_relay_extra_reply (relay.h), and those without an answer by the thread that sends. What answers
 * nothing is dropped. The threads take relay->lock, never while the kernel gets an answer; tierfs_relay_answer_error
 * takes none.
 */
#pragma once

#include "relay_state.h"

#include <stdint.h>

/* error: an errno; 0: done, with nothing to say. An answer that is not taken is logged. origin: NULL: nobody waits. */
void tierfs_relay_answer_error(const struct tierfs_origin *origin, uint64_t unique, int error);

/* The threads; context: the relay. Both get answers from one engine after another. */
void *tierfs_relay_answers_thread(void *context);
void *tierfs_relay_names_thread(void *context);
