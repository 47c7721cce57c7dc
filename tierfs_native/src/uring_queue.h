/*
 * A thread's queues at work: entries are registered, requests taken out of them and answered, and answers committed, by
 * that thread alone. Answers of other threads are handed to it.
 */
#pragma once

#include "uring_state.h"

#include <stddef.h>

/* In the thread itself, once all has been prepared. Returns only when nothing can be done any more (logged). */
void tierfs_uring_run(struct tierfs_uring_thread *thread);

/* As in struct tierfs_origin, of an entry. Any thread; takes the lock of the thread of the entry. -EINVAL: not an answer to it. */
int tierfs_uring_answer_entry(const struct tierfs_origin *origin, const void *message, size_t bytes);
