/*
 * The engine's life: started, started again when it dies (at once, and after pauses that grow if it serves nobody), and
 * ended with the mount. Main thread alone; takes channel_lock when there is another engine.
 */
#pragma once

#include "front.h"

#define TIERFS_EXIT_FAILED 1
#define TIERFS_EXIT_UPGRADE 75 /* an engine that made room for a newer one */

/* Starts an engine, connects it, and tells it what there is (front_handover.h). 0, or -errno: there is none. */
int tierfs_front_start_engine(struct tierfs_front *front);

/* The moment has come at which the next one was to start. If it cannot, that is logged, and tried again later. */
void tierfs_front_start_engine_again(struct tierfs_front *front);

/* A signal is to be read: the end of the engine, or that it should end. The exit status of the front, or -1: go on. */
int tierfs_front_handle_signal(struct tierfs_front *front);

/* The mount ends although the store does not have all of it. Returns the exit status. */
int tierfs_front_give_up(struct tierfs_front *front);
